"""The table of contents: the passes from a module to a program, in order.

    capture    module -> Graph               `fusewright.capture`
    settle     Graph -> Graph                `fusewright.capture.masks`
    rewrite    Graph -> Graph                `fusewright.rules` under `fusewright.schedule.cost`
    turn       Graph -> Graph                `fusewright.schedule.channels_last`, where that is asked for
    cut        Graph -> Graph, kernels       `fusewright.schedule.groups` under `fusewright.tuning`
    lower      Graph -> Program              `fusewright.codegen.aten`

Every pass takes a valid value and returns one (`fusewright.ir.spec.check` runs between them).  Verification and
measuring follow on the built program (`fusewright.optimizer`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from fusewright.capture import Captured, capture
from fusewright.capture.masks import asked_of, settled
from fusewright.codegen.aten import Program, lower
from fusewright.errors import CaptureError, UnsupportedError
from fusewright.ir import ops
from fusewright.ir.memory_order import Order, order_of, output_orders
from fusewright.ir.node import Graph, Node
from fusewright.ir.placement import gathered, placed
from fusewright.ir.spec import check
from fusewright.ir.types import main_device
from fusewright.plan import KernelChoice, Work
from fusewright.rules import RULES, views
from fusewright.rules.engine import Mode, Rewritten, rewrite, total
from fusewright.runtime import compiler, nvrtc
from fusewright.runtime.device import LARGE_GPU, DeviceFacts, device_facts
from fusewright.runtime.launch import layout_of
from fusewright.schedule.bias_behind import with_bias_behind
from fusewright.schedule.channels_last import as_eager_lies, channels_last, with_memory_of_its_own
from fusewright.schedule.cost import CostModel
from fusewright.schedule.few_elements import of_few
from fusewright.schedule.groups import cut, with_statistics
from fusewright.schedule.kernel_cost import by_kernels
from fusewright.schedule.losses import of_logits
from fusewright.schedule.moves_first import moves_first
from fusewright.schedule.pools_by_axis import by_axis
from fusewright.schedule.reduced_norms import of_norms
from fusewright.schedule.reduced_shares import of_kept_rows
from fusewright.schedule.single_columns import as_sums
from fusewright.schedule.sums_apart import with_sums_apart
from fusewright.schedule.taps_as_features import with_taps_as_features
from fusewright.schedule.turned_products import as_they_lie
from fusewright.schedule.views_first import rows_first, views_first
from fusewright.schedule.window_products import as_products
from fusewright.schedule.window_sums import as_pools
from fusewright.schedule.wishes import NO_WISHES, Wishes
from fusewright.tree import flat_tensors, odd_container
from fusewright.tuning import TARGETS, Decision, Tuner, Ways
from fusewright.verification.numerics import tf32_allowed
from fusewright.verification.state import preserved

Kernels = Literal["auto", "always", "never"]
Windows = Literal["estimated", "measured", "never"]


@dataclass(frozen=True)
class Built:
    """What the passes made of one model for one signature.

    before, after   work of the model, and of the program
    recomputed      work of the rewritten graph in PyTorch's own operations, which gradients flow through
    masks           how many attentions do without a mask that the trace had
    turned          how many convolutions have images whose channels lie last in memory
    batches         how many products read as it lies what the model turns for them
    windows         how many convolutions of few windows are products of these
    features        how many convolutions of few features have taps as features
    formed          how many convolutions have kernels that form the window sums they run on
    sums_apart      whether none was to have
    """

    captured: Captured
    rewritten: Rewritten
    program: Program
    before: Work
    after: Work
    recomputed: Work
    device: torch.device
    without: frozenset[str] = frozenset()
    choices: tuple[KernelChoice, ...] = ()
    decisions: Mapping[str, Decision] = field(default_factory=dict)
    masks: int = 0
    turned: int = 0
    batches: int = 0
    windows: int = 0
    features: int = 0
    formed: int = 0
    sums_apart: bool = False


def build(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    mode: Mode = "cost",
    finite: bool = False,
    without: frozenset[str] = frozenset(),
    only: frozenset[str] | None = None,
    kernels: Kernels = "never",
    precision: str = "eager",
    measure: bool = True,
    target: torch.device | None = None,
    last: bool = False,
    windows: Windows = "estimated",
    sums_apart: bool = False,
    gradients: bool = True,
    plain: bool = False,
    wishes: Wishes = NO_WISHES,
    decisions: Mapping[str, Decision] | None = None,
    ways: dict[Any, Ways] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Built:
    """Run all passes on `model` called with `args` and `kwargs`, leaving out the rules named in `without`, and
    all but `only`.

    Groups become generated kernels as `kernels` says and as `decisions` of an earlier build have it; with `measure`,
    the rest is decided by measuring on the device.  `ways` keeps the tiles that were found for another build.

    With `last`, images have their channels last in memory, as the convolutions of a GPU's libraries have them.

    Convolutions of few windows become products of these where `windows` is not "never" and that is less work by
    estimate; or, where programs are "measured", where it may be.  Window sums are formed by their convolutions' kernels
    where that is not clearly slower by estimate; with `sums_apart`, by kernels of their own.

    Without `gradients`, the program is for calls in which nothing has one (`capture.inference`).

    Where outputs have to be `plain`, as a text of their own has them, they are in dicts, lists and tuples.

    For a `target` that is not here, everything is done as on a large GPU, by estimate; the program refers to it.
    `wishes` may leave operators alone.

    Raises `CaptureError` when the model cannot be captured whole, or so.
    """
    captured, graph, masks = _traced(model, args, kwargs, gradients, target)
    if plain and (odd := odd_container(captured.out_spec)) is not None:
        raise CaptureError(
            f"{type(model).__name__} cannot be written down: it returns a {odd}; return tensors in dicts, lists or "
            "tuples instead."
        )
    device = main_device(n.device for n in graph.nodes())
    tensors = flat_tensors(args, kwargs)
    hints = {symbol: tensors[where.input].shape[where.dim] for symbol, where in graph.symbols.items()}
    fusing = kernels != "never" and kernel_target(device) is None
    sliding = fusing and TARGETS[device.type].FORMS_WINDOW_SUMS
    facts = device_facts(device) if target is None else LARGE_GPU
    cost = CostModel(facts, hints, derived_ahead=not model.training, fusing=sliding)
    rules = [rule for rule in RULES if rule.name not in without and (only is None or rule.name in only)]
    alone = wishes.left_alone(graph)
    whole = by_kernels(cost) if sliding else cost
    rewritten = rewrite(graph, rules, cost, mode=mode, finite=finite, fusing=fusing, alone=alone, whole=whole)
    check(rewritten.graph)
    layouts = {node: layout_of(tensor) for node, tensor in zip(rewritten.graph.inputs, tensors, strict=True)}
    orders = _orders(rewritten.graph, model, captured.constants, tensors)
    how: dict[str, Any] = {"progress": progress, "wishes": wishes, "ways": {} if ways is None else ways}
    how |= {"layouts": layouts, "orders": orders, "remembered": decisions or {}}
    tuner = Tuner(device, hints, kernels, tf32_allowed(precision), measure, **how)
    eager = output_orders(graph, _orders(graph, model, captured.constants, tensors), kernels=False)
    final = as_eager_lies(with_memory_of_its_own(rewritten.graph, graph), eager, orders)
    turned, batches, multiplied, spread, formed = 0, 0, 0, 0, 0
    if last:
        final, turned = channels_last(final, orders)
        check(final)
    if fusing:
        passes = _Passes(tuner, cost, facts, hints, orders, alone, without, training=model.training)
        try:
            if windows != "never" and mode != "never":
                final, multiplied = passes.products(final, always=mode == "always", measured=windows == "measured")
                final, spread = passes.features(final)
            final, formed = passes.sums(final, apart=sums_apart)
            final, batches = passes.shapes(final)
            final = passes.groups(final)
        finally:
            tuner.builders.shutdown(wait=False, cancel_futures=True)  # what was begun ahead, and not asked for
    attributes = [key for key, tensor in captured.constants.items() if _found(model, key) is tensor]
    program = lower(final, captured.out_spec, captured.constants, attributes, tuple(tuner.kernels.values()))
    work = total(graph, cost), total(final, cost), total(rewritten.graph, cost)
    tuned = tuple(tuner.choices), tuner.decisions
    counts = masks, turned, batches, multiplied, spread, formed
    return Built(captured, rewritten, program, *work, device, without, *tuned, *counts, sums_apart)


def _traced(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], gradients: bool, target: torch.device | None
) -> tuple[Captured, Graph, int]:
    """What was captured, its graph where it is to run, and how many attentions do without a mask.

    Raises `CaptureError` as `build` does.
    """
    captured = capture(model, args, dict(kwargs), gradients=gradients)
    settled_graph, masks = settled(captured.graph, lambda: _asked(model, args, kwargs))
    left = {effect.op.target for effect in settled_graph.effects if isinstance(effect.op, ops.Opaque)}
    reasons = tuple(reason for reason in captured.reasons if reason.partition(" ")[0] in left)
    captured = replace(captured, graph=settled_graph, reasons=reasons)
    graph = check(gathered(captured.graph))
    if len(graph.inputs) > 1 and _writes_to_inputs(graph):
        raise CaptureError(
            f"{type(model).__name__} cannot be planned: it writes to an input, and what that changes depends on which "
            "of its inputs share memory; it runs as it did."
        )
    return captured, graph if target is None else check(placed(graph, target)), masks


@dataclass(frozen=True)
class _Passes:
    """The passes between the rules and the lowering, where kernels are generated; each gives a graph that is checked.

    alone      whether a node is left as it is
    without    names of rules that are left out
    """

    tuner: Tuner
    cost: CostModel
    facts: DeviceFacts
    hints: Mapping[Any, int]
    orders: Mapping[Node, Order]
    alone: Callable[[Node], bool]
    without: frozenset[str]
    training: bool

    def products(self, graph: Graph, *, always: bool, measured: bool) -> tuple[Graph, int]:
        """Convolutions of few windows as products of these, and how many."""
        if not self.tuner.moves:
            return graph, 0
        found, number = as_products(graph, self.cost, self.orders, alone=self.alone, always=always, measured=measured)
        if not number:
            return found, 0
        # What was behind the convolutions goes past the views of their products.
        outwards = [rule for rule in views.RULES if rule.name not in self.without]
        return check(rewrite(found, outwards, self.cost, fusing=True, alone=self.alone).graph), number

    def features(self, graph: Graph) -> tuple[Graph, int]:
        """Convolutions of few features in two steps, and how many: of float32 that may be rounded, since half
        precisions would be rounded in between."""
        if not self.tuner.moves or not self.tuner.tf32[0] or self.training:
            return graph, 0
        found, number = with_taps_as_features(graph, self.cost, self.orders, self.tuner.seconds, alone=self.alone)
        return check(found), number

    def sums(self, graph: Graph, *, apart: bool) -> tuple[Graph, int]:
        """Window sums by kernels of their own where that pays, or always `apart`; how many are not.  A single launch
        that is wished for has none."""
        if not self.tuner.moves or self.tuner.wishes.single:
            return graph, 0
        how = self.cost, self.orders, self.tuner.seconds
        found, number = with_sums_apart(graph, *how, alone=self.alone, always=apart)
        return check(found), number

    def shapes(self, graph: Graph) -> tuple[Graph, int]:
        """In the forms that families know, and how many products read what is turned as it lies."""
        moves, orders, sizes = self.tuner.moves, self.orders, (self.facts, self.hints, self.orders)
        if moves:
            graph = with_bias_behind(graph, orders, alone=self.alone)
        graph = rows_first(views_first(by_axis(as_pools(graph, orders), orders), orders), orders)
        # In training, a product gives gradients in fewer passes.
        graph = as_sums(graph, *sizes) if moves and not self.training else graph
        graph = of_kept_rows(graph, *sizes) if moves else graph
        graph = of_norms(graph, orders) if moves and not self.training else graph
        graph = of_logits(graph, *sizes)
        graph = of_few(graph, orders) if moves else graph
        graph = moves_first(graph, orders) if moves else graph
        # In training, gradients of weights want what is turned in rows.
        graph, batches = as_they_lie(graph, *sizes) if moves and not self.training else (graph, 0)
        return check(graph), batches

    def groups(self, graph: Graph) -> Graph:
        """Cut into groups, with the kernels that the tuner takes for them."""
        tuner = self.tuner
        graph = check(with_statistics(graph, tuner.prefers, self.alone, self.orders))
        tuner.prepare(graph, self.alone, self.orders)
        lies = tuner.reads_channels_last
        return check(cut(graph, tuner, self.alone, self.orders, moves=tuner.moves, as_it_lies=lies))


def kernel_target(device: torch.device) -> str | None:
    """Why no kernels can be generated for `device`, or `None` where they can."""
    if device.type not in TARGETS:
        return f"there are no generated kernels for {device.type}"
    try:
        if device.type == "cuda":
            nvrtc.version()
        else:
            compiler.compiler()
    except UnsupportedError as error:
        return str(error)
    return None


def _asked(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[bool]:
    with preserved(model):
        return asked_of(model, args, dict(kwargs))


def _writes_to_inputs(graph: Graph) -> bool:
    """Whether an opaque operation writes to memory of an input (the writes that are seen all stay opaque)."""
    shares: set[Node] = set(graph.inputs)
    for node in graph.nodes():
        if isinstance(node.op, ops.Opaque) and node.args and node.args[0] in shares:
            if node.op.target.split(".")[1].endswith("_"):
                return True
            shares |= set() if node.op.allocates else {node}
    return False


def _found(model: nn.Module, path: str) -> object:
    """What `model` has at a dotted path, if anything."""
    found: Any = model
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _orders(
    graph: Graph, model: nn.Module, constants: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]
) -> dict[Node, Order]:
    """Of the dimensions of what a graph starts from, in memory."""
    found = {node: order_of(tensor, node) for node, tensor in zip(graph.inputs, inputs, strict=True)}
    for node in graph.nodes():
        held: object = None
        if isinstance(node.op, ops.Param | ops.Buffer):
            held = _found(model, node.op.path)
        if isinstance(node.op, ops.Constant):
            held = constants.get(node.op.key)
        if isinstance(held, torch.Tensor) and held.layout is torch.strided:
            found[node] = order_of(held, node)
    return found
