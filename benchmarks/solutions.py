"""Solution files tried: written, run where Fusewright cannot be imported, and timed beside the in-process module.

    python benchmarks/solutions.py --device cuda --solutions DIR --out benchmarks/results/solutions_h200.json
    python benchmarks/solutions.py --device cpu --only conv_avgpool --out solutions.json      # its logic, without a GPU

Every problem has processes of its own.  First the files are written, several at a time: `write_solution` runs each in a
clean interpreter (``python -I`` that finds no Fusewright), compares outputs and gradients with float64, and reports how
long the kernels took to build.  The founding models come first, one after the other, with kernels chosen by measuring;
the others take every group's default kernel (``--measured`` measures all).  Then the forward is timed in turns: eager,
the module that `optimize` returns, and the file.  What fails is a row with one sentence and the end of its stderr.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fusewright
from fusewright.dispatch import Options
from fusewright.emit.writing import write_solution
from fusewright.errors import FusewrightError
from fusewright.measure import compare, environment, forward_call, save_results
from fusewright.problem import load_candidate, load_problem

ROOT = Path(__file__).parent.parent
FOUNDING = ("conv_avgpool_sigmoid_sum", "conv3d_div_maxpool_gap_bias_sum", "convtranspose_gap_bias_logsumexp")
PROBLEMS = (
    *(f"examples/{name}.py" for name in (*FOUNDING, "classifier_head")),
    *(f"benchmarks/problems/{path.name}" for path in sorted((ROOT / "benchmarks/problems").glob("*.py"))),
)
AT_ONCE = 5
WRITING, TIMING = 150, 90  # seconds a process may take
Row = dict[str, Any]


def make(path: Path, solution: Path, device: str, measured: bool) -> Row:
    """Writes a solution; what the clean interpreter found."""
    options = Options(measure=measured, verify=False)
    begun = time.perf_counter()
    written = write_solution(
        load_problem(path), solution, options, device="cuda", force=True, timed=measured and device == "cuda"
    )
    facts = written.checked.facts
    return {
        "kernels": [c.name for c in written.plan.kernels if c.path == "generated"],
        "rules": [fired.rule for fired in written.plan.rules],
        "measured choice": measured and device == "cuda",
        "lines": len(solution.read_text().splitlines()),
        "seconds to write": time.perf_counter() - begun,
        "seconds of first call": facts["first call"] if device == "cuda" else None,
        "errors": facts["errors"],
        "compiled for": list(written.checked.compiled_for),
    }


def timed(path: Path, solution: Path, measured: bool, lock: Path) -> Row:
    """Medians of eager, the in-process module and the file, in milliseconds."""
    problem = load_problem(path)
    model, inputs = problem.build(device="cuda"), problem.inputs(device="cuda")
    file = load_candidate(solution, problem).build(device="cuda")
    file.load_state_dict(model.state_dict())
    fast = fusewright.optimize(model, inputs, verify=False, measure=measured)
    modules: dict[str, nn.Module] = {"eager": model, "in process": fast, "file": file}
    calls: dict[str, Callable[[], Any]] = {name: forward_call(module, inputs) for name, module in modules.items()}
    for call in calls.values():
        call()
    with _alone(lock):
        samples = compare(calls, device="cuda", min_time=0.2, max_time=8.0)
    medians = {name: sample.median * 1e3 for name, sample in samples.items()}
    return {"milliseconds": medians, "file / in process": medians["file"] / medians["in process"]}


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Nobody else times anything meanwhile."""
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def in_a_process(seconds: float, *arguments: str) -> Row:
    """What this script prints last when it is called with `arguments`; a sentence where it fails."""
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    environment_ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False, cwd=ROOT, env=environment_
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"took more than {seconds:g} s"}
    lines = done.stdout.strip().splitlines()
    try:
        found: Row = json.loads(lines[-1])
    except (ValueError, IndexError):
        said = done.stderr.strip().splitlines()
        return {"failure": said[-1] if said else f"exit code {done.returncode}", "stderr": said[-12:]}
    return found


class Run:
    """All problems, with a row each that is saved whenever it grows."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.chosen = chosen
        self.deadline = time.monotonic() + chosen.seconds
        self.paths = [p for p in PROBLEMS if any(word in p for word in chosen.only.split(","))]
        self.saving = threading.Lock()
        self.rows: dict[str, Row] = {p: {"problem": Path(p).stem} for p in self.paths}
        self.folder = chosen.solutions or Path(tempfile.mkdtemp(prefix="solutions-"))
        self.folder.mkdir(parents=True, exist_ok=True)

    def measured(self, path: str) -> bool:
        return self.chosen.measured or Path(path).stem in FOUNDING

    def step(self, path: str, name: str, seconds: float, *more: str) -> None:
        """One process about one problem."""
        row, left = self.rows[path], self.deadline - time.monotonic()
        if "failure" in row:
            return
        if left < 20:
            row["failure"] = "there was no time left"
        else:
            how = ["--measured"] if self.measured(path) else []
            solution = self.folder / f"{Path(path).stem}.py"
            arguments = ("--out", os.devnull, "--device", self.chosen.device, *how, *more)
            row |= in_a_process(min(seconds, left), name, path, "--solutions", str(solution), *arguments)
        with self.saving:
            self.save()
            print(_line(row), flush=True)

    def all(self) -> None:
        """Writes every file, then times every one that was written."""
        alone = [p for p in self.paths if self.measured(p)]
        for path in alone:
            self.step(path, "--make", WRITING)
        with ThreadPoolExecutor(AT_ONCE if self.chosen.device == "cuda" else 1) as pool:
            list(pool.map(lambda p: self.step(p, "--make", WRITING), [p for p in self.paths if p not in alone]))
        if self.chosen.device == "cuda":
            with ThreadPoolExecutor(2) as pool:
                list(
                    pool.map(lambda p: self.step(p, "--time", TIMING, "--lock", str(self.folder / "lock")), self.paths)
                )

    def save(self) -> None:
        save_results(
            self.chosen.out, {"environment": environment(self.chosen.device), "solutions": list(self.rows.values())}
        )


def _line(row: Row) -> str:
    if "failure" in row:
        return f"{row['problem']}: {row['failure']}"
    error = max(e["new"] for e in row["errors"].values())
    text = f"{row['problem']}: {len(row['kernels'])} kernels, error {error:.1e}"
    if row["seconds of first call"] is not None:
        text += f", first call {row['seconds of first call']:.1f} s"
    if "milliseconds" in row:
        times = ", ".join(f"{name} {value:.3f}" for name, value in row["milliseconds"].items())
        text += f"; ms: {times}; file / in process {row['file / in process']:.2f}"
    return text


def one(work: Callable[[], Row]) -> None:
    """Prints what came of one step; a mistake of ours keeps its trace."""
    try:
        print(json.dumps(work()))
    except FusewrightError as error:
        print(json.dumps({"failure": str(error)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", default="", help="problems whose path contains one of these words (a,b,c)")
    parser.add_argument("--measured", action="store_true", help="choose all kernels by measuring, one after the other")
    parser.add_argument("--solutions", type=Path, help="where the files go; by default a temporary folder")
    parser.add_argument("--seconds", type=float, default=400.0, help="start nothing after so long")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--time", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.make:
        one(lambda: make(ROOT / chosen.make, chosen.solutions, chosen.device, chosen.measured))
    elif chosen.time:
        one(lambda: timed(ROOT / chosen.time, chosen.solutions, chosen.measured, chosen.lock))
    else:
        Run(chosen).all()


if __name__ == "__main__":
    main()
