"""Measures eager, torch.compile and Fusewright on the founding models and on cases of the main theorem, in one run.

    python benchmarks/run.py --device cpu --threads 2 --out benchmarks/results/cpu.json

Every model is built and verified first; what is printed is what is written.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import fusewright
import fusewright.plan
from fusewright.measure import save_results
from fusewright.peers import bench
from fusewright.problem import load_problem

ROOT = Path(__file__).parent.parent

# problem file -> batch on a CPU; a GPU gets the file's own
CASES = {
    "examples/conv_avgpool_sigmoid_sum.py": 16,
    "examples/conv3d_div_maxpool_gap_bias_sum.py": 16,
    "examples/convtranspose_gap_bias_logsumexp.py": 4,
    "examples/classifier_head.py": 16,
    "benchmarks/problems/convtranspose2d_cropped_mean.py": 4,
    "benchmarks/problems/conv2d_strided_dilated_mean.py": 4,
    "benchmarks/problems/conv3d_mean_over_depth.py": 8,
    "benchmarks/problems/linear_sum_over_features.py": 1024,
    "benchmarks/problems/conv1d_adaptive_pool.py": 16,
}


def run_case(path: str, batch: int | None, device: str, names: tuple[str, ...], training: bool) -> dict[str, Any]:
    """All rows of one model, with what Fusewright did to it."""
    problem = load_problem(ROOT / path)
    problem = problem if batch is None else problem.with_batch(batch)
    model, inputs = problem.build(device=device), problem.inputs(device=device)
    plans: dict[str, fusewright.plan.Plan] = {}

    def optimized(target: nn.Module, example: Any) -> nn.Module:
        fast = fusewright.optimize(target, example)
        plans["plan"] = fusewright.explain(fast)
        return fast

    measured = bench(model, inputs, names, include={"fusewright": optimized}, training=training, max_time=20.0)
    plan = plans["plan"]
    return {
        **measured.record(),
        "problem": Path(path).stem,
        "inputs": [list(shape) for shape in problem.shapes()],
        "status": plan.status,
        "reason": plan.reason,
        "verified": plan.verdict.checked if plan.verdict is not None else None,
        "rules": [fired.rule for fired in plan.rules],
        "flops": [plan.before.flops, plan.after.flops] if plan.before and plan.after else None,
    }


def show(records: list[dict[str, Any]]) -> None:
    """One line per model: milliseconds of each peer, forward (and forward+backward)."""
    table = Table("model", "inputs", "status")
    names = [row["name"] for row in records[0]["rows"]]
    for name in names:
        table.add_column(f"{name} ms", justify="right")
    for record in records:
        cells = [_cell(row) for row in record["rows"]]
        table.add_row(record["problem"], str(record["inputs"][0]), record["status"], *cells)
    Console(width=180).print(table)


def _cell(row: dict[str, Any]) -> str:
    if row["forward"] is None:
        return row["reason"][:30]
    text = f"{row['forward']['median'] * 1e3:.3f}"
    return text + (f" / {row['training']['median'] * 1e3:.3f}" if row["training"] else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--peers", default="eager,compile")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--training", action="store_true", help="time forward and backward as well")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    records = []
    for path, batch in CASES.items():
        if chosen.only not in path:
            continue
        limit = batch if chosen.device == "cpu" else None
        records.append(run_case(path, limit, chosen.device, tuple(chosen.peers.split(",")), chosen.training))
        show(records[-1:])
        save_results(chosen.out, {"cases": records})  # after every case: a run cut short keeps what it measured
    show(records)


if __name__ == "__main__":
    main()
