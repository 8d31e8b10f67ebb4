"""`optimize` and `explain`: build, verify, measure, keep what is proven and faster."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fusewright import advice
from fusewright.dispatch import Args, Entry, Kwargs, Options, Runner, State, guard_of
from fusewright.errors import CaptureError, FusewrightError, UnsupportedError
from fusewright.measure import compare, forward_call, training_call
from fusewright.module import attach, state_of, unhooked
from fusewright.pipeline import Built, build
from fusewright.plan import Kept, Plan, Timing
from fusewright.reduced import reduced
from fusewright.runtime.watch import has_inner_hooks
from fusewright.tree import flat_tensors
from fusewright.verification import Verdict
from fusewright.verification import verify as run_verification
from fusewright.verification.state import preserved

Progress = Callable[[str], None]

# A rewritten path is kept only when its median is below the original's by this share: less is noise.
FASTER = 0.98

# Models estimated to take longer than this many seconds are verified at a smaller side: a verification is some hundred
# runs, most of them in float64.
SLOW = 0.02

_UNNAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
_REST = inspect.Parameter.VAR_KEYWORD

_CHOICES = {
    "precision": ("eager", "fp32", "tf32"),
    "rewrite": ("cost", "always", "never"),
    "kernels": ("auto", "always", "never"),
}
_plans: WeakKeyDictionary[nn.Module, Plan] = WeakKeyDictionary()


def optimize(
    model: nn.Module,
    example_inputs: Any,
    *,
    training: bool | None = None,
    precision: Literal["eager", "fp32", "tf32"] = "eager",
    rewrite: Literal["cost", "always", "never"] = "cost",
    kernels: Literal["auto", "always", "never"] = "auto",
    finite: bool = False,
    verify: bool = True,
    measure: bool = True,
    progress: Progress | None = None,
) -> nn.Module:
    """A drop-in replacement for `model` that does less work, verified against it and kept only where measured faster.

    `example_inputs` holds positional arguments (a tuple or list, or one tensor) or keyword arguments (a dict).
    `training` plans for that mode instead of ``model.training``.  `precision`, `rewrite`, `kernels` and `finite` are
    described in the README; `verify=False` and `measure=False` leave the proof and the comparison out.  `progress` is
    told what is being done.

    The result shares parameters, buffers and attributes with `model`, which stays usable.  A model that cannot be
    captured, gains nothing, or fails verification is returned as it is; `explain` says why.

    Raises `FusewrightError` for arguments that are none of these, and `UnsupportedError` for ``kernels="always"``.
    """
    options = Options(training, precision, rewrite, kernels, finite, verify, measure)
    args, kwargs = _checked(model, example_inputs, options)
    state = state_of(model)
    original = model if state is None else state.original
    entry = _plan(original, args, kwargs, options, progress or (lambda _: None))
    assert entry.plan is not None
    if entry.forward is None and entry.training is None:
        _plans[original] = entry.plan
        return original
    state = State(original, options, planner=_plan, plan=entry.plan)
    with _mode(original, options.training):
        state.add(entry, args, kwargs)
    return attach(original, state)


def explain(model_or_fast: nn.Module, example_inputs: Any = None) -> Plan:
    """The plan of an optimised module, or, given example inputs, what `optimize` would try on a model and why.

    Printable; `plan.rules`, `plan.kernels`, `plan.kept`, `plan.advice` and `plan.to_json()` hold the parts.
    Raises `FusewrightError` for a model without a plan when no example inputs are given.
    """
    state = state_of(model_or_fast)
    if example_inputs is None:
        found = _plans.get(model_or_fast) if state is None else state.latest_plan()
        if found is None:
            name = type(model_or_fast).__name__
            raise FusewrightError(f"{name} has no plan yet: pass example_inputs, or what fusewright.optimize returned")
        return found
    options = Options(verify=False, measure=False) if state is None else replace(state.options, measure=False)
    args, kwargs = _checked(model_or_fast, example_inputs, options)
    plan = _plan(model_or_fast if state is None else state.original, args, kwargs, options).plan
    assert plan is not None
    return plan


def _checked(model: nn.Module, example_inputs: Any, options: Options) -> tuple[Args, Kwargs]:
    """The example call, once all arguments are found to make sense."""
    if not isinstance(model, nn.Module):
        raise FusewrightError(f"model is a {type(model).__name__}, not an nn.Module")
    for name, choices in _CHOICES.items():
        if getattr(options, name) not in choices:
            raise FusewrightError(f"{name} is {getattr(options, name)!r}; choose one of {', '.join(choices)}")
    if options.kernels == "always":
        raise UnsupportedError("kernels='always' needs a generated kernel for every group, and there are none yet")
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, tuple | list):
        return tuple(example_inputs), {}
    kind = type(example_inputs).__name__
    raise FusewrightError(f"example_inputs is a {kind}; pass a tuple of positional or a dict of keyword arguments")


def _plan(model: nn.Module, args: Args, kwargs: Kwargs, options: Options, progress: Progress = lambda _: None) -> Entry:
    """Build, verify, measure, decide: what is to serve calls like this one, with the plan that says why."""
    draft = _draft(model, args, kwargs, options)
    reason = _untouchable(model, args, kwargs)
    if reason is not None:
        return Entry(None, None, replace(draft, reason=reason))
    trial = _Trial(unhooked(model), args, kwargs, options, progress)
    with _mode(trial.model, options.training), torch.inference_mode(False):
        try:
            return _tried(trial, draft)
        except CaptureError as error:
            return Entry(None, None, replace(draft, reason=str(error)))
        except Exception as error:  # a model that we fail on still has to run
            reason = f"Fusewright failed on it ({type(error).__name__}: {error}); please report this"
            warnings.warn(f"{type(model).__name__} is left as it is: {reason}", RuntimeWarning, stacklevel=3)
            return Entry(None, None, replace(draft, reason=reason))


def _tried(trial: _Trial, draft: Plan) -> Entry:
    """What building, verifying and measuring come to; raises `CaptureError` where it cannot be built."""
    trial.progress("capturing and rewriting")
    built = build(trial.model, trial.args, trial.kwargs, mode=trial.options.rewrite, finite=trial.options.finite)
    plan = _described(draft, built)
    if plan.rules:
        return _judge(trial, built, plan)
    reason = "no rule applies" if not plan.declined else "no rule that applies would pay"
    return Entry(None, None, replace(plan, status="unchanged", reason=reason))


def _draft(model: nn.Module, args: Args, kwargs: Kwargs, options: Options) -> Plan:
    tensors = flat_tensors(args, kwargs)
    device = next((str(t.device) for t in (*tensors, *model.parameters())), "cpu")
    shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in tensors)
    mode = "training" if (model.training if options.training is None else options.training) else "evaluation"
    return Plan(type(model).__name__, "untouched", "", device, f"{shapes}, {mode} mode")


def _untouchable(model: nn.Module, args: Args, kwargs: Kwargs) -> str | None:
    """Why `model` is not even captured, or `None`."""
    if "forward" in vars(model):
        return "its forward was replaced on the instance; optimise the module before wrapping it"
    if isinstance(model, torch.jit.ScriptModule):
        return "it is a TorchScript module; optimise the module it was made from"
    if has_inner_hooks(model):
        return "a submodule has hooks, which a captured graph would not run; remove them first"
    tensors = [*flat_tensors(args, kwargs), *model.parameters(), *model.buffers()]
    if any(nn.parameter.is_lazy(t) for t in tensors):
        return "it has uninitialised (lazy) parameters; run it once first"
    odd = next((t for t in tensors if type(t) not in (Tensor, nn.Parameter, nn.Buffer)), None)
    if odd is not None:
        return f"it holds or takes a {type(odd).__name__}, not plain tensors"
    if any(t.device.type == "meta" for t in tensors):
        return "it holds or takes tensors on the meta device, which have no values to verify with"
    return None


class _mode:
    """The model in the given training mode for a while, each submodule back in its own afterwards."""

    def __init__(self, model: nn.Module, training: bool | None) -> None:
        self.model = model
        self.training = training
        self.flags: list[tuple[nn.Module, bool]] = []

    def __enter__(self) -> None:
        if self.training is not None and self.training != self.model.training:
            self.flags = [(m, m.training) for m in self.model.modules()]
            self.model.train(self.training)

    def __exit__(self, *_: object) -> None:
        for module, flag in self.flags:
            module.training = flag


def _described(draft: Plan, built: Built) -> Plan:
    return replace(
        draft,
        status="rewritten",
        before=built.before,
        after=built.after,
        rules=built.rewritten.fired,
        declined=built.rewritten.declined,
        opaque=tuple(built.captured.reasons),
        precision=advice.precision_notes(built),
        advice=advice.advice(built),
        program=built.program.source,
    )


@dataclass(frozen=True)
class _Trial:
    """One call of one model, to be judged."""

    model: nn.Module
    args: Args
    kwargs: Kwargs
    options: Options
    progress: Progress

    @property
    def inputs(self) -> Any:
        """The example inputs as `verify` and `measure` take them: all positional, or all by name."""
        if not (self.args and self.kwargs):
            return dict(self.kwargs) if self.kwargs else self.args
        bound = inspect.signature(self.model.forward).bind(*self.args, **self.kwargs)
        kinds = {name: parameter.kind for name, parameter in bound.signature.parameters.items()}
        if any(kinds[name] in _UNNAMED for name in bound.arguments):
            raise CaptureError(f"{type(self.model).__name__} takes arguments that have no name beside named ones")
        rest: Mapping[str, Any] = next(
            (bound.arguments[n] for n, kind in kinds.items() if kind is _REST and n in bound.arguments), {}
        )
        return {**{name: value for name, value in bound.arguments.items() if kinds[name] is not _REST}, **rest}


def _judge(trial: _Trial, built: Built, plan: Plan) -> Entry:
    """Verify and measure a rewritten program; keep it where it is right and faster."""
    candidate, runner = _candidate(trial, built)
    if trial.options.verify:
        verdict = _verified(trial, built)
        plan = replace(plan, verdict=verdict)
        if not verdict.ok:
            failed = next(row for row in verdict.rows if row.ok is False)
            reason = f"verification failed ({failed.name}: {failed.detail}); the original is kept"
            return Entry(None, None, replace(plan, status="unchanged", reason=reason))
    with preserved(trial.model):
        kept, timing = _measured(trial, candidate)
    forward, training = (k.path == "rewritten" for k in kept)
    status: Literal["rewritten", "unchanged"] = "rewritten" if forward or training else "unchanged"
    reason = "" if forward or training else "the rewritten program was not faster; the original is kept"
    plan = replace(plan, status=status, reason=reason, kept=kept, timing=timing)
    return Entry(runner if forward else None, runner if training else None, plan)


def _candidate(trial: _Trial, built: Built) -> tuple[nn.Module, Runner]:
    """A module that runs `built` on every call it is valid for."""
    graph = built.captured.graph
    guard = guard_of(trial.args, trial.kwargs, tuple(n.shape for n in graph.inputs), graph.symbols)
    runner = Runner(built.program, guard, trial.options.precision)
    state = State(trial.model, trial.options)
    state.add(Entry(runner, runner), trial.args, trial.kwargs)
    return attach(trial.model, state), runner


def _verified(trial: _Trial, built: Built) -> Verdict:
    """All checks; of a slow model at a smaller side, and then the example at full size against eager."""

    def again(args: Args, kwargs: Kwargs) -> Built:
        return build(trial.model, args, kwargs, mode=trial.options.rewrite, finite=trial.options.finite)

    smaller = None
    if built.before.seconds > SLOW:
        with preserved(trial.model):
            smaller = reduced(trial.model, trial.args, trial.kwargs, built, again)
    if smaller is None:
        return _checked_against_float64(trial, built)
    args, kwargs, small = smaller
    verdict = _checked_against_float64(replace(trial, args=args, kwargs=kwargs), small)
    full = _verify(trial, built, checks=("example", "metadata"), truth="eager")
    rows = tuple(replace(row, name=f"{row.name} at full size") for row in full.rows)
    sizes = ", ".join(str(tuple(t.shape)) for t in flat_tensors(args, kwargs))
    checked = f"{verdict.checked}, on inputs cut to {sizes}; then against eager at full size"
    return Verdict((*verdict.rows, *rows), checked, verdict.seconds + full.seconds)


def _checked_against_float64(trial: _Trial, built: Built) -> Verdict:
    return _verify(trial, built, cut_batch=bool(built.captured.graph.symbols))


def _verify(trial: _Trial, built: Built, **how: Any) -> Verdict:
    candidate, runner = _candidate(trial, built)
    exact = all(fired.exactness == "exact" for fired in built.rewritten.fired)
    verdict = run_verification(
        trial.model,
        candidate,
        trial.inputs,
        training=trial.model.training,
        precision=trial.options.precision,
        exact=exact,
        progress=lambda name: trial.progress(f"verifying: {name}"),
        **how,
    )
    assert runner.calls > 0, "the verification never ran the program"
    return verdict


def _measured(trial: _Trial, candidate: nn.Module) -> tuple[tuple[Kept, Kept], Timing]:
    """Which path serves calls without and with gradients."""
    if not trial.options.measure:
        reason = "by the cost model; not measured" if trial.options.rewrite == "cost" else "as asked; not measured"
        return (Kept("forward", "rewritten", reason), Kept("forward+backward", "rewritten", reason)), Timing()
    device = next((t.device for t in flat_tensors(trial.args, trial.kwargs)), torch.device("cpu"))
    modules = {"original": trial.model, "rewritten": candidate}
    trial.progress("measuring the forward")
    calls = {name: forward_call(module, trial.inputs) for name, module in modules.items()}
    seconds = {name: s.median for name, s in compare(calls, device=device, max_time=10.0).items()}
    timing = Timing(original_forward=seconds["original"], rewritten_forward=seconds["rewritten"])
    forward = _keep("forward", seconds, trial.options)
    wanted = any(t.requires_grad for t in flat_tensors(trial.args, trial.kwargs))
    if not wanted and not any(p.requires_grad for p in trial.model.parameters()):
        return (forward, replace(forward, mode="forward+backward")), timing
    trial.progress("measuring forward and backward")
    calls = {name: training_call(m, trial.inputs, input_gradients=wanted) for name, m in modules.items()}
    seconds = {name: s.median for name, s in compare(calls, device=device, max_time=15.0).items()}
    timing = replace(timing, original_training=seconds["original"], rewritten_training=seconds["rewritten"])
    return (forward, _keep("forward+backward", seconds, trial.options)), timing


def _keep(mode: Literal["forward", "forward+backward"], seconds: Mapping[str, float], options: Options) -> Kept:
    ratio = seconds["original"] / seconds["rewritten"]
    if options.rewrite == "always":
        return Kept(mode, "rewritten", f"as asked; measured {ratio:.2f}x")
    if seconds["rewritten"] < FASTER * seconds["original"]:
        return Kept(mode, "rewritten", f"measured {ratio:.2f}x faster")
    return Kept(mode, "original", f"the rewritten program measured {ratio:.2f}x the original's speed")
