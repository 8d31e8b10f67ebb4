"""The first call and the peak memory of models on a CPU: each figure from a fresh process of its own.

    python benchmarks/footprint.py --threads 2 --out benchmarks/results/cpu_footprint.json

first call  seconds of the first call after `fusewright.optimize`, which compiles the kernels (cold) or finds them in
            the cache (warm); nothing is measured or verified before
extra       bytes by which the resident set grows during a call beyond what model, inputs and libraries take: the peak
            (``VmHWM``, reset before the call) minus the size before it, unused memory given back beforehand
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from run import CASES, ROOT

import fusewright
from fusewright.measure import environment, forward_call, save_results
from fusewright.problem import load_problem


def resident(field: str) -> int:
    """Bytes that a line of ``/proc/self/status`` gives."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def measured(path: str, batch: int, threads: int, who: str) -> dict[str, Any]:
    """One process's figures: of the model itself (``eager``) or of what `fusewright.optimize` makes of it."""
    torch.set_num_threads(threads)
    problem = load_problem(ROOT / path).with_batch(batch)
    model, inputs = problem.build(device="cpu"), problem.inputs(device="cpu")
    if who != "eager":
        model = fusewright.optimize(model, inputs, verify=False, measure=False)
    call = forward_call(model, inputs)
    start = time.perf_counter()
    call()
    first = time.perf_counter() - start
    ctypes.CDLL(None).malloc_trim(0)  # glibc's; what follows needs Linux as well
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, as proc(5) says
    before = resident("VmRSS")
    call()
    kernels = [] if who == "eager" else [k.name for k in fusewright.explain(model).kernels if k.path == "generated"]
    return {"first": first, "extra": resident("VmHWM") - before, "kernels": kernels, "environment": environment()}


def in_a_process(path: str, batch: int, threads: int, who: str, cache: str) -> dict[str, Any]:
    """`measured`, in a process of its own with this cache."""
    command = [sys.executable, __file__, "--threads", str(threads), "--measure", path, str(batch), who]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "FUSEWRIGHT_CACHE_DIR": cache}
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run_case(path: str, batch: int, threads: int) -> dict[str, Any]:
    """Eager, a cold cache, a warm cache."""
    with tempfile.TemporaryDirectory() as cache:
        eager, cold, warm = (in_a_process(path, batch, threads, who, cache) for who in ("eager", "cold", "warm"))
    return {
        "problem": Path(path).stem,
        "batch": batch,
        "environment": warm["environment"],
        "kernels": warm["kernels"],
        "first_call": {"cold": cold["first"], "warm": warm["first"]},
        "extra": {"eager": eager["extra"], "fusewright": warm["extra"]},
    }


def show(records: list[dict[str, Any]]) -> None:
    """One line per model."""
    table = Table("model", "batch", "first call, cold s", "warm s", "extra of eager MB", "of Fusewright MB", "share")
    for r in records:
        first, extra = r["first_call"], r["extra"]
        share = f"{extra['fusewright'] / extra['eager']:.1%}" if extra["eager"] else "-"
        sizes = (f"{extra[name] / 1e6:.1f}" for name in ("eager", "fusewright"))
        table.add_row(r["problem"], str(r["batch"]), f"{first['cold']:.2f}", f"{first['warm']:.3f}", *sizes, share)
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="run the cases whose name contains one of these words (a,b,c)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", nargs=3, metavar=("PATH", "BATCH", "WHO"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        path, batch, who = chosen.measure
        print(json.dumps(measured(path, int(batch), chosen.threads, who)))
        return
    records = []
    for path, batch in CASES.items():
        if any(word in path for word in chosen.only.split(",")):
            records.append(run_case(path, batch, chosen.threads))
            show(records[-1:])
            if chosen.out:
                save_results(chosen.out, {"cases": records})
    show(records)


if __name__ == "__main__":
    main()
