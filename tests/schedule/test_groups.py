"""Which groups are found in which models, what they are called, and what stays outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright import pipeline, tuning
from fusewright.capture import capture
from fusewright.codegen import cuda
from fusewright.codegen.aten import lower
from fusewright.ir import ops, spec
from fusewright.ir.build import pointwise
from fusewright.ir.fused import Fused
from fusewright.ir.node import Graph, Node, make, topological
from fusewright.problem import load_problem
from fusewright.runtime.device import DeviceFacts
from fusewright.schedule import chain
from fusewright.schedule.group import Group, as_graph, bodies, signature
from fusewright.schedule.groups import cut

EXAMPLES = Path(__file__).parents[2] / "examples"
FACTS = DeviceFacts("GPU", conv=1.2e14, matmul=5e13, wide=5e13, memory=3.5e12, reduce=3e12, window=3e11, launch=6e-6)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes do what they do on a large GPU."""
    monkeypatch.setattr(pipeline, "kernel_target", lambda device: None)
    monkeypatch.setitem(tuning.TARGETS, "cpu", cuda)
    monkeypatch.setattr(pipeline, "device_facts", lambda device: FACTS)


def taken(graph: Graph, accept: Callable[[Group], bool] = lambda group: True) -> tuple[list[Group], Graph]:
    """The groups that are found where those that `accept` likes are replaced, and the graph with them."""
    found: list[Group] = []

    def decide(group: Group) -> Node | None:
        found.append(group)
        return group.fused(f"{group.name}_{len(found)}") if accept(group) else None

    return found, spec.check(cut(graph, decide))


def graph_of(model: nn.Module, *args: Tensor) -> Graph:
    return capture(model.eval(), args, {}).graph


