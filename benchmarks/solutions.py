"""Solution files tried: written, run where Fusewright cannot be imported, and timed beside the in-process module.

    python benchmarks/solutions.py --device cuda --out benchmarks/results/h200_solutions.json
    python benchmarks/solutions.py --device cpu --divide 16 --out benchmarks/results/cpu_solutions.json
    python benchmarks/solutions.py --device cpu --out solutions.json model.py     # a problem of your own

Every problem has processes of its own.  First the files are written, on a GPU several at a time: `write_solution` runs
each in a clean interpreter (``python -I`` that finds no Fusewright) and compares outputs and gradients with float64.
Its first call there builds the kernels; a second clean interpreter finds them built.  The founding models come first,
one after the other, with kernels chosen by measuring; the others take every group's default kernel (``--measured``
measures all, ``--kernels always`` takes kernels where PyTorch would be faster, too).  Then forward, and forward with
backward, are timed in turns: eager, the module that `optimize` returns, and the file.  ``--divide`` makes batches
smaller, for a small machine.  What fails is a row with one sentence and the end of its stderr.
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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fusewright
from fusewright.dispatch import Options
from fusewright.emit.trying import ROWS
from fusewright.emit.writing import write_solution
from fusewright.errors import FusewrightError
from fusewright.measure import compare, environment, forward_call, save_results, training_call
from fusewright.problem import Problem, load_candidate, load_problem

ROOT = Path(__file__).parent.parent
FOUNDING = ("conv_avgpool_sigmoid_sum", "conv3d_div_maxpool_gap_bias_sum", "convtranspose_gap_bias_logsumexp")
PROBLEMS = (
    *(f"examples/{name}.py" for name in (*FOUNDING, "classifier_head")),
    *(f"benchmarks/problems/{path.name}" for path in sorted((ROOT / "benchmarks/problems").glob("*.py"))),
)
AT_ONCE = 5
SECONDS = {"cuda": (150, 90), "cpu": (600, 300)}  # that writing and timing may take
Row = dict[str, Any]

# What a clean interpreter does to find out how long the first call takes once kernels are built.
FIRST_CALL = """
import json, sys, time
solution, torch_at, device, rows = sys.argv[1:]
sys.path.append(torch_at)
sys.modules["fusewright"] = None
import runpy, torch
scope = runpy.run_path(solution)
given, taken = scope["get_init_inputs"](), scope["get_inputs"]()
model = (scope["ModelNew"](**given) if isinstance(given, dict) else scope["ModelNew"](*given)).to(device)
cut = lambda x: x[: int(rows)].to(device) if isinstance(x, torch.Tensor) else x
begun = time.perf_counter()
with torch.no_grad():
    model(**{k: cut(x) for k, x in taken.items()}) if isinstance(taken, dict) else model(*map(cut, taken))
if device == "cuda":
    torch.cuda.synchronize()
print(json.dumps(time.perf_counter() - begun))
"""


def make(path: Path, solution: Path, device: str, options: Options, divide: int) -> Row:
    """Writes a solution; what clean interpreters found."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="solutions-built-") as built:
        os.environ["TORCH_EXTENSIONS_DIR"] = built
        problem = _problem(path, divide)
        written = write_solution(problem, solution, options, targets=[device], force=True, timed=False)
        ((plan,), (checked,)) = written.plans, written.checked
        seconds = time.perf_counter() - begun
        warm = None if checked.facts["stands in"] else _first_call(solution, device)
    return {
        "kernels": [c.name for c in plan.kernels if c.path == "generated"],
        "rules": [fired.rule for fired in plan.rules],
        "measured choice": options.measure,
        "asked for kernels": options.kernels,
        "precision": written.precision,
        "eager rounds": checked.facts.get("eager rounds"),
        "lines": len(solution.read_text().splitlines()),
        "seconds to write": seconds,
        "seconds of first call": None if warm is None else {"cold": checked.facts["first call"], "warm": warm},
        "errors": checked.facts["errors"],
        "compiled for": list(checked.compiled_for),
    }


