"""`torch.compile(model, backend="fusewright")`: every graph that Dynamo takes from a model is optimised as a model is.

PyTorch finds the backend by its entry point, so nothing needs to be imported.  Dynamo's graphs take weights and sizes
as inputs; a `Region` is such a graph as a module that has the weights and reads the sizes from tensors.  It is planned
in its first call, on copies of that call's tensors, and the result is timed against the compiler that would have had
the graph otherwise: the faster one serves it.

    torch.compile(model, backend="fusewright")
    torch.compile(model, backend="fusewright", options={"precision": "fp32", "otherwise": "eager"})
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fusewright.dispatch import State
from fusewright.errors import FusewrightError, UnsupportedError
from fusewright.ir.types import main_device
from fusewright.measure import compare, forward_call, training_call
from fusewright.module import attach, state_of
from fusewright.optimizer import explain, optimize
from fusewright.plan import Plan
from fusewright.verification.state import preserved

log = logging.getLogger(__name__)

# What `options` may say as `fusewright.optimize` has it; beside these, who has a graph otherwise.
OPTIONS = frozenset({"precision", "rewrite", "kernels", "graphs", "finite", "verify", "measure"})
OURS, OTHERWISE = "fusewright", "inductor"
# Layers that are alike share a graph; for more sets of weights than this the other compiler serves it.
MOST_WEIGHTS = 64

Call = Callable[..., Any]
_SLOT = "_fusewright_programs"


@dataclass(frozen=True)
class Inputs:
    """The inputs of a graph of Dynamo's, by number.

    held      weights and buffers
    given     what a call brings: tensors, and numbers that no tensor has for a length
    lengths   numbers that one has: which of `given` it is, and the dimension
    """

    held: tuple[int, ...]
    given: tuple[int, ...]
    lengths: Mapping[int, tuple[int, int]]

    @classmethod
    def of(cls, graph: GraphModule, examples: Sequence[Any]) -> Inputs:
        """As Dynamo describes them.  It marks what it found on modules; an unmarked buffer is as good as an input."""
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        tensors = [i for i, x in enumerate(examples) if isinstance(x, Tensor)]
        held = tuple(i for i in tensors if _is_held(examples[i]))
        given = [i for i in tensors if i not in held]
        found: dict[str, tuple[int, int]] = {}
        for at, i in enumerate(given):
            for dim, length in enumerate(getattr(placeholders[i].meta.get("example_value"), "shape", ())):
                found.setdefault(str(length), (at, dim))
        numbers = [i for i in range(len(examples)) if i not in tensors]
        lengths = {i: found[str(x)] for i in numbers if isinstance(x := examples[i], torch.SymInt) and str(x) in found}
        return cls(held, (*given, *(i for i in numbers if i not in lengths)), lengths)

    def all(self, held: Sequence[Tensor], given: Sequence[Any]) -> list[Any]:
        """What the graph takes."""
        values = dict(zip((*self.held, *self.given), (*held, *given), strict=True))
        values |= {i: given[at].shape[dim] for i, (at, dim) in self.lengths.items()}
        return [values[i] for i in range(len(values))]


def _is_held(x: Tensor) -> bool:
    return isinstance(x, nn.Parameter) or getattr(x, "_dynamo_static_input_type", None) is not None


class Region(nn.Module):
    """A graph as a module whose attributes are its weights and buffers: `given` are the inputs of its forward.

    `run` computes the same from all inputs of the graph, where it is not the graph itself that should.
    """

    def __init__(self, graph: GraphModule, inputs: Inputs, held: Sequence[Tensor], run: Call | None = None) -> None:
        super().__init__()
        self.graph, self.inputs, self.run = graph, inputs, run
        self.names = [f"held_{i}" for i in inputs.held]
        for name, tensor in zip(self.names, held, strict=True):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)

    @property
    def held(self) -> list[Tensor]:
        """The weights and buffers, in the order of the graph's inputs."""
        return [getattr(self, name) for name in self.names]

    def forward(self, *given: Any) -> Any:
        """What the graph gives for these."""
        run = self.run or self.graph.forward  # called itself, a graph would print what it raises
        return run(*self.inputs.all(self.held, given))

    def __deepcopy__(self, memo: dict[int, Any]) -> Region:
        """A copy is for planning anew: the graph itself, which takes other dtypes as well."""
        graph, held = copy.deepcopy((self.graph, self.held), memo)
        return Region(graph, self.inputs, held).train(self.training)


