"""Writes the README's measured tables from the data under `benchmarks/results/`; nothing there is typed by hand.

python benchmarks/table.py            # rewrite README.md
python benchmarks/table.py --check    # exit 1 if README.md does not hold what the data say
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
START, END = "<!-- measured tables: benchmarks/table.py writes what follows -->\n", "<!-- end of measured tables -->\n"
FILES = ("cpu.json", "h200.json", "h200_aten.json")
# What sets a file's run apart.
SETTINGS = {"h200_aten.json": "without generated kernels"}
# A peer's name in the data, and at the head of its column; one that no case has gets none.
PEERS = {"eager": "eager", "compile": "torch.compile", "compile-max": "max-autotune", "fusewright": "Fusewright"}


def tables() -> str:
    """All tables, one per results file that exists."""
    return "\n".join(
        _table(json.loads((RESULTS / name).read_text()), name) for name in FILES if (RESULTS / name).exists()
    )


def _table(record: dict[str, Any], name: str) -> str:
    cases = record["cases"]
    where = cases[0]["environment"]
    threads = f", {where['threads']} threads" if "cuda" not in where else f", CUDA {where['cuda']}"
    title = f"{where['device']}, torch {where['torch']}{threads}, {where['date'][:10]}"
    peers = {name: text for name, text in PEERS.items() if any(row["name"] == name for c in cases for row in c["rows"])}
    trained = any(row["training"] for case in cases for row in case["rows"])
    floored = any("roofline" in case for case in cases)
    columns = ["model", "input", *peers.values(), "times eager"]
    columns += ["floor", "fraction"] if floored else []
    columns += [f"forward+backward: {text}" if text == "eager" else text for text in peers.values()] if trained else []
    unless = " unless the row says otherwise" if any(_label(case) for case in cases) else ""
    lines = [
        f"{title}; {SETTINGS.get(name, 'float32, default flags')}{unless}; "
        f"milliseconds, medians of interleaved rounds, `results/{name}`:",
        "",
        f"| {' | '.join(columns)} |",
        f"| --- | --- |{' ---: |' * (len(columns) - 2)}",
    ]
    return "\n".join([*lines, *(_row(case, peers, trained, floored) for case in cases)]) + "\n"


def _row(case: dict[str, Any], peers: dict[str, str], trained: bool, floored: bool) -> str:
    rows = {row["name"]: row for row in case["rows"]}
    shape = "x".join(map(str, case["inputs"][0]))
    forward = [_milliseconds(rows, n, "forward") for n in peers]
    training = [_milliseconds(rows, n, "training") for n in peers] if trained else []
    ratio = rows["fusewright"]["ratio"]
    gain = f"{ratio:.2f}" if case["status"] == "rewritten" and ratio is not None else case["status"]
    floor = _floor(case, rows["fusewright"]) if floored else []
    return f"| {' | '.join([case['problem'] + _label(case), shape, *forward, gain, *floor, *training])} |"


def _label(case: dict[str, Any]) -> str:
    """What is not as the table's title says: the dtype, the flags."""
    dtype, flags = case.get("dtype", "float32"), case.get("flags", "default")
    words = [word for word, usual in ((dtype, "float32"), (flags, "default")) if word != usual]
    return f" ({', '.join(words)})" if words else ""


def _floor(case: dict[str, Any], row: dict[str, Any]) -> list[str]:
    """The least time that the model can take, and the fraction of it that is reached."""
    if "roofline" not in case:
        return ["-", "-"]
    fraction = row["fraction"]
    return [_number(case["roofline"]["seconds"] * 1e3), "-" if fraction is None else f"{fraction:.0%}"]


def _milliseconds(rows: dict[str, Any], name: str, mode: str) -> str:
    sample = rows[name][mode] if name in rows else None
    return "-" if sample is None else _number(sample["median"] * 1e3)


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def written(text: str) -> str:
    """`text` with the tables between the markers."""
    head, rest = text.split(START)
    return head + START + "\n" + tables() + "\n" + END + rest.split(END)[1]


def main() -> int:
    text = README.read_text()
    if "--check" in sys.argv:
        return int(written(text) != text)
    README.write_text(written(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
