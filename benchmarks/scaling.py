"""How times on a CPU grow with the batch, the image's side, the channels and the threads, one of them at a time.

    python benchmarks/scaling.py --out benchmarks/results/cpu_scaling.json

The model is a founding one; what does not vary is as `BASE` has it.  Every row is optimised for itself, and eager and
Fusewright are timed in turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from roofline import floor
from run import ROOT

import fusewright
from fusewright.capture import capture
from fusewright.measure import compare, environment, forward_call, save_results
from fusewright.problem import load_problem

PROBLEM = "examples/conv_avgpool_sigmoid_sum.py"
BASE = {"batch": 4, "side": 192, "in_channels": 8, "out_channels": 64, "threads": 2}
SWEEPS = {
    "batch": (1, 2, 4, 8, 16),
    "side": (24, 48, 96, 192, 384),
    "in_channels": (1, 3, 8, 16, 64),
    "out_channels": (8, 16, 48, 64, 256),
    "threads": (1, 2, 4),
}


def points(most_threads: int) -> Iterator[tuple[str, dict[str, int]]]:
    """What varies, and the values of one row."""
    for name, values in SWEEPS.items():
        for value in values:
            point = {**BASE, name: value}
            if point["threads"] <= most_threads:
                yield name, point


def run_point(point: dict[str, int], checked: bool) -> dict[str, Any]:
    """Seconds of eager and of Fusewright, and the least time there could be."""
    torch.set_num_threads(point["threads"])
    problem = load_problem(ROOT / PROBLEM)
    numbers = {"batch_size": point["batch"], "height": point["side"], "width": point["side"]}
    vars(problem.module).update(numbers, in_channels=point["in_channels"], out_channels=point["out_channels"])
    model, inputs = problem.build().eval().requires_grad_(False), problem.inputs()
    fast = fusewright.optimize(model, inputs, verify=checked)
    calls = {"eager": forward_call(model, inputs), "fusewright": forward_call(fast, inputs)}
    times = compare(calls, min_time=0.05, rounds=9, max_time=5.0)
    least = floor(capture(model, tuple(inputs), {}).graph, inputs, calls["eager"]())
    return {
        "point": point,
        "kernels": [choice.name for choice in fusewright.explain(fast).kernels if choice.path == "generated"],
        "times": {name: asdict(sample) for name, sample in times.items()},
        "ratio": times["eager"].median / times["fusewright"].median,
        "roofline": least.record(times["fusewright"].median),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """One line per row."""
    table = Table("varies", *BASE, "eager ms", "fusewright ms", "times as fast", "of the roofline", title=PROBLEM)
    for row in rows:
        milliseconds = [f"{row['times'][name]['median'] * 1e3:.3f}" for name in ("eager", "fusewright")]
        ends = [f"{row['ratio']:.1f}", f"{row['roofline']['fraction']:.0%}"]
        table.add_row(row["varies"], *map(str, row["point"].values()), *milliseconds, *ends)
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="the most there are")
    parser.add_argument("--verify", action="store_true", help="verify every row (several seconds each)")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, point in points(chosen.threads):
        rows.append({"varies": name, **run_point(point, chosen.verify)})
        if chosen.out:
            save_results(chosen.out, {"problem": PROBLEM, "environment": environment(), "rows": rows})
    show(rows)


if __name__ == "__main__":
    main()
