"""Models on which a rewrite fires, and how to tell that its program served a call."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch import Tensor, nn

import fusewright
from fusewright.kernel import Kernel
from fusewright.module import state_of


class Gap(nn.Module):
    """A convolution, its mean over positions, and an attribute that the forward reads."""

    def __init__(self, divisor: float = 2.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bias = nn.Parameter(torch.randn(8))
        self.divisor = divisor

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.conv(x).mean((2, 3)) / self.divisor * scale + self.bias


class Normed(nn.Module):
    """Batch norm and dropout after the part that is rewritten."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.conv(x).mean((2, 3)))))


class Linear(nn.Module):
    """The smallest model that gains: a sum over the features of a matmul."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum(1)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.factors = [2.0, 3.0]
        self.settings = Settings()
        self.shift = torch.ones(8)

    def forward(self, x: Tensor) -> Tensor:
        depth = len(self.settings.deep["a"][0])
        return self.conv(x).mean((2, 3)) * self.factors[0] + self.shift * 2 + depth


class Slotted:
    __slots__ = ("factor",)


class Hidden(nn.Module):
    """State in places that are no attributes of the module."""

    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.slotted = Slotted()
        self.slotted.factor = 2.0
        self.array = numpy.ones(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3)) * self.slotted.factor * float(self.array[0]) * self.factor


class Settings:
    def __init__(self) -> None:
        self.deep = {"a": [[1, 2], [3]]}


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gap = Gap()

    def forward(self, inputs: dict, shift: int | None):
        first, second = inputs["more"]
        y = self.gap(inputs["image"]) + (0 if second is None else self.gap(second)) + (shift or 0)
        return {"y": y, "both": (y * 2, [self.gap(first)])}


class Exposed(nn.Module):
    """Returns what a program might keep for later, and views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor):
        scaled = self.bias * 3 + self.conv.bias
        y = self.conv(x).mean((2, 3)) + scaled
        constant = torch.zeros(2, 2)
        return y, scaled, (self.bias * 2).reshape(2, 4), (self.bias * 5)[2:4], constant, y[:, :2], self.bias


class DataDependent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class Final(Gap):
    def __init_subclass__(cls) -> None:
        raise TypeError("no subclass, please")


def images(batch: int = 4, side: int = 10, **options: Any) -> Tensor:
    return torch.randn(batch, 3, side, side, **options)


def fast(model: nn.Module, *args: Any, **options: Any) -> nn.Module:
    """The optimised model, on which some rule must have fired."""
    chosen = {"rewrite": "always", "measure": False, "verify": False, **options}
    result = fusewright.optimize(model, args or (images(),), **chosen)
    assert result is not model, fusewright.explain(model).reason
    return result


def kernels_of(module: nn.Module) -> tuple[Kernel, ...]:
    """The generated kernels of the first program of an optimised module."""
    state = state_of(module)
    assert state is not None
    return next(e.runner.program.kernels for e in state.entries.values() if e.runner is not None)


def program_calls(module: nn.Module) -> int:
    """How many calls a program has served."""
    state = state_of(module)
    assert state is not None
    runners = {id(e.runner): e.runner for e in state.entries.values() if e.runner is not None}
    return sum(r.calls for r in runners.values())


def same(optimised: nn.Module, original: nn.Module, *args: Any, program: bool | None = None, **kwargs: Any) -> None:
    """The two agree on a call; `program` says whether a program must, or must not, have served it."""
    before = program_calls(optimised)
    found, expected = optimised(*args, **kwargs), original(*args, **kwargs)
    half = expected.dtype in (torch.float16, torch.bfloat16)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2 if half else 1e-5, atol=2e-2 if half else 1e-5)
    if program is not None:
        assert (program_calls(optimised) > before) == program