def _problem(path: Path, divide: int) -> Problem:
    """A problem with so many times fewer rows, though never fewer than two."""
    problem = load_problem(path)
    return problem if divide == 1 else problem.with_batch(max(2, problem.shapes()[0][0] // divide))


def _first_call(solution: Path, device: str) -> float:
    """Seconds that the first call takes in a clean interpreter; raises `FusewrightError` where it fails."""
    found = str(Path(torch.__file__).parents[1])
    command = [sys.executable, "-I", "-c", FIRST_CALL, str(solution), found, device, str(ROWS[device])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FusewrightError(f"the file does not run again: {done.stderr.strip().splitlines()[-1]}")
    return float(done.stdout.splitlines()[-1])


def timed(path: Path, solution: Path, device: str, options: Options, divide: int) -> Row:
    """Medians of eager, the in-process module of the file's precision and the file, in milliseconds."""
    problem = _problem(path, divide)
    model, inputs = problem.build(device=device), problem.inputs(device=device)
    file = load_candidate(solution, problem).build(device=device)
    file.load_state_dict(model.state_dict())
    fast = fusewright.optimize(
        model, inputs, verify=False, measure=options.measure, precision=options.precision, kernels=options.kernels
    )
    modules: dict[str, nn.Module] = {"eager": model, "in process": fast, "file": file}
    row: Row = {}
    for kind, call_of in CALLS.items():
        calls: dict[str, Callable[[], Any]] = {name: call_of(module, inputs) for name, module in modules.items()}
        try:
            for call in calls.values():
                call()
        except ValueError:  # nothing has a gradient
            continue
        samples = compare(calls, device=device, min_time=0.2, max_time=8.0 if device == "cuda" else 40.0)
        medians = {name: sample.median * 1e3 for name, sample in samples.items()}
        row[kind] = {"milliseconds": medians, "file / in process": medians["file"] / medians["in process"]}
    return row


CALLS: dict[str, Callable[[nn.Module, Any], Callable[[], Any]]] = {
    "forward": forward_call,
    "forward and backward": partial(training_call, input_gradients=False),
}


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Nobody else uses the device meanwhile."""
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
        given = [path.resolve() for path in chosen.problems]
        self.paths = [str(p) for p in given or PROBLEMS if any(w in str(p) for w in chosen.only.split(","))]
        self.writing, self.timing = SECONDS[chosen.device]
        self.saving = threading.Lock()
        self.rows: dict[str, Row] = {p: {"problem": Path(p).stem} for p in self.paths}
        self.folder = (chosen.solutions or Path(tempfile.mkdtemp(prefix="solutions-"))).resolve()
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
            how = [*(["--measured"] if self.measured(path) else []), "--kernels", self.chosen.kernels]
            solution = self.folder / f"{Path(path).stem}.py"
            how += ["--device", self.chosen.device, "--divide", str(self.chosen.divide)]
            how += ["--precision", row.get("precision", "eager")]
            arguments = ("--out", os.devnull, *how, *more)
            row |= in_a_process(min(seconds, left), name, path, "--solutions", str(solution), *arguments)
        with self.saving:
            self.save()
            print(_line(row), flush=True)

    def all(self) -> None:
        """Writes every file, then times every one that was written."""
        alone = [p for p in self.paths if self.measured(p)]
        for path in alone:
            self.step(path, "--make", self.writing)
        with ThreadPoolExecutor(AT_ONCE if self.chosen.device == "cuda" else 1) as pool:
            list(pool.map(lambda p: self.step(p, "--make", self.writing), [p for p in self.paths if p not in alone]))
        if self.chosen.device == "cuda" and not torch.cuda.is_available():
            return
        lock = ("--lock", str(self.folder / "lock"))
        with ThreadPoolExecutor(2 if self.chosen.device == "cuda" else 1) as pool:
            list(pool.map(lambda p: self.step(p, "--time", self.timing, *lock), self.paths))

    def save(self) -> None:
        save_results(
            self.chosen.out,
            {
                "environment": environment(self.chosen.device),
                "batches divided by": self.chosen.divide,
                "solutions": list(self.rows.values()),
            },
        )


def _line(row: Row) -> str:
    if "failure" in row:
        return f"{row['problem']}: {row['failure']}"
    error = max(e["new"] for e in row["errors"].values())
    text = f"{row['problem']}: {len(row['kernels'])} kernels, error {error:.1e}"
    if row["seconds of first call"] is not None:
        text += f", first call {row['seconds of first call']['cold']:.1f} s"
        text += f", {row['seconds of first call']['warm']:.2f} s where it is built"
    for kind in CALLS:
        if kind in row:
            times = ", ".join(f"{name} {value:.3f}" for name, value in row[kind]["milliseconds"].items())
            text += f"; {kind} in ms: {times}, file / in process {row[kind]['file / in process']:.2f}"
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
    parser.add_argument("problems", type=Path, nargs="*", help="problem files; by default those of the project")
    parser.add_argument("--only", default="", help="problems whose path contains one of these words (a,b,c)")
    parser.add_argument("--measured", action="store_true", help="choose all kernels by measuring, one after the other")
    parser.add_argument("--kernels", choices=("auto", "always"), default="auto", help="as `optimize` has it")
    parser.add_argument("--divide", type=int, default=1, metavar="N", help="batches so many times smaller")
    parser.add_argument("--solutions", type=Path, help="where the files go; by default a temporary folder")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start nothing after so long")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--time", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--precision", default="eager", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    options = Options(measure=chosen.measured, verify=False, kernels=chosen.kernels)
    if chosen.make:
        one(lambda: make(ROOT / chosen.make, chosen.solutions, chosen.device, options, chosen.divide))
    elif chosen.time:
        own = replace(options, precision=chosen.precision)
        with _alone(chosen.lock):
            one(lambda: timed(ROOT / chosen.time, chosen.solutions, chosen.device, own, chosen.divide))
    else:
        Run(chosen).all()


if __name__ == "__main__":
    main()
