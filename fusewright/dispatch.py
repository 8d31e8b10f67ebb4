"""Which program serves a call: signatures, entries, and what happens when a call comes that no entry covers.

A signature is the state of the module (structure, attributes, flags: an *epoch*), and the kinds of all inputs.  A new
batch size under a symbolic batch needs no new plan.  Anything else new runs the original the first time it is seen and
is planned and verified when it returns, at most `Options.replans` times; every other call runs the original.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from operator import attrgetter
from typing import Any, Literal

import sympy
import torch
from torch import Tensor, nn

from fusewright.codegen.aten import Program
from fusewright.errors import FusewrightError, UnsupportedError
from fusewright.ir.memory_order import Order, is_in_rows, order_of
from fusewright.ir.node import Symbol
from fusewright.ir.ops import Size
from fusewright.plan import Mode, Plan
from fusewright.runtime import compiler
from fusewright.runtime.derived import DerivedWeights
from fusewright.runtime.device import capability_of
from fusewright.runtime.observers import observed, transforms
from fusewright.runtime.operators import is_ordinary
from fusewright.runtime.recording import NOTHING, Held, Recorder, Surroundings
from fusewright.runtime.watch import Watch, freeze, has_inner_hooks, has_plain_parameters
from fusewright.schedule.wishes import NO_WISHES, Wishes
from fusewright.tree import flat_tensors, tree_flatten

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Key = tuple[Hashable, ...]

# More signatures, or states of a module, than this are not remembered: what comes then runs the original.
MOST_SIGNATURES = 256
MOST_STATES = 64

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, Tensor)


@dataclass(frozen=True)
class Options:
    """What the user asked of `fusewright.optimize`, kept for planning again."""

    training: bool | None = None
    precision: Literal["eager", "fp32", "tf32"] = "eager"
    rewrite: Literal["cost", "always", "never"] = "cost"
    kernels: Literal["auto", "always", "never"] = "auto"
    finite: bool = False
    verify: bool = True
    measure: bool = True
    replans: int = 8
    wishes: Wishes = NO_WISHES
    target: torch.device | None = None  # a device that is not here, which nothing can run or be measured on
    sides: bool = False  # look for other lengths of an input that the program serves as it is
    graphs: Literal["auto", "always", "never"] = "auto"  # record forwards on a GPU as CUDA graphs


@dataclass(frozen=True)
class Guard:
    """The calls a program is valid for: input kinds with symbolic sizes, and the range of each symbol.

    `orders` are those in which the inputs' dimensions lie in memory, for a program whose answers lie as they did when
    it was made; one of ATen operations alone lets them follow the inputs.
    """

    layout: Hashable
    shapes: tuple[tuple[Size, ...], ...]
    kinds: tuple[tuple[torch.dtype, torch.device], ...]
    symbols: Mapping[sympy.Symbol, Symbol]
    orders: tuple[Order | None, ...] | None = None

    def admits(self, layout: Hashable, tensors: tuple[Tensor, ...]) -> bool:
        """Whether a call of this layout with these tensors is covered."""
        if layout != self.layout or tuple((t.dtype, t.device) for t in tensors) != self.kinds:
            return False
        if any(t.ndim != len(shape) for t, shape in zip(tensors, self.shapes, strict=True)):
            return False
        if self.orders is not None and tuple(map(_order, tensors)) != self.orders:
            return False
        sizes: dict[sympy.Symbol, int] = {}
        for symbol, where in self.symbols.items():
            value = sizes[symbol] = tensors[where.input].shape[where.dim]
            if value < where.low or (where.high is not None and value > where.high):
                return False
        wanted = (tuple(n if isinstance(n, int) else int(n.subs(sizes)) for n in shape) for shape in self.shapes)
        return all(tuple(t.shape) == shape for t, shape in zip(tensors, wanted, strict=True))


class Runner:
    """A program, ready to be called on a module.

    recorded  the most elements that inputs may have for a call without gradients to be a replay of what was recorded
    alone     whether the program is worth calls that are no replays
    """

    def __init__(
        self, program: Program, guard: Guard, precision: str = "eager", recorded: int = 0, alone: bool = True
    ) -> None:
        assert program.repeatable or not recorded, "a replay computes and does nothing else"
        self.program = program
        self.guard = guard
        self.precision = precision
        self.recorder = Recorder(recorded) if recorded else None
        self.alone = alone
        self.calls = 0
        derive, self._forward = program.functions()
        # Where nothing is foreign, ordinary tensors are all that operations come across.
        self._direct = program.functions(direct=True)[1] if program.kernels and not program.foreign else None
        self._judged: tuple[object, bool, Held] = (None, False, NOTHING)
        self._derived = DerivedWeights(derive, program.sources, program.constants) if program.derived else None
        on_gpu = any(device.type == "cuda" for _, device in guard.kinds)
        self.may_go_ahead = on_gpu and program.repeatable and not program.looks_up
        self._context = _tf32(precision == "tf32") if on_gpu and precision != "eager" else contextlib.nullcontext

    def __call__(self, module: nn.Module, args: Args, kwargs: Kwargs, state: object = None) -> Any:
        """What the model would return for this call, which `guard` admits; `state` is as `DerivedWeights` has it.

        `NO_ANSWER` where the model itself should be asked.
        """
        tensors = args if isinstance(self.guard.layout, int) else flat_tensors(args, kwargs)
        self.calls += 1
        with self._context():
            held = self._read_by(module, tensors, state)
            if self.recorder is not None and held is not None:
                derive = partial(self._derive, module, state)
                answer = self.recorder.replay(tensors, held, derive, ahead=self.may_go_ahead)
                if answer:
                    return answer[0]
            derived = self._derive(module, state)
            forward = self._forward if self._direct is None or held is None else self._direct
            if self.recorder is None or held is None:
                return forward(module, *tensors, *derived) if self.alone or torch.is_grad_enabled() else NO_ANSWER
            around = cache(partial(Surroundings, derived, held))
            due = self.recorder.is_due(tensors, around)
            if not (due or self.alone):
                return NO_ANSWER
            result = forward(module, *tensors, *derived)
            if due:
                self.recorder.record(self._forward, module, tensors, around())
            return result

    def _derive(self, module: nn.Module, state: object) -> tuple[Tensor, ...]:
        return () if self._derived is None else self._derived(module, state)

    def _read_by(self, module: nn.Module, tensors: Sequence[Any], state: object) -> Held | None:
        """What a call without gradients, which nobody wants to see, may read beside its inputs; `None` for other calls,
        and where not all of it is ordinary tensors."""
        asked = self._direct is not None or self.recorder is not None
        if not asked or state is None or torch.is_grad_enabled() or observed():
            return None
        judged, right, held = self._judged  # read once: another thread may replace it
        if judged is not state:
            constants = self.program.constants
            everything = [*module.parameters(), *module.buffers(), *constants.values()]
            everything += (attrgetter(path)(module) for path in self.program.attributes)
            reads = [constants[p] if p in constants else attrgetter(p)(module) for p in self.program.reads]
            right, held = all(map(is_ordinary, everything)), Held(everything, reads)
            self._judged = state, right, held
        return held if right and all(map(is_ordinary, tensors)) else None

    def has_answers(self) -> bool:
        """Whether calls may well be answered here, and not by the model."""
        return self.alone or (self.recorder is not None and not self.recorder.is_empty)

    def forget(self) -> None:
        """Keep nothing alive of a state that its module has left."""
        self._judged = None, False, NOTHING
        if self._derived is not None:
            self._derived.forget()
        if self.recorder is not None:
            self.recorder.forget()

    def as_recorded(self, most: int, *, alone: bool) -> Runner:
        """The same program, recorded for inputs of up to so many elements."""
        return Runner(self.program, self.guard, self.precision, recorded=most, alone=alone)

    def __reduce__(self) -> Any:  # what was derived and recorded belongs to one module
        most = 0 if self.recorder is None else self.recorder.most
        return Runner, (self.program, self.guard, self.precision, most, self.alone)


def _tf32(allowed: bool) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context in which float32 convolutions and matmuls may, or may not, use tf32."""

    @contextlib.contextmanager
    def context() -> Any:
        matmul, conv = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, conv

    return context


