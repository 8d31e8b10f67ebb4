"""What limits kernels on a GPU, by its hardware counters: Nsight Compute (`ncu`) reads them during one forward.

    python benchmarks/counters.py conv_avgpool_sigmoid_sum 21#17 --out benchmarks/results/h200_counters.json

Models are problem files of `examples/` or `benchmarks/problems/` with one input, by name, or rows of random seeds
(`seed#row`).  Kernels are chosen by measuring, as by default, in inference; then one forward is read, kernel by kernel.
Clocks are left as they are.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import random_configurations
import torch
from torch import Tensor, nn

from fusewright.measure import environment, save_results
from fusewright.problem import load_problem

ROOT = Path(__file__).parent.parent
FOLDERS = ROOT / "examples", ROOT / "benchmarks" / "problems"

# Of a multiprocessor's time, or of the GPU's, the percentage in which something is busy.  What tensor cores of Hopper
# read from shared memory is under "shared memory" as well.
BUSY = {
    "issue slots": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "tensor cores": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "fp32": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "integers, comparisons": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "special functions": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "shared memory": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
}
SECONDS, WARPS = "gpu__time_duration.sum", "sm__warps_active.avg.per_cycle_active"
# Warps that wait for something, per instruction.
STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
REASONS = {
    "memory": "long_scoreboard",
    "shared memory": "short_scoreboard",
    "a barrier": "barrier",
    "the instruction before": "wait",
    "a busy pipe": "math_pipe_throttle",
    "loads and stores": "lg_throttle",
    "shared memory's queue": "mio_throttle",
    "instructions": "no_instruction",
}
UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3}


def metrics() -> list[str]:
    """What `ncu` is asked for."""
    return [SECONDS, WARPS, *BUSY.values(), *(STALLED.format(reason) for reason in REASONS.values())]


def read(text: str) -> list[dict[str, Any]]:
    """The kernels of a raw page in CSV: name, seconds, warps of a multiprocessor, percentages of time in which parts of
    it are busy, and for what warps wait, as shares of all that these reasons come to."""
    rows = list(csv.reader(io.StringIO("\n".join(line for line in text.splitlines() if line.startswith('"')))))
    if not rows:
        return []
    names, units, *kernels = rows
    return [_kernel(dict(zip(names, kernel, strict=True)), dict(zip(names, units, strict=True))) for kernel in kernels]


def _kernel(values: dict[str, str], units: dict[str, str]) -> dict[str, Any]:
    def number(name: str) -> float:
        return float(values[name].replace(",", "") or "nan")

    waits = {label: number(STALLED.format(reason)) for label, reason in REASONS.items()}
    every = sum(waits.values()) or 1.0
    return {
        "kernel": values["Kernel Name"].partition("(")[0],
        "seconds": number(SECONDS) * UNITS[units[SECONDS]],
        "warps": number(WARPS),
        "busy": {label: number(name) for label, name in BUSY.items()},
        "waits": {label: share / every for label, share in waits.items()},
    }


def _model(name: str) -> tuple[nn.Module, Tensor]:
    """A model and its input on a GPU."""
    device = torch.device("cuda")
    if "#" in name:
        seed, index = map(int, name.split("#"))
        drawn = random_configurations.draw(seed, index, *random_configurations.BYTES["cuda"])
        return random_configurations.with_input(drawn, index, device)
    path = next((p for folder in FOLDERS if (p := folder / f"{name}.py").exists()), None)
    if path is None:
        raise SystemExit(f"{name} is neither a problem file of examples/ or benchmarks/problems/ nor seed#row")
    problem = load_problem(path)
    (x,) = problem.inputs(device=device)
    assert isinstance(x, Tensor), name
    return problem.build(device=device).eval().requires_grad_(False), x


def forwards(models: list[str], told: Path) -> None:
    """One forward of each model for the profiler; what was run is `told` to a file."""
    found: list[dict[str, Any]] = []
    for name in models:
        model, x = _model(name)
        fast, entry = random_configurations.optimized(model, x, graphs="never")
        assert entry.runner is not None, f"{name} is kept as it is"
        launches = sum(len(kernel.launches) for kernel in entry.runner.program.kernels)
        with torch.no_grad():
            for _ in range(3):
                fast(x)
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            fast(x)
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
        found.append({"model": name, "shape": list(x.shape), "launches": launches})
        save_results(told, {"environment": environment("cuda"), "models": found})


def profiled(models: list[str]) -> dict[str, Any]:
    """The record of these models, read in a process of their own."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise SystemExit("ncu (Nsight Compute) is not on the PATH: it reads a GPU's counters")
    with tempfile.TemporaryDirectory() as folder:
        log, told = Path(folder) / "log.csv", Path(folder) / "told.json"
        how = ["--clock-control", "none", "--profile-from-start", "off", "--kernel-name", "regex:fused_"]
        page = ["--csv", "--page", "raw", "--metrics", ",".join(metrics()), "--log-file", str(log)]
        own = [sys.executable, __file__, "--told", str(told), *models]
        subprocess.run([ncu, *how, *page, *own], check=True, stdout=sys.stderr)
        facts = json.loads(told.read_text())
        kernels = iter(read(log.read_text()))
    return {"environment": facts["environment"], "rows": [_row(row, kernels) for row in facts["models"]]}


def _row(row: dict[str, Any], kernels: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """A model's row with its kernels, which are the next ones."""
    return {**row, "kernels": [kernel for _, kernel in zip(range(row["launches"]), kernels, strict=False)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--told", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.told:
        forwards(chosen.models, chosen.told)
        return
    record = profiled(chosen.models)
    for row in record["rows"]:
        for kernel in row["kernels"]:
            busiest = sorted(kernel["busy"].items(), key=lambda pair: -pair[1])[:3]
            busy = ", ".join(f"{label} {percent:.0f}%" for label, percent in busiest)
            print(f"{row['model']}: {kernel['kernel']} {kernel['seconds'] * 1e3:.3f} ms: {busy}")
    if chosen.out:
        save_results(chosen.out, record)


if __name__ == "__main__":
    main()
