"""Which groups of a graph become generated kernels, and with which tiles: measured on the device, and remembered.

A group is timed alone, on random operands of its sizes: the ATen program, and its kernel for a few tile shapes.  Times
are kept per device, group and sizes, so that another run starts with the answer.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fusewright import racing
from fusewright.codegen import cpu, cuda
from fusewright.codegen.fixed import fixed
from fusewright.codegen.held import of_held
from fusewright.errors import FusewrightError, UnsupportedError
from fusewright.ir import ops
from fusewright.ir.fused import Fused
from fusewright.ir.intervals import interval
from fusewright.ir.memory_order import Order, last_order, lies_last, order_of
from fusewright.ir.node import Graph, Node
from fusewright.ir.pointwise import Interval
from fusewright.kernel import Kernel
from fusewright.plan import KernelChoice
from fusewright.racing import Option
from fusewright.random_operands import dense, random_operand, rows_of_indices
from fusewright.runtime.cache import cache_directory, write_atomic
from fusewright.runtime.device import capability_of, device_name
from fusewright.runtime.launch import FORMATS
from fusewright.runtime.memory import is_out_of_memory
from fusewright.runtime.native import launcher
from fusewright.runtime.operators import reference_of
from fusewright.schedule.chain import refuses
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.cost import FREE
from fusewright.schedule.group import Group, signature, sizes
from fusewright.schedule.groups import cut
from fusewright.schedule.kept_rows_record import KeptRows
from fusewright.schedule.sample import SampleProgram
from fusewright.schedule.stream_record import Stream
from fusewright.schedule.wishes import NO_WISHES, Wishes
from fusewright.side_by_side import side_by_side
from fusewright.verification.asserted import OnHost

# Bump when kernels change so much that old timings mean nothing.
REVISION = 31

# Seconds that measuring the groups of one model may take; later groups get the kernel of the best estimate, and after
# so many seconds convolutions, whose tiles take longest to find and to build, are left to ATen.
SECONDS, LONGEST = 20.0, 60.0

# Seconds that finding the tiles of all groups may take side by side, and that the build of a kernel takes about: as
# many are built ahead as should be done in time.
FINDING, BUILD = 30.0, 2.0

# A kernel replaces ATen when its time is below this share of ATen's.
FASTER = 0.97

# Who writes kernels for the devices of a type.
TARGETS = {"cuda": cuda, "cpu": cpu}

# On a GPU, of the kernels whose times are within this factor of the least, so many are timed once more, in turns.
CLOSE, FINALISTS = 1.1, 4

# That may take a second, and so many seconds when the time is up.
BRIEF = 0.1

Mode = Literal["auto", "always", "never"]
# The option to end before the pool of a group; what follows is in other groups then.
EARLY: Option = {"early": True}

# By so much estimates of two ways may be wrong: beyond, only the better one is measured.
UNSURE = 1.5

# An addition and a function take five passes over memory, or three in one kernel: so much of the time of ATen's
# operations, a convolution among them, is left at least.
AS_ONE = 0.6

# Seconds of an update of running statistics by operations of its own, and elements that are worth one unmeasured.
UPDATE = 1e-5
WORTH_UPDATING = 2**20


@dataclass
class Decision:
    """What was decided for a group: the tiles of its kernel (`None`: ATen runs it), with the times in seconds."""

    option: Option | None
    generated: float | None = None
    aten: float | None = None
    tried: int = 0


@dataclass(frozen=True)
class Ways:
    """The options of a group; `early` is how long it takes to end early over how long the whole group does,
    by estimate (infinite where there is no pool, nor a softmax)."""

    options: tuple[Option, ...]
    early: float


# What a group's kernels depend on beside sizes: family, body, and of its operands the layouts and the bounds of their
# values: a logsumexp of what is known to be small leaves out the maximum.  And how the result has to lie.
Form = tuple[str, tuple[Node, ...], tuple[tuple[str | None, Interval], ...], str]


def _is_one_launch(kernel: Kernel) -> bool:
    """Whether a call launches once and allocates nothing but its output."""
    return len(kernel.launches) == 1 and not kernel.scratch


@dataclass
class Tuner:
    """Decides for one graph; hand it to `fusewright.schedule.groups.cut`.

    hints       values of the batch symbols
    tf32        whether float32 convolutions, and matmuls, may use tf32
    layouts     of the graph's inputs, as `fusewright.kernel.Kernel.layouts` has them (contiguous where not named)
    orders      of what else the graph starts from, where it does not lie row by row
    remembered  `decisions` of another build, taken over without measuring (for the same model at other sizes)
    ways        those that other builds of the same model found, and this one finds
    known       decisions by kind and sizes, for what a model computes more than once
    twins       names of kernels by form and tiles, for the same reason
    builds      of kernels that were begun ahead, by kind and sizes
    expected    layouts of what kernels will write, by the names that groups have while all are looked for
    lying       orders of values that were asked for

    To end before its pool or softmax is an option of a group like its tiles, and what it leaves is decided like any
    other group.
    """

    device: torch.device
    hints: Mapping[Any, int]
    mode: Mode
    tf32: tuple[bool, bool]
    measure: bool = True
    layouts: Mapping[Node, str] = field(default_factory=dict)
    orders: Mapping[Node, Order] = field(default_factory=dict)
    remembered: Mapping[str, Decision] = field(default_factory=dict)
    progress: Callable[[str], None] = lambda _: None
    wishes: Wishes = NO_WISHES
    ways: dict[tuple[Any, ...], Ways] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)
    known: dict[str, Decision] = field(default_factory=dict)
    kernels: dict[str, Kernel] = field(default_factory=dict)
    choices: list[KernelChoice] = field(default_factory=list)
    left: list[set[Node]] = field(default_factory=list)
    twins: dict[tuple[Form, str], str] = field(default_factory=dict)
    builds: dict[str, list[racing.Build]] = field(default_factory=dict)
    expected: dict[str, str] = field(default_factory=dict)
    lying: dict[Node, Order] = field(default_factory=dict)
    builders: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(racing.at_once(), initializer=racing.give_way)
    )
    started: float = field(default_factory=time.monotonic)

    @property
    def moves(self) -> bool:
        """Whether the device's kernels move elements."""
        moves: bool = TARGETS[self.device.type].MOVES_ELEMENTS
        return moves

    def __call__(self, group: Group) -> Node | None:
        """The node that stands for `group`, or `None` where it stays as it is."""
        if group.root.device != self.device:
            return None
        name = self._fresh(group.name)
        decision = self._decision(group, name)
        if decision is None:
            return None
        if decision.option == EARLY and _reads_elements(group):
            return None  # the shorter group is offered next
        if decision.option == EARLY:
            node = None if group.shorter is None else self(group.shorter)
            return None if node is None else group.behind(node)
        if decision.option is not None:
            name = self._called(group, name, decision.option)
        path: Literal["generated", "ATen"] = "ATen" if decision.option is None else "generated"
        times, inner = (decision.generated, decision.aten, decision.tried), set(group.inner)
        part = any(inner <= other for other in self.left)
        self.choices.append(KernelChoice(name, group.family, group.root.where, path, *times, part))
        if decision.option is None:
            self.left.append(inner)
            return None
        return group.fused(name, rows=group.order == "any" and self._written(name) == "contiguous")

    def prefers(self, group: Group) -> bool:
        """Whether groups that take as long as this one, which is of a norm or of its statistics, and an update of
        running ones, are to be its norm's."""
        if group.root.device != self.device:
            return False
        decision = self._decision(group, group.name)
        if decision is None or decision.option is None or self.mode == "always":
            return decision is not None and decision.option is not None
        if group.family == "statistics" or decision.generated is None or decision.aten is None:
            # Statistics by themselves are compared with what is not the norm's own way to them.
            return prod(sizes(group.operands[0], self.hints)) >= WORTH_UPDATING
        return decision.generated + UPDATE < FASTER * decision.aten

    def _decision(self, group: Group, name: str) -> Decision | None:
        """What is decided for a group, now or earlier."""
        kind, sized = self._kind(group), self._sized(group)
        key = self._key(kind)
        decision = self.remembered.get(key) or self.known.get(sized)
        if decision is None or (decision.option == EARLY and group.shorter is None):
            decision = self._decided(group, name)
        if decision is not None:
            self.decisions[key] = self.known[sized] = decision
        return decision

    def _fresh(self, name: str) -> str:
        name = self.wishes.name or name
        fresh, count = name, 1
        while fresh in self.kernels:
            count += 1
            fresh = f"{name}_{count}"
        return fresh

    def _called(self, group: Group, name: str, option: Option) -> str:
        """What the group's kernel is called: as that of an equal layer, which it shares, or else `name`."""
        name = self.twins.setdefault((self._form(group), repr(option)), name)
        if name not in self.kernels:
            self.kernels[name] = replace(self._kernel(group, name, option), brief=None)
        return name

    def _layouts(self, group: Group) -> dict[Node, str]:
        """Of the operands that do not come contiguous: inputs, what earlier kernels write, and what ATen computes."""
        found = {node: self._layout(node) for node in group.operands}
        return {node: layout for node, layout in found.items() if layout != "contiguous"}

    def _layout(self, node: Node) -> str:
        """How a value will lie."""
        if node in self.layouts:
            return self.layouts[node]
        if isinstance(node.op, Fused):
            return self._written(node.op.name)
        # Kernels want weights in rows.
        return "channels_last" if node.varies and self._lies_last(node) else "contiguous"

    def _lies_last(self, node: Node) -> bool:
        """Whether a value has its channels last where what ATen computes, and kernels, lies as is planned."""
        if node.ndim not in FORMATS["channels_last"]:
            return False
        images = {n: last_order(n) for n, layout in self.layouts.items() if layout == "channels_last"}
        return lies_last(node, {**self.orders, **images}, self.lying)

    def reads_channels_last(self, node: Node, operand: int) -> bool:
        """Whether the kernel of a group reads an operand whose channels lie last as it lies."""
        assert isinstance(node.op, Fused)
        return node.op.name in self.kernels and self.kernels[node.op.name].layouts[operand] == "channels_last"

    def _written(self, name: str) -> str:
        """The layout of what a kernel writes, or will."""
        return self.kernels[name].output.layout if name in self.kernels else self.expected[name]

    def _form(self, group: Group) -> Form:
        layouts = self._layouts(group)
        operands = tuple((layouts.get(node), interval(node)) for node in group.operands)
        return group.family, group.bodies, operands, group.order

    def _key(self, kind: str) -> str:
        """What a decision is remembered by: its kind and which of that kind it is, since they may differ in size."""
        return f"{kind} #{sum(key.rpartition(' #')[0] == kind for key in self.decisions)}"

    def _sized(self, group: Group) -> str:
        """What times depend on: two groups of one model for which it is the same share a decision."""
        return f"{self._kind(group)} of {[sizes(n, self.hints) for n in group.operands]}"

    def _kind(self, group: Group) -> str:
        """What a group computes and how its operands lie in memory: its options are as good at any size."""
        layouts = self._layouts(group)
        at = [f"{i} {layouts[n]}" for i, n in enumerate(group.operands) if n in layouts]
        at += [] if group.order == "eager" else [f"written {group.order}"]
        return f"{signature(group)}, {', '.join(at)}" if at else signature(group)

    def _rounds(self, group: Group) -> bool:
        """Whether operands of the group's products may be rounded to tf32."""
        convolutions, matmuls = self.tf32
        convolves = any(isinstance(n.op, ops.Matmul) and n.op.convolves for n in group.inner)
        return convolutions if convolves or group.family == "contraction" else matmuls

    def seconds(self, conv: Node) -> float:
        """About how many seconds the best kernel of a convolution alone takes."""
        machine = capability_of(self.device)
        found: float = TARGETS[self.device.type].seconds_alone(conv, self.hints, tf32=self.tf32[0], capability=machine)
        return found

    def _kernel(self, group: Group, name: str, option: Option) -> Kernel:
        kernel: Kernel = TARGETS[self.device.type].generate(group, name, option, tf32=self._rounds(group))
        return replace(of_held(kernel, group), fixed=fixed(group))

    def _decided(self, group: Group, name: str) -> Decision | None:
        """The decision for a group met for the first time; `None` where no kernel can be made."""
        late = self.measure and time.monotonic() - self.started > LONGEST and self._place(group) not in self.ways
        if late and self.mode == "auto" and group.family == "contraction":
            return Decision(None)
        if group.shorter is None:
            return self._whole(group, name)
        if self.wishes.single:
            return self._whole(group, name) if self._ways(group).options else Decision(dict(EARLY))
        times = self._ways(group).early
        if times < 1 / UNSURE and (not self.measure or self._runs(group.shorter)):
            return Decision(dict(EARLY))
        found = self._whole(group, name)
        unsure = self.measure and times < UNSURE and self._left() > 0.0 and not _is_ahead(group, found)
        return self._shorter(group, found) if unsure else found

    def _part(self, shorter: Group) -> Decision | None:
        """The decision for what a group may end with."""
        sized = self._sized(shorter)
        part = self.known.get(sized) or self._decided(shorter, shorter.name)
        if part is not None:
            self.known[sized] = part
        return part

    def _runs(self, shorter: Group) -> bool:
        """Whether one of its kernels ran: what a whole group never writes may be more than there is memory for."""
        part = self._part(shorter)
        return part is not None and (part.option == EARLY or part.generated is not None)

    def _shorter(self, group: Group, found: Decision | None) -> Decision | None:
        """The decision `found` for a group, or to end early where that measured faster."""
        assert group.shorter is not None
        part = self._part(group.shorter)
        if part is None:
            return found
        seconds, behind = _taken(part), self._behind(group, part)
        if seconds is None or behind is None:
            return found
        early = Decision(dict(EARLY), seconds + behind)
        if found is None or found.option is None:  # what follows is others' in either way
            return found if part.option is None else early
        return early if found.generated is not None and seconds + behind < FASTER * found.generated else found

    def _behind(self, group: Group, part: Decision) -> float | None:
        """Seconds that what follows the shorter group takes, as it is cut; `None` where they are not known."""
        assert group.shorter is not None
        rest, y = group.rest(), group.shorter
        layout = "contiguous" if part.option is None else self._kernel(y, y.name, part.option).output.layout
        lies = dense(torch.empty(sizes(y.root, self.hints), device="meta"), layout)
        given: dict[str, Any] = {"layouts": {rest.inputs[0]: layout}, "remembered": {}, "wishes": NO_WISHES}
        alone = replace(self, decisions={}, kernels={}, twins={}, choices=[], orders={}, lying={}, **given)
        timed: set[Node] = set()

        def decide(found: Group) -> Node | None:
            if timed.issuperset(found.inner):
                return None  # ATen has it
            known = len(alone.choices)
            node = alone(found)
            timed.update(found.inner if len(alone.choices) > known else ())
            return node

        orders = {rest.inputs[0]: order_of(lies, rest.inputs[0])}
        final = cut(rest, decide, orders=orders, moves=self.moves)
        left = {node for node in final.nodes() if node.varies} - timed
        if any(not isinstance(node.op, (*FREE, Fused)) for node in left):
            return None
        times = [_taken(decision) for decision in alone.decisions.values()]
        return None if None in times else sum(t for t in times if t is not None)

    def _whole(self, group: Group, name: str) -> Decision | None:
        """Which tiles a kernel of all of the group has, or that ATen runs it; `None` where no kernel can be made."""
        target, machine = TARGETS[self.device.type], capability_of(self.device)
        layouts, tf32 = self._layouts(group), self._rounds(group)
        options = list(self._ways(group).options)
        if self.wishes.single:
            options = [option for option in options if _is_one_launch(self._kernel(group, name, option))]
        if not options:
            return None
        if not self.measure:
            pays = self.mode == "always" or target.pays(
                group, options[0], self.hints, layouts, tf32=tf32, capability=machine
            )
            return Decision(options[0] if pays else None)
        path = self._remembered_at(group)
        found = None if path is None else _read(path, options)
        if found is None:
            found = self._measured(group, name, options)
            if path is not None and found.tried:
                with suppress(OSError):  # a full disk costs the next run its head start, nothing more
                    write_atomic(path, json.dumps(vars(found)).encode())
        if found.option is not None and self.mode == "auto" and found.generated is not None and found.aten is not None:
            slower = found.generated > FASTER * found.aten
            return Decision(None if slower else found.option, found.generated, found.aten, found.tried)
        return found

    def _place(self, group: Group) -> tuple[Any, ...]:
        """What the ways to cut a group depend on."""
        return self._form(group), *(sizes(node, self.hints) for node in group.operands)

    def _ways(self, group: Group) -> Ways:
        """The ways to cut a group, found once."""
        place = self._place(group)
        if place not in self.ways:
            self.ways[place] = self._find(group, capability_of(self.device))
        return self.ways[place]

    def _find(self, group: Group, capability: int | None) -> Ways:
        target, layouts = TARGETS[self.device.type], self._layouts(group)
        how: dict[str, Any] = {"tf32": self._rounds(group), "capability": capability}
        pooled = group.shorter is not None and not self.wishes.single
        early = target.early(group, self.hints, layouts, **how) if pooled else math.inf
        found = target.options(group, self.hints, layouts, **how)
        if _writes_images(group):  # as is planned
            last = self._lies_last(group.fused(""))
            found = [option for option in found if ("last" in option) == last]
        return Ways(tuple(found), early)

    def prepare(self, graph: Graph, alone: Callable[[Node], bool], orders: Mapping[Node, Order]) -> None:
        """Before `graph` is cut: finds the ways to cut all its groups side by side, and begins to build their kernels.

        A network has dozens of groups, each of which would have to be waited for otherwise.  On a CPU, what is built
        ahead would disturb what is measured.
        """
        if self.device.type != "cuda" or not self.measure or self.remembered or self.wishes.single:
            return
        expected = {self._place(group): group for group in self._expected(graph, alone, orders)}
        missing, capability = [place for place in expected if place not in self.ways], capability_of(self.device)
        if len(expected) < 2:
            return
        if missing:
            self.progress(f"finding tiles of {len(missing)} groups")
            # A group and the shorter one by one process: they have most in common.
            parts = [[g for g in (expected[place], expected[place].shorter) if g is not None] for place in missing]
            found = side_by_side(lambda some: [self._find(group, capability) for group in some], parts, FINDING)
            if found is None:
                return
            for some, ways in zip(parts, found, strict=True):
                self.ways.update((self._place(group), way) for group, way in zip(some, ways, strict=True))
        self.progress("writing kernels")
        self._begin([group for whole in expected.values() for group in self._rivals(whole)])

    def _expected(self, graph: Graph, alone: Callable[[Node], bool], orders: Mapping[Node, Order]) -> list[Group]:
        """The groups of `graph`, were each to become a kernel."""
        found: list[Group] = []

        def decide(group: Group) -> Node | None:
            if group.root.device != self.device:
                return None
            name = f"{group.name}_{len(found)}"
            found.append(group)
            node = group.fused(name)
            self.expected[name] = "channels_last" if self._lies_last(node) else "contiguous"
            return node

        cut(graph, decide, alone, orders, moves=self.moves)
        return found

    def _rivals(self, group: Group) -> list[Group]:
        """Of a group and the shorter one, those that will be measured as far as that is known."""
        early = self._ways(group).early
        some = [group] if early >= 1 / UNSURE else []
        return [*some, group.shorter] if group.shorter is not None and early < UNSURE else some

    def _begin(self, groups: list[Group]) -> None:
        """Builds of kernels: the first of every group, then others of each, as many as should be done in time."""
        kinds: dict[str, Group] = {}
        for group in groups:
            path = self._remembered_at(group)
            if self._ways(group).options and (path is None or not path.exists()):
                kinds[self._sized(group)] = group
        most = max(1, int(racing.at_once() * SECONDS / BUILD / max(1, len(kinds))))
        for part in (slice(0, 1), slice(1, most)):
            for sized, group in kinds.items():
                options = racing.in_turn(self._ways(group).options)[part]
                self.builds.setdefault(sized, []).extend(self._build(group, group.name, option) for option in options)

    def _left(self) -> float:
        """Seconds that measuring may still take."""
        return self.started + SECONDS - time.monotonic()

    def _fits(self, build: racing.Build, *, wait: bool) -> bool:
        """Whether a kernel is built, which is waited for while there is time and for the first one whatever it takes,
        and loads.

        Loading holds up launches, so nothing is loaded while others are timed.
        """
        try:
            built = build.done.result(timeout=None if wait else max(0.0, self._left()))
        except TimeoutError:
            return False
        return built and racing.can_load(build.launcher, self.device)

    def _remembered_at(self, group: Group) -> Path | None:
        """The file that keeps a group's times; `None` where no directory is safe to use."""
        threads = f"x{torch.get_num_threads()}" if self.device.type == "cpu" else ""
        device = f"{device_name(self.device)}{threads}"
        single = " single" if self.wishes.single else ""  # the best of fewer options
        key = f"{REVISION} {device} {torch.__version__} {self.tf32} {self._sized(group)}{single}"
        try:
            return cache_directory() / f"tuned-{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
        except UnsupportedError:
            return None

    def _measured(self, group: Group, name: str, options: list[Option]) -> Decision:
        """Times of ATen and of the kernel's best tile shape; the best guess where memory is short."""
        try:
            layouts = self._layouts(group)
            rows = rows_of_indices(group, self.hints)
            refusing = any(map(refuses, group.inner))
            drawn = [random_operand(n, self.hints, self.device, rows, alike=refusing) for n in group.operands]
            operands = [dense(x, layouts.get(n)) for x, n in zip(drawn, group.operands, strict=True)]
            if refusing and not self._answers(group, name, options[0], operands):
                return Decision(options[0])
            return self._raced(group, name, options, operands)
        except RuntimeError as error:
            if is_out_of_memory(error):
                return Decision(None if group.family == "matmul" else options[0])  # that takes more than ATen
            raise

    def _answers(self, group: Group, name: str, option: Option, operands: list[Tensor]) -> bool:
        """Whether eager has an answer to `operands`, which are any numbers: where it has none, a GPU's kernels end the
        process, ATen's and ours."""
        reference = reference_of(self._kernel(group, name, option))
        try:
            with torch.no_grad(), OnHost():
                reference(*operands)
        except (IndexError, ValueError):
            return False
        return True

    def _raced(self, group: Group, name: str, options: list[Option], operands: list[Tensor]) -> Decision:
        """The times on `operands`, of kernels as they get built; those that cannot be built or run are passed over."""
        builds = self.builds.pop(self._sized(group), [])
        if not builds:
            if self._left() < 0.0:
                options = options[:1]
            elif self.device.type == "cuda":
                options = racing.in_turn(options)
            builds = [self._build(group, name, option) for option in options]
        reference = reference_of(builds[0].launcher.kernel)
        self.progress(f"tuning {name}: building {len(builds)} kernels")
        times: dict[int, float] = {}
        try:
            if self.device.type == "cpu":  # a compiler would take time from what is measured
                wait([b.done for b in builds], timeout=max(0.0, self.started + SECONDS / 2 - time.monotonic()))
            with torch.no_grad():
                for i, build in enumerate(builds):
                    if not self._fits(build, wait=not times):
                        continue
                    most = 4 * min(times.values(), default=math.inf)
                    if self.device.type == "cuda" and self._left() < 0.0:
                        most = 0.0  # one call is enough then: what is close is timed in turns
                    try:
                        times[i] = racing.seconds(partial(build.launcher, *operands), self.device, most=most)
                    except FusewrightError:
                        continue
                    self.progress(f"tuning {name}: {len(times)} of {len(builds)}")
                aten = partial(reference, *operands)
                if not times:
                    return Decision(None, None, racing.seconds(aten, self.device), 0)
                best = min(times, key=times.__getitem__)
                if self.device.type != "cuda":
                    least = racing.seconds(aten, self.device)
                else:
                    close = sorted((i for i in times if times[i] < CLOSE * times[best]), key=times.__getitem__)
                    calls = {i: partial(builds[i].launcher, *operands) for i in close[:FINALISTS]}
                    long = 1.0 if self._left() > 0.0 else BRIEF
                    best, times[best], least = racing.fastest(calls, aten, self.device, long)
        finally:
            for build in builds:
                build.done.cancel()
        return Decision(builds[best].option, times[best], least, len(times))

    def _build(self, group: Group, name: str, option: Option) -> racing.Build:
        """A kernel that a thread begins to build; only what gets chosen becomes an operator."""
        kernel = self._kernel(group, name, option)
        made = launcher(kernel.brief or kernel)
        return racing.Build(option, made, self.builders.submit(racing.can_build, made, self.device))


