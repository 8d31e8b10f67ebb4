"""Fused operators (`fused_models.py`) in eager, by torch.compile and as `fusewright.optimize` serves them, in turns.

    python benchmarks/fused.py --device cuda:0,cuda:1 --out benchmarks/results/h100_fused.json
    python benchmarks/fused.py --rows 1,5 --no-verify --out rows.json
    python benchmarks/fused.py --device cpu --divide 64 --part 1/4 --out part.json
    python benchmarks/fused.py --dtype bfloat16 --channels-last --part 1/8 --out part.json

Calls are forward, without gradients, by default flags.  Devices share the rows, each with a process of its own, which
is replaced when it dies or takes too long; whatever goes wrong becomes a row of one sentence.  Results are saved after
every row; with ``--append``, rows that the file has, and that did not fail, are not measured again: a run is continued.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import geometric_mean
from threading import Lock
from typing import Any

import torch
from fused_models import ROWS, Row
from random_configurations import admit, model_from
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from worker import Worker, answer, attempted

import fusewright
from fusewright.measure import compare, environment, forward_call, save_results

# Seconds after which a row is given up, and within which all candidates together are timed.
LIMIT, TIMING = 300.0, 3.0
PEERS = ("eager", "compile")
# The difference from eager, as a share of its largest value, beyond which a row is wrong; tf32 is on in both.
WRONG = 1e-2
# What is less than this next to numbers around 1 is rounding: some chains average what a norm has just centred.
SMALL = 1e-3
# A row is slower than a peer if it takes so many times as long.
SLOWER = 1.03


# -- one row, in the worker -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Where and how all rows are measured: floating-point numbers are of `dtype`, images have their channels last."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    channels_last: bool = False

    def placed(self, tensor: Tensor) -> Tensor:
        """`tensor` in this dtype and memory format."""
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
        layout = last if self.channels_last and last else torch.preserve_format
        return tensor.to(self.dtype if tensor.is_floating_point() else tensor.dtype, memory_format=layout)


def measured(row: Row, setting: Setting, verify: bool) -> dict[str, Any]:
    """The record of one row, seconds throughout; what fails is told in it."""

    def fill(record: dict[str, Any]) -> None:
        torch.manual_seed(row.index)
        model = model_from(row.source(), setting.device).train(row.training)
        model._apply(setting.placed)
        inputs = (setting.placed(torch.randn(shape, device=setting.device)) for shape in row.inputs)
        serve(record, model, tuple(inputs), verify)

    return attempted(_named(row), fill, setting.device)


def _named(row: Row) -> dict[str, Any]:
    return {
        "index": row.index,
        "name": str(row),
        "shape": list(row.shape),
        "given": row.given,
        "training": row.training,
    }


def serve(record: dict[str, Any], model: nn.Module, inputs: tuple[Tensor, ...], verify: bool) -> None:
    """Adds what is known after each step, so that a failure leaves the steps before it in the record."""
    begun = time.perf_counter()
    fast = fusewright.optimize(model, inputs, verify=verify)
    record["optimized"] = time.perf_counter() - begun
    plan = fusewright.explain(fast)
    record |= {"status": plan.status, "reason": plan.reason, "refused": list(plan.refused)}
    record["verified"] = None if plan.verdict is None else plan.verdict.checked
    record["rules"] = [fired.rule for fired in plan.rules]
    record["precision"] = list(plan.precision)
    record |= {"kernels": [asdict(k) for k in plan.kernels], "kept": [asdict(k) for k in plan.kept]}
    record["difference"] = difference(forward_call(model, inputs)(), forward_call(fast, inputs)())
    entrants: dict[str, nn.Module] = {"fusewright": fast}
    record["reasons"] = admit(entrants, model, inputs, PEERS)
    calls = {name: forward_call(module, inputs) for name, module in entrants.items()}
    times = compare(calls, device=inputs[0].device, min_time=0.02, rounds=7, max_time=TIMING)
    record["times"] = {name: asdict(sample) for name, sample in times.items()}


def difference(expected: Tensor, given: Tensor) -> float:
    """The largest difference, as a share of the largest expected value, or of `SMALL`; infinite where one is NaN.  Of
    whole numbers, indices that is, the share of those that differ."""
    if expected.shape != given.shape:
        return float("inf")
    if not expected.is_floating_point():
        return float((expected != given).float().mean())
    gap = (expected - given).abs_()
    gap[(expected == given) | (expected.isnan() & given.isnan())] = 0.0
    share = float(gap.max()) / max(float(expected.nan_to_num(0.0, 0.0, 0.0).abs_().max()), SMALL)
    return share if share == share else float("inf")


def _work(pipe: Connection, setting: Setting, verify: bool, threads: int | None) -> None:
    """Answers rows with records; first of all with facts."""
    if threads:
        torch.set_num_threads(threads)
    if setting.device.type == "cuda" and setting.device.index is not None:
        torch.cuda.set_device(setting.device)
    pipe.send({"environment": environment(setting.device)})
    answer(pipe, lambda row: measured(row, setting, verify))


# -- all rows ---------------------------------------------------------------------------------------------------------


def summary(records: Sequence[dict[str, Any]], dtype: str = "float32") -> dict[str, Any]:
    """What is asked of all rows together; rows are named by their index."""
    whole = [record for record in records if not record["error"]]
    compared = [record for record in whole if "compile" in record["times"]]
    return {
        "rows": len(records),
        "failed": [record["index"] for record in records if record["error"]],
        "wrong": [record["index"] for record in whole if not record["difference"] <= wrong(dtype)],
        "verification failed": [r["index"] for r in whole if r["reason"].startswith("verification failed")],
        "kept as they are": [record["index"] for record in whole if record["status"] != "rewritten"],
        "compile over eager": _mean(compared, "eager", "compile"),
        "fusewright over eager": _mean(whole, "eager", "fusewright"),
        "fusewright over compile": _mean(compared, "compile", "fusewright"),
        "slower than eager": [r["index"] for r in whole if times(r, "fusewright", "eager") > SLOWER],
        "slower than compile": [r["index"] for r in compared if times(r, "fusewright", "compile") > SLOWER],
    }


def times(record: dict[str, Any], one: str, other: str) -> float:
    """How many times as long `one` takes as the `other`."""
    return float(record["times"][one]["median"] / record["times"][other]["median"])


def wrong(dtype: str) -> float:
    """The difference from eager beyond which a row is wrong: half precision may differ by some of its own digits."""
    return max(WRONG, 16 * torch.finfo(getattr(torch, dtype)).eps)


def _mean(records: Iterable[dict[str, Any]], one: str, other: str) -> float | None:
    found = [times(record, one, other) for record in records if {one, other} <= record["times"].keys()]
    return geometric_mean(found) if found else None


def show(record: dict[str, Any]) -> None:
    """All rows, milliseconds; then the summary."""
    table = Table("#", "model", "kernels (ms, of ATen)", "difference", title="medians in ms")
    for name in (*PEERS, "fusewright", "times compile"):
        table.add_column(name, justify="right")
    for row in record["rows"]:
        table.add_row(*_cells(row))
    console = Console(width=230)
    console.print(table)
    for key, value in record["summary"].items():
        console.print(f"{key}: {value:.3f}" if isinstance(value, float) else f"{key}: {value}", highlight=False)


def _cells(row: dict[str, Any]) -> list[str]:
    head = [str(row["index"]), row["name"]]
    if row["error"]:
        return [*head, row["error"]]
    kernels = [f"{k['name'].removeprefix('fused_')} {k['path']} ({_of_both(k)})" for k in row["kernels"]]
    taken = [f"{row['times'][n]['median'] * 1e3:.3f}" if n in row["times"] else "-" for n in (*PEERS, "fusewright")]
    ratio = f"{times(row, 'compile', 'fusewright'):.2f}" if "compile" in row["times"] else "-"
    said = "" if row["status"] == "rewritten" else f"{row['status']}: {row['reason']}"
    return [*head, "; ".join([*kernels, *([said] if said else [])]), f"{row['difference']:.1e}", *taken, ratio]


def _of_both(kernel: dict[str, Any]) -> str:
    found = (kernel["generated"], kernel["aten"])
    return ", ".join("-" if seconds is None else f"{seconds * 1e3:.3f}" for seconds in found)


def chosen_rows(rows: str, part: str, divide: int) -> list[Row]:
    """The rows with these indices (a,b,c; all where none is named), and of them every N-th from the I-th on."""
    wanted = {int(index) for index in rows.split(",") if index}
    first, step = map(int, part.split("/"))
    return [row.divided(divide) for row in ROWS if not wanted or row.index in wanted][first - 1 :: step]


def run(rows: Sequence[Row], workers: Sequence[Worker], record: dict[str, Any], until: float, options: Any) -> None:
    """Each worker takes the next row, while there are any and the time has not come."""
    left, lock = iter(rows), Lock()

    def serve(worker: Worker) -> None:
        while time.monotonic() < until:
            with lock:
                row = next(left, None)
            if row is None:
                return
            found = worker.row(row, _named(row), options.limit)
            with lock:
                record["rows"] = sorted([*record["rows"], found], key=lambda r: r["index"])
                record["summary"] = summary(record["rows"], options.dtype)
                print(f"{' | '.join(_cells(found))} | {found['took']:.1f} s", file=sys.stderr, flush=True)
                if options.out:
                    save_results(options.out, record)

    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(serve, workers))


def main() -> None:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="", help="these rows alone (a,b,c)")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="every N-th of the rows, from the I-th on")
    parser.add_argument("--device", default="cuda", help="or several that share the rows: cuda:0,cuda:1")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--channels-last", action="store_true", help="images and their weights have channels last")
    parser.add_argument("--divide", type=int, default=1, help="batches by this number")
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which a row is given up")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no row is begun")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--append", action="store_true", help="keep the rows that the file has")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    saved = json.loads(chosen.out.read_text())["rows"] if chosen.append and chosen.out.exists() else []
    had = [row for row in saved if not row["error"]]
    known = {row["index"] for row in had}
    rows = [row for row in chosen_rows(chosen.rows, chosen.part, chosen.divide) if row.index not in known]
    workers: list[Worker] = []
    try:
        for device in chosen.device.split(","):
            setting = Setting(torch.device(device), getattr(torch, chosen.dtype), chosen.channels_last)
            workers.append(Worker(_work, setting, not chosen.no_verify, chosen.threads))
        record: dict[str, Any] = {"fusewright": fusewright.__version__, **workers[0].facts, "divided": chosen.divide}
        record |= {"dtype": chosen.dtype, "channels_last": chosen.channels_last}
        record |= {"verified": not chosen.no_verify, "summary": summary(had, chosen.dtype), "rows": had}
        run(rows, workers, record, begun + chosen.seconds, chosen)
    finally:
        for worker in workers:
            worker.stop()
    show(record)


if __name__ == "__main__":
    main()
