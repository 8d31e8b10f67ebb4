"""Contraction groups: what they are made of, how a dimension is described, what is refused and why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch

from fusewright.ir import ops
from fusewright.ir.build import cast, pointwise
from fusewright.ir.node import Graph, Node, make
from fusewright.ir.ops import Slot
from fusewright.schedule.axes import Axis
from fusewright.schedule.contraction import Box, Contraction, match, varies

B = sympy.Symbol("B", integer=True, positive=True)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
F32 = torch.float32


def inp(*shape: ops.Size, dtype: torch.dtype = F32, name: str = "x", device: torch.device = CPU) -> Node:
    return make(ops.Input(shape, dtype, device, name, 0))


def weight(*shape: int, dtype: torch.dtype = F32, path: str = "w", device: torch.device = CPU) -> Node:
    return make(ops.Param(shape, dtype, device, path))


def conv(
    x: Node, o: int = 5, k: int = 3, s: int = 1, pad: int = 0, d: int = 1, groups: int = 1, transposed: bool = False
) -> Node:
    n, c = x.ndim - 2, x.shape[1]
    assert isinstance(c, int)
    op = ops.Conv((s,) * n, ((pad, pad),) * n, (d,) * n, groups, transposed, (0,) * n)
    shape = (c, o // groups) if transposed else (o, c // groups)
    return make(op, x, weight(*shape, *(k,) * n, dtype=x.dtype, device=x.device), None)


def pool(x: Node, k: int = 2, s: int = 2, dilation: int = 1, n: int = 2) -> Node:
    return make(ops.Pool("max", (k,) * n, (s,) * n, (0,) * n, (dilation,) * n), x)


def number(value: float) -> Node:
    return make(ops.Number(value))


def fold(x: Node, kind: str, *dims: int) -> Node:
    return make(ops.Reduce(kind, dims, False), x)


def matched(root: Node, *others: Node) -> Contraction | str:
    return match(root, Graph((), (root, *others)).users())


def reads(axis: Axis, length: int, positions: int) -> dict[int, set[tuple[int, int]]]:
    """(input index, tap) per output position, as the cells of `axis` cover them."""
    found: dict[int, set[tuple[int, int]]] = {}
    for cell in range(-(-positions // axis.stride)):
        for phase in axis.phases:
            for j, element in enumerate(phase.elements):
                p = cell * axis.stride + axis.start + element
                at = [(cell * axis.advance + phase.offset(j, t), u) for t, u in enumerate(phase.taps)]
                if p < positions:
                    assert p not in found
                    found[p] = {(i, u) for i, u in at if 0 <= i < length}
    return found


@pytest.mark.parametrize("taps", [1, 2, 3, 5])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (2, 3), (4, 6), (1, 2)])
@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("transposed", [False, True])
def test_an_axis_reads_what_a_convolution_does(
    taps: int, stride: int, dilation: int, padding: int, transposed: bool
) -> None:
    length = 9
    node = conv(inp(1, 2, length), 4, taps, stride, padding, dilation, transposed=transposed)
    positions = node.shape[2]
    assert isinstance(positions, int)
    if positions < 1:
        pytest.skip("nothing is left")
    group = matched(node)
    assert isinstance(group, Contraction)
    want: dict[int, set[tuple[int, int]]] = {p: set() for p in range(positions)}
    for p in range(positions):
        for i in range(length):
            for u in range(taps):
                hit = (
                    i * stride + u * dilation - padding == p if transposed else p * stride + u * dilation - padding == i
                )
                if hit:
                    want[p].add((i, u))
    assert reads(group.axes[2], length, positions) == want


def test_stages_in_their_order() -> None:
    y = conv(inp(2, 3, 16, 16))
    before = pointwise("relu", y)
    pooled = pool(before)
    after = pointwise("tanh", pooled)
    group = matched(fold(after, "sum", 1, 2, 3))
    assert isinstance(group, Contraction)
    assert group.before is not None and group.before.root is before
    assert group.window is not None and group.window.node is pooled
    assert group.after is not None and group.after.root is after
    assert group.over_channels and group.over_positions


X, ON_GPU = inp(2, 3, 16, 16), inp(2, 3, 16, 16, device=GPU)
Y = conv(X)
CONV = ops.Conv((1, 1), ((0, 0), (0, 0)), (1, 1), 1, False, (0, 0))
REFUSED: dict[str, tuple[Callable[[], Node], str]] = {
    "dilated pool": (lambda: pool(Y, dilation=2), "the pooling is dilated"),
    "pool over some dimensions": (lambda: pool(Y, n=1), "not over all positions"),
    "two pools": (lambda: pool(pool(Y)), "comes after what a tile can do"),
    "after the reduction": (lambda: fold(fold(Y, "sum", 1), "max", 1), "comes after what a tile can do"),
    "operand per sample after the reduction": (
        lambda: pointwise("add", fold(conv(inp(5, 3, 16, 16), 5), "sum", 1), weight(5, 1, 1)),
        "more than single numbers",
    ),
    "product": (lambda: fold(Y, "prod", 1, 2, 3), "a fused reduction is one of"),
    "over one dimension": (lambda: fold(Y, "sum", 3), "over some of the positions only"),
    "over the batch": (lambda: fold(Y, "sum", 0), "over some of the positions only"),
    "operand per position": (lambda: pointwise("add", Y, weight(1, 5, 14, 14)), "neither a number nor one"),
    "element that is pooled": (
        lambda: pool(pointwise("add", Y, weight(2, 5, 14, 14))),
        "what is computed from it is pooled",
    ),
    "element behind a pool": (
        lambda: pointwise("add", pool(Y), weight(2, 5, 7, 7)),
        "neither a number nor one number per channel",
    ),
    "element and softmax": (
        lambda: make(ops.Softmax(1, False), pointwise("add", Y, weight(2, 5, 14, 14))),
        "is pooled or a softmax",
    ),
    "truth per element": (
        lambda: pointwise("where", inp(2, 5, 14, 14, dtype=torch.bool), Y, number(0)),
        "neither a",
    ),
    "operand along the last dimension": (
        lambda: pointwise("add", conv(inp(2, 3, 7), 5), weight(5)),
        "neither a number",
    ),
    "integers": (lambda: conv(inp(1, 3, 8, 8, dtype=torch.int64)), "has no kernel"),
    "to integers": (lambda: cast(Y, torch.int64), "is no floating-point number"),
    "a truth": (lambda: pointwise("gt", Y, X.op and make(ops.Number(0.0))), "is no floating-point number"),
    "to float64": (lambda: fold(cast(Y, torch.float64), "sum", 1), "the precision changes"),
    "to less and back": (lambda: cast(cast(Y, torch.float16), F32), "rounded to a narrower type"),
    "large": (lambda: conv(inp(1, 2, 40000, 40000), 1), "more than 2^31 elements"),
    "large output": (lambda: conv(inp(1, 1, 40000, 40000), 2, 1), "more than 2^31 elements"),
    "empty": (lambda: conv(inp(0, 3, 8, 8)), "an empty convolution"),
    "as many features as samples": (
        lambda: make(CONV, inp(B, 3, 8, 8), inp(B, 3, 3, 3, name="w"), None),
        "differ from call to call",
    ),
    "as many channels as samples": (
        lambda: make(CONV, inp(2, B, 8, 8), inp(5, B, 3, 3, name="w"), None),
        "differ from call to call",
    ),
    "taps as the input is long": (
        lambda: make(CONV, inp(2, 3, 8, 8), inp(5, 3, 3, B, name="w"), None),
        "differ from call to call",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    root, reason = REFUSED[name]
    found = matched(root())
    assert isinstance(found, str) and reason in found


def test_operands_vary() -> None:
    """By the sample's channel before by the element, where both are so."""
    y = conv(inp(B, 3, 8, 8))
    shapes = {
        (): "scalar",
        (1, 1, 1, 1): "scalar",
        (5, 1, 1): "channel",
        (1, 5, 1, 1): "channel",
        (B, 5, 1, 1): "sample's channel",
        (B, 5, 6, 6): "element",
        (5, 6, 6): None,
        (B, 1, 6, 6): None,
        (B, 1, 1, 1): None,
        (2, 5, 1, 1): None,
        (6,): None,
    }
    assert {shape: varies(inp(*shape), y) for shape in shapes} == shapes
    assert varies(inp(B, 5, 1, 1), conv(inp(B, 3, 3, 3))) == "sample's channel"


