"""From a problem to a solution file on disk: planned, written, tried in a fresh process, and only then named."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fusewright
from fusewright.capture import capture
from fusewright.codegen.aten import Program
from fusewright.dispatch import Options
from fusewright.emit import fresh
from fusewright.emit.header import Checked, header, listed
from fusewright.emit.solution import Draft, text
from fusewright.errors import CaptureError, FusewrightError, UnsupportedError
from fusewright.optimizer import planned
from fusewright.pipeline import kernel_target
from fusewright.plan import Plan
from fusewright.problem import Problem
from fusewright.runtime import nvrtc
from fusewright.schedule.wishes import Wishes
from fusewright.tree import flat_tensors

Progress = Callable[[str], None]

# Compute capabilities, times ten, that kernels are compiled for where there is no GPU.
ARCHITECTURES = (80, 90)

# Rows of the inputs that a solution is compared with float64 on.
ROWS = 4

# Seconds that a solution may take in its fresh process, building included.
SECONDS = 600


@dataclass(frozen=True)
class Written:
    """A solution file, with its plan and what is known of it."""

    path: Path
    plan: Plan
    checked: Checked


def check_output(path: Path, problem: Path, force: bool) -> None:
    """Raises `UnsupportedError` where a solution could not be written to `path`, before anything long has run."""
    if path.exists() and path.samefile(problem):
        raise UnsupportedError(f"-o {path}: this is the problem file itself; name another")
    if path.is_dir():
        raise UnsupportedError(f"-o {path}: this is a directory; name a file")
    if path.exists() and not force:
        raise UnsupportedError(f"-o {path}: this file exists; --force replaces it")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UnsupportedError(f"-o {path}: {path.parent} is no directory that can be written to")


def write_solution(
    problem: Problem,
    path: Path,
    options: Options,
    *,
    device: str,
    force: bool = False,
    timed: bool = True,
    progress: Progress = lambda _: None,
) -> Written:
    """Writes the solution of `problem` to `path`.

    `device` is where it is made to run, ``"cuda"`` or ``"cpu"``; for the former without a GPU everything is done by
    estimate and the kernels are compiled as a check.  On one, the file is `timed` as well.

    Raises `UnsupportedError` where there is nothing to write or nowhere to write it to, and `FusewrightError` where
    the file turned out to be wrong.
    """
    check_output(path, problem.path, force)
    absent = device == "cuda" and not torch.cuda.is_available()
    target = torch.device("cuda", 0) if absent else None
    if (missing := kernel_target(torch.device(device))) is not None:
        raise UnsupportedError(f"--target {device}: {missing}")
    model = problem.build(device="cpu" if absent else device)
    if options.training is not None:
        model.train(options.training)
    inputs: Any = problem.placeholders() if absent else problem.inputs(device=device)
    options = replace(options, target=target, verify=not absent and options.verify)
    options = replace(options, measure=not absent and options.measure)
    progress("planning")
    draft = drafted(problem, model, inputs, options, progress)
    checked = _compiled(draft, progress) if absent else Checked()
    checked = _placed(draft, checked, path, "cpu" if absent else device, timed and not absent, progress)
    return Written(path, draft.plan, checked)


def drafted(
    problem: Problem, model: nn.Module, inputs: Any, options: Options, progress: Progress = lambda _: None
) -> Draft:
    """What a solution of `problem` is made of.

    Raises `UnsupportedError` where there is nothing to make one of, or not what was asked.
    """
    either = _either_mode(model, inputs, options.wishes)
    args, kwargs, entry = planned(model, inputs, options, progress)
    assert entry.plan is not None
    if entry.runner is None:
        raise UnsupportedError(f"no solution file was written: {entry.plan.reason}")
    target = options.target or next(tensor.device for tensor in flat_tensors(args, kwargs))
    if options.wishes.single:
        _require_one_launch(entry.runner.program)
    return Draft(problem, model, args, kwargs, entry, options.precision, options.wishes, either, target.type)


def _either_mode(model: nn.Module, inputs: Any, wishes: Wishes) -> bool:
    """Whether the forward does the same in training and in evaluation mode.

    Raises `UnsupportedError` for wishes about operators that it does not have.
    """
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
    flags = [(module, module.training) for module in model.modules()]
    try:
        graphs = [capture(model.train(mode), args, dict(kwargs)).graph for mode in (True, False)]
    except CaptureError:
        return False
    finally:
        for module, flag in flags:
            module.training = flag
    wishes.left_alone(graphs[0])
    return graphs[0].outputs == graphs[1].outputs and graphs[0].effects == graphs[1].effects


def _require_one_launch(program: Program) -> None:
    """Raises `UnsupportedError` where a call does more than launch one kernel and allocate its output."""
    forward = program.source.partition("def forward(")[2]
    computed = re.findall(r"= (?!\w+\.(?:shape\[|reshape\(|permute\())(.*?)\(", forward)
    if program.derived:
        paths = listed(list(program.sources))
        raise UnsupportedError(
            f"--single-kernel: PyTorch's operations derive what the kernel reads from {paths}, so there would be more "
            "than one launch"
        )
    if len(computed) != 1 or computed != [kernel.name for kernel in program.kernels]:
        raise UnsupportedError(
            f"--single-kernel: no generated kernel does it all in one launch; there would be {listed(computed)}"
        )


def _compiled(draft: Draft, progress: Progress) -> Checked:
    """Compiles the kernels for the architectures that they are made for."""
    kernels = draft.program.kernels
    least = max((kernel.needs for kernel in kernels), default=0)
    names = []
    for arch in ARCHITECTURES:
        if arch < least or not kernels:
            continue
        names.append(f"sm_{arch}")
        for kernel in kernels:
            progress(f"compiling {kernel.name} for {names[-1]}")
            nvrtc.compile(kernel.source, names[-1], name=kernel.name)
    return Checked(compiled_for=tuple(names))


def _placed(draft: Draft, checked: Checked, path: Path, device: str, timed: bool, progress: Progress) -> Checked:
    """Writes the file under another name, tries it, completes its header and gives it its name."""
    checked = replace(checked, version=fusewright.__version__)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.stem}-", suffix=".py", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise UnsupportedError(f"-o {path}: cannot be written: {error.strerror}") from error
    unnamed = Path(name)
    try:
        unnamed.write_text(content_of(draft, checked), encoding="utf-8")
        progress("verifying the file in a fresh process")
        keeps_nan = all(fired.exactness != "finite" for fired in draft.plan.rules)
        training = draft.model.training
        facts = tried(draft.problem.path, unnamed, device, timed=timed, training=training, keeps_nan=keeps_nan)
        checked = replace(checked, facts=facts, date=f"{datetime.now():%Y-%m-%d}")
        unnamed.write_text(content_of(draft, checked), encoding="utf-8")
        unnamed.chmod(0o666 & ~_umask())
        unnamed.replace(path)
    except OSError as error:
        raise UnsupportedError(f"-o {path}: cannot be written: {error.strerror}") from error
    finally:
        unnamed.unlink(missing_ok=True)
    return checked


def content_of(draft: Draft, checked: Checked) -> str:
    """The whole text of a solution file."""
    kernels = draft.program.kernels
    name = f"{draft.problem.model_class.__name__} of {draft.problem.path.name}"
    return formatted(text(draft, header(name, draft.plan, kernels, checked, draft.wishes)))


def formatted(source: str) -> str:
    """`source` as ruff formats it, where there is one; it is written to need little of that."""
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if ruff is None:
        return source
    command = [ruff, "format", "--isolated", "--line-length", "120", "--stdin-filename", "solution.py", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else source


def tried(
    problem: Path, solution: Path, device: str, *, timed: bool, training: bool = True, keeps_nan: bool = True
) -> dict[str, Any]:
    """What `fusewright.emit.fresh` finds out about a solution in a process of its own.

    Raises `FusewrightError` where it is wrong.
    """
    asked = {
        "problem": str(problem.resolve()),
        "solution": str(solution.resolve()),
        "device": device,
        "rows": ROWS if device == "cuda" else 2,
        "time": timed,
        "training": training,
        "keeps nan": keeps_nan,
    }
    # An isolated interpreter may not find a PyTorch that was found through the environment.
    found = f"sys.path.append({str(Path(torch.__file__).parents[1])!r}); runpy.run_path({fresh.__file__!r}"
    script = f"import runpy, sys; {found}, run_name='__main__')"
    command = [sys.executable, "-I", "-c", script, json.dumps(asked)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise FusewrightError(f"the solution file took more than {SECONDS} s in a fresh process") from error
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = next(iter(reversed(done.stderr.strip().splitlines())), f"exit code {done.returncode}")
        raise FusewrightError(f"the solution file does not run in a fresh process: {last}")
    facts: dict[str, Any] = json.loads(lines[-1])
    if not facts.pop("ok"):
        raise FusewrightError(f"the solution file is wrong and was not kept: {facts['reason']}")
    return facts


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
