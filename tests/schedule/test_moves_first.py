"""Norms behind moves of whole rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gpu_build import as_on_a_gpu, emulated
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.codegen.aten import lower
from fusewright.ir import ops
from fusewright.ir.node import topological
from fusewright.schedule import rearrangement
from fusewright.schedule.moves_first import moves_first
from tests.capture.harness import Fn

WEIGHT, BIAS = torch.linspace(0.5, 2, 16), torch.linspace(-1, 1, 16)


def norm(x: Tensor) -> Tensor:
    return F.layer_norm(x, (16,), WEIGHT, BIAS)


def windows(x: Tensor) -> Tensor:
    """(N, 6, 8, C) in windows of 3 x 4."""
    return x.unflatten(1, (2, 3)).unflatten(3, (2, 4)).transpose(2, 3).flatten(3, 4).flatten(0, 2)


MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "rolled": lambda x: torch.roll(norm(x), (1, -2), (1, 2)).relu(),
    "windows": lambda x: windows(norm(x)) * 2,
    "rolled windows": lambda x: windows(torch.roll(norm(x), (1, -2), (1, 2))) * 2,
    "flipped": lambda x: norm(x).flip(2) * 2,
    "some of those": lambda x: windows(torch.roll(norm(x), 1, 1))[:, 1:3] * 2,
    "some, returned": lambda x: torch.roll(norm(x), 1, 1)[:, 1:3],
    "turned": lambda x: norm(x).transpose(1, 2).flatten(1, 2) * 2,
    "rolled, and rows cut": lambda x: torch.roll(norm(x), 1, 1).unflatten(3, (2, 8)) * 2,
    "rolled, channels first": lambda x: torch.roll(norm(x), 1, 1).permute(0, 3, 1, 2) * 2,
    "two dimensions": lambda x: torch.roll(F.layer_norm(x, (8, 16)), 1, 1).flatten(2) * 2,
}
STAYS: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, Tensor]]] = {
    "nothing is copied": lambda x: norm(x).flatten(1, 2) * 2,
    "rolled along rows": lambda x: torch.roll(norm(x), 1, 3) * 2,
    "rows are cut": lambda x: norm(x).unflatten(3, (2, 8)).flip(3) * 2,
    "channels first": lambda x: norm(x).permute(0, 3, 1, 2).flatten(2) * 2,
    "one of two dimensions": lambda x: torch.roll(F.layer_norm(x, (8, 16)), 1, 2) * 2,
    "others read it": lambda x: (lambda y: (torch.roll(y, 1, 1) * 2, y * 3))(norm(x)),
    "joined": lambda x: torch.cat((norm(x), x), 1) * 2,
}


@pytest.mark.parametrize("name", MOVED)
def test_moves_of_whole_rows(name: str) -> None:
    x = torch.randn(2, 6, 8, 16)
    captured = capture(Fn(MOVED[name]), (x,))
    found = moves_first(captured.graph)
    (node,) = (n for n in found.nodes() if isinstance(n.op, ops.Norm))
    behind = set(found.nodes()) - set(topological([node]))
    assert not any(isinstance(n.op, ops.Roll | ops.Flip) for n in behind), behind
    assert name.startswith("rolled,") or not any(map(rearrangement.copies, behind))
    derive, forward = lower(found, None, captured.constants).functions()
    result, want = forward(None, x, *derive(None))[0], MOVED[name](x)
    torch.testing.assert_close(result, want, check_stride=True)


@pytest.mark.parametrize("name", STAYS)
def test_others_stay(name: str) -> None:
    graph = capture(Fn(STAYS[name]), (torch.randn(2, 6, 8, 16),)).graph
    assert moves_first(graph) is graph


def test_kernels() -> None:
    """A norm that is read in shifted windows is one launch; nothing is copied for it."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(96)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.roll(self.norm(x), (-3, -3), (1, 2)).unflatten(1, (2, 7)).unflatten(3, (2, 7))
            return h.transpose(2, 3).flatten(3, 4).flatten(0, 2)

    model, x = Shifted().eval(), torch.randn(2, 14, 14, 96)
    built = as_on_a_gpu(model, x)
    assert [c.family for c in built.choices] == ["normalization"]
    with torch.no_grad():
        want = model(x)
    torch.testing.assert_close(emulated(built, model, x), want, rtol=1e-5, atol=1e-5)
