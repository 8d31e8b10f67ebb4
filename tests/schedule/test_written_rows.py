"""In which order convolutions of images whose channels lie last write: what readers want, as long as results lie as in
eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_build import as_on_a_gpu, built_for_a_gpu, emulated
from torch import Tensor, nn

from fusewright import tuning
from fusewright.capture import capture
from fusewright.codegen import cuda
from fusewright.ir.fused import Fused
from fusewright.runtime.launch import FORMATS
from fusewright.schedule.groups import cut

LAST = torch.channels_last


class Model(nn.Module):
    """A convolution, and what reads it."""

    def __init__(self, function: Callable[[nn.Module, Tensor], object], groups: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.function = nn.Conv2d(8, 8, 3, groups=groups), function
        self.norm, self.second = nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> object:
        return self.function(self, self.conv(x))


def shuffled(y: Tensor) -> Tensor:
    """`F.pixel_shuffle`, as a GPU computes it."""
    n, _, h, w = y.shape
    return y.reshape(n, 2, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, 2, 2 * h, 2 * w)


ROWS: dict[str, Callable[..., object]] = {
    "a norm of positions": lambda m, y: F.instance_norm(y).tanh() * 2,
    "a norm, and a function of both": lambda m, y: (y + F.instance_norm(y).tanh()).amax(1, keepdim=True),
    "a rearrangement": lambda m, y: shuffled(y.relu()),
    "what is flattened": lambda m, y: y.relu().flatten(1).cumsum(1),
    "a softmax of positions": lambda m, y: y.flatten(2).softmax(2),
    "a copy": lambda m, y: y.relu().contiguous() * 1.5,
}
AS_EAGER: dict[str, Callable[..., object]] = {
    "a result": lambda m, y: y.relu(),
    "a result as well": lambda m, y: (y, F.instance_norm(y)),
    "a function that is one": lambda m, y: (F.instance_norm(y).mean((2, 3)), y.relu() + y.sigmoid()),
    "a convolution, too": lambda m, y: m.second(y) + F.instance_norm(y)[:, :4],
    "channels as rows": lambda m, y: y.permute(0, 2, 3, 1).contiguous().cumsum(3),
    "rows that are views": lambda m, y: y.permute(0, 2, 3, 1).softmax(3),
}
EACH = [
    pytest.param(function, order, id=name)
    for order, some in (("contiguous", ROWS), ("channels_last", AS_EAGER))
    for name, function in some.items()
]


def strides(x: Tensor) -> list[int]:
    return [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1]


@pytest.mark.parametrize(("function", "order"), EACH)
def test_who_reads_it_decides(function: Callable[..., object], order: str) -> None:
    model, x = Model(function).eval(), torch.randn(2, 8, 9, 11).to(memory_format=LAST)
    built = as_on_a_gpu(model, x)
    kernel = next(k for k in built.program.kernels if k.name.startswith("fused_conv") and k.shapes[0][1] == "8")
    assert (kernel.layouts[0], kernel.output.layout) == ("channels_last", order)
    found, want = emulated(built, model, x), model(x)
    for a, b in zip(*((v,) if isinstance(v, Tensor) else v for v in (found, want)), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-5)
        assert strides(a) == strides(b)


@pytest.mark.parametrize("order", ["contiguous", "channels_last"])
def test_what_comes_in_rows_stays_so(order: str) -> None:
    model, x = Model(ROWS["a rearrangement"]).eval(), torch.randn(2, 8, 9, 11)
    first, second = as_on_a_gpu(model, x.contiguous(memory_format=FORMATS[order][4])).program.kernels
    assert (first.layouts[0], first.output.layout, second.layouts) == (order, "contiguous", ("contiguous",))


def test_norms_of_groups_are_in_rows_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Model(lambda m, y: m.norm(y).relu() + y, 1).eval(), torch.empty(8, 8, 32, 32).to(memory_format=LAST)
    first, second = built_for_a_gpu(monkeypatch, model, x).program.kernels
    assert (first.layouts[0], first.output.layout) == ("channels_last", "contiguous")
    assert set(second.layouts) == {"contiguous"}


@pytest.mark.parametrize("behind", [False, True])
def test_tiles_of_rows(behind: bool) -> None:
    """Those of channels of their own have nothing else: for others that is as good, for results it is not."""
    function = (lambda m, y: m.second(y.relu()).amax((2, 3))) if behind else (lambda m, y: y.relu())
    model, x = Model(function, groups=8).eval(), torch.empty(64, 8, 90, 110).to(memory_format=LAST)
    (first, *_) = as_on_a_gpu(model, x).program.kernels
    assert first.name == "fused_conv_relu" and first.output.layout == ("contiguous" if behind else "channels_last")


def test_what_a_tile_writes_is_what_is_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tuning.TARGETS, "cpu", cuda)
    model = Model(lambda m, y: m.second(y.relu()).amax((2, 3)), groups=8).eval()
    x = torch.empty(64, 8, 90, 110).to(memory_format=LAST)
    graph = capture(model, (x,), {}).graph
    hints = {symbol: x.shape[where.dim] for symbol, where in graph.symbols.items()}
    lies: dict[str, Any] = {"layouts": {graph.inputs[0]: "channels_last"}, "orders": {graph.inputs[0]: (0, 2, 3, 1)}}
    tuner = tuning.Tuner(torch.device("cpu"), hints, "always", (False, False), measure=False, **lies)
    first, second = (n.op for n in cut(graph, tuner, orders=lies["orders"]).nodes() if isinstance(n.op, Fused))
    assert tuner.kernels[first.name].output.layout == "contiguous" and first.rows and not second.rows


class Twins(nn.Module):
    """Two convolutions of one shape, whose readers want different orders."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return F.instance_norm(self.first(x)), self.second(x)


def test_equal_layers_share_a_kernel_where_orders_agree() -> None:
    model, x = Twins().eval(), torch.randn(2, 8, 9, 11).to(memory_format=LAST)
    built = as_on_a_gpu(model, x)
    written = sorted(k.output.layout for k in built.program.kernels if k.name.startswith("fused_conv"))
    assert written == ["channels_last", "contiguous"]
    kinds = [key for key in built.decisions if key.startswith("contraction")]
    assert len({key.rpartition(" #")[0] for key in kinds}) == 2
    for a, b in zip(emulated(built, model, x), model(x), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-4, atol=1e-5, check_stride=True)