def _writes_images(group: Group) -> bool:
    """Whether a group that is no convolution's may write its one result in the order in which images lie."""
    record = group.record
    if isinstance(record, Stream):
        return not record.folds
    return isinstance(record, SampleProgram) or (isinstance(record, KeptRows) and record.results[0].elements)


def _reads_elements(group: Group) -> bool:
    """Whether a convolution takes in what reads a tensor as large as its output, as a residual."""
    return isinstance(group.record, Contraction) and bool(group.record.elements)


def _is_ahead(group: Group, found: Decision | None) -> bool:
    """Whether nothing is to be gained by ending ahead of a residual: no kernel reads it, or one is faster than ATen's
    operations by more than they would gain if those behind the convolution were one pass (`AS_ONE`)."""
    if not _reads_elements(group):
        return False
    if found is None or found.generated is None or found.aten is None:
        return True
    return found.option is None or found.generated < AS_ONE * found.aten


def _taken(decision: Decision) -> float | None:
    """Seconds of what was decided."""
    return decision.aten if decision.option is None else decision.generated


def _read(path: Path, options: list[Option]) -> Decision | None:
    """What a file says, where that is times of one of these options."""
    try:
        found = Decision(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    numbers = all(isinstance(n, float) for n in (found.generated, found.aten)) and isinstance(found.tried, int)
    return found if numbers and found.option in options else None
