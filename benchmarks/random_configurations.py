"""Random models of the fused family: whether a generated kernel covers each, is right, and how near its floor it runs.

    python benchmarks/random_configurations.py --seed 1 --count 30 --device cuda --out random.json
    python benchmarks/random_configurations.py --seed 1 --rows 9,17 --device cuda                 # two rows again

Each model goes through `fusewright.optimize` with ``kernels="always"`` (tuned on the device), is compared with a
float64 run of some rows of the batch under the precision contract of `fusewright.verify`, in place of all its checks,
and is then timed in turns with eager and its peers: as ``kernels="always"`` has it, and as ``"auto"`` does where that
chooses otherwise.  Floors are `roofline.py`'s; "functions" is the least time that pointwise functions take on a GPU
(`functions.py`), which the fraction leaves out.

Configurations run in a process of their own, which is replaced when it dies or takes too long; whatever goes wrong
becomes a row of one sentence.  Results are saved after every row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from accuracy import Accuracy
from configurations import Configuration, Sizes, draw
from rich.console import Console
from rich.table import Table
from roofline import floor, rates
from torch import Tensor, nn
from worker import LOST, Worker, answer, attempted, sentence

import fusewright
from fusewright.capture import capture
from fusewright.dispatch import Entry, Options, State
from fusewright.measure import compare, environment, forward_call, save_results
from fusewright.module import attach
from fusewright.optimizer import planned
from fusewright.peers import peers
from fusewright.pipeline import kernel_target
from fusewright.plan import Plan
from fusewright.problem import load_problem
from fusewright.tuning import FASTER
from fusewright.verification.numerics import tf32_allowed

BYTES = {"cuda": (1e8, 1e9), "cpu": (5e5, 4e6)}
# Seconds after which a configuration is given up, and within which all candidates together are timed.
LIMIT, TIMING = 120.0, 3.0


# -- one configuration, in the worker ---------------------------------------------------------------------------------


def measured(configuration: Configuration, index: int, device: torch.device, names: tuple[str, ...]) -> dict[str, Any]:
    """The row of one configuration; what fails is told in it."""
    row: dict[str, Any] = {"index": index, "name": str(configuration), "source": configuration.source()}
    return attempted(row, lambda row: _fill(row, configuration, device, names), device)


def _fill(row: dict[str, Any], configuration: Configuration, device: torch.device, names: tuple[str, ...]) -> None:
    """Adds what is known after each step, so that a failure leaves the steps before it in the row."""
    model, x = with_input(configuration, row["index"], device)
    sizes = Sizes.of(configuration)
    missing = kernel_target(device)
    begun = time.perf_counter()
    fast, entry = optimized(model, x, kernels="always" if missing is None else "never")
    plan, runner = entry.plan, entry.runner
    assert plan is not None
    if runner is None:
        raise RuntimeError(f"the model is kept as it is: {plan.reason}")
    row |= {
        "built": time.perf_counter() - begun,
        "path": _path(plan),
        "launches": sum(len(k.launches) for k in runner.program.kernels),
        "recorded": any(kept.path == "recorded" for kept in plan.kept),
    }
    row |= {"rules": [fired.rule for fired in plan.rules], "kernels": [asdict(c) for c in plan.kernels]}
    accuracy = Accuracy(model, fast, x, sizes.flops, sizes.middle).checked()
    if not runner.calls:
        raise RuntimeError("the model ran in place of the program made of it")
    row["accuracy"] = asdict(accuracy)
    entrants = {"fusewright": fast}
    if _declined(plan):
        chosen, other = optimized(model, x)
        row["auto"] = [asdict(c) for c in other.plan.kernels] if other.plan is not None else []
        entrants = {"fusewright": chosen, "always": fast}
    row["reasons"] = admit(entrants, model, (x,), names)
    row["lost"] = next((name for name, reason in row["reasons"].items() if LOST in reason), "")
    if row["lost"]:
        raise RuntimeError(f"{LOST} in {row['lost']}")
    calls = {name: forward_call(module, (x,)) for name, module in entrants.items()}
    times = compare(calls, device=device, min_time=0.02, rounds=7, max_time=TIMING)
    row["times"] = {name: asdict(sample) for name, sample in times.items()}
    least = floor(capture(model, (x,), {}, gradients=False).graph, x, forward_call(model, (x,))())
    row["roofline"] = least.record(times["fusewright"].median)


def drawn(rows: str) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Name, model and input on a GPU of these configurations (a,b,c) of seed 1, for other benchmarks."""
    for index in map(int, filter(None, rows.split(","))):
        configuration = draw(1, index, *BYTES["cuda"])
        yield f"random row {index}: {configuration}", *with_input(configuration, index, torch.device("cuda"))


