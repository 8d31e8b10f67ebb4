"""Which other lengths of its input a program serves as it is, and what keeps it from that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.dispatch import Options, Sides
from fusewright.optimizer import planned

ASKED = Options(verify=False, measure=False, rewrite="always", kernels="always", sides=True)


class Head(nn.Module):
    def __init__(self, after: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.conv(x), x)


def sides(
    after: Callable[[Tensor, Tensor], Tensor],
    *shape: int,
    order: torch.memory_format = torch.contiguous_format,
    **options: Any,
) -> Sides:
    """What is found for a convolution and what comes after it, which must have become a kernel."""
    args = (torch.rand(shape or (4, 3, 24, 30)).contiguous(memory_format=order),)
    _, _, entry = planned(Head(after), args, Options(**{**vars(ASKED), **options}), lambda _: None)
    assert entry.runner is not None and entry.runner.program.kernels
    return entry.sides


def test_image_sizes_are_arguments_of_kernels() -> None:
    found = sides(lambda y, x: y.relu().mean((2, 3)))
    assert found == Sides({2: (12, 48), 3: (15, 60)}, gradients=True)


def test_references_that_hold_for_one_size() -> None:
    found = sides(lambda y, x: F.avg_pool2d(y, 4).sigmoid().sum((1, 2, 3)), 4, 3, 34, 38)
    assert found == Sides({2: (34, 68), 3: (38, 76)}, gradients=False)  # a strip is the whole image


def test_a_size_that_is_a_number_in_the_program() -> None:
    assert sides(lambda y, x: y.relu().mean((2, 3)) * x.shape[3]) == Sides({2: (12, 48)}, gradients=True)
    assert sides(lambda y, x: y.relu().mean((2, 3)) * (x.shape[2] * x.shape[3])) == Sides()


@pytest.mark.parametrize(
    "branch",
    [
        lambda x: x.shape[2] > 40,
        lambda x: x.shape[2] % 2 + x.shape[3] % 2 == 1,
        lambda x: x.shape[3] == 41,  # one length that no build is tried for
        lambda x: x.shape[2] == x.shape[3],
        lambda x: x.shape[2] // 2 % 19 == 10,
    ],
)
@pytest.mark.sampled
def test_a_forward_that_asks_for_a_size(branch: Callable[[Tensor], bool]) -> None:
    found = sides(lambda y, x: y.tanh().mean((2, 3)) if branch(x) else y.relu().mean((2, 3)))
    assert found == Sides()


def test_what_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    mean: Callable[[Tensor, Tensor], Tensor] = lambda y, x: y.relu().mean((2, 3))  # noqa: E731
    assert sides(mean, sides=False) == Sides()
    assert sides(mean, 1, 3, 24, 30) == Sides()  # made for this batch alone
    assert sides(mean, order=torch.channels_last).ranges == {2: (12, 48), 3: (15, 60)}
    assert sides(mean, 4, 3, 24, 7) == Sides({2: (12, 48)}, gradients=True)
    monkeypatch.setattr("fusewright.sides.MOST_NODES", 2)
    assert sides(mean) == Sides()