class Function(nn.Module):
    """A function of tensors and of the module, which has a convolution, a linear layer, a scale and a bias."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)
        self.conv1d = nn.Conv1d(3, 8, 3, padding_mode="circular")
        self.scale, self.bias = nn.Parameter(torch.ones(8, 1, 1)), nn.Parameter(torch.zeros(8))
        self.function = function

    def forward(self, *args: Tensor) -> object:
        return self.function(self, *args)


IMAGES = (4, 3, 16, 16)
TABLE: dict[str, tuple[Callable[..., object], tuple[int, ...], list[tuple[str, str]]]] = {
    "contraction and tail": (
        lambda m, x: m.linear(torch.relu(m.conv(x)).mean((2, 3))).softmax(1),
        IMAGES,
        [("contraction", "fused_conv_relu_mean_linear_softmax")],
    ),
    "a copy on the way": (
        lambda m, x: m.linear(x.flatten(2).transpose(1, 2).contiguous().tanh()).clone().softmax(2).sum(1),
        (4, 8, 5, 5),
        [("sample program", "fused_tanh_linear_softmax_sum")],
    ),
    "pooled inside": (
        lambda m, x: torch.tanh(F.max_pool2d(torch.relu(m.conv(x)), 2)).amax((1, 2, 3)),
        IMAGES,
        [("contraction", "fused_conv_relu_max_tanh_max")],
    ),
    "an operand per channel": (
        lambda m, x: torch.relu(m.conv(x) * m.scale),
        IMAGES,
        [("contraction", "fused_conv_mul_relu")],
    ),
    "a softmax over channels": (
        lambda m, x: torch.sigmoid(torch.softmax(m.conv(x), 1)),
        IMAGES,
        [("contraction", "fused_conv_softmax_sigmoid")],
    ),
    "a softmax over rows": (
        lambda m, x: torch.sigmoid(torch.softmax(torch.relu(m.conv(x)), 3)),
        IMAGES,
        [("contraction", "fused_conv_relu"), ("normalization", "fused_softmax_sigmoid")],
    ),
    "an opaque operation in between": (
        lambda m, x: torch.renorm(torch.tanh(m.conv(x)), 2, 0, 1e9).relu().sum((2, 3)),
        IMAGES,
        [("contraction", "fused_conv_tanh"), ("stream", "fused_relu_sum")],
    ),
    "prefix sums": (
        lambda m, x: torch.cumsum(torch.tanh(x) + m.bias, 1).relu() + x,
        (4, 96, 8),
        [("scan", "fused_tanh_add_cumsum_relu_add")],
    ),
    "prefix sums of prefix sums": (
        lambda m, x: torch.cumsum(torch.cumsum(x, 1) * 2, 2),
        (4, 96, 24),
        [("scan", "fused_cumsum_mul"), ("scan", "fused_cumsum")],
    ),
    "nothing but a stream": (
        lambda m, x: (x * torch.sigmoid(x)).sum((2, 3)),
        (4, 8, 600, 600),
        [("stream", "fused_sigmoid_mul_sum")],
    ),
    "rows of samples": (lambda m, x: m.linear(x).softmax(-1), (4, 8), [("sample program", "fused_linear_softmax")]),
    "a norm": (lambda m, x: F.layer_norm(x, (8,)) + m.bias, (4, 6, 8), [("normalization", "fused_layernorm_add")]),
    "only views": (lambda m, x: x[:, 1:].permute(0, 2, 1).reshape(4, 8, 5, 1), (4, 6, 8), []),
    "views and a copy": (
        lambda m, x: x[:, 1:].permute(0, 2, 1).reshape(4, -1),
        (4, 6, 8),
        [("rearrangement", "fused_rearrange")],
    ),
    "only parameters": (lambda m, x: (x, torch.relu(m.scale * 2).sum()), (4, 6), []),
    "random numbers": (
        lambda m, x: torch.bernoulli(x.abs().clamp(max=1)),
        (4, 6),
        [("stream", "fused_abs_clamp_max")],
    ),
    "whole numbers": (lambda m, x: x.to(torch.int32) + 1, (4, 6), []),
    "a conversion": (lambda m, x: x.double(), (4, 6), [("stream", "fused_cast")]),
}


@pytest.mark.parametrize("name", TABLE)
def test_found(name: str) -> None:
    function, shape, expected = TABLE[name]
    found, graph = taken(graph_of(Function(function), torch.rand(shape)))
    assert [(g.family, g.name) for g in found] == expected
    assert sum(isinstance(n.op, Fused) for n in graph.nodes()) == len(expected)


class Tokens(nn.Module):
    """A function of tokens and of the module, which has two embeddings and a linear layer."""

    def __init__(self, function: Callable[[Tokens, Tensor], object]) -> None:
        super().__init__()
        self.table, self.other, self.linear = nn.Embedding(50, 16), nn.Embedding(9, 16), nn.Linear(16, 5)
        self.function = function

    def forward(self, tokens: Tensor) -> object:
        return self.function(self, tokens)


LOOKUPS: dict[str, tuple[Callable[[Tokens, Tensor], object], list[tuple[str, str]]]] = {
    "mean": (
        lambda m, t: m.linear(m.table(t).mean(1)).softmax(1),
        [("stream", "fused_embedding_mean"), ("sample program", "fused_linear_softmax")],
    ),
    "two": (
        lambda m, t: torch.relu(m.table(t) + m.other(t)).amax(1),
        [("stream", "fused_embedding_add_relu_max")],
    ),
    "not reduced": (lambda m, t: m.table(t) * 4, [("stream", "fused_embedding_mul")]),
    "nothing but rows": (lambda m, t: m.table(t), []),
    "of constants": (
        lambda m, t: (m.table(t) + m.other(torch.arange(6))).sum(1),
        [("stream", "fused_embedding_add_sum")],
    ),
    "with another user": (
        lambda m, t: (y := m.table(t), y.mean(1).tanh()),
        [("stream", "fused_mean_tanh")],
    ),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookups(name: str) -> None:
    """Rows are read where they are reduced, before a sample program would take the reduction."""
    function, expected = LOOKUPS[name]
    found, graph = taken(graph_of(Tokens(function), torch.randint(9, (4, 6))))
    assert [(g.family, g.name) for g in found] == expected
    left = [n for n in graph.nodes() if isinstance(n.op, ops.Embedding)]
    assert len(left) == (name in ("nothing but rows", "of constants", "with another user"))


# Which rules may fire in a founding model, its groups, and what the kernels are called where that is its chain.
BOX = "avg_pool(conv(x, w)) = conv_strided(box(x), w)"
FOUNDING: dict[str, tuple[frozenset[str] | None, tuple[int, ...], list[str], str | None]] = {
    "conv_avgpool_sigmoid_sum": (
        frozenset(),
        (128, 8, 384, 384),
        ["contraction"],
        "fused_conv_avg_sigmoid_sum",
    ),
    "conv3d_div_maxpool_gap_bias_sum": (
        None,
        (128, 8, 16, 64, 64),
        ["contraction"],
        "fused_conv_max_add_mean_div_add_sum",
    ),
    "convtranspose_gap_bias_logsumexp": (None, (16, 64, 512, 512), ["range reduction", "sample program"], None),
}


@pytest.mark.parametrize("name", FOUNDING)
def test_founding_models(name: str, on_gpu: None) -> None:
    """Nothing but kernels runs: one, or a range reduction and what is small."""
    only, shape, families, expected = FOUNDING[name]
    problem = load_problem(EXAMPLES / f"{name}.py")
    model = problem.model_class(*problem.init_inputs())
    built = pipeline.build(model, (torch.empty(shape),), {}, kernels="always", measure=False, only=only)
    forward = built.program.source.split("def forward")[1].splitlines()[1:]
    calls = [line for line in forward if " = " in line and ".shape[" not in line]
    assert [c.family for c in built.choices] == families and len(calls) == len(families)
    assert expected is None or [k.name for k in built.program.kernels] == [expected]


def test_window_sums_are_taken_inside(on_gpu: None) -> None:
    problem = load_problem(EXAMPLES / "conv_avgpool_sigmoid_sum.py")
    model, x = problem.model_class(*problem.init_inputs()), torch.empty(128, 8, 384, 384)
    built = pipeline.build(model, (x,), {}, kernels="never", mode="always", only=frozenset({BOX}))
    assert [fired.rule for fired in built.rewritten.fired] == [BOX]
    (group,), _ = taken(built.rewritten.graph)
    assert group.name == "fused_conv_avg_sigmoid_sum"
    assert group.record.box.count == (1, 4, 4) and group.operands[0].shape[1:] == (8, 384, 384)


@pytest.mark.parametrize(("shape", "conv", "window", "before"), [
    ((8, 43, 349, 358), nn.Conv2d(43, 78, (3, 2), padding=(2, 0), dilation=2), 6, (0, 2, 0)),
    ((16, 36, 4498), nn.Conv1d(36, 19, 7, padding=3, dilation=2), 4, (0, 0, 3)),
    ((32, 64, 56, 56), nn.Conv2d(64, 128, 3, padding=1), 2, (0, 1, 1)),
])  # fmt: skip
def test_window_sums_of_a_padded_input_are_taken_inside(
    shape: tuple[int, ...], conv: nn.Module, window: int, before: tuple[int, ...]
) -> None:
    """As the cost model has it: a larger kernel in place of the pool would multiply more."""
    model = nn.Sequential(conv, {1: nn.AvgPool1d, 2: nn.AvgPool2d}[len(shape) - 2](window))
    gpu = torch.device("cuda")
    built = pipeline.build(model, (torch.empty(shape),), {}, kernels="always", measure=False, target=gpu)
    assert [fired.rule for fired in built.rewritten.fired] == [BOX]
    assert [(c.name, c.path) for c in built.choices] == [("fused_conv_avg", "generated")]
    (group,), _ = taken(built.rewritten.graph)
    assert group.record.box.before == before and group.operands[0].shape == group.record.x.shape


def test_declined_groups_leave_the_graph_as_it_is() -> None:
    graph = graph_of(Function(TABLE["contraction and tail"][0]), torch.rand(IMAGES))
    found, after = taken(graph, lambda group: False)
    assert {g.family for g in found} >= {"contraction", "stream", "sample program"}
    assert len({g.root for g in found if g.family != "contraction"}) <= len(found)
    assert after.outputs == graph.outputs and after.nodes() == graph.nodes()


def test_what_is_declined_is_not_asked_about_again_when_what_it_reads_becomes_a_kernel() -> None:
    """Groups without an anchor are found from the outputs on: those behind a new kernel are made anew."""

    def forward(m: Function, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.nextafter(torch.tanh(x * 2), x.sort(1)[0].sin())  # nothing is fused across
        return x.exp() + 1

    found, after = taken(graph_of(Function(forward), torch.rand(4, 3, 9, 9)), lambda group: "tanh" in group.name)
    names = [group.name for group in found]
    assert sorted(names) == ["fused_exp", "fused_exp_add", *["fused_mul_tanh"] * 3, *["fused_sin"] * 3]
    assert sum(isinstance(node.op, Fused) for node in after.nodes()) == 3


def test_sharing_takes_no_longer_than_the_graph() -> None:
    """Each value is read twice, by the next two: there are more ways through than anyone could follow."""

    def forward(m: Function, x: Tensor) -> Tensor:
        y = x.cos()
        for _ in range(60):
            x, y = y, x + y * 0.5
        return x

    found, _ = taken(graph_of(Function(forward), torch.rand(4, 3, 9, 9)))
    assert len(found) == 1 and not found[0].also


def test_a_group_of_several_results_is_asked_about_once() -> None:
    """Whichever of them it would be found from."""
    model = Function(lambda m, x: (x.sin(), torch.tanh(x * 2)))
    found, _ = taken(graph_of(model, torch.rand(4, 3, 9, 9)), lambda group: not group.also)
    assert [group.name for group in found] == ["fused_mul_tanh_sin", "fused_mul_tanh", "fused_sin"]
    ((first, second),) = (group.results for group in found if group.also)
    assert first is found[1].root and second is found[2].root


def test_a_group_declined_with_its_tail_is_offered_without() -> None:
    graph = graph_of(Function(lambda m, x: m.linear(m.conv(x).relu().mean((2, 3))).softmax(1)), torch.rand(4, 3, 9, 9))
    offered, cut_graph = taken(graph, lambda g: getattr(g.record, "tail", None) is None)
    names = [g.name for g in offered if g.family == "contraction"]
    assert names[0] == "fused_conv_relu_mean_linear_softmax" and names[-1] == "fused_conv_relu_mean"
    assert any(isinstance(n.op, Fused) and n.op.name.startswith("fused_conv_relu_mean_") for n in cut_graph.nodes())


def test_a_group_declined_with_its_softmax_is_offered_without() -> None:
    model = Function(lambda m, x: F.max_pool2d(torch.softmax(m.conv(x).relu(), 1), 2))
    offered, _ = taken(graph_of(model, torch.rand(IMAGES)), lambda g: getattr(g.record, "shares", None) is None)
    names = [g.name for g in offered if g.family == "contraction"]
    assert names == ["fused_conv_relu_softmax_max", "fused_conv_relu_softmax", "fused_conv_relu"]


class Block(nn.Module):
    """Of a residual network, with a convolution beside the first two, or none."""

    def __init__(self, *, beside: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.beside = nn.Conv2d(8, 8, 1) if beside else nn.Identity()
        self.scale = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x).relu()) * self.scale
        return F.relu(y + (x if isinstance(self.beside, nn.Identity) else self.beside(x) * self.scale))


class Normed(nn.Module):
    """One that halves the image, with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(64, 128, 3, 2, 1, bias=False), nn.Conv2d(128, 128, 3, 1, 1, bias=False)
        self.beside = nn.Conv2d(64, 128, 1, 2, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(128) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(y + self.norms[2](self.beside(x)))


def in_order(graph: Graph) -> list[list[str]]:
    """Short words of what the groups compute, in the order they are computed."""
    bodies = [topological([n.op.body]) for n in graph.nodes() if isinstance(n.op, Fused)]
    return [[w for n in nodes if (w := chain.word(n)) is not None] for nodes in bodies]


def test_residual_blocks() -> None:
    """The last convolution adds what came in; where that is of a convolution too, the one that multiplies more adds
    what the other gives, which has its own chain."""
    _, graph = taken(graph_of(Block(beside=False), torch.randn(2, 8, 12, 12)))
    assert in_order(graph) == [["conv", "relu"], ["conv", "mul", "add", "relu"]]
    for _ in range(2):
        _, graph = taken(graph_of(Block(beside=True), torch.randn(2, 8, 12, 12)))
        assert sorted(in_order(graph)) == [["conv", "mul"], ["conv", "mul", "add", "relu"], ["conv", "relu"]]


@pytest.mark.parametrize("last", [False, True])
def test_residual_blocks_in_the_pipeline(last: bool) -> None:
    """Three kernels, batch norms inside, whichever way the input lies in memory."""
    model, x = Normed().eval(), torch.empty(8, 64, 28, 28)
    x = x.to(memory_format=torch.channels_last) if last else x
    built = pipeline.build(model, (x,), {}, kernels="always", measure=False, target=torch.device("cuda"))
    kernels = built.program.kernels
    assert sorted(k.name for k in kernels) == ["fused_conv", "fused_conv_add_relu", "fused_conv_relu"]
    assert {k.output.layout for k in kernels} == {"channels_last" if last else "contiguous"}
    (added,) = (k for k in kernels if "add" in k.name)
    assert [added.layouts[i] for i, shape in enumerate(added.shapes) if shape == added.output.shape] == [
        added.output.layout
    ]


def test_a_block_declined_with_its_addition_is_offered_without() -> None:
    found, graph = taken(
        graph_of(Block(beside=False), torch.randn(2, 8, 12, 12)), lambda g: not getattr(g.record, "elements", ())
    )
    assert [g.name for g in found if g.family == "contraction"][1:] == ["fused_conv_mul_add_relu", "fused_conv_mul"]
    assert in_order(graph)[1:] == [["conv", "mul"], ["add", "relu"]]


def test_what_others_use_is_not_added_inside() -> None:
    """The convolution's own output is one of the results, or its mean scales it."""
    for function in (
        lambda m, x, r: (F.relu((y := m.conv(x)) + r), y.square()),
        lambda m, x, r: (y := m.conv(x)) * y.mean((2, 3), keepdim=True).sigmoid() + r,
    ):
        found, _ = taken(graph_of(Function(function), torch.randn(4, 3, 16, 16), torch.randn(4, 8, 14, 14)))
        assert not any(getattr(g.record, "elements", ()) for g in found if g.family == "contraction")


def test_a_declined_contraction_leaves_its_chain_to_other_families() -> None:
    graph = graph_of(Function(lambda m, x: torch.relu(m.conv(x)).sum((2, 3))), torch.rand(IMAGES))
    found, after = taken(graph, lambda group: group.family != "contraction")
    assert [g.name for g in found] == ["fused_conv_relu_sum", "fused_relu_sum"]
    assert [type(n.op) for n in after.nodes() if n.inputs] == [ops.Conv, Fused]


def test_each_group_is_offered_once() -> None:
    graph = graph_of(Function(lambda m, x: torch.relu(m.conv(x)) + torch.tanh(m.conv(x + 1))), torch.rand(IMAGES))
    found, _ = taken(graph, lambda group: False)
    assert len({(g.family, g.root) for g in found}) == len(found)


@pytest.mark.parametrize("other", ["output", "branch", "opaque"])
def test_values_with_other_users_stay_outside(other: str) -> None:
    def function(m: Function, x: Tensor) -> object:
        y = torch.relu(m.conv(x))
        second = {"output": lambda: y, "branch": lambda: y.amax(1), "opaque": lambda: torch.renorm(y, 2, 0, 1e9)}[
            other
        ]()
        return y.sum((2, 3)), second

    graph = graph_of(Function(function), torch.rand(IMAGES))
    users = graph.users()
    found, after = taken(graph)
    assert found[0].name == "fused_conv_relu"
    for group in found:
        inside = {n for n in group.inner if n is not group.root}
        assert all(users[n] == sum(a is n for m in group.inner for a in m.inputs) for n in inside if n in users)
    assert len(after.outputs) == 2


def test_groups_of_derived_values_are_left_to_derive() -> None:
    """What depends on parameters alone is an operand, whole."""
    graph = graph_of(Function(lambda m, x: x * torch.exp(m.scale).sum()), torch.rand(4, 8, 64, 64))
    found, after = taken(graph)
    assert [g.name for g in found] == ["fused_mul"]
    assert not any(isinstance(n.op, Fused) for n in topological(list(after.outputs[0].inputs[1:])))


def test_body_is_the_group_over_placeholders() -> None:
    found, _ = taken(graph_of(Function(TABLE["contraction and tail"][0]), torch.rand(IMAGES)))
    (group,) = found
    (root,) = group.bodies
    inputs = [n for n in topological([root]) if not n.inputs and not isinstance(n.op, ops.Number)]
    assert all(isinstance(n.op, ops.Input) for n in inputs)
    assert sorted(n.op.index for n in inputs) == list(range(len(group.operands)))
    graph = as_graph((root,), group.operands)
    assert [n.shape for n in graph.inputs] == [n.shape for n in group.operands]
    assert list(graph.symbols) and (root.shape, root.dtype) == (group.root.shape, group.root.dtype)


def test_signatures_leave_out_what_a_call_decides() -> None:
    def kind(function: Callable[..., object], *shape: int) -> str:
        return signature(taken(graph_of(Function(function), torch.rand(shape)))[0][0])

    def gap(m: Function, x: Tensor) -> Tensor:
        return torch.relu(m.conv(x)).sum((2, 3))

    assert kind(gap, 4, 3, 16, 16) == kind(gap, 4, 3, 20, 24) == kind(gap, 9, 3, 16, 16)
    assert kind(gap, 4, 3, 16, 16) != kind(lambda m, x: torch.relu(m.conv(x)).mean((2, 3)), 4, 3, 16, 16)

    def wider(m: Function, x: Tensor) -> Tensor:
        return torch.relu(F.conv2d(x, m.conv.weight.repeat(2, 1, 1, 1), m.bias.repeat(2))).sum((2, 3))

    assert kind(gap, 4, 3, 16, 16) != kind(wider, 4, 3, 16, 16)  # tiles for 8 features are none for 16


def test_a_symbol_is_read_from_a_multiple_where_nothing_else_has_it() -> None:
    """Windows of images are 4*B samples."""
    batch = sympy.Symbol("B", integer=True, positive=True)
    windows = make(ops.Input((4 * batch, 3), torch.float32, torch.device("cpu"), "windows", 0))
    halves = make(ops.Input((2 * batch, 6), torch.float32, torch.device("cpu"), "halves", 1))
    root = make(ops.Cat(1), *(make(ops.Reshape((batch, 12)), part) for part in (windows, halves)))
    graph = as_graph(bodies((root,), (windows, halves)), (windows, halves))
    assert [(s.input, s.dim, s.times) for s in graph.symbols.values()] == [(1, 0, 2)]
    parts = torch.randn(20, 3), torch.randn(10, 6)
    (found,) = lower(graph).functions()[1](None, *parts)
    assert torch.equal(found, torch.cat([part.reshape(5, 12) for part in parts], 1))


def test_groups_that_are_declined_are_not_found_again() -> None:
    """Two reductions of rows that another one joins are one group, whichever of them it was found from."""
    x, y = (make(ops.Input((4, 96), torch.float32, torch.device("cpu"), f"x{i}", i)) for i in range(2))
    norms = [make(ops.Reduce("norm", (1,), True), v) for v in (x, y)]
    scaled = [pointwise("div", v, n) for v, n in zip((x, y), norms, strict=True)]
    graph = Graph((x, y), (make(ops.Reduce("sum", (1,)), pointwise("mul", *scaled)),))
    met: list[str] = []

    def decline(group: Group) -> None:
        met.append(group.family)
        assert len(met) < 50

    assert cut(graph, decline) is graph
    assert met.count("kept rows") == 1


def test_a_product_that_is_not_reduced_may_be_written_still() -> None:
    """A group that ends in a reduction and does not pay ends ahead of it."""
    x, y = (make(ops.Input((512, 40), torch.float32, torch.device("cpu"), f"x{i}", i)) for i in range(2))
    value = pointwise("exp", make(ops.Matmul(transpose_w=True), x, y, None))
    graph = Graph((x, y), (make(ops.Reduce("mean", (0, 1)), value),))

    def decide(group: Group) -> Node | None:
        return None if group.family != "matmul" or group.root is not value else group.fused("written")

    names = [n.op.name for n in cut(graph, decide).nodes() if isinstance(n.op, Fused)]
    assert names == ["written"]