class Programs:
    """Programs for the graphs that a tensor is a weight of, by their graph, as an attribute of that tensor.

    They refer to it, and live as long as it and their graph do.  Whoever saves or copies the tensor gets `None`.
    """

    def __init__(self) -> None:
        self.kept: WeakKeyDictionary[Served, list[nn.Module]] = WeakKeyDictionary()

    def __reduce__(self) -> Any:
        return type(None), ()


class Served:
    """A graph of Dynamo's, called as Dynamo calls it.

    other, otherwise    the name of the other compiler, and what it made of the graph
    plan                what Fusewright made of it; `None` before the first call
    seconds             of a call, by who was called ("fusewright", `other`); empty where nothing was timed
    """

    def __init__(
        self, graph: GraphModule, inputs: Inputs, other: str, otherwise: Call, options: Mapping[str, Any]
    ) -> None:
        self.graph, self.inputs, self.options = graph, inputs, options
        self.other, self.otherwise = other, otherwise
        self.plan: Plan | None = None
        self.seconds: dict[str, float] = {}
        self._trains = False
        self._is_kept = False  # whether calls like the first one are served by the program at all
        self._portable: Mapping[str, Any] = {}  # what was planned, without its weights
        # By the `id`s of weights, until one of these dies; nothing for those that the other compiler serves.
        self._by_weights: dict[tuple[int, ...], ref[nn.Module] | None] = {}
        self._without_weights: nn.Module | None = None
        self._lock = threading.RLock()

    def __call__(self, *args: Any) -> Any:
        """What the graph gives for all its inputs, weights among them."""
        key = tuple(id(args[i]) for i in self.inputs.held)
        if key not in self._by_weights:
            with self._lock:
                self._meet(key, args)
        found = self._by_weights.get(key)  # nothing, too, for weights that are too many
        program = None if found is None else found()
        return self.otherwise(*args) if program is None else program(*(args[i] for i in self.inputs.given))

    def _meet(self, key: tuple[int, ...], args: Sequence[Any]) -> None:
        """Find out who serves calls with these weights."""
        if key in self._by_weights or len(self._by_weights) >= MOST_WEIGHTS:
            return
        held = [args[i] for i in self.inputs.held]
        planned: nn.Module | None = None
        if self.plan is None:
            try:
                planned = self._planned(Region(self.graph, self.inputs, held), [args[i] for i in self.inputs.given])
            except UnsupportedError:
                raise
            except FusewrightError:  # the graph rejects this call, which its own error says best
                return
        program = self._for_weights(held, planned) if self.serves else None
        for tensor in held:
            finalize(tensor, self._by_weights.pop, key, None).atexit = False
        self._by_weights[key] = None if program is None else ref(program)
        if program is not None and held:
            _programs_of(held[0]).setdefault(self, []).append(program)
        else:
            self._without_weights = program

    def _planned(self, region: Region, given: Sequence[Any]) -> nn.Module:
        """`region` optimised, and timed beside the other compiler."""
        examples = tuple(_copied(x) for x in given)
        wanted = [x.requires_grad for x in examples if isinstance(x, Tensor)]
        self._trains = torch.is_grad_enabled() and (any(wanted) or any(p.requires_grad for p in region.parameters()))
        mode = ("with input gradients" if any(wanted) else "forward+backward") if self._trains else "forward"
        planned = optimize(region.train(self._trains), examples, **self.options)
        plan, state = explain(planned), state_of(planned)
        if state is not None:
            self._portable = state.portable()
        self._is_kept = any(kept.mode == mode and kept.path != "original" for kept in plan.kept)
        if self._is_kept and self.options.get("measure", True):
            peer = Region(self.graph, self.inputs, region.held, self.otherwise).train(self._trains)
            timed = partial(training_call, input_gradients=any(wanted)) if self._trains else forward_call
            calls = {OURS: timed(planned, examples), self.other: timed(peer, examples)}
            device = main_device(x.device for x in (*region.held, *examples) if isinstance(x, Tensor))
            with preserved(region):
                found = compare(calls, device=device, min_time=0.1, rounds=7, max_time=5.0)
            self.seconds = {who: sample.median for who, sample in found.items()}
        self.plan = plan
        log.info("%s", self)
        return planned

    def _for_weights(self, held: Sequence[Tensor], planned: nn.Module | None) -> nn.Module | None:
        """The program for these weights; what it does not serve, the other compiler does.  One that has tensors of its
        own is for those alone that it was `planned` for."""
        region = Region(self.graph, self.inputs, held, self.otherwise).train(self._trains)
        state = State.from_portable(region, self._portable)
        return attach(region, state) if state.entries else planned

    @property
    def programs(self) -> list[nn.Module]:
        """Fusewright's, for each set of weights that it was called with and that one serves."""
        found = [made() for made in self._by_weights.values() if made is not None]
        return [program for program in found if program is not None]

    def holds(self, weights: set[int]) -> bool:
        """Whether it was called with any of the tensors that have these `id`s."""
        return any(not weights.isdisjoint(key) for key in self._by_weights)

    @property
    def serves(self) -> bool:
        """Whether Fusewright's program serves the graph, at least some calls of it."""
        if not self._is_kept:
            return False
        return not self.seconds or self.seconds[OURS] < self.seconds[self.other]

    def __str__(self) -> str:
        """In one line; `plan` says it all."""
        if self.plan is None:
            return "a graph that was not called yet"
        who = OURS if self.serves else self.other
        times = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in self.seconds.items())
        why = times or self.plan.reason or "not measured"
        return f"a graph of {len(self.inputs.held)} weights for {self.plan.signature}: served by {who} ({why})"