@dataclass(frozen=True)
class Sides:
    """Ranges of lengths, by dimension of the one input, that a program serves beside those that it was made for.

    `gradients`: those flow through it as well.
    """

    ranges: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    gradients: bool = False


@dataclass(frozen=True)
class Entry:
    """What serves calls of one signature: a program in the modes it is kept for, the original in all others.

    `sides` are other lengths of its input that the program was found to serve, where `Options` asked.
    """

    runner: Runner | None = None
    modes: frozenset[Mode] = frozenset()
    plan: Plan | None = None
    sides: Sides = field(default_factory=Sides)


ORIGINAL = Entry()
NO_ANSWER = object()
Planner = Callable[[nn.Module, Args, Kwargs, Options], Entry]


@dataclass
class State:
    """What an optimised module knows beyond the original."""

    original: nn.Module
    options: Options
    planner: Planner | None = None
    entries: dict[Key, Entry] = field(default_factory=dict)
    plan: Plan | None = None
    replans: int = 0
    watch: Watch = field(init=False)
    epoch: int | None = field(init=False)

    def __post_init__(self) -> None:
        self._epochs: dict[Any, int] = {}
        self._seen: set[Key] = set()
        # The last call with gradients that its program was slower for: the like of it are handed on unexamined, since
        # on a GPU whatever runs before the first kernel is time that the backward cannot hide.
        self._slower: Hashable = None
        # The last call without gradients whose program may go ahead: its key, the program, and the module's state.
        self._last: tuple[Key, Runner, Watch] | None = None
        self._lock = threading.RLock()
        self._renew()

    def ahead(self, module: nn.Module, args: Args, kwargs: Kwargs) -> Any:
        """The answer to a call like the last one, or `NO_ANSWER`.

        Whether the module has changed takes a network as long to find out as a few kernels run.  A program on a GPU
        that does no harm is launched before, and its answer dropped where the module has.
        """
        last = self._last  # read once: another thread may replace it
        if last is None or torch.is_grad_enabled() or _is_changed_from_outside():
            return NO_ANSWER
        key, runner, watch = last
        if watch is not self.watch or not runner.has_answers() or _key(args, kwargs) != key:
            return NO_ANSWER
        try:
            answer = runner(module, args, kwargs, watch)
        except Exception:
            if watch.unchanged():
                raise
            return NO_ANSWER
        return answer if watch.unchanged() else NO_ANSWER

    def runner(self, args: Args, kwargs: Kwargs) -> Runner | None:
        """The program for this call, or `None` for the original."""
        training = self._training(args, kwargs) if torch.is_grad_enabled() else None
        if training is not None and training == self._slower:
            return None
        if _is_changed_from_outside():
            return None
        if not self.watch.unchanged():
            self._renew()
        if self.epoch is None:
            return None
        key = _key(args, kwargs)
        if key is None:
            return None
        entry = self.entries.get((self.epoch, *key))
        if entry is None:
            entry = self._resolve((self.epoch, *key), args, kwargs)
        if entry.runner is None:
            return None
        tensors = args if isinstance(key[0], int) else flat_tensors(args, kwargs)
        mode = _mode(tensors)
        if mode in entry.modes:
            if mode == "forward" and entry.runner.may_go_ahead:
                self._last = key, entry.runner, self.watch
            return entry.runner
        self._slower = training
        return None

    def _training(self, args: Args, kwargs: Kwargs) -> Hashable:
        """What calls with gradients are told apart by; `None` for those that it would take long to."""
        if kwargs or not all(isinstance(a, Tensor) for a in args):
            return None
        return (self.original.training, *((a.shape, a.dtype, a.device, a.requires_grad) for a in args))

    def add(self, entry: Entry, args: Args, kwargs: Kwargs) -> None:
        """Let `entry` serve calls like this one, in the module's present state."""
        if not self.watch.unchanged():
            self._renew()
        key = _key(args, kwargs)
        if key is not None and self.epoch is not None:
            self.entries[(self.epoch, *key)] = entry

    def _renew(self) -> None:
        """The module changed: to a state seen before, or to a new one."""
        with self._lock:
            watch = Watch(self.original)
            known = self._epochs.get(watch.fingerprint)
            if has_inner_hooks(self.original) or not has_plain_parameters(self.original):
                known = None
            elif known is None and len(self._epochs) < MOST_STATES:
                known = self._epochs[watch.fingerprint] = len(self._epochs)
            self.watch, self.epoch, self._slower, self._last = watch, known, None, None
            for entry in self.entries.values():
                if entry.runner is not None:
                    entry.runner.forget()

    def _resolve(self, key: Key, args: Args, kwargs: Kwargs) -> Entry:
        """An entry for a signature met for the first or second time."""
        with self._lock:
            entry = self._covering(args, kwargs)
            if entry is None and key not in self._seen and len(self._seen) < MOST_SIGNATURES:
                self._seen.add(key)
                return ORIGINAL
            if entry is None:
                entry = self._planned(args, kwargs)
            if len(self.entries) < MOST_SIGNATURES:
                self.entries[key] = entry
            return entry

    def _covering(self, args: Args, kwargs: Kwargs) -> Entry | None:
        """An entry of this epoch whose guard admits the call: another batch size of a known signature."""
        tensors, layout = flat_tensors(args, kwargs), _layout(args, kwargs)
        for (epoch, *_), entry in self.entries.items():
            if epoch == self.epoch and entry.runner is not None and entry.runner.guard.admits(layout, tensors):
                return entry
        return None

    def _planned(self, args: Args, kwargs: Kwargs) -> Entry:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if self.planner is None or self.replans >= self.options.replans or capturing:
            return ORIGINAL
        self.replans += 1
        present = replace(self.options, training=None)  # as it is now, whatever it was planned for first
        try:
            # A verification edits weights for a moment, and other threads may be calling the model meanwhile.
            entry = self.planner(copy.deepcopy(self.original), args, kwargs, present)
        except (FusewrightError, RuntimeError, TypeError):  # it rejects this call, which its own error says best, or
            return ORIGINAL  # cannot be copied
        return entry if _is_portable(entry) else ORIGINAL

    def latest_plan(self) -> Plan | None:
        """The plan of the newest signature, else the first one."""
        plans = [e.plan for e in self.entries.values() if e.plan is not None]
        return plans[-1] if plans else self.plan

    def copied_to(self, original: nn.Module) -> State:
        """The state of a deep copy of the module: the plans of its present state, for other parameters."""
        return State.from_portable(original, self.portable())

    def portable(self) -> dict[str, Any]:
        """What a copy or a pickle takes along: options, plan, and the entries of the module's present state."""
        current = self.watch.unchanged()
        kept = self.entries.items() if current else ()
        entries = {key[1:]: _for_other_module(e) for key, e in kept if key[0] == self.epoch}
        return {"options": self.options, "planner": self.planner, "entries": entries, "plan": self.plan}

    @classmethod
    def from_portable(cls, original: nn.Module, portable: Mapping[str, Any]) -> State:
        """The state that `portable` describes, for `original`."""
        kept = {key: e for key, e in portable["entries"].items() if _is_portable(e) and _runs_here(e)}
        entries = {(0, *key): _for_other_module(e) for key, e in kept.items()}
        return cls(original, portable["options"], portable["planner"], entries, plan=portable["plan"])


