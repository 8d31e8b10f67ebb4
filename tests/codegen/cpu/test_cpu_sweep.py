"""Every family at more than 500 combinations of shape, strides and dtype, against float64."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import sweep
import torch
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
Chain = nn.Sequential
BLOCKS, CASES = 8, 72  # 576 cases of each family


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    """Kernels are built into a directory of the test's."""
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path))


def assert_right(family: str, first: int, cases: int) -> None:
    torch.set_num_threads(2)
    done = 0
    for tried in count():
        if done >= cases:
            return
        assert tried < 20 + cases, f"{done} cases of {family} after {tried} models"
        done += sweep.check(family, first + tried)


@pytest.mark.parametrize("family", sweep.FAMILIES)
@pytest.mark.sampled
def test_some(family: str) -> None:
    assert_right(family, 0, 20)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("family", sweep.FAMILIES)
def test_many(family: str, block: int) -> None:
    assert_right(family, 1000 * (block + 1), CASES)


class Function(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


# Sizes and windows at the ends of what there is.
UNUSUAL: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one number": (lambda: Function(lambda x: (x.relu() * 2 + 1).tanh()), (1,)),
    "down to one number": (lambda: Function(lambda x: x.relu().sum()), (7, 5)),
    "long rows": (lambda: Function(lambda x: (x.tanh() * 2).sum(-1)), (3, 1_000_003)),
    "many rows": (lambda: Function(lambda x: (x.tanh() * 2).logsumexp(-1)), (100_003, 3)),
    "primes": (lambda: Chain(nn.Sigmoid(), nn.AvgPool2d(3, 2, 1), Function(lambda x: x.sum((1, 2, 3)))),
               (7, 11, 101, 97)),
    "columns of one": (lambda: Chain(nn.Conv2d(3, 17, (3, 1)), nn.ReLU(), nn.MaxPool2d((2, 1))), (2, 3, 31, 1)),
    "rows of one": (lambda: Chain(nn.Conv2d(3, 17, (1, 3)), nn.ReLU(), nn.AvgPool2d((1, 2))), (2, 3, 1, 31)),
    "without a batch": (lambda: Chain(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)), (3, 9, 9)),
    "more padding than image": (lambda: Chain(nn.Conv2d(3, 8, 3, padding=5), nn.ReLU(), nn.MaxPool2d(2)), (2, 3, 1, 2)),
    "taps outside alone": (lambda: Chain(nn.Conv2d(3, 8, 3, padding=8, dilation=8), nn.GELU()), (2, 3, 5, 4)),
    "one position": (lambda: Chain(nn.Conv2d(3, 8, (13, 17)), nn.ReLU(), nn.Flatten()), (2, 3, 13, 17)),
    "depthwise": (lambda: Chain(nn.Conv2d(37, 37, 5, 1, 2, groups=37), nn.Hardswish()), (2, 37, 19, 23)),
    "depthwise, three each": (lambda: Chain(nn.Conv2d(6, 18, 3, 2, groups=6), nn.AdaptiveMaxPool2d(1)), (2, 6, 19, 23)),
    "many channels": (lambda: Chain(nn.Conv2d(513, 7, 3), nn.ReLU()), (1, 513, 9, 9)),
    "many features": (lambda: Chain(nn.Conv2d(3, 1025, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)), (1, 3, 9, 9)),
    "a large batch": (lambda: Chain(nn.Conv1d(1, 1, 3), nn.ReLU()), (20_011, 1, 9)),
    "circular": (lambda: Chain(nn.Conv2d(3, 8, 3, 1, 1, padding_mode="circular"), nn.ReLU()), (2, 3, 9, 8)),
    "reflected": (lambda: Chain(nn.Conv2d(3, 8, 3, 1, 1, padding_mode="reflect"), nn.ReLU()), (2, 3, 9, 8)),
    "far below zero": (lambda: Chain(nn.Conv2d(3, 8, 3), Function(lambda x: x - 100), nn.MaxPool2d(3, 1, 1)),
                       (2, 3, 5, 5)),
    "large exponents": (lambda: Function(lambda x: (x * 1e4).logsumexp((1, 2))), (3, 40, 50)),
}  # fmt: skip
QUICK = ("columns of one", "more padding than image", "many rows", "depthwise")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in UNUSUAL])
@pytest.mark.sampled
def test_unusual(name: str) -> None:
    make, shape = UNUSUAL[name]
    torch.manual_seed(0)
    model = sweep.Model(make().eval(), shape, torch.float32, "always")
    x = torch.randn(shape)
    sweep.Program(sweep.build(model, x)).check(model.module, x, name)
