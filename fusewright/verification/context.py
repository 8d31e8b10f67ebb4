"""Running reference, candidate and truth from one state, one seed and one set of inputs, within a budget."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fusewright.ir.types import main_device
from fusewright.runtime.memory import is_out_of_memory
from fusewright.runtime.operators import written_out
from fusewright.tree import TreeSpec, tree_flatten
from fusewright.verification.asserted import OnHost
from fusewright.verification.compare import Comparison, Rules, Sample, compare, worst_of
from fusewright.verification.inputs import Call, copied, is_real, nudged
from fusewright.verification.numerics import (
    OtherRoundings,
    RoundedOperands,
    RoundedResults,
    WideArithmetic,
    ieee_float32,
    tf32_allowed,
)
from fusewright.verification.state import State, reseed

# Further evidence: this many runs, or as many as it takes to see this many elements, within the limit; never fewer than
# the least, however long they take.
_EVIDENCE_RUNS, _EVIDENCE_ELEMENTS, _EVIDENCE_LIMIT, _EVIDENCE_LEAST = 8, 32, 31, 3


class NotApplicable(Exception):
    """The check says nothing about this model; the message says why."""


class Fault(Exception):
    """The candidate is wrong in a way that has no size; the message says how."""


@dataclass(frozen=True)
class Run:
    """What one forward call (and backward, where asked for) gave and left behind.

    trained  what else than its inputs gets a gradient
    """

    outputs: list[Any]
    structure: TreeSpec
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    inputs: list[Tensor]
    trained: list[Tensor]

    @cached_property
    def values(self) -> dict[str, Tensor]:
        """Every output tensor by position, and every gradient that there is by name."""
        outputs = {f"output {i}": x for i, x in enumerate(self.outputs) if isinstance(x, Tensor)}
        gradients = {f"gradient of {name}": g for name, g in self.gradients.items() if g is not None}
        return {**outputs, **gradients}


Baselines = Mapping[str, Run]
"""Eager first, and by what makes them inexact what else may be as inexact as eager."""


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    training: bool
    precision: str = "eager"
    exact: bool = False
    gradients: bool = True
    seed: int = 0
    max_bytes: int = 0
    evidence_seconds: float = 5.0
    """The time that one comparison may take to gather further evidence."""


@dataclass
class Context:
    """What every check needs: the two modules, their truth, the inputs at three sizes, and how to compare."""

    reference: nn.Module
    candidate: nn.Module
    example: Call
    options: Options
    core: Call = field(init=False)
    """The example at the largest size whose float64 run fits the budget."""
    side: Call = field(init=False)
    """The example at a size at which many more runs fit the budget."""
    oracle: nn.Module | None = field(init=False, default=None)
    """The reference in float64; `None` where only eager itself can be the truth."""
    oracle_reason: str = field(init=False, default="")
    looseness: float = field(init=False, default=8.0)
    """How many times as wide the floors of the tolerance are where eager itself is the truth."""
    bytes_per_row: float = field(init=False, default=0.0)
    state: State = field(init=False)
    refuses: bool = field(init=False, default=False)
    """Whether the reference was seen to refuse numbers on a GPU."""

    def __post_init__(self) -> None:
        self.core = self.side = self.example
        self.state = State(self.reference, self.candidate)

    @cached_property
    def modes(self) -> tuple[bool, ...]:
        """Without gradients, and with them where they are asked for and there are any: cuDNN's recurrent networks have
        none in evaluation mode."""
        if not self.options.gradients:
            return (False,)
        with suppress(NotApplicable):
            self.eager(self.side, grad=True)
            return False, True
        return (False,)

    @property
    def has_gradients(self) -> bool:
        """Whether anything is run with gradients."""
        return True in self.modes

    # -- one run ------------------------------------------------------------------------------------------------------

    def eager(self, call: Call, *, grad: bool = False) -> Run:
        """The reference, as the user runs it.  Raises `NotApplicable` where it refuses these inputs."""
        modes: list[AbstractContextManager[Any]] = [ieee_float32()] if self.options.precision == "fp32" else []
        host = OnHost()
        if any(x.is_cuda for x in call.tensors()):
            modes.append(host)
        try:
            return self._run(self.reference, call, grad, modes)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise NotApplicable(f"the reference itself raises {summary(error)}") from error
        finally:
            self.refuses |= host.refuses

    def tried(self, call: Call, *, grad: bool = False, within: AbstractContextManager[Any] | None = None) -> Run:
        """The candidate.  Raises `Fault` where it refuses inputs that the reference accepts, for which it is asked
        without kernels first where those would end the process."""
        try:
            if self.refuses:
                self._run(self.candidate, call, grad, [OnHost(written_out)])
            return self._run(self.candidate, call, grad, [within or nullcontext()])
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise Fault(f"the candidate raises {summary(error)}") from error

    def truth(self, call: Call, *, grad: bool = False, tf32: bool = False) -> Run:
        """The reference in float64, on operands rounded to tf32 where asked for.

        Where there is none it is eager itself, kept from tf32 but for that rounding.
        """
        convolutions, matmuls = tf32_allowed(self.options.precision) if tf32 else (False, False)
        if self.oracle is None:
            rounded = [RoundedOperands(convolutions=convolutions, matmuls=matmuls)] if convolutions or matmuls else []
            return self._run(self.reference, call, grad, [ieee_float32(), *rounded])
        mode = WideArithmetic(convolutions=convolutions, matmuls=matmuls)
        return self.run_wide(call, grad, mode)

    def run_wide(self, call: Call, grad: bool, mode: WideArithmetic) -> Run:
        """The float64 reference under a mode of its own."""
        assert self.oracle is not None
        self.state.restore()
        self._copy_state(self.oracle)
        wide = call.map(_widened)
        device = main_device(x.device for x in call.tensors())
        return self._run(self.oracle, wide, grad, [torch.autocast(device.type, enabled=False), mode])

    def _run(self, module: nn.Module, call: Call, grad: bool, modes: Sequence[AbstractContextManager[Any]]) -> Run:
        self.state.restore()
        if module.training != self.options.training:
            # Only then: a part that is frozen on purpose keeps its own flag.
            module.train(self.options.training)
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.enter_context(torch.set_grad_enabled(grad))
            for mode in modes:
                stack.enter_context(mode)
            leaves = [copied(x.detach()).requires_grad_(grad and is_real(x)) for x in call.tensors()]
            given = [copied(leaf) if leaf.requires_grad else leaf for leaf in leaves]
            passed = iter(given)
            reseed(self.options.seed)
            outputs, structure = tree_flatten(call.map(lambda _: next(passed))(module))
            trained = _leaves(outputs, besides=leaves) if grad else []
            gradients = self._gradients(module, leaves, outputs) if grad else {}
        buffers = {name: x.detach().clone() for name, x in module.named_buffers()}
        return Run(outputs, structure, gradients, buffers, [x.detach() for x in given], trained)

    def _gradients(self, module: nn.Module, leaves: list[Tensor], outputs: list[Any]) -> dict[str, Tensor | None]:
        ends = [x for x in outputs if is_real(x) and x.requires_grad]
        wanted = {f"input {i}": x for i, x in enumerate(leaves) if x.requires_grad}
        own = dict(module.named_parameters(remove_duplicate=False))
        wanted |= {name: own[name] for name, p in self.reference.named_parameters() if p.requires_grad}
        if not ends or not wanted:
            return {}
        grads = torch.autograd.grad(ends, list(wanted.values()), [self._cotangent(x) for x in ends], allow_unused=True)
        return {name: g if g is None else g.to_dense() for name, g in zip(wanted, grads, strict=True)}

    def _cotangent(self, x: Tensor) -> Tensor:
        # Seven-bit values are the same number in every floating dtype.
        generator = torch.Generator(device=x.device).manual_seed(self.options.seed + x.numel())
        value = torch.randint(-64, 65, x.shape, generator=generator, device=x.device) / 32
        return value.to(x.dtype)

    def _copy_state(self, oracle: nn.Module) -> None:
        """Each run starts the float64 reference from the reference's state of that moment, edits included."""
        with torch.no_grad():
            for own, theirs in zip(_tensors_of(oracle), _tensors_of(self.reference), strict=True):
                if not own.is_leaf:  # a buffer that its last run wrote to
                    own.detach_()
                own.copy_(theirs)

    # -- agreement ----------------------------------------------------------------------------------------------------

    def rules(self, planted: Any = None) -> Rules:
        """The kind of agreement that the options ask for."""
        return Rules(self.options.exact, planted, looseness=1.0 if self.oracle is not None else self.looseness)

    def against_eager(self, *, looseness: float) -> Context:
        """The same without a float64 reference: eager is the truth, and what rounding to tf32 does to it its error."""
        bare = copy(self)
        bare.oracle, bare.looseness = None, looseness
        return bare

    def sample(self, call: Call, *, grad: bool = False) -> tuple[Run, Run, Baselines, Run]:
        """Eager, the candidate, the baselines of the error and the truth, all on `call`."""
        eager = self.eager(call, grad=grad)
        tried = self.tried(call, grad=grad)
        truth = self.truth(call, grad=grad)
        baselines = {"eager": eager}
        if any(x.is_cuda for x in call.tensors()) and any(tf32_allowed(self.options.precision)):
            baselines["tf32"] = self.truth(call, grad=grad, tf32=True)
        if self.oracle is not None and self._is_wide(call):
            baselines["other roundings"] = self.run_wide(call, grad, OtherRoundings())
        return eager, tried, baselines, truth

    def _is_wide(self, call: Call) -> bool:
        """Whether the model computes in float64 itself, so that its truth has rounding errors like eager's."""
        return any(x.dtype == torch.float64 for x in (*call.tensors(), *_tensors_of(self.reference)))

    def agreement(self, call: Call, *, grad: bool = False, planted: Any = None, tried: Run | None = None) -> Comparison:
        """Compares every output (and gradient) on `call`, of a run made already where `tried` gives it.

        Raises `Fault` where they cannot even be compared.
        """
        eager, now, baselines, truth = self.sample(call, grad=grad)
        tried = now if tried is None else tried
        same_form(eager, tried)
        same_gradients(eager, tried)
        evidence = {tf32: _Evidence(self, call, grad, eager, tf32) for tf32 in (False, True)}
        results = []
        for name, value in tried.values.items():
            if name not in eager.values:
                continue
            true = _of(truth, name, eager)
            first = Sample(value, _named(baselines.values(), name, eager), true)
            tf32 = "tf32" in baselines and not torch.equal(_of(baselines["tf32"], name, eager), true)
            result = compare(first, partial(evidence[tf32].of, name, first), self.rules(planted))
            results.append(replace(result, detail=f"{name}: {result.detail}" if result.detail else ""))
        return worst_of(results)