def _is_portable(entry: Entry) -> bool:
    """Whether a program holds no tensor of its own: one found in a list of the model, say, is another in a copy."""
    return entry.runner is None or not entry.runner.program.constants


def _runs_here(entry: Entry) -> bool:
    """Whether the kernels of a program can be built for this machine, which need not be where they were planned."""
    kernels = entry.runner.program.kernels if entry.runner is not None else ()
    machine = capability_of(torch.device("cuda"))
    if machine is not None and not all(kernel.runs_on(machine) for kernel in kernels if kernel.target == "cuda"):
        return False
    if all(kernel.target != "cpu" for kernel in kernels):
        return True  # other devices are looked for in every call
    try:
        return bool(compiler.compiler())
    except UnsupportedError:
        return False


def _for_other_module(entry: Entry) -> Entry:
    return entry if entry.runner is None else replace(entry, runner=copy.copy(entry.runner))


def _mode(tensors: tuple[Tensor, ...]) -> Mode:
    if not torch.is_grad_enabled():
        return "forward"
    if any(t.requires_grad for t in tensors):
        return "with input gradients"
    return "forward+backward"


def _layout(args: Args, kwargs: Kwargs) -> Hashable:
    """How the arguments are arranged, and every one that is no tensor; `None` where one is no plain value either."""
    if not kwargs and all(isinstance(a, Tensor) for a in args):
        return len(args)
    leaves, spec = tree_flatten((args, dict(kwargs)))
    if not all(isinstance(leaf, _PLAIN) for leaf in leaves):
        return None
    return str(spec), tuple("tensor" if isinstance(leaf, Tensor) else freeze(leaf) for leaf in leaves)