def with_input(configuration: Configuration, index: int, device: torch.device) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(index)
    return model_from(configuration.source(), device), torch.randn(configuration.shape, device=device)


def model_from(source: str, device: torch.device) -> nn.Module:
    """The model without gradients, from a file with this text as a user's would be."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.py"
        path.write_text(source)
        return load_problem(path).build(device=device).eval().requires_grad_(False)


def optimized(model: nn.Module, x: Tensor, **options: Any) -> tuple[nn.Module, Entry]:
    """What `fusewright.optimize` returns without verifying it, and what serves calls."""
    args, kwargs, entry = planned(model, (x,), Options(**{"verify": False} | options), lambda _: None)
    state = State(model, Options())
    state.add(entry, args, kwargs)
    return attach(model, state), entry


def _path(plan: Plan) -> str:
    """What computes the convolution: a generated kernel, ATen, or nothing because the algebra removed it."""
    if "F.conv" in plan.program.partition("def forward(")[2]:
        return "ATen"
    return "generated" if any(c.family == "contraction" and c.path == "generated" for c in plan.kernels) else "algebra"


def _declined(plan: Plan) -> bool:
    """Whether ``kernels="auto"`` would leave a group to ATen."""
    return any(c.generated is not None and c.aten is not None and c.generated > FASTER * c.aten for c in plan.kernels)


def admit(
    entrants: dict[str, nn.Module], model: nn.Module, inputs: tuple[Tensor, ...], names: tuple[str, ...]
) -> dict[str, str]:
    """Adds the peers that survive one call to `entrants`; why the others do not."""
    reasons = {}
    for peer in peers(names):
        try:
            module = peer.build(model, inputs)
            forward_call(module, inputs)()
        except Exception as failure:
            reasons[peer.name] = sentence(failure)
        else:
            entrants[peer.name] = module
    return reasons


# -- the worker -------------------------------------------------------------------------------------------------------


def _work(pipe: Connection, device: str, threads: int | None) -> None:
    """Answers (configuration, index, names of peers) with a row; first of all with facts."""
    if threads:
        torch.set_num_threads(threads)
    reached = rates(torch.device(device), torch.float32, tf32_allowed("eager")[0])
    pipe.send({"environment": environment(device), "rates": asdict(reached)})
    answer(pipe, lambda job: measured(*job[:2], torch.device(device), job[2]))


def _row(
    worker: Worker, job: tuple[Configuration, int], names: tuple[str, ...], lost: dict[str, Any], limit: float
) -> dict[str, Any]:
    """A row; where a peer lost the device, measured again without it."""
    row = worker.row((*job, names), lost, limit)
    peer = row.get("lost")
    if not peer:
        return row
    again = worker.row((*job, tuple(name for name in names if name != peer)), lost, limit)
    return {**again, "reasons": {**again.get("reasons", {}), peer: row["reasons"][peer]}}


# -- the table --------------------------------------------------------------------------------------------------------


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is asked of all rows together; rows are named by their index."""
    whole = [row for row in rows if not row["error"]]
    fractions = [row["roofline"]["fraction"] for row in whole]
    with_functions = [fraction_with_functions(row["roofline"]) for row in whole]
    compared = [row for row in whole if "compile" in row["times"]]
    slower = [r for r in compared if r["times"]["fusewright"]["median"] > r["times"]["compile"]["median"]]
    return {
        "rows": len(rows),
        "all right": bool(rows) and len(whole) == len(rows) and all(row["accuracy"]["right"] for row in whole),
        "failed": [row["index"] for row in rows if row["error"]],
        "wrong": [row["index"] for row in whole if not row["accuracy"]["right"]],
        "convolution removed": [row["index"] for row in whole if row["path"] == "algebra"],
        "convolution left to ATen": [row["index"] for row in whole if row["path"] == "ATen"],
        "median fraction": statistics.median(fractions) if fractions else None,
        "worst fraction": min(fractions, default=None),
        "median fraction, functions as well": statistics.median(with_functions) if with_functions else None,
        "worst fraction, functions as well": min(with_functions, default=None),
        "compared with compile": len(compared),
        "slower than compile": [row["index"] for row in slower],
    }


