"""Measures eager, torch.compile and Fusewright on the founding models and on cases of the main theorem, in one run.

    python benchmarks/run.py --device cpu --threads 2 --out benchmarks/results/cpu.json
    python benchmarks/run.py --device cuda --out benchmarks/results/h200.json
    python benchmarks/run.py --device cuda --no-tf32 --append --out benchmarks/results/h200.json
    python benchmarks/run.py --device cpu --threads 2 --eval --only densenet --append --out benchmarks/results/cpu.json

Every model is built and verified first; what is printed is what is written.  Floors are `roofline.py`'s.
"""

from __future__ import annotations

import argparse
import gc
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from roofline import floor
from torch import nn

import fusewright
import fusewright.plan
from fusewright.capture import capture
from fusewright.measure import forward_call, save_results
from fusewright.peers import bench
from fusewright.problem import load_problem
from fusewright.tree import flat_tensors
from fusewright.verification.numerics import tf32_allowed

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
    "benchmarks/problems/conv2d_relu_bias.py": 2,
    "benchmarks/problems/conv2d_tanh_scale_bias_maxpool.py": 4,
    "benchmarks/problems/convtranspose3d_maxpools_sum.py": 1,
    "benchmarks/problems/convtranspose3d_scale_maxpool_gap_clamp.py": 4,
    "benchmarks/problems/conv1x1_hardswish_gap_bf16.py": 4,
    "benchmarks/problems/densenet_transition.py": 16,
    "benchmarks/problems/conv1x1_hardswish_gap_linear.py": 16,
    "benchmarks/problems/conv2d_relu_maxpool.py": 16,
    "benchmarks/problems/conv2d_relu_mean_over_time.py": 2,
    "benchmarks/problems/linear_relu_logsumexp.py": 1024,
    "benchmarks/problems/linear_gelu_mean_tokens.py": 8,
}
PEERS = {"cuda": "eager,compile,compile-max", "cpu": "eager,compile"}
NO_TF32 = "allow_tf32=False"
EVAL = "evaluation mode"


def run_case(
    path: str,
    batch: int | None,
    device: str,
    names: tuple[str, ...],
    training: bool,
    verify: bool = True,
    evaluation: bool = False,
) -> dict[str, Any]:
    """All rows of one model, with what Fusewright did to it and the least time that it can take."""
    problem = load_problem(ROOT / path)
    problem = problem if batch is None else problem.with_batch(batch)
    model, inputs = problem.build(device=device), problem.inputs(device=device)
    model.train(model.training and not evaluation)
    plans: dict[str, fusewright.plan.Plan] = {}

    def optimized(target: nn.Module, example: Any) -> nn.Module:
        fast = fusewright.optimize(target, example, verify=verify)
        plans["plan"] = fusewright.explain(fast)
        return fast

    measured = bench(model, inputs, names, include={"fusewright": optimized}, training=training, max_time=20.0)
    if "plan" not in plans:  # optimize raised, and its row says what
        plans["plan"] = fusewright.explain(model, inputs)
    plan = plans["plan"]
    return {
        **_with_floor(measured.record(), model, inputs),
        "flags": _flags(evaluation),
        "dtype": str(flat_tensors((inputs,), {})[0].dtype).removeprefix("torch."),
        "problem": Path(path).stem,
        "inputs": [list(shape) for shape in problem.shapes()],
        "status": plan.status,
        "reason": plan.reason,
        "verified": plan.verdict.checked if plan.verdict is not None else None,
        "rules": [fired.rule for fired in plan.rules],
        "kernels": [asdict(choice) for choice in plan.kernels],
        "flops": [plan.before.flops, plan.after.flops] if plan.before and plan.after else None,
    }


def _flags(evaluation: bool) -> str:
    flags = [*([] if tf32_allowed("eager")[0] else [NO_TF32]), *([EVAL] if evaluation else [])]
    return ", ".join(flags) or "default"


def _with_floor(record: dict[str, Any], model: nn.Module, inputs: Any) -> dict[str, Any]:
    """The record with the model's floor, and the fraction of it that each row reaches."""
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (tuple(inputs), {})
    least = floor(capture(model, args, kwargs).graph, inputs, forward_call(model, inputs)())
    for row in record["rows"]:
        row["fraction"] = None if row["forward"] is None else least.seconds / row["forward"]["median"]
    return {**record, "roofline": asdict(least)}


def show(records: list[dict[str, Any]]) -> None:
    """One line per model: milliseconds of each peer, forward (and forward+backward); the floor; how near it we are."""
    table = Table("model", "inputs", "status")
    names = list(dict.fromkeys(row["name"] for record in records for row in record["rows"]))
    for name in (*(f"{name} ms" for name in names), "floor ms", "fraction"):
        table.add_column(name, justify="right")
    for record in records:
        rows = {row["name"]: row for row in record["rows"]}
        cells = [_cell(rows[name]) if name in rows else "-" for name in names]
        least, fraction = record.get("roofline"), rows["fusewright"].get("fraction")
        cells.append("-" if least is None else f"{least['seconds'] * 1e3:.3f}")
        cells.append("-" if fraction is None else f"{fraction:.0%}")
        flags = record.get("flags", "default")
        label = record["problem"] + ("" if flags == "default" else f" ({flags})")
        table.add_row(label, str(record["inputs"][0]), record["status"], *cells)
    Console(width=200).print(table)


def _cell(row: dict[str, Any]) -> str:
    if row["forward"] is None:
        return str(row["reason"])[:30]
    text = f"{row['forward']['median'] * 1e3:.3f}"
    return text + (f" / {row['training']['median'] * 1e3:.3f}" if row["training"] else "")


def added(records: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """`records` with `new` in the place of the same case under the same flags, or at the end."""

    def key(record: dict[str, Any]) -> tuple[str, str]:
        return record["problem"], record.get("flags", "default")

    if not any(key(record) == key(new) for record in records):
        return [*records, new]
    return [new if key(record) == key(new) else record for record in records]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--peers", help=f"by default {PEERS['cpu']}, on a GPU {PEERS['cuda']}")
    parser.add_argument("--only", default="", help="run the cases whose name contains one of these words (a,b,c)")
    parser.add_argument("--training", action="store_true", help="time forward and backward as well")
    parser.add_argument("--no-tf32", action="store_true", help=f"run under {NO_TF32}; the cases are labelled with it")
    parser.add_argument("--eval", action="store_true", help=f"models in {EVAL}; the cases are labelled with it")
    parser.add_argument("--no-verify", action="store_true", help="leave verification to another run")
    parser.add_argument("--append", action="store_true", help="keep the other cases that the file holds")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    if chosen.no_tf32:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    kind = torch.device(chosen.device).type
    names = tuple((chosen.peers or PEERS[kind]).split(","))
    records = json.loads(chosen.out.read_text())["cases"] if chosen.append and chosen.out.exists() else []
    for path, batch in CASES.items():
        if not any(word in path for word in chosen.only.split(",")):
            continue
        limit = batch if kind == "cpu" else None
        record = run_case(path, limit, chosen.device, names, chosen.training, not chosen.no_verify, chosen.eval)
        records = added(records, record)
        show([record])
        save_results(chosen.out, {"cases": records})  # after every case: a run cut short keeps what it measured
        gc.collect()
        if kind == "cuda":
            torch.cuda.empty_cache()
    show(records)


if __name__ == "__main__":
    main()
