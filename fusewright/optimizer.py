"""`optimize` and `explain`: build, verify, measure, keep what is proven and faster."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fusewright.dispatch import Args, Entry, Kwargs, Options, State
from fusewright.errors import CaptureError, FusewrightError, UnsupportedError
from fusewright.ir.types import main_device
from fusewright.module import attach, state_of, unhooked
from fusewright.pipeline import kernel_target
from fusewright.plan import Plan
from fusewright.runtime.memory import is_out_of_memory
from fusewright.runtime.watch import has_inner_hooks
from fusewright.tree import flat_tensors, tree_map
from fusewright.trial import Progress, Trial, tried
from fusewright.verification.state import preserved

_CHOICES = {
    "precision": ("eager", "fp32", "tf32"),
    "rewrite": ("cost", "always", "never"),
    "kernels": ("auto", "always", "never"),
    "graphs": ("auto", "always", "never"),
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
    graphs: Literal["auto", "always", "never"] = "auto",
    finite: bool = False,
    verify: bool = True,
    measure: bool = True,
    progress: Progress | None = None,
) -> nn.Module:
    """A drop-in replacement for `model` that does less work, verified against it and kept only where measured faster.

    `example_inputs` holds positional arguments (a tuple or list, or one tensor) or keyword arguments (a dict).
    `training` plans for that mode instead of ``model.training``.  `precision`, `rewrite`, `kernels`, `graphs` and
    `finite` are described in the README; `verify=False` and `measure=False` leave the proof and the comparison out.
    `progress` is told what is being done.

    The result shares parameters, buffers and attributes with `model`, which stays usable.  A model that cannot be
    captured, gains nothing, or fails verification is returned as it is; `explain` says why.

    Raises `FusewrightError` for arguments that are none of these, and `UnsupportedError` for ``kernels="always"`` where
    no kernels can be generated, and for ``graphs="always"`` where there is no GPU.
    """
    options = Options(training, precision, rewrite, kernels, finite, verify, measure, graphs=graphs)
    args, kwargs = _checked(model, example_inputs, options)
    state = state_of(model)
    original = model if state is None else state.original
    entry = _plan(original, args, kwargs, options, progress or (lambda _: None))
    assert entry.plan is not None
    if entry.runner is None:
        _plans[original] = entry.plan
        return original
    state = State(original, options, planner=_plan, plan=entry.plan)
    with _mode(original, options.training):
        state.add(entry, args, kwargs)
    return attach(original, state)


def planned(model: nn.Module, example_inputs: Any, options: Options, progress: Progress) -> tuple[Args, Kwargs, Entry]:
    """The example call, and what would serve calls like it: as `optimize` has it, for whoever writes it down.

    Raises `FusewrightError` as `optimize` does.
    """
    args, kwargs = _checked(model, example_inputs, options)
    return args, kwargs, _plan(model, args, kwargs, options, progress)


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
    args, kwargs = _call(example_inputs)
    device = main_device(t.device for t in (*flat_tensors(args, kwargs), *model.parameters()))
    if options.graphs == "always" and device.type != "cuda":
        raise UnsupportedError(f"graphs='always' needs a model on a GPU, and this one is on {device}")
    if options.kernels == "always":
        missing = kernel_target(options.target or device)
        if missing is not None:
            raise UnsupportedError(f"kernels='always' needs a generated kernel for every group, and {missing}")
    return args, kwargs


def _call(example_inputs: Any) -> tuple[Args, Kwargs]:
    """Example inputs as positional and keyword arguments."""
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
        return Entry(plan=replace(draft, reason=reason))
    with _mode(model, options.training), _plain_modes():
        args, kwargs = tree_map(_leaf, (args, dict(kwargs)))
        trial = Trial(unhooked(model), args, kwargs, options, progress)
        try:
            return tried(trial, draft)
        except CaptureError as error:
            _require_runs(trial)
            return Entry(plan=replace(draft, reason=str(error)))
        except Exception as error:  # a model that we fail on still has to run
            reason = f"Fusewright failed on it ({type(error).__name__}: {error}); please report this"
            warnings.warn(f"{type(model).__name__} is left as it is: {reason}", RuntimeWarning, stacklevel=3)
            return Entry(plan=replace(draft, reason=reason))


def _require_runs(trial: Trial) -> None:
    """Raises `FusewrightError` where the model itself rejects the example call: that is the caller's to mend."""
    try:
        with preserved(trial.model), torch.no_grad():
            trial.model(*trial.args, **trial.kwargs)
    except Exception as error:
        if is_out_of_memory(error):
            return
        name, cause = type(trial.model).__name__, str(error).strip().partition("\n")[0]
        message = f"{name} does not run on the example inputs ({type(error).__name__}: {cause}); pass inputs it takes"
        raise FusewrightError(message) from error


@contextmanager
def _plain_modes() -> Iterator[None]:
    """Neither inference mode nor autocast, whatever surrounds the call: a program is made for neither."""
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _leaf(value: Any) -> Any:
    """An input without its history, be it a graph or an inference."""
    if not isinstance(value, Tensor) or (value.is_leaf and not value.is_inference()):
        return value
    plain = value.clone() if value.is_inference() else value.detach()
    return plain.requires_grad_(value.requires_grad)


def _draft(model: nn.Module, args: Args, kwargs: Kwargs, options: Options) -> Plan:
    tensors = flat_tensors(args, kwargs)
    device = str(main_device(t.device for t in (*tensors, *model.parameters())))
    shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in tensors)
    mode = "training" if (model.training if options.training is None else options.training) else "evaluation"
    return Plan(type(model).__name__, "untouched", "", device, f"{shapes}, {mode} mode")


def _untouchable(model: nn.Module, args: Args, kwargs: Kwargs) -> str | None:
    """Why `model` is not even captured, or `None`."""
    if isinstance(model, torch.jit.ScriptModule):
        return "it is a TorchScript module; optimise the module it was made from"
    if "forward" in vars(model):
        return "its forward was replaced on the instance; optimise the module before wrapping it"
    tensors = [*flat_tensors(args, kwargs), *model.parameters(), *model.buffers()]
    if any(nn.parameter.is_lazy(t) for t in tensors):
        return "it has uninitialised (lazy) parameters; run it once first"
    if has_inner_hooks(model):
        return "a submodule has hooks, which a captured graph would not run; remove them first"
    odd = next((t for t in tensors if type(t) not in (Tensor, nn.Parameter, nn.Buffer)), None)
    if odd is not None:
        return f"it holds or takes a {type(odd).__name__}, not plain tensors"
    if any(t.device.type == "meta" for t in tensors):
        return "it holds or takes tensors on the meta device, which have no values to verify with"
    inputs = flat_tensors(args, kwargs)
    if any(t.layout is not torch.strided for t in inputs):
        return "it takes a sparse tensor; such calls run as they did"
    if any(0 in t.shape for t in inputs):
        return "an input is empty, which shows nothing of what is right or fast; pass inputs with elements"
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
