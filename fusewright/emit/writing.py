"""From a problem to a solution file on disk: planned, written, tried in a fresh process, and only then named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fusewright
from fusewright.capture import capture
from fusewright.codegen.aten import Program
from fusewright.dispatch import Entry, Guard, Options, Runner
from fusewright.emit.architecture import architecture
from fusewright.emit.building import TEXTS
from fusewright.emit.draft import Draft
from fusewright.emit.header import Checked, Part, called_in, header, left_to_pytorch, listed
from fusewright.emit.model_code import model_code
from fusewright.emit.serving import tf32_setting
from fusewright.emit.solution import text
from fusewright.emit.trying import ROWS, Differs, tried
from fusewright.errors import CaptureError, FusewrightError, UnsupportedError
from fusewright.ir.types import main_device
from fusewright.optimizer import planned
from fusewright.pipeline import kernel_target
from fusewright.plan import Plan
from fusewright.problem import Problem, guarded
from fusewright.runtime import nvrtc
from fusewright.runtime.cache import write_atomic
from fusewright.schedule.wishes import Wishes
from fusewright.tree import flat_tensors

Progress = Callable[[str], None]

# Compute capabilities, times ten, that kernels are compiled for where there is no GPU.
ARCHITECTURES = (80, 90)


@dataclass(frozen=True)
class Written:
    """A solution file, with the plan and what is known of it for each device that was asked for.

    `precision` is what its kernels were made with (`Options.precision`).
    """

    path: Path
    plans: tuple[Plan, ...]
    checked: tuple[Checked, ...]
    precision: str = "eager"


def check_output(path: Path, problem: Path, force: bool) -> None:
    """Raises `UnsupportedError` where a solution could not be written to `path`, before anything long has run."""
    if path.exists() and path.samefile(problem):
        raise UnsupportedError(f"-o {path}: this is the problem file itself; name another")
    if path.is_dir():
        raise UnsupportedError(f"-o {path}: this is a directory; name a file")
    if path.exists() and not force:
        raise UnsupportedError(f"-o {path}: this file exists; --force replaces it")
    if not path.parent.is_dir():
        raise UnsupportedError(f"-o {path}: {path.parent} is no directory; make it first")
    try:
        tempfile.TemporaryFile(dir=path.parent).close()  # what permissions say is not all there is to it
    except OSError as error:
        raise UnsupportedError(f"-o {path}: nothing can be written to {path.parent}: {error.strerror}") from error


def write_solution(
    problem: Problem,
    path: Path,
    options: Options,
    *,
    targets: Collection[str],
    force: bool = False,
    timed: bool = True,
    progress: Progress = lambda _: None,
) -> Written:
    """Writes the solution of `problem` to `path`.

    `targets` are where it is made to run, ``"cuda"``, ``"cpu"`` or both; for the former without a GPU everything is
    done by estimate and the kernels are compiled as a check.  On one that is here, the file is `timed` as well.

    A file whose kernels rounded to tf32 where they ran, and that is not what eager computes to the tolerance of the
    field's harness, is made once more without tf32.  Where it then is eager's own tf32 that lies between the two, the
    header says by how much.

    Raises `UnsupportedError` where there is nothing to write or nowhere to write it to, and `FusewrightError` where
    the file turned out to be wrong.
    """
    check_output(path, problem.path, force)
    try:
        return _written(problem, path, options, targets, timed, progress)
    except DiffersByTf32:
        # Eager may use tf32 and often does not: then only kernels without it are as close as the field asks for.
        progress("once more without tf32, which eager does not use here")
        return _written(problem, path, replace(options, precision="fp32"), targets, timed, progress)


def _written(
    problem: Problem, path: Path, options: Options, targets: Collection[str], timed: bool, progress: Progress
) -> Written:
    drafts = _drafts(problem, options, targets, progress)
    checked = [_compiled(draft, progress) if _absent(draft.target) else Checked() for draft in drafts]
    checked = _placed(drafts, checked, path, timed, progress)
    return Written(path, tuple(draft.plan for draft in drafts), tuple(checked), options.precision)


class DiffersByTf32(Differs):
    """Kernels that the settings alone let round to tf32 ran there; without that it may be as close."""


class NothingGained(UnsupportedError):
    """There is nothing to write a solution of."""


def _drafts(problem: Problem, options: Options, targets: Collection[str], progress: Progress) -> list[Draft]:
    """A draft for each of `targets`."""
    drafts: list[Draft] = []
    refusals: dict[str, NothingGained] = {}
    for target in (target for target in TEXTS if target in targets):
        if (missing := kernel_target(torch.device(target))) is not None:
            raise UnsupportedError(f"--target {target}: {missing}")
        progress(f"planning for {target}")
        suffix = f"_{target}" if len(targets) > 1 else ""
        try:
            drafts.append(replace(_draft(problem, options, target, progress), suffix=suffix))
        except NothingGained as refusal:
            refusals[target] = refusal
    if not drafts:
        raise next(iter(refusals.values()))
    for target, reason in refusals.items():
        others = ",".join(draft.target for draft in drafts)
        raise UnsupportedError(f"for {target}, {reason}; --target {others} writes one without it")
    return drafts


def _absent(target: str) -> bool:
    return target == "cuda" and not torch.cuda.is_available()


def _draft(problem: Problem, options: Options, target: str, progress: Progress) -> Draft:
    """The draft for one device, which may be absent."""
    absent = _absent(target)
    model = problem.build(device="cpu" if absent else target)
    if options.training is not None:
        model.train(options.training)
    inputs: Any = problem.placeholders() if absent else problem.inputs(device=target)
    problem.check_inputs(model, inputs)
    options = replace(options, target=torch.device("cuda", 0) if absent else None)
    if absent:
        options = replace(options, verify=False, measure=False)
    try:
        return drafted(problem, model, inputs, options, progress)
    except UnsupportedError:
        raise
    except (FusewrightError, SystemExit) as error:
        cause = error if isinstance(error, SystemExit) else error.__cause__
        if cause is None:
            raise
        with guarded(problem.path, f"{problem.model_class.__name__}.forward()"):  # says where in the user's file
            raise cause from None


def drafted(
    problem: Problem, model: nn.Module, inputs: Any, options: Options, progress: Progress = lambda _: None
) -> Draft:
    """What a solution of `problem` for one device is made of.

    Raises `UnsupportedError` where there is nothing to make one of, or not what was asked.
    """
    options = replace(options, graphs="never")  # a file holds a program, which calls of it run
    either = _either_mode(model, inputs, options.wishes)
    if options.wishes.single:  # by estimate first: a refusal should not wait for all that a file needs
        _, _, entry = planned(model, inputs, replace(options, verify=False, measure=False), progress)
        _require_one_launch(_running(entry).program)
    args, kwargs, entry = planned(model, inputs, replace(options, sides=True), progress)
    runner = _running(entry)
    if options.wishes.single:
        _require_one_launch(runner.program)
    target = options.target or main_device(tensor.device for tensor in flat_tensors(args, kwargs))
    return Draft(problem, model, args, kwargs, entry, options.precision, options.wishes, either, target.type)


def _running(entry: Entry) -> Runner:
    """What runs; raises `NothingGained` where that is the original."""
    assert entry.plan is not None
    if entry.runner is None:
        raise NothingGained(f"no solution file was written: {_why_not(entry.plan)}")
    return entry.runner


def _why_not(plan: Plan) -> str:
    """Why nothing was gained, kernels included."""
    if plan.status != "unchanged" or plan.verdict is not None:
        return plan.reason
    if slower := list(dict.fromkeys(choice.name for choice in left_to_pytorch(plan))):
        faster = f"{plan.reason}, and PyTorch's own operations are faster than {listed(slower)}"
        return f"{faster}; --kernels always writes a file with these all the same"
    return f"{plan.reason}, and no part of the model has a kernel" if not plan.kernels else plan.reason


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
    own = [kernel.name for kernel in program.kernels]
    if len(computed) != 1 or computed != own:
        unknown = re.findall(r"torch\.ops\.\w+\.(\w+)\.", forward)
        raise UnsupportedError(
            "--single-kernel: no generated kernel does it all in one launch; there would be "
            f"{listed(list(dict.fromkeys([*own, *called_in(forward), *unknown])) or ['none'])}"
        )


def _compiled(draft: Draft, progress: Progress) -> Checked:
    """Compiles the kernels for the architectures that they are made for."""
    kernels = draft.kernels
    names = architecture(kernels).among(ARCHITECTURES) if kernels else []
    for name in names:
        for kernel in kernels:
            progress(f"compiling {kernel.name} for {name}")
            nvrtc.compile(kernel.source, name, name=kernel.name)
    return Checked(compiled_for=tuple(names))


def _placed(
    drafts: Sequence[Draft], checked: Sequence[Checked], path: Path, timed: bool, progress: Progress
) -> list[Checked]:
    """Writes the file elsewhere, tries it, completes its header, and writes it to its place."""
    date = f"{datetime.now():%Y-%m-%d}"
    checked = [replace(known, version=fusewright.__version__, date=date) for known in checked]
    try:
        with tempfile.TemporaryDirectory(prefix="fusewright-") as folder:
            unnamed = Path(folder) / path.name
            unnamed.write_text(content_of(drafts, checked), encoding="utf-8")
            for i, draft in enumerate(drafts):
                progress(f"verifying the file for {draft.target} in a fresh process")
                checked[i] = replace(checked[i], facts=_facts(draft, unnamed, timed))
        write_atomic(path, content_of(drafts, checked).encode())
    except OSError as error:
        raise UnsupportedError(f"-o {path}: cannot be written: {error.strerror}") from error
    return checked


def _facts(draft: Draft, solution: Path, timed: bool) -> dict[str, Any]:
    """What is found out about a file on the device of a draft, or with a CPU in its place."""
    absent = _absent(draft.target)
    device = "cpu" if absent else draft.target
    try:
        return tried(
            draft.problem.path,
            solution,
            device,
            target=draft.target,
            timed=timed and not absent,
            training=draft.model.training,
            keeps_nan=all(fired.exactness != "finite" for fired in draft.plan.rules),
            exact=draft.target == "cuda" and tf32_setting(draft) is None,
            rows=_rows(draft.guard, ROWS[device]),
            sides=draft.entry.sides.ranges,
        )
    except Differs as error:
        if absent or tf32_setting(draft) is None:
            raise
        raise DiffersByTf32(str(error)) from error


def _rows(guard: Guard, few: int) -> list[int | None]:
    """The leading rows of each tensor input in a batch of `few`, all (`None`) of one that has no rows of a batch."""
    batch = {symbol: max(at.low, few) for symbol, at in guard.symbols.items()}
    firsts = [shape[0] if shape else 0 for shape in guard.shapes]
    return [None if isinstance(n, int) else int(n.subs(batch)) for n in firsts]


def content_of(drafts: Sequence[Draft], checked: Sequence[Checked]) -> str:
    """The whole text of a solution file."""
    first = drafts[0]
    name = f"{first.problem.model_class.__name__} of {first.problem.path.name}"
    parts = [
        Part(d.target, d.plan, d.kernels, d.served, known, () if d.wishes.keep or d.wishes.only else d.rest)
        for d, known in zip(drafts, checked, strict=True)
    ]
    code = model_code(first.problem.path, first.problem.source)
    return formatted(text(drafts, code, header(name, parts, first.wishes, code.remarks)))


def formatted(source: str) -> str:
    """`source` as ruff formats it, where there is one; it is written to need little of that."""
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if ruff is None:
        return source
    command = [ruff, "format", "--isolated", "--line-length", "120", "--stdin-filename", "solution.py", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else source
