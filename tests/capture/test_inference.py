"""What PyTorch's modules compute where nothing has a gradient, which is not what a trace of them shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusewright
from fusewright.capture import capture
from fusewright.capture.inference import has_other_ways, without_gradients
from fusewright.ir import ops
from tests.dropin import program_calls


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.attention(x, x, x, need_weights=False)[0]) * 2


class Block(nn.Module):
    """Attention comes first in the sum, and is what lies where."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h, _ = self.attention(h, h, h)
        h = h + x
        return h + self.mlp(self.second(h))


@pytest.mark.parametrize("model", [Attends, Block])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.sampled
def test_calls_without_gradients_are_served(model: type[nn.Module], trained: bool) -> None:
    torch.manual_seed(0)
    module, x = model().eval().requires_grad_(trained), torch.randn(6, 16, 32)
    fast = fusewright.optimize(module, (x,), rewrite="always", measure=False)
    plan = fusewright.explain(fast)
    assert plan.status == "rewritten" and {k.mode: k.path for k in plan.kept}["forward"] == "rewritten"
    assert all(k.path == "original" for k in plan.kept[1:]) and plan.verdict is not None
    called = program_calls(fast)
    with torch.no_grad():
        found, expected = fast(x), module(x)
    assert found.stride() == expected.stride()
    assert program_calls(fast) == called + 1
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    given = x.clone().requires_grad_()
    assert fast(given).stride() == module(given).stride()  # the original's, a turned view
    assert program_calls(fast) == called + 1


def gelus(module: nn.Module, **options: Any) -> list[tuple[Any, ...]]:
    graph = capture(module, (torch.randn(4, 8, 32),), **options).graph
    return [n.op.params for n in graph.nodes() if isinstance(n.op, ops.Pointwise) and n.op.fn == "gelu"]


@pytest.mark.parametrize("activation", ["gelu", F.gelu, nn.GELU()])
def test_gelu_is_what_it_is_without_gradients(activation: Any) -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, activation=activation, batch_first=True).eval()
    own = layer.activation
    assert gelus(layer) == [("none",)]
    assert gelus(layer, gradients=False) == [("tanh",)]
    assert layer.activation is own


def test_modules_are_left_as_they_were() -> None:
    block = Block().eval()
    layer = nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True).eval()
    before = [dict(vars(m)) for m in (*block.modules(), *layer.modules())]
    model = nn.ModuleList([block, layer])
    with pytest.raises(RuntimeError, match="stop"), without_gradients(model):
        assert "forward" in vars(block.attention)
        raise RuntimeError("stop")
    assert [dict(vars(m)) for m in (*block.modules(), *layer.modules())] == before


def test_what_has_one_way_is_tried_once() -> None:
    assert has_other_ways(Block().eval()) and not has_other_ways(Block().train())
    assert not has_other_ways(nn.Sequential(nn.Linear(3, 3), nn.MultiheadAttention(32, 4)).eval())