@pytest.mark.parametrize("x", [X, ON_GPU], ids=["cpu", "cuda"])
def test_windows_between_strides(x: Node) -> None:
    y = conv(x, s=2, transposed=True)
    group = matched(pool(y, s=3))
    assert isinstance(group, Contraction) and group.window is not None
    assert group.axes == group.plain_axes and not group.cells_are_windows  # as without the pooling
    assert {(a.stride, a.together, a.advance) for a in group.window_axes[1:]} == {(3, 2, 3)}
    group = matched(pool(y, s=4))
    assert isinstance(group, Contraction) and group.axes != group.plain_axes and group.cells_are_windows


def test_another_user_refuses() -> None:
    """The convolution's output would be needed in memory anyway."""
    found = matched(pool(pointwise("relu", Y)), Y)
    assert isinstance(found, str)
    found = matched(fold(pool(Y), "sum", 1), pool(Y))
    assert isinstance(found, str) and "another user" in found


def box(count: int, slots: int, start: int = 0, step: int = 1, scale: float = 0.5) -> tuple[Slot, ...]:
    return tuple(Slot(start + j, start + j + (count - 1) * step + 1, step, scale) for j in range(slots))


def summed(table: tuple[tuple[int, tuple[Slot, ...]], ...], dtype: torch.dtype = F32, x: Node = X) -> Node:
    return make(ops.RangeSum(table, dtype), x)


