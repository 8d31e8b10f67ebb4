"""What becomes of models that read a part of what they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_build import as_on_a_gpu
from torch import Tensor, nn

import fusewright
from fusewright.capture import capture
from fusewright.ir.placement import placed
from fusewright.pipeline import Built, build
from fusewright.rules import RULES
from fusewright.rules.engine import rewrite
from fusewright.runtime.device import LARGE_GPU
from fusewright.schedule.cost import CostModel

WIDTH, LENGTH, HEADS = 32, 50, 4


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.before, self.behind = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def attended(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        shares = torch.softmax(q @ k.transpose(-2, -1) * (width // HEADS) ** -0.5, -1)
        y: Tensor = self.out((shares @ v).transpose(1, 2).reshape(n, length, width))
        return y

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attended(self.before(x)))
        y: Tensor = x + self.down(F.gelu(self.up(self.behind(x))))
        return y


class Last(nn.Module):
    """Two blocks and a head that reads some tokens."""

    def __init__(self, taken: Callable[[Tensor], Any], dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(dropout), Block(dropout))
        self.norm, self.head, self.taken = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10), taken

    def forward(self, x: Tensor) -> Any:
        return self.taken(self.norm(self.blocks(x)), self.head)


TAKEN: dict[str, Callable[..., Tensor]] = {
    "the class token": lambda x, head: head(x[:, 0]),
    "the last one": lambda x, head: head(x)[:, -1] * 1.0,
    "some of them": lambda x, head: head(x[:, 1:9]).mean(1),
    "every other": lambda x, head: head(x)[:, ::2].amax(1),
}


def cpu(model: nn.Module, x: Tensor, **options: Any) -> Built:
    return build(model, (x,), {}, kernels="never", **options)


@pytest.mark.parametrize("name", TAKEN)
def test_what_nobody_reads_of_the_last_block_is_not_computed(name: str) -> None:
    """But for keys and values."""
    model, x = Last(TAKEN[name]).eval(), torch.randn(3, LENGTH, WIDTH)
    built = cpu(model, x)
    fired = {f.rule for f in built.rewritten.fired}
    assert {"slice(norm(x)) = norm(slice(x))", "slice(matmul(x, w)) = matmul(slice(x), slice(w))"} <= fired
    share = 0.5 if "other" in name else 9 / LENGTH
    block = 2 * LENGTH * WIDTH * WIDTH * 8 * 3  # of the two products behind the attention
    assert built.before.flops - built.after.flops >= (1 - share) * block
    derive, forward = built.program.functions()
    with torch.no_grad():
        torch.testing.assert_close(forward(model, x, *derive(model)), model(x), rtol=1e-5, atol=1e-5)


def test_verified_and_served() -> None:
    model, x = Last(TAKEN["the class token"]).eval(), torch.randn(3, LENGTH, WIDTH)
    fast = fusewright.optimize(model, (x,), rewrite="always", kernels="never", measure=False)
    plan = fusewright.explain(fast)
    assert plan.verdict is not None and plan.verdict.ok and any("slice" in f.rule for f in plan.rules)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)


def test_what_is_returned_stays_a_view() -> None:
    model = Last(lambda x, head: x[:, 0]).eval()
    built = cpu(model, torch.randn(3, LENGTH, WIDTH))
    assert not [f for f in built.rewritten.fired if "slice" in f.rule]


@pytest.mark.parametrize(
    "taken",
    [
        lambda x, head: (head(x[:, 0]), x.mean((1, 2))),
        lambda x, head: head(x[:, 0]) + head(x).mean(1),
        lambda x, head: (lambda a, b: F.gelu(a) * b)(*head(x).chunk(2, -1)),
    ],
    ids=["others read all", "all and a part", "halves of columns"],
)
def test_what_others_read_is_computed_once(taken: Callable[..., Any]) -> None:
    built = cpu(Last(taken).eval(), torch.randn(3, LENGTH, WIDTH))
    assert not [f for f in built.rewritten.fired if "slice" in f.rule]


def test_numbers_drawn_stay_the_same() -> None:
    """A dropout draws as many as before."""
    model, x = Last(TAKEN["the class token"], 0.5).train(), torch.randn(3, LENGTH, WIDTH)
    built = cpu(model, x)
    derive, forward = built.program.functions()
    torch.manual_seed(0)
    want = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(forward(model, x, *derive(model)), want, rtol=1e-5, atol=1e-5)


def test_a_kernel_keeps_what_follows_its_convolution() -> None:
    class Cropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(8, 8, 3, padding=2)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.conv(x))[:, :, :-2] * 2

    model = Cropped().eval().requires_grad_(False)
    graph = placed(capture(model, (torch.empty(64, 8, 100),), {}).graph, torch.device("cuda"))
    cost = CostModel(LARGE_GPU, dict.fromkeys(graph.symbols, 64), derived_ahead=True, fusing=True)
    assert not [f for f in rewrite(graph, RULES, cost, fusing=True).fired if "slice" in f.rule]


def test_kernels() -> None:
    """Those of one token are those of few rows."""
    model, x = Last(TAKEN["the class token"]).eval(), torch.randn(3, LENGTH, WIDTH)
    built = as_on_a_gpu(model, x)
    assert any("slice" in f.rule for f in built.rewritten.fired)
    derive, forward = built.program.functions()
    with torch.no_grad():
        torch.testing.assert_close(forward(model, x, *derive(model)), model(x), rtol=1e-5, atol=1e-5)
