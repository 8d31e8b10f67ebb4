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
FILES = ("cpu.json", "h200.json", "h100.json", "h200_aten.json")
FUSED = "h[12]00_fused*.json"
# What sets a file's run apart.
SETTINGS = {"h200_aten.json": "without generated kernels"}
# A peer's name in the data, and at the head of its column; one that no case has gets none.
PEERS = {
    "eager": "eager",
    "compile": "torch.compile",
    "compile-max": "max-autotune",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "fusewright": "Fusewright",
}


def tables() -> str:
    """All tables, one per results file that exists, and one of all runs of the fused operators."""
    writers = {**dict.fromkeys(FILES, _table), "cpu_footprint.json": _footprint, "cpu_scaling.json": _scaling}
    networks = [f"h100_networks{kind}.json" for kind in ("", "_bf16", "_batch1")]
    networks += [f"h200_networks_{kind}.json" for kind in ("channels_last", "bf16")]
    writers |= dict.fromkeys(networks, _networks)
    found = {name: json.loads((RESULTS / name).read_text()) for name in writers if (RESULTS / name).exists()}
    fused = {path.name: json.loads(path.read_text()) for path in RESULTS.glob(FUSED)}
    written = [writers[name](record, name) for name, record in found.items()]
    return "\n".join([*written, *([_fused(fused)] if fused else [])])


def _where(environment: dict[str, Any]) -> str:
    threads = f", CUDA {environment['cuda']}" if "cuda" in environment else f", {environment['threads']} threads"
    return f"{environment['device']}, torch {environment['torch']}{threads}, {environment['date'][:10]}"


def _rows(columns: list[str], rows: list[list[str]], words: int) -> list[str]:
    """A table whose first `words` columns are text and whose others are numbers."""
    ruler = " --- |" * words + " ---: |" * (len(columns) - words)
    return [f"| {' | '.join(columns)} |", f"|{ruler}", *(f"| {' | '.join(row)} |" for row in rows)]


def _table(record: dict[str, Any], name: str) -> str:
    cases = record["cases"]
    title = _where(cases[0]["environment"])
    peers = {name: text for name, text in PEERS.items() if any(row["name"] == name for c in cases for row in c["rows"])}
    trained = any(row["training"] for case in cases for row in case["rows"])
    floored = any("roofline" in case for case in cases)
    several = len(peers) > 2
    columns = ["model", "input", *peers.values(), "times eager"]
    columns += ["times the fastest peer"] if several else []
    columns += ["floor", "fraction"] if floored else []
    columns += [f"forward+backward: {text}" if text == "eager" else text for text in peers.values()] if trained else []
    unless = " unless the row says otherwise" if any(_label(case) for case in cases) else ""
    lines = [
        f"{title}; {SETTINGS.get(name, 'float32, default flags')}{unless}; "
        f"milliseconds, medians of interleaved rounds, `results/{name}`:",
        "",
        *_rows(columns, [_row(case, peers, trained, floored) for case in cases], words=2),
    ]
    return "\n".join(lines) + "\n"


def _row(case: dict[str, Any], peers: dict[str, str], trained: bool, floored: bool) -> list[str]:
    rows = {row["name"]: row for row in case["rows"]}
    shape = "x".join(map(str, case["inputs"][0]))
    forward = [_milliseconds(rows, n, "forward") for n in peers]
    training = [_milliseconds(rows, n, "training") for n in peers] if trained else []
    ratio = rows["fusewright"]["ratio"]
    gain = [f"{ratio:.2f}" if case["status"] == "rewritten" and ratio is not None else case["status"]]
    if len(peers) > 2:
        gain += [_times_the_fastest(rows)]
    floor = _floor(case, rows["fusewright"]) if floored else []
    return [case["problem"] + _label(case), shape, *forward, *gain, *floor, *training]


def _times_the_fastest(rows: dict[str, Any]) -> str:
    others = [row["forward"]["median"] for name, row in rows.items() if name != "fusewright" and row["forward"]]
    ours = rows["fusewright"]["forward"]
    return f"{min(others) / ours['median']:.2f}" if others and ours else "-"


