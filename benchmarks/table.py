"""Writes the measured tables of the documents from the data under `benchmarks/results/`; none is typed by hand.

python benchmarks/table.py            # rewrite the tables of README.md and docs/measurements.md
python benchmarks/table.py --check    # exit 1 if a document does not hold what the data say

A document says ``<!-- table: NAME -->`` where a table goes, and ``<!-- end of table -->`` behind it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "measurements.md")
TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->\n)", re.DOTALL)
FUSED = "h[12]00_fused*.json"
FOUNDING = ("conv_avgpool_sigmoid_sum", "conv3d_div_maxpool_gap_bias_sum", "convtranspose_gap_bias_logsumexp")
# What sets a file's run apart.
SETTINGS = {"h200_aten.json": "without generated kernels"}
# A model is slower than a peer if it takes so many times as long (as `fused.SLOWER`).
SLOWER = 1.03
# A peer's name in the data, and at the head of its column; one that no case has gets none.
PEERS = {
    "eager": "eager",
    "compile": "torch.compile",
    "compile-max": "max-autotune",
    "onnxruntime": "ONNX Runtime",
    "openvino": "OpenVINO",
    "fusewright": "Fusewright",
}


def text_of(name: str) -> str:
    """The table of that name: of one results file, or of several under a name of its own."""
    if name in SEVERAL:
        return SEVERAL[name]()
    write = next((write for start, write in WRITERS.items() if re.fullmatch(start, name)), _table)
    return write(_data(name), name)


def _data(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


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


def _counters(record: dict[str, Any], name: str) -> str:
    """What limits a kernel: each model's longest."""
    rows = []
    for row in record["rows"]:
        kernel = max(row["kernels"], key=lambda kernel: kernel["seconds"])
        waits = max(kernel["waits"], key=kernel["waits"].__getitem__)
        busy = [f"{percent:.0f}%" for percent in kernel["busy"].values()]
        ends = [f"{kernel['warps']:.0f}", waits]
        label = f"{row['model']}: {row['name']}" if "name" in row else row["model"]
        rows.append([label, _number(kernel["seconds"] * 1e3), *busy, *ends])
    columns = ["model", "ms", *record["rows"][0]["kernels"][0]["busy"], "warps", "they wait most for"]
    title = f"{_where(record['environment'])}; the longest kernel of each, how much of its time parts are busy"
    return "\n".join([f"{title}, `results/{name}`:", "", *_rows(columns, rows, words=1)]) + "\n"


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


def _fused_runs(files: str = FUSED) -> dict[str, Any]:
    """The runs of the fused operators by their file, the earliest first."""
    runs = {path.name: _data(path.name) for path in RESULTS.glob(files)}
    return dict(sorted(runs.items(), key=lambda item: item[1]["environment"]["date"]))


def _fused() -> str:
    """What came of each run of the fused operators."""
    rows, records = [], _fused_runs()
    for name, record in records.items():
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


def _operators(record: dict[str, Any], name: str) -> str:
    """Fused operators in another precision or memory format, beside the run before what is told with the table."""
    former = RESULTS / name.replace(".json", "_before.json")
    before = {row["index"]: row for row in _data(former.name)["rows"] if _timed(row)} if former.exists() else {}
    rows = []
    for row in filter(_timed, record["rows"]):
        who = ("eager", "compile", "fusewright")
        times = [row["times"][one]["median"] for one in who]
        first = before.get(row["index"])
        earlier = [_number(first["times"]["fusewright"]["median"] * 1e3) if first else "-"] if before else []
        texts = [str(row["index"]), f"`{row['name']}`", "x".join(map(str, row["shape"]))]
        gains = [f"{seconds / times[-1]:.2f}" for seconds in times[:-1]]
        rows.append(
            [*texts, *(_number(seconds * 1e3) for seconds in times[:-1]), *earlier, _number(times[-1] * 1e3), *gains]
        )
    columns = ["row", "model", "input", "eager", "torch.compile", *(["Fusewright, first"] if before else [])]
    columns += ["Fusewright", "times eager", "times torch.compile"]
    how = f"{record['dtype']}{', channels last' if record['channels_last'] else ''}"
    title = f"{_where(record['environment'])}; fused operators, {how}, milliseconds"
    return "\n".join([f"{title}, `results/{name}`:", "", *_rows(columns, rows, words=3)]) + "\n"


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


def _founding() -> str:
    """The founding models on a GPU and on a CPU."""
    rows = []
    for name in ("h200.json", "cpu.json"):
        for case in _data(name)["cases"]:
            if case["problem"] in FOUNDING and not _label(case):
                found = {row["name"]: row for row in case["rows"]}
                times = [found[who]["forward"]["median"] for who in ("eager", "compile", "fusewright")]
                texts = [case["problem"], "x".join(map(str, case["inputs"][0])), _device(case["environment"])]
                gains = [f"{seconds / times[-1]:.1f}" for seconds in times[:-1]]
                rows.append([*texts, *(_number(seconds * 1e3) for seconds in times), *gains])
    columns = ["model", "input", "device", "eager, ms", "torch.compile, ms", "Fusewright, ms"]
    return "\n".join(_rows([*columns, "times eager", "times torch.compile"], rows, words=3)) + "\n"