def _is_changed_from_outside() -> bool:
    """Whether what a call computes depends on what is around it: inputs may be stand-ins of `torch.func`, and under
    autocast operations choose dtypes of their own."""
    return transforms() is not None or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _key(args: Args, kwargs: Kwargs) -> Key | None:
    """The inputs' part of the signature; `None` for inputs that only the original understands."""
    layout = _layout(args, kwargs)
    if layout is None:
        return None
    tensors = args if isinstance(layout, int) else flat_tensors(args, kwargs)
    for t in tensors:
        if type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided or 0 in t.shape:
            return None
    return (layout, *((t.shape, t.dtype, t.device, _order(t)) for t in tensors))


def _order(t: Tensor) -> Order | None:
    """The order of an input's dimensions in memory; `None` for row by row, as most lie, which is quick to see."""
    return None if is_in_rows(t) else order_of(t)


def guard_of(
    args: Args,
    kwargs: Kwargs,
    shapes: tuple[tuple[Size, ...], ...],
    symbols: Mapping[Any, Symbol],
    *,
    ordered: bool = False,
) -> Guard:
    """The guard of a program captured from this call; `ordered` where it must lie in memory as it does here."""
    tensors = flat_tensors(args, kwargs)
    kinds = tuple((t.dtype, t.device) for t in tensors)
    orders = tuple(map(_order, tensors)) if ordered else None
    return Guard(_layout(args, kwargs), shapes, kinds, dict(symbols), orders)
