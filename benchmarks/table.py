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
FILES = ("cpu.json", "h200.json")


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
    trained = any(row["training"] for case in cases for row in case["rows"])
    columns = ["model", "input", "eager", "torch.compile", "Fusewright", "times eager"]
    columns += ["forward+backward: eager", "torch.compile", "Fusewright"] if trained else []
    lines = [
        f"{title}; float32, default flags; milliseconds, medians of interleaved rounds, `results/{name}`:",
        "",
        f"| {' | '.join(columns)} |",
        f"| --- | --- |{' ---: |' * (len(columns) - 2)}",
    ]
    return "\n".join([*lines, *(_row(case, trained) for case in cases)]) + "\n"


def _row(case: dict[str, Any], trained: bool) -> str:
    rows = {row["name"]: row for row in case["rows"]}
    shape = "x".join(map(str, case["inputs"][0]))
    forward = [_milliseconds(rows[n]["forward"]) for n in ("eager", "compile", "fusewright")]
    training = [_milliseconds(rows[n]["training"]) for n in ("eager", "compile", "fusewright")] if trained else []
    gain = f"{rows['fusewright']['ratio']:.2f}" if case["status"] == "rewritten" else "unchanged"
    return f"| {' | '.join([case['problem'], shape, *forward, gain, *training])} |"


def _milliseconds(sample: dict[str, float] | None) -> str:
    if sample is None:
        return "-"
    value = sample["median"] * 1e3
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
