"""Random chains of modules: contraction -> pointwise, norm, pool, scale, bias -> reductions, sometimes more tails.

Everything is drawn from one seeded `random.Random`.  A step is drawn for the value it meets and tried on it; one that
PyTorch refuses, or that leaves nothing, too much or non-finite values, is drawn anew and counted.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

import torch
from torch import Tensor, nn

if __package__:
    from tests.fuzz.steps import CONTRACTIONS, LINEAR, MIDDLE, REDUCTIONS, TAILS, Step, batch_norm
else:
    from steps import CONTRACTIONS, LINEAR, MIDDLE, REDUCTIONS, TAILS, Step, batch_norm

LARGEST, LOUDEST = 4096, 1e3  # elements and magnitude of a value


class Chain(nn.Module):
    """The steps one after another; the values before the steps in `side` are used once more."""

    def __init__(self, steps: Sequence[nn.Module], side: Sequence[int] = ()) -> None:
        super().__init__()
        self.bandicoot = nn.ModuleList(steps)  # a name that no generated text may hold
        self.side = tuple(side)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        others = []
        for index, step in enumerate(self.bandicoot):
            if index in self.side:
                others.append(x.square().mean())
            x = step(x)
        return (x, *others)


@dataclass(frozen=True)
class Drawn:
    """A model in float64 with an input, and how many draws were thrown away on the way."""

    model: Chain
    x: Tensor
    redrawn: int


def draw(seed: int) -> Drawn:
    """The chain of this seed."""
    redrawn = 0
    for attempt in count():
        random = Random(f"{seed}.{attempt}")
        torch.manual_seed(random.randrange(2**31))
        x = _input(random)
        steps, thrown = _steps(random, x)
        redrawn += thrown
        side = [random.randrange(1, len(steps))] if len(steps) > 2 and random.random() < 0.12 else []
        model = Chain(steps, side).double()
        _scramble(model)
        model.train(random.random() < 0.5)
        if _sound(copy.deepcopy(model), x):
            return Drawn(model, x, redrawn)
        redrawn += 1
    raise AssertionError


def _steps(random: Random, x: Tensor) -> tuple[list[nn.Module], int]:
    """Steps for x, and how many were thrown away."""
    steps: list[nn.Module] = []
    thrown, value = 0, x
    for kinds in _plan(random):
        for _ in range(12):
            step = _tried(kinds, random, value)
            if step is not None:
                steps.append(step)
                value = step(value).detach()
                break
            thrown += 1
    return steps, thrown


def _plan(random: Random) -> list[Sequence[Step]]:
    """What kinds of steps, one after another."""
    plan: list[Sequence[Step]] = [CONTRACTIONS]
    if random.random() < 0.15:
        plan.append([batch_norm])
    if random.random() < 0.45:  # the main theorem is about what follows the contraction at once
        plan += [LINEAR] * random.randint(1, 2)
    else:
        plan += [MIDDLE] * random.randint(0, 4)
    if random.random() < 0.2:
        plan += [CONTRACTIONS, MIDDLE]
    plan += [REDUCTIONS] * random.choice((0, 1, 1, 2, 3))
    if random.random() < 0.25:
        plan += [TAILS]
    return plan


def _input(random: Random) -> Tensor:
    n = random.choice((0, 1, 1, 2, 2, 2, 3))
    most = (0, 17, 9, 6)[n]
    lengths = [random.randint(1 if random.random() < 0.1 else 3, most) for _ in range(n)]
    channels = random.choice((1, 2, 3, 4, 6))
    return torch.randn(random.choice((2, 2, 3)), channels, *lengths, dtype=torch.float64)


def _tried(kinds: Sequence[Step], random: Random, value: Tensor) -> nn.Module | None:
    """A step of these kinds that does something sensible with `value`; `None` for a draw that does not."""
    try:
        step = random.choice(kinds)(random, value).double()
    except (RuntimeError, ValueError, IndexError):
        return None
    return step if _sound(step, value) else None


def _sound(module: nn.Module, value: Tensor) -> bool:
    """Whether PyTorch takes the module at `value`, and all that comes out is of moderate size and magnitude."""
    try:
        with torch.no_grad():
            results = module(value)
    except (RuntimeError, ValueError, IndexError):
        return False
    return all(
        0 < r.numel() <= LARGEST and bool(torch.isfinite(r).all()) and float(r.abs().max()) <= LOUDEST
        for r in (results if isinstance(results, tuple) else (results,))
    )


def _scramble(model: nn.Module) -> None:
    """Random affine parameters and running statistics, which start as ones and zeros."""
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "affine", False) or isinstance(module, nn.LayerNorm | nn.RMSNorm):
                for parameter in module.parameters(recurse=False):
                    parameter.copy_(torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                buffer.copy_(torch.rand_like(buffer) + 0.5 if name.endswith("var") else torch.randn_like(buffer))
