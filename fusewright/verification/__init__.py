"""Verification: whether a candidate computes what a reference computes, with evidence, for any two modules."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from fusewright.errors import FusewrightError
from fusewright.runtime.memory import available_bytes, is_out_of_memory
from fusewright.verification.checks import CHECKS, CORE, CheckFunction
from fusewright.verification.context import Context, Fault, NotApplicable, Options
from fusewright.verification.inputs import Call
from fusewright.verification.sizes import default_max_bytes, fit, halve
from fusewright.verification.state import preserved
from fusewright.verification.verdict import Check, Verdict

__all__ = ["Check", "Verdict", "verify"]

_PRECISIONS = ("eager", "fp32", "tf32")


def verify(
    reference: nn.Module,
    candidate: nn.Module,
    example_inputs: object,
    *,
    training: bool | None = None,
    precision: str = "eager",
    exact: bool = False,
    seconds: float = 60.0,
    max_bytes: int | None = None,
    gradients: bool = True,
    seed: int = 0,
    checks: Sequence[str] | None = None,
    truth: Literal["float64", "eager"] = "float64",
    cut_batch: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Verdict:
    """Checks that `candidate` computes what `reference` computes, against a float64 run of the reference.

    The modules may share their parameters; otherwise the candidate is given the reference's state while it is checked.
    Both are left as they were found: parameters, buffers, gradients, training flags and random-number generators.

    `example_inputs` holds positional arguments (a tuple or list) or keyword arguments (a dict); other batches and
    values are derived from it.  `training` follows ``reference.training`` where it is `None`.  `precision` is the
    contract: ``"eager"`` (the user's flags), ``"fp32"`` (never tf32) or ``"tf32"``.  `exact` asks for eager's
    NaN and Inf to the element.  No check is started after `seconds`, but for those of `CORE`; float64 runs that would
    take more than `max_bytes` (a quarter of the free memory by default) are made at a smaller batch.  `progress` is
    told the name of each check before it runs.  `checks` names the ones to run, all by default; `truth` may be eager
    itself, at 8 times the tolerance, where a float64 run is made elsewhere (at a smaller size, say); without
    `cut_batch` no check runs at a smaller batch, however long it takes.

    Without `gradients`, nothing is run with them.

    Raises `FusewrightError` for arguments that are none of these.
    """
    if precision not in _PRECISIONS:
        raise FusewrightError(f"precision is {precision!r}; choose one of {', '.join(_PRECISIONS)}")
    call = Call.of(example_inputs)
    if max_bytes is None:
        max_bytes = default_max_bytes(call, available_bytes)
    training = reference.training if training is None else training
    options = Options(training, precision, exact, gradients, seed, max_bytes, evidence_seconds=max(seconds, 12.0) / 12)
    start = time.monotonic()
    with torch.inference_mode(False), preserved(reference, candidate):
        problem = _align(reference, candidate)
        context = Context(reference, candidate, call, options)
        fitting = (lambda: None) if truth == "eager" else partial(fit, context, seconds if cut_batch else None)
        context.oracle_reason = "as asked"
        chosen = [entry for entry in CHECKS if checks is None or entry[0] in checks]
        rows, checked = _run_checks(context, problem, fitting, chosen, seconds, progress or (lambda _: None))
    return Verdict(tuple(rows), checked, time.monotonic() - start)


def _align(reference: nn.Module, candidate: nn.Module) -> str:
    """Gives a candidate with tensors of its own the reference's state; why that cannot be done, or nothing."""
    theirs = {id(x) for x in (*reference.parameters(), *reference.buffers())}
    if theirs == {id(x) for x in (*candidate.parameters(), *candidate.buffers())}:
        return ""
    own = dict(_named_tensors(candidate))
    try:
        with torch.no_grad():
            for name, x in _named_tensors(reference):
                if own[name] is not x:
                    if own[name].shape != x.shape:
                        return f"{name} has shape {tuple(own[name].shape)}, not {tuple(x.shape)}"
                    own[name].copy_(x)
    except KeyError as error:
        return f"the candidate has no {error.args[0]}"
    return ""


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _run_checks(
    context: Context,
    problem: str,
    fitting: Callable[[], None],
    checks: Sequence[tuple[str, CheckFunction]],
    seconds: float,
    progress: Callable[[str], None],
) -> tuple[list[Check], str]:
    if problem:
        return [Check("state_dict", False, problem)], "nothing: the two modules do not have one state"
    start = time.monotonic()
    try:
        progress("sizes")
        fitting()
    except NotApplicable as error:
        return [Check("example", False, str(error))], "nothing"
    rows = []
    for name, function in checks:
        if name not in CORE and time.monotonic() - start > seconds:
            rows.append(Check(name, None, f"not run: the {seconds:g} s allowed were over"))
            continue
        progress(name)
        rows.append(_run_check(context, name, function))
    return rows, _describe(context)


def _run_check(context: Context, name: str, function: CheckFunction) -> Check:
    """One check; where memory runs out, at half the size until it fits."""
    while True:
        try:
            return function(context, name)
        except NotApplicable as error:
            return Check(name, False if name == "example" else None, str(error))
        except Fault as error:
            return Check(name, False, str(error))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        if not halve(context):
            return Check(name, None, "does not fit in memory at any size")


def _describe(context: Context) -> str:
    core, side, full = context.core.batch(), context.side.batch(), context.example.batch()
    against = "float64" if context.oracle is not None else f"eager at 8 times the tolerance: {context.oracle_reason}"
    mode = "training mode" if context.options.training else "evaluation mode"
    if full is None:
        return f"against {against}, in {mode}"
    return f"against {against}, in {mode}, at batch {core} of {full}, distributions and layouts at batch {side}"
