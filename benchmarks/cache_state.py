"""What the state of the level-2 cache before a call adds to its measured time: it is emptied in two ways, or left.

    python benchmarks/cache_state.py --out benchmarks/results/h200_cache_state.json

`written` overwrites twice the cache's size, so that up to a whole cache of changed lines has yet to be written to
memory when the call begins; `read` reads as much instead; `left` does nothing.  Each of a few models (the founding
ones and random ones of `configurations.py`) is timed forward as in `fusewright.measure`, and so is `nothing`, an
operation on one number.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from random_configurations import drawn
from solutions import FOUNDING
from torch import Tensor, nn

import fusewright
from fusewright.measure import environment, forward_call, save_results
from fusewright.problem import load_problem

ROOT = Path(__file__).parent.parent
States = dict[str, Callable[[], object]]


def milliseconds(call: Callable[[], object], before: Callable[[], object], calls: int = 50) -> float:
    """The median of the times between two events around each call."""
    for _ in range(3):
        before()
        call()
    pairs = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(calls)]
    for start, end in pairs:
        before()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def main() -> None:
    """Prints and saves a line for each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", default="7,21,23,26", help="random models, of seed 1")
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    size = torch.cuda.get_device_properties("cuda").L2_cache_size
    scratch = torch.zeros(2 * size // 4, device="cuda")
    states: States = {"written": scratch.zero_, "read": scratch.sum, "left": lambda: None}
    one = torch.zeros(1, device="cuda")
    rows: dict[str, Any] = {"nothing": {s: milliseconds(one.neg_, f) for s, f in states.items()}}
    for name, model, x in models(arguments.rows):
        fast = fusewright.optimize(model, (x,), verify=False)
        calls = {"eager": forward_call(model, (x,)), "fusewright": forward_call(fast, (x,))}
        rows[name] = {who: {s: milliseconds(call, f) for s, f in states.items()} for who, call in calls.items()}
        print(name, rows[name], flush=True)
        save_results(arguments.out, {"environment": environment("cuda"), "milliseconds": rows})
        torch.cuda.empty_cache()


def models(rows: str) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Name, model and input of the founding models and of these random ones."""
    for name in FOUNDING:
        problem = load_problem(ROOT / "examples" / f"{name}.py")
        (x,) = problem.inputs(device="cuda")
        yield name, problem.build(device="cuda").requires_grad_(False), x
    yield from drawn(rows)


if __name__ == "__main__":
    main()