def fraction_with_functions(roofline: dict[str, Any]) -> float:
    """The fraction of a floor that also waits for pointwise functions, which no kernel evaluates faster."""
    fraction: float = roofline["fraction"]
    return fraction * max(1.0, (roofline["functions"] or 0.0) / roofline["seconds"])


def show(record: dict[str, Any], names: tuple[str, ...]) -> None:
    """All rows, milliseconds; then the summary."""
    table = Table("#", "model", "conv by", "error / eager's", "bound", title="medians in ms")
    for name in ("floor", "fusewright", "always", *names):
        table.add_column(name, justify="right")
    table.add_column("fraction", justify="right")
    table.add_column("functions", justify="right")
    for row in record["rows"]:
        table.add_row(*_cells(row, names))
    console = Console(width=230)
    console.print(table)
    for key, value in record["summary"].items():
        console.print(f"{key}: {value:.3f}" if isinstance(value, float) else f"{key}: {value}", highlight=False)


def _cells(row: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    head = [str(row["index"]), row["name"]]
    if row["error"]:
        return [*head, row.get("path", "-"), row["error"]]
    checked, roofline, times = row["accuracy"], row["roofline"], row["times"]
    error = f"{checked['error']:.1e} / {checked['eager']:.1e}" if checked["right"] else f"WRONG: {checked['reason']}"
    timed = [f"{times[n]['median'] * 1e3:.3f}" if n in times else "-" for n in ("fusewright", "always", *names)]
    return [
        *(*head, row["path"], error, roofline["bound"]),
        *(f"{roofline['seconds'] * 1e3:.3f}", *timed, f"{roofline['fraction']:.0%}"),
        "-" if roofline["functions"] is None else f"{roofline['functions'] * 1e3:.3f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="index of the first configuration")
    parser.add_argument("--rows", help="these configurations alone (a,b,c)")
    parser.add_argument("--device", choices=list(BYTES), default="cuda")
    parser.add_argument("--bytes", nargs=2, type=float, metavar=("LOW", "HIGH"), help="of input and output together")
    parser.add_argument("--peers", default="eager,compile")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which a configuration is given up")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    names = tuple(chosen.peers.split(","))
    low, high = chosen.bytes or BYTES[chosen.device]
    worker = Worker(_work, chosen.device, chosen.threads)
    record: dict[str, Any] = {"seed": chosen.seed, "bytes": [low, high], "fusewright": fusewright.__version__}
    record |= {**worker.facts, "summary": {}, "rows": []}
    try:
        every = range(chosen.first, chosen.first + chosen.count)
        for index in map(int, chosen.rows.split(",")) if chosen.rows else every:
            configuration = draw(chosen.seed, index, low, high)
            lost = {"index": index, "name": str(configuration), "source": configuration.source()}
            row = _row(worker, (configuration, index), names, lost, chosen.limit)
            record["rows"].append(row)
            record["summary"] = summary(record["rows"])
            print(f"{' | '.join(_cells(row, names))} | {row['took']:.1f} s", file=sys.stderr, flush=True)
            if chosen.out:
                save_results(chosen.out, record)
    finally:
        worker.stop()
    show(record, names)


if __name__ == "__main__":
    main()