def _footprint(record: dict[str, Any], name: str) -> str:
    """First calls and peak memory."""
    cases = record["cases"]
    rows = []
    for case in cases:
        first, extra = case["first_call"], case["extra"]
        share = f"{extra['fusewright'] / extra['eager']:.1%}" if extra["eager"] else "-"
        sizes = [_number(extra[who] / 1e6) for who in ("eager", "fusewright")]
        rows.append(
            [case["problem"], str(case["batch"]), f"{first['cold']:.2f}", f"{first['warm']:.2f}", *sizes, share]
        )
    columns = ["model", "batch", "first call, s", "kernels in the cache", "extra MB: eager", "Fusewright", "share"]
    title = f"{_where(cases[0]['environment'])}; seconds of the first call and peak memory beyond model and inputs"
    return "\n".join([f"{title}, a process each, `results/{name}`:", "", *_rows(columns, rows, words=1)]) + "\n"


def _scaling(record: dict[str, Any], name: str) -> str:
    """How times grow with one number at a time."""
    rows = []
    for row in record["rows"]:
        times = [_number(row["times"][who]["median"] * 1e3) for who in ("eager", "fusewright")]
        ends = [f"{row['ratio']:.1f}", f"{row['roofline']['fraction']:.0%}"]
        rows.append([row["varies"], *map(str, row["point"].values()), *times, *ends])
    first = list(record["rows"][0]["point"])
    columns = ["varies", *(word.replace("_", " ") for word in first), "eager", "Fusewright", "times eager", "fraction"]
    title = f"{_where(record['environment'])}; `{Path(record['problem']).stem}` at other sizes, milliseconds"
    return "\n".join([f"{title}, `results/{name}`:", "", *_rows(columns, rows, words=1)]) + "\n"


def _fused(records: dict[str, Any]) -> str:
    """What came of each run of the fused operators, the earliest first."""
    rows = []
    for name, record in sorted(records.items(), key=lambda item: item[1]["environment"]["date"]):
        found = record["summary"]
        means = [found[key] for key in ("compile over eager", "fusewright over eager", "fusewright over compile")]
        where = record["environment"]
        texts = [f"`results/{name}`", where["device"], where["date"][:10]]
        numbers = [str(found["rows"]), *(f"{mean:.2f}" for mean in means), str(len(found["slower than compile"]))]
        rows.append([*texts, *numbers])
    columns = [
        "data",
        "device",
        "date",
        "models",
        "torch.compile over eager",
        "Fusewright over eager",
        "over torch.compile",
    ]
    columns += ["slower than torch.compile"]
    where = next(iter(records.values()))["environment"]
    title = f"torch {where['torch']}, CUDA {where['cuda']}; fused operators (`benchmarks/fused.py`)"
    return "\n".join([f"{title}, geometric means:", "", *_rows(columns, rows, words=3)]) + "\n"


def _networks(record: dict[str, Any], name: str) -> str:
    """Whole networks; those that came to nothing are left out, and told of by the data."""
    rows = []
    for row in record["rows"]:
        if not row["error"]:
            times = {who: row["times"][who]["median"] for who in ("eager", "compile", "fusewright")}
            gains = [f"{times[who] / times['fusewright']:.2f}" for who in ("eager", "compile")]
            numbers = [*(_number(seconds * 1e3) for seconds in times.values()), *gains, f"{row['optimized']:.0f}"]
            rows.append([row["name"] + _label(row), "x".join(map(str, row["shape"])), *numbers])
    columns = [
        "network",
        "input",
        *(PEERS[who] for who in ("eager", "compile", "fusewright")),
        "times eager",
        "times compile",
        "planned in, s",
    ]
    proven, unproven = (
        [row["name"] for row in record["rows"] if not row["error"] and (row["verified"] is None) == missing]
        for missing in (False, True)
    )
    proof = ", outputs compared with eager's but not verified" if unproven else ""
    if proven and unproven:
        proof = f", {', '.join(proven)} verified, outputs of the others compared with eager's"
    dtype = record.get("dtype", "float32 but for what the row says")
    title = f"{_where(record['environment'])}; whole networks (`benchmarks/networks.py`), {dtype}, default flags"
    return "\n".join([f"{title}{proof}, milliseconds, `results/{name}`:", "", *_rows(columns, rows, words=2)]) + "\n"


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