def _summary() -> str:
    """Geometric means over everything else that was timed beside `torch.compile`."""
    latest = _latest(FUSED)
    drawn = [row for name in RANDOM if name.startswith("h200") for row in _data(name)["rows"] if _timed(row)]
    rows = [_gains("fused operators, the latest run of each", "H100, H200", latest.values())]
    layers = [row for row in latest.values() if row["index"] <= LAYERS]
    rows += [_gains(f"of these rows 1 to {LAYERS}: one layer and what follows it", "H100, H200", layers)]
    rows += [_gains(label, "H200", _latest(files).values()) for label, files in OPERATORS]
    for label, name in RUNS:
        record = _data(name)
        rows.append(_gains(label, _device(record["environment"]), filter(_timed, record["rows"])))
    rows += [_gains("random convolutions with what follows", "H200", drawn)]
    rows += [_gains("random convolutions with what follows", "CPU", filter(_timed, _data("cpu_random.json")["rows"]))]
    columns = [
        "models",
        "device",
        "number",
        "times eager",
        "times torch.compile",
        "at least",
        "slower than torch.compile",
    ]
    return "\n".join(_rows(columns, rows, words=2)) + "\n"


def _latest(files: str) -> dict[tuple[Any, ...], Any]:
    """The latest run of each of the fused operators that was timed beside both."""
    runs = _fused_runs(files).values()
    return {(row["name"], *row["shape"]): row for run in runs for row in run["rows"] if _timed(row)}


def _random() -> str:
    """Every seed of random models by itself."""
    rows = []
    for name in RANDOM:
        record = _data(name)
        gains = _gains(str(record["seed"]), _device(record["environment"]), filter(_timed, record["rows"]))
        found = record["summary"]
        fractions = [f"{found[key]:.0%}" for key in ("median fraction", "worst fraction")]
        rows.append([*gains[:2], record["environment"]["date"][:10], f"`results/{name}`", *gains[3:], *fractions])
    columns = ["seed", "device", "date", "data", "times eager", "times torch.compile", "at least"]
    columns += ["slower than torch.compile", "median of the floor", "worst"]
    return "\n".join(_rows(columns, rows, words=4)) + "\n"


def _device(environment: dict[str, Any]) -> str:
    """A card's short name, or `CPU`."""
    return environment["device"].split()[1] if "cuda" in environment else "CPU"


def _timed(row: dict[str, Any]) -> bool:
    return not row["error"] and {"eager", "compile", "fusewright"} <= row["times"].keys()


def _gains(label: str, device: str, found: Iterable[dict[str, Any]]) -> list[str]:
    times = [{who: row["times"][who]["median"] for who in ("eager", "compile", "fusewright")} for row in found]
    eager, compiled = ([row[who] / row["fusewright"] for row in times] for who in ("eager", "compile"))
    means = [f"{geometric_mean(gains):.2f}" for gains in (eager, compiled)]
    slower = sum(gain * SLOWER < 1 for gain in compiled)
    return [label, device, str(len(times)), *means, f"{min(compiled):.2f}", str(slower)]


# Of the fused operators, the last row that is a convolution or a linear layer and what follows it.
LAYERS = 100

# Fused operators in another precision or memory format.
OPERATORS = (
    ("fused operators, bfloat16, the latest run of each", "h200_operators_bf16*.json"),
    ("fused operators, channels last, the latest run of each", "h200_operators_channels_last*.json"),
    ("fused operators, both, the latest run of each", "h200_operators_last_in_bf16*.json"),
)
# What else is in the summary, each of one run.
RUNS = (
    ("networks, float32", "h100_networks.json"),
    ("networks, bfloat16", "h200_networks_bf16.json"),
    ("networks, channels last", "h200_networks_channels_last.json"),
    ("networks at batch 1", "h100_networks_batch1.json"),
    ("networks at batch 1", "cpu_networks.json"),
)
# The last whole run of each seed.
RANDOM = (
    *(f"h200_random{seed}.json" for seed in ("_after_140", "_seed2", "_seed3", "_seed6", "_seed9", "_seed13")),
    *(f"h200_random{seed}.json" for seed in ("_seed31", "_seed47", "_seed61", "_seed73", "_seed79", "_seed83")),
    *(f"h100_random{seed}.json" for seed in ("_after_126", "_seed2", "_seed3", "_seed4", "_seed5")),
    "cpu_random.json",
)
WRITERS: dict[str, Callable[[dict[str, Any], str], str]] = {
    ".*_counters.*": _counters,
    "cpu_footprint.*": _footprint,
    "cpu_scaling.*": _scaling,
    ".*_networks.*": _networks,
    ".*_operators_.*": _operators,
}
SEVERAL: dict[str, Callable[[], str]] = {
    "founding": _founding,
    "summary": _summary,
    "fused": _fused,
    "random": _random,
}


def written(text: str) -> str:
    """`text` with every table between its markers."""
    return TABLE.sub(lambda found: f"{found[1]}\n{text_of(found[2])}\n{found[3]}", text)


def main() -> int:
    texts = {path: path.read_text() for path in DOCUMENTS}
    if "--check" in sys.argv:
        return int(any(written(text) != text for text in texts.values()))
    for path, text in texts.items():
        path.write_text(written(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
