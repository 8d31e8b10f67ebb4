"""Reductions over some of a convolution's positions: windows inside the tile first, and the same value in the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulation.emulate import emulate
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.codegen import cuda
from fusewright.codegen.aten import lower
from fusewright.ir import ops, spec
from fusewright.ir.build import pointwise
from fusewright.ir.node import Graph, Node, make
from fusewright.ir.placement import placed
from fusewright.schedule.group import Group, as_graph
from fusewright.schedule.groups import cut
from fusewright.schedule.partial import split

F64 = torch.float64


class Model(nn.Module):
    """A convolution (3 -> 5) and what follows it."""

    def __init__(self, conv: type[nn.Module], behind: Callable[[Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.behind = conv(3, 5, 3, **attributes), behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.conv(x))


def found(model: nn.Module, x: Tensor) -> tuple[Graph, Group]:
    """The graph, with the first step of its reduction spelled out where there is one, and its contraction group."""
    groups: list[Group] = []

    def decide(group: Group) -> Node | None:
        groups.append(group)
        return group.root if groups == [group] and group.split is not None else None

    return spec.check(cut(capture(model.eval(), (x,), {}).graph, decide)), groups[0]


IMAGES, VOLUMES = (2, 3, 13, 21), (2, 3, 6, 9, 19)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "rows": (lambda: Model(nn.Conv2d, lambda y: y.relu().sum(2)), IMAGES, (8, 1)),
    "columns": (lambda: Model(nn.Conv2d, lambda y: y.tanh().mean(3, keepdim=True)), IMAGES, (1, 8)),
    "channels as well": (lambda: Model(nn.Conv2d, lambda y: y.square().mean((1, 3))), IMAGES, (1, 8)),
    "maximum": (lambda: Model(nn.Conv2d, lambda y: (1 - y).amax(-1).relu(), padding=1), IMAGES, (1, 8)),
    "minimum of channels": (lambda: Model(nn.Conv2d, lambda y: y.amin((1, 2), keepdim=True)), IMAGES, (8, 1)),
    "one of three": (lambda: Model(nn.Conv3d, lambda y: y.sigmoid().sum(2)), VOLUMES, (4, 1, 1)),
    "two of three": (lambda: Model(nn.Conv3d, lambda y: y.relu().mean((2, 4))), VOLUMES, (4, 1, 4)),
    "as many as strides": (
        lambda: Model(nn.ConvTranspose2d, lambda y: y.relu().sum(3), stride=(1, 3)), (2, 3, 5, 7), (1, 9)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_same_value_in_two_steps(name: str) -> None:
    model_of, shape, window = CASES[name]
    model, x = model_of().to(F64), torch.randn(shape, dtype=F64)
    graph, group = found(model, x)
    assert group.split is not None and group.record.window.op.kernel == window
    assert group.record.over_channels == (1 in group.split.root.op.dims)
    derive, forward = lower(graph).functions()
    torch.testing.assert_close(forward(model, x, *derive(model))[0], model(x))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_the_kernel_of_the_first_step(name: str) -> None:
    model_of, shape, _ = CASES[name]
    model, x = model_of().to(F64), torch.randn(shape, dtype=F64)
    graph, group = found(model, x)
    kernel = cuda.generate(group, "fused_test", cuda.options(group, dict.fromkeys(graph.symbols, 2), {})[0], tf32=False)
    operands = [x if isinstance(n.op, ops.Input) else model.get_parameter(n.op.path).detach() for n in group.operands]
    derive, forward = lower(as_graph(group.bodies, group.operands)).functions()
    torch.testing.assert_close(emulate(kernel, *operands), forward(model, *operands, *derive(model))[0])


WHOLE: dict[str, tuple[Callable[[], nn.Module], torch.dtype]] = {
    "all positions": (lambda: Model(nn.Conv2d, lambda y: y.relu().sum((2, 3))), F64),
    "the batch": (lambda: Model(nn.Conv2d, lambda y: y.relu().sum((0, 3))), F64),
    "logsumexp": (lambda: Model(nn.Conv2d, lambda y: y.logsumexp(3)), F64),
    "pooled already": (lambda: Model(nn.Conv2d, lambda y: nn.functional.max_pool2d(y, 2).sum(3)), F64),
    "sums of half precisions": (lambda: Model(nn.Conv2d, lambda y: y.relu().sum(3)), torch.bfloat16),
    "another user": (lambda: Model(nn.Conv2d, lambda y: y.sum(3) + y.amax(3)), F64),
}


def test_window_sums_stay_inside() -> None:
    """A convolution of window sums and what follows is one tile's work as it is."""
    graph = capture(Model(nn.Conv2d, lambda y: y.relu().sum(3)), (torch.randn(IMAGES),), {}).graph
    (root,), (x,) = graph.outputs, graph.inputs
    assert isinstance(root, Node) and split(root, graph.users()) is not None
    slots = tuple(ops.Slot(j, j + 3, 1, 1.0) for j in range(19))
    conv = next(n for n in graph.nodes() if isinstance(n.op, ops.Conv))
    boxed = make(conv.op, make(ops.RangeSum(((3, slots),), x.dtype), x), *conv.args[1:])
    root = make(ops.Reduce("sum", (3,)), pointwise("relu", boxed))
    assert split(root, Graph((), (root,)).users()) is None


@pytest.mark.parametrize("name", WHOLE)
def test_what_stays_whole(name: str) -> None:
    model_of, dtype = WHOLE[name]
    group = found(model_of().to(dtype), torch.randn(IMAGES, dtype=dtype))[1]
    assert group.family == "contraction" and group.split is None


def test_strides_that_are_kept() -> None:
    """On a CPU windows may begin between the strides of a transposed convolution, so it is split too."""
    model = Model(nn.ConvTranspose2d, lambda y: y.sum(3), stride=2).double()
    group = found(model, torch.randn(IMAGES, dtype=F64))[1]
    assert group.family == "contraction" and group.split is not None
    assert group.record.window is not None and group.record.axes == group.record.plain_axes


def test_strides_that_are_kept_on_a_gpu_stay_whole() -> None:
    """Not every GPU pools windows that begin between strides, and the first of two steps has nothing shorter."""
    captured = capture(Model(nn.ConvTranspose2d, lambda y: y.sum(3), stride=2), (torch.randn(IMAGES),), {})
    for device, taken in (("cpu", True), ("cuda", False)):
        graph = placed(captured.graph, torch.device(device))
        (root,) = graph.outputs
        assert isinstance(root, Node) and (split(root, graph.users()) is not None) == taken
