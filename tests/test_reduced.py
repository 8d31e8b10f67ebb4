"""The smaller call that stands for a slow one in most of a verification: which side is taken, and when none is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fusewright import reduced as module
from fusewright.errors import CaptureError
from fusewright.reduced import reduced


def built(*rules: str, kernels: tuple[str, ...] = (), batches: int = 0) -> Any:
    fired = [SimpleNamespace(rule=rule) for rule in rules]
    return SimpleNamespace(
        rewritten=SimpleNamespace(fired=fired),
        program=SimpleNamespace(kernels=[SimpleNamespace(name=name) for name in kernels]),
        batches=batches,
        windows=0,
        features=0,
    )


class Clock:
    """Every build takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds, self.sides = 0.0, seconds, []  # type: ignore[var-annotated]

    def monotonic(self) -> float:
        return self.now

    def build(self, *answers: Any) -> Any:
        left = iter(answers)

        def build(args: Any, kwargs: Any) -> Any:
            self.now += self.seconds
            self.sides.append(args[0].shape[-1])
            answer = next(left)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return build


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock(1.0)
    monkeypatch.setattr(module, "time", found)
    return found


MODEL, X = nn.Conv2d(2, 2, 3), torch.randn(2, 2, 230, 227)


def test_the_smallest_side_that_stands_for_the_call(clock: Clock) -> None:
    """One at which other rules fire, or which cannot be captured, does not."""
    wanted = built("slide", kernels=("fused_conv",))
    build = clock.build(built("other"), CaptureError("no"), wanted)
    args, kwargs, small = reduced(MODEL, (X,), {}, wanted, build) or pytest.fail("none was taken")
    assert small is wanted and kwargs == {} and clock.sides == [27, 43, 75]
    assert args[0].shape == (2, 2, 78, 75)


def test_a_network_that_takes_long_to_build_is_not_tried_at_every_side(clock: Clock) -> None:
    clock.seconds = module.PATIENCE + 1
    assert reduced(MODEL, (X,), {}, built("slide"), clock.build(*[built("other")] * 4)) is None
    assert clock.sides == [27]


def test_a_side_that_is_small_already(clock: Clock) -> None:
    assert reduced(MODEL, (X[..., :30, :30],), {}, built("slide"), clock.build()) is None


def test_a_model_that_refuses_a_side(clock: Clock) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Flatten(), nn.Linear(2 * 228 * 225, 1))
    assert reduced(model, (X,), {}, built("slide"), clock.build()) is None and clock.sides == []