class _Evidence:
    """Samples on inputs moved by noise of the size of a rounding, or some times that, taken once for all tensors of a
    comparison.

    For tensors that rounding to `tf32` moves, that is the rounding: a switch that it throws may stay as it is under
    the noise of float32.
    """

    def __init__(self, context: Context, call: Call, grad: bool, base: Run, tf32: bool) -> None:
        self._context, self._call, self._grad, self._base, self._tf32 = context, call, grad, base, tf32
        self._runs: dict[int, list[tuple[Run, Run, Baselines, Run]]] = {}
        self._exact: Run | None = None
        self._spent = False
        self._seconds: dict[int, float] = {}

    def of(self, name: str, first: Sample, times: int) -> list[Sample]:
        """The samples of one tensor, `times` as many as usual, with so much more noise; of none, eager with each
        result rounded exactly."""
        if not times:
            return self._rounded(name, first)
        needed = times * max(_EVIDENCE_RUNS, min(_EVIDENCE_LIMIT, _EVIDENCE_ELEMENTS // first.candidate.numel()))
        runs = self._runs.setdefault(times, [])
        while len(runs) < needed and not self._spent and not self._is_late(times):
            start = time.monotonic()
            self._take(times)
            self._seconds[times] = self._seconds.get(times, 0.0) + time.monotonic() - start
        return [sample for run in runs if (sample := self._sample(name, first, *run)) is not None]

    def _rounded(self, name: str, first: Sample) -> list[Sample]:
        """Without noise, the reference whose operations have no error but that of rounding to float32."""
        if self._context.oracle is None or first.eager.dtype != torch.float32:
            return []
        if self._exact is None:
            self._exact = self._context.run_wide(self._call, self._grad, RoundedResults())
        value = self._exact.values.get(name)
        return [] if value is None else [replace(first, baselines=(value.to(first.eager.dtype),))]

    def _is_late(self, times: int) -> bool:
        allowed = times * self._context.options.evidence_seconds
        return self._seconds.get(times, 0.0) > allowed and len(self._runs[times]) >= _EVIDENCE_LEAST

    def _take(self, times: int) -> None:
        taken = sum(map(len, self._runs.values()))
        call = nudged(self._call, self._context.options.seed + 1 + taken, tf32=self._tf32, times=times)
        if not any(is_real(x) for x in call.tensors()):
            # Integers have no rounding-sized neighbours.
            self._spent = True
            return
        try:
            self._runs[times].append(self._context.sample(call, grad=self._grad))
        except (NotApplicable, Fault):
            self._spent = True

    def _sample(
        self, name: str, first: Sample, eager: Run, tried: Run, baselines: Baselines, truth: Run
    ) -> Sample | None:
        if name not in tried.values or name not in eager.values:
            return None
        if tried.values[name].shape != first.candidate.shape or eager.values[name].shape != first.eager.shape:
            return None
        if self._context.oracle is None:
            # Eager is the truth: what noise does to it stands in for its error.
            baselines = {"unmoved": self._base, **baselines}
        return Sample(tried.values[name], _named(baselines.values(), name, eager), _of(truth, name, eager))


def _named(runs: Iterable[Run], name: str, eager: Run) -> tuple[Tensor, ...]:
    return tuple(_of(run, name, eager) for run in runs)


def _of(run: Run, name: str, eager: Run) -> Tensor:
    """A tensor by name; float64 and eager may differ in whether a gradient that is zero exists."""
    own = eager.values[name]
    return run.values.get(name, torch.zeros_like(own))


def same_form(eager: Run, tried: Run) -> None:
    """Raises `Fault` unless the outputs have one structure, and each pair one type, shape, dtype and device."""
    if eager.structure != tried.structure:
        raise Fault(f"the output's structure is {tried.structure}, not {eager.structure}")
    for i, (a, b) in enumerate(zip(eager.outputs, tried.outputs, strict=True)):
        if not isinstance(a, Tensor):
            _same_constant(i, a, b)
            continue
        if not isinstance(b, Tensor):
            raise Fault(f"output {i} is a {type(b).__name__}, not a tensor")
        for what in ("shape", "dtype", "device", "layout"):
            if getattr(a, what) != getattr(b, what):
                raise Fault(f"output {i} has {what} {_plain(getattr(b, what))}, not {_plain(getattr(a, what))}")


def _same_constant(i: int, a: Any, b: Any) -> None:
    same = abs(a - b) <= 1e-5 * abs(a) if isinstance(a, float) and isinstance(b, float) and a != b else a == b
    if type(a) is not type(b) or not (same or a != a):
        raise Fault(f"output {i} is {b!r}, not {a!r}")


def same_gradients(eager: Run, tried: Run) -> None:
    """Raises `Fault` where a gradient exists that should not, or the reverse."""
    for i, (a, b) in enumerate(zip(eager.outputs, tried.outputs, strict=True)):
        if isinstance(a, Tensor) and a.requires_grad != b.requires_grad:
            raise Fault(f"output {i} has requires_grad {b.requires_grad}, not {a.requires_grad}")
    for name, expected in eager.gradients.items():
        given = tried.gradients.get(name)
        if expected is None and given is not None and bool(given.any()):
            raise Fault(f"the gradient of {name} should be none or zero and is not")
        if expected is not None and given is None:
            raise Fault(f"the gradient of {name} is missing")
        if expected is not None and given is not None and expected.shape != given.shape:
            raise Fault(f"the gradient of {name} has shape {tuple(given.shape)}, not {tuple(expected.shape)}")


def _widened(x: Tensor) -> Tensor:
    if not is_real(x):
        return x
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def summary(error: BaseException) -> str:
    """An exception in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__


def _plain(value: object) -> object:
    return tuple(value) if isinstance(value, torch.Size) else value


def _leaves(outputs: list[Any], *, besides: list[Tensor]) -> list[Tensor]:
    """The tensors that get a gradient from real `outputs`, but for some."""
    stack = [x.grad_fn for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None]
    seen, found = set(stack), dict[int, Tensor]()
    while stack:
        step = stack.pop()
        if type(step).__name__ == "AccumulateGrad":  # a function of Python's may have any attribute
            leaf: Tensor = step.variable  # type: ignore[attr-defined]
            found[id(leaf)] = leaf
        behind = {before for before, _ in step.next_functions if before is not None} - seen
        seen |= behind
        stack += behind
    return [x for key, x in found.items() if key not in set(map(id, besides))]