def _programs_of(tensor: Tensor) -> WeakKeyDictionary[Served, list[nn.Module]]:
    found = getattr(tensor, _SLOT, None)
    if not isinstance(found, Programs):
        found = Programs()
        setattr(tensor, _SLOT, found)
    return found.kept


def _copied(x: Any) -> Any:
    """An input that may be written to, as often as a call is tried."""
    return x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


_served: WeakSet[Served] = WeakSet()


def served(model: nn.Module | None = None) -> list[Served]:
    """The graphs that this backend has been given and that are still in use: all, or those with weights of `model`.

    Each has a `plan`, which is what `fusewright.explain` gives for a module, and the `seconds` it was chosen by.
    """
    weights = None if model is None else {id(x) for x in (*model.parameters(), *model.buffers())}
    return [found for found in _served if weights is None or found.holds(weights)]


def backend(graph: GraphModule, examples: Sequence[Any], *, mode: str | None = None, options: Any = None) -> Served:
    """What serves a graph of Dynamo's: see `torch.compile`, and the head of this module.

    `options` are those of `fusewright.optimize` (`precision`, `rewrite`, `kernels`, `graphs`, `finite`, `verify`,
    `measure`), and `otherwise`, the backend for what is not rewritten, or slower so ("inductor"; "eager" for none).

    Raises `FusewrightError` for other options.
    """
    chosen = dict(options or {})
    otherwise = chosen.pop("otherwise", OTHERWISE)
    unknown = sorted(set(chosen) - OPTIONS)
    if unknown or mode not in (None, "default"):
        what = f"options {', '.join(unknown)}" if unknown else f"mode {mode!r}"
        raise FusewrightError(
            f"backend='fusewright' has no {what}; its options are otherwise, {', '.join(sorted(OPTIONS))}"
        )
    inputs = Inputs.of(graph, examples)
    ours = GraphModule(graph, copy.deepcopy(graph.graph))  # its code is there from the start; theirs may be changed
    found = Served(ours, inputs, otherwise, _compiled(otherwise, graph, examples), chosen)
    _served.add(found)
    return found


def _compiled(name: str, graph: GraphModule, examples: Sequence[Any]) -> Call:
    """The graph by another backend of Dynamo's, or as it is where that fails on it.

    Raises `FusewrightError` where there is no such backend.
    """
    known = [other for other in torch.compiler.list_backends(()) if other != OURS]
    if name not in known:
        raise FusewrightError(f"otherwise is {name!r}, which is no backend here; choose one of {', '.join(known)}")
    try:
        compiled: Call = torch._dynamo.lookup_backend(name)(graph, list(examples))
    except Exception as error:  # no C++ compiler, an operation that it does not know
        log.warning("%s fails on a graph, which runs in eager where it is not rewritten: %s", name, error)
        return graph.forward
    return compiled