APART = ((2, (Slot(0, 3, 1, 1.0), Slot(2, 5, 1, 1.0), Slot(4, 7, 1, 1.0))),)
CLIPPED = ((2, tuple(Slot(max(j - 2, 0), min(j + 2, 16), 1, 1.0) for j in range(18))),)


def test_windows_apart_or_clipped_on_a_cpu() -> None:
    group = matched(conv(summed(APART)))
    assert isinstance(group, Contraction)
    assert group.x is X and group.box == Box((1, 3, 1), (1, 1, 1), 1.0, (1, 2, 1), (0, 0, 0), (0, -9, 0))
    group = matched(conv(summed(CLIPPED)))
    assert isinstance(group, Contraction)
    assert group.x is X and group.box == Box((1, 4, 1), (1, 1, 1), 1.0, (1, 1, 1), (0, 2, 0), (0, 3, 0))


def test_clipped_windows_on_a_gpu() -> None:
    """As many as a lane has registers for, also where more share a row than a CPU would add up anew."""
    many = ((2, tuple(Slot(max(j - 2, 0), min(j + 4, 16), 1, 1.0) for j in range(15))),)
    for table, count, behind in ((CLIPPED, 4, 3), (many, 6, 2)):
        group = matched(conv(summed(table, x=ON_GPU)))
        assert isinstance(group, Contraction)
        assert group.x is ON_GPU and group.box == Box(
            (1, count, 1), (1, 1, 1), 1.0, (1, 1, 1), (0, 2, 0), (0, behind, 0)
        )


def test_window_sums_are_formed_inside() -> None:
    group = matched(conv(summed(((2, box(3, 12, step=2)), (3, box(2, 15)))), s=4))
    assert isinstance(group, Contraction)
    assert group.x is X and group.box == Box((1, 3, 2), (1, 2, 1), 0.25)


@pytest.mark.parametrize("root", [
    conv(summed(((2, box(3, 12, start=1)),))),  # not from the beginning
    conv(summed(((2, box(3, 12)),)), pad=1),
    pool(conv(summed(((2, box(3, 12)),)))),  # a window of window sums
    conv(summed(APART, x=ON_GPU)),
    conv(summed(((2, tuple(Slot(max(j - 9, 0), min(j + 11, 16), 1, 1.0) for j in range(25))),), x=ON_GPU)),  # 22 rows
    conv(summed(((2, tuple(Slot(max(j - 2, 0), min(j + 3, 16), 1, 1.0) for j in range(16))),))),  # five share a row
    conv(summed(((2, (Slot(0, 3, 1, 1.0), Slot(1, 4, 1, 1.0), Slot(3, 6, 1, 1.0))),))),  # at no one distance
])  # fmt: skip
def test_other_window_sums_are_read_from_memory(root: Node) -> None:
    group = matched(root)
    assert isinstance(group, Contraction)
    assert group.box is None and isinstance(group.x.op, ops.RangeSum)


T = inp(2, 5, 14, 14, name="t")
GATE = pointwise("sigmoid", T)
TURNED = pointwise("sigmoid", make(ops.Permute((0, 1, 3, 2), False), T))
OTHERS = pointwise("sigmoid", conv(inp(2, 3, 16, 16, name="t")))
OF_TWO = pointwise("sigmoid", pointwise("add", T, inp(2, 5, 14, 14, name="u")))


@pytest.mark.parametrize(
    ("operand", "read", "others"),
    [
        pytest.param(GATE, T, (), id="of what a call passes"),
        pytest.param(GATE, GATE, (GATE,), id="others read it"),
        pytest.param(TURNED, TURNED, (), id="of a view that does not lie row by row"),
        pytest.param(OTHERS, OTHERS, (), id="another convolution may give it"),
        pytest.param(OTHERS, OTHERS.arg(0), (OTHERS.arg(0),), id="others read what it is of"),
        pytest.param(OF_TWO, OF_TWO, (), id="of two tensors"),
    ],
)
def test_functions_of_operands(operand: Node, read: Node, others: tuple[Node, ...]) -> None:
    """Where what they are of lies in memory anyway, and nobody else has them, they are computed with the rest."""
    found = matched(pointwise("mul", Y, operand), *others)
    assert isinstance(found, Contraction) and found.operands == (read,)
