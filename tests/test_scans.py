"""Scans as models write them: one kernel each, which reads what is given and writes the result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gpu_build import as_on_a_gpu, emulated
from torch import Tensor, nn


class Scanned(nn.Module):
    """A function of x and a mask."""

    mask: Tensor

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("mask", torch.arange(48) % 3 > 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.mask)


def exclusive(x: Tensor, dim: int) -> Tensor:
    """Sums of all that is ahead; the last row is left out."""
    return torch.cumsum(torch.cat((torch.zeros_like(x.select(dim, 0).unsqueeze(dim)), x), dim=dim)[:-1], dim=dim)


def weights(density: Tensor) -> Tensor:
    """What layers take of light that has passed those ahead."""
    a = 1 - torch.exp(-F.relu(density) * 0.3)
    return a * torch.cumprod(torch.cat((torch.ones_like(a[:, :1]), 1 - a + 1e-10), 1), 1)[:, :-1]


def rendered(x: Tensor) -> Tensor:
    """Colours of rays through layers of a density each."""
    return (weights(x[..., 3])[..., None] * torch.sigmoid(x[..., :3])).sum(1)


MODELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "products": lambda x, m: torch.cumprod(1 + x / 8, 1),
    "from the end": lambda x, m: torch.cumsum(x.flip(1), 1).flip(1),
    "from the end, of functions": lambda x, m: torch.exp(-torch.cumsum((x * 0.1).flip(1), 1).flip(1)) + x,
    "flipped once": lambda x, m: torch.cumsum(x.flip(-1), -1),
    "ahead": lambda x, m: exclusive(x, 1),
    "ahead, narrowed": lambda x, m: torch.cumsum(torch.cat((x.new_zeros(len(x), 1), x), 1), 1).narrow(1, 0, 48),
    "ahead of what is cut": lambda x, m: torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1).cumsum(1),
    "ahead, padded": lambda x, m: F.pad(x, (1, 0))[..., :-1].cumsum(-1),
    "ahead, padded and cropped": lambda x, m: F.pad(x, (1, -1)).cumsum(-1),
    "ahead, moved behind": lambda x, m: F.pad(torch.cumprod(1 - x / 8, 1), (1, -1), value=1.0) * x,
    "without itself": lambda x, m: x.cumsum(1) - x,
    "a mask": lambda x, m: torch.cumsum(x * m, 1),
    "where": lambda x, m: torch.cumsum(torch.where(m, x, 0.0), 1),
    "filled": lambda x, m: torch.cumsum(x.masked_fill(m, 0.0), 1),
    "transmittance": lambda x, m: weights(x),
    "apart": lambda x, m: weights(x.view(-1, 12, 4)[..., 3]),
    "rendered": lambda x, m: rendered(x.view(-1, 12, 4)),
    "a sum of what is left": lambda x, m: (weights(x) * x).sum(1),
    "the greatest": lambda x, m: torch.cummax(x, 1)[0],
    "logarithms": lambda x, m: torch.logcumsumexp(x, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled
def test_one_kernel(name: str, dtype: torch.dtype) -> None:
    """Nothing else is computed, and no less exactly than in eager."""
    torch.manual_seed(0)
    model, x = Scanned(MODELS[name]), torch.randn(6, 48).to(dtype)
    built = as_on_a_gpu(model, x)
    assert [(c.family, c.path) for c in built.choices] == [("scan", "generated")]
    assert "torch." not in built.program.source.split("def forward")[1]
    got, eager, truth = emulated(built, model, x), model(x), model(x.double())
    assert got.dtype == eager.dtype
    few = 2 * torch.finfo(dtype).eps * truth.abs().max()  # a CPU's eager sums are in double precision
    assert (got - truth).abs().max() <= 2 * (eager - truth).abs().max() + few


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled
def test_gradients(name: str) -> None:
    """They are PyTorch's."""
    torch.manual_seed(0)
    model, x = Scanned(MODELS[name]), torch.randn(6, 48, dtype=torch.float64, requires_grad=True)
    derive, forward = as_on_a_gpu(model, x.detach()).program.functions()
    weight = torch.randn_like(model(x))
    (wanted,) = torch.autograd.grad((model(x) * weight).sum(), x)
    (found,) = torch.autograd.grad((forward(model, x, *derive(model)) * weight).sum(), x)
    torch.testing.assert_close(found, wanted)


def test_other_rows_than_are_scanned_are_left_out() -> None:
    """What a batch is cut by is no prefix."""
    x = torch.randn(6, 48)
    model = Scanned(lambda x, m: exclusive(x, 1))
    assert emulated(as_on_a_gpu(model, x), model, x).shape == (5, 49)
    columns = Scanned(lambda x, m: exclusive(x, 0))
    built = as_on_a_gpu(columns, x)
    torch.testing.assert_close(emulated(built, columns, x), columns(x))
