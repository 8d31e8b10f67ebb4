"""Regions without gradients, and of autocast turned off: part of the graph, with eager's gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fusewright.capture import capture, regions
from fusewright.errors import CaptureError
from fusewright.ir.ops import Detach
from tests.capture.harness import check, kinds, opaque
from tests.dropin import fast, program_calls

Forward = Callable[["Model", torch.Tensor], Any]


class Model(nn.Module):
    """A forward with a parameter, a buffer, a plain tensor and two layers at hand."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.given = forward
        self.w = nn.Parameter(torch.randn(3))
        self.register_buffer("b", torch.randn(3))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.plain = torch.randn(3)
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.given(self, x)


def plain_autocast() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)


def _inside_and_outside(m: Model, x: torch.Tensor) -> Any:
    with torch.no_grad():
        scale = (m.w * x).mean(1, keepdim=True)
    return x * scale * m.w


def _rotary(m: Model, x: torch.Tensor) -> Any:
    with torch.no_grad(), plain_autocast():
        angles = torch.arange(x.shape[1]).float()[:, None] * m.b[None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return x[:, :, None] * cos + x[:, :, None] * sin * m.w


def _several(m: Model, x: torch.Tensor) -> Any:
    with torch.no_grad():
        values, indices = (x * m.w).max(1)
        flat = x.reshape(-1)
    return {"values": values, "indices": indices, "rest": x.reshape(-1) * flat, "both": x * values[:, None]}


@torch.no_grad()
def _whole(m: Model, x: torch.Tensor) -> Any:
    return m.layer(x).relu(), x, m.w


@torch.no_grad()
def _within(m: Model, x: torch.Tensor) -> Any:
    with torch.no_grad():
        y = x * m.w
    with plain_autocast():
        z = y.float() + m.w
        with plain_autocast():
            z = z * m.w
    return z, m.b * 2


def _gradients_within(m: Model, x: torch.Tensor) -> Any:
    with torch.no_grad():
        before = m.w * 2
        with torch.enable_grad():
            between = m.w * x
        after = between * m.w
    return before, between, after, after * m.w


def _unchanged(m: Model, x: torch.Tensor) -> Any:
    h = x.sin()
    with torch.no_grad():
        same, scaled = h, h * 2
    return same * m.w + scaled, same


def _switched(m: Model, x: torch.Tensor) -> Any:
    torch.set_grad_enabled(False)
    y = m.layer(x)
    torch.set_grad_enabled(True)
    return y * m.layer(x)


def _literal(m: Model, x: torch.Tensor) -> Any:
    with torch.no_grad():
        y = x * torch.tensor([1.0, 2.0, 3.0]) + m.plain
    return y * x


def _sizes(m: Model, x: torch.Tensor) -> Any:
    with torch.no_grad():
        count = x.shape[0] * 2
        y = x.reshape(count * 3 // 2) + torch.arange(count * 3 // 2)
    return y * count


def _fresh_in_place(m: Model, x: torch.Tensor) -> Any:
    with torch.no_grad():
        h = (x * m.w).relu_()
        h += m.w
    return h * x


def _frozen(m: Model, x: torch.Tensor) -> Any:
    with torch.no_grad():
        h = m.layer(x)
    return m.layer(h)


REGIONS: dict[str, Forward] = {
    "inside and outside": _inside_and_outside,
    "rotary": _rotary,
    "several results": _several,
    "whole forward": _whole,
    "regions within": _within,
    "gradients within": _gradients_within,
    "unchanged": _unchanged,
    "switched": _switched,
    "literal": _literal,
    "sizes": _sizes,
    "fresh memory in place": _fresh_in_place,
    "frozen layer": _frozen,
    "integers": lambda m, x: torch.no_grad()(lambda: (x * m.w).argmax(1))() + 1,
}


@pytest.mark.parametrize("wanted", [True, False], ids=["input gradient", "none"])
@pytest.mark.parametrize("name", REGIONS)
def test_a_region_without_gradients(name: str, wanted: bool) -> None:
    captured = check(Model(REGIONS[name]), torch.randn(4, 3, requires_grad=wanted), batch=3)
    assert set(opaque(captured)) <= {"arange", "max", "argmax"}


def test_what_no_gradient_comes_back_to_is_not_detached() -> None:
    assert Detach not in kinds(check(Model(_rotary), torch.randn(4, 3)))
    assert kinds(check(Model(_inside_and_outside), torch.randn(4, 3))).count(Detach) == 2


def _write_buffer(m: Model, x: torch.Tensor) -> Any:
    with torch.no_grad():
        m.steps.add_(1)
        m.b.lerp_(x.mean(0), 0.1)
    return x * m.b / m.steps


def _assign_buffer(m: Model, x: torch.Tensor) -> Any:
    with torch.no_grad():
        m.b = 0.9 * m.b + x.mean(0) * m.w
    return x * m.b


def _write_value(m: Model, x: torch.Tensor) -> Any:
    h = x.sin()
    with torch.no_grad():
        h.mul_(2)
        h.add_(m.w)
        seen = h * 3
    return h * m.w, seen


def _write_view(m: Model, x: torch.Tensor) -> Any:
    h = x.sin() + m.w
    with torch.no_grad():
        h[:, 0].zero_()
    return h * m.w


def _write_parameter(m: Model, x: torch.Tensor) -> Any:
    before = m.w * 1.0
    with torch.no_grad():
        m.w.mul_(0.5)
    return x * m.w + before


WRITES: dict[str, Forward] = {
    "buffer": _write_buffer,
    "assigned buffer": _assign_buffer,
    "value": _write_value,
    "view": _write_view,
    "parameter": _write_parameter,
}


@pytest.mark.parametrize("name", WRITES)
def test_a_region_that_writes_to_what_is_outside(name: str) -> None:
    captured = check(Model(WRITES[name]), torch.randn(4, 3, requires_grad=True), batch=3)
    assert any(n.endswith("_") for n in opaque(captured))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_norm_without_gradients(training: bool) -> None:
    def forward(m: Model, x: torch.Tensor) -> Any:
        with torch.no_grad():
            h = m.norm(m.layer(x))
        return h * m.w

    captured = check(Model(forward).train(training), torch.randn(4, 3, requires_grad=True), batch=3)
    assert opaque(captured) == ["add_"] * training


@pytest.mark.parametrize(
    "forward",
    [lambda m, x: (x * m.w).detach() * m.w, lambda m, x: (x * m.w).detach_() * m.w, lambda m, x: x.detach()],
    ids=["detach", "detach_", "returned"],
)
def test_a_detached_value_gives_no_gradient(forward: Forward) -> None:
    captured = check(Model(forward), torch.randn(4, 3, requires_grad=True), batch=3)
    assert kinds(captured).count(Detach) == 1 and not opaque(captured)


def test_detaching_in_place_without_gradients() -> None:
    def forward(m: Model, x: torch.Tensor) -> Any:
        h = x * m.w
        with torch.no_grad():
            h.detach_()
        return h * m.w

    check(Model(forward), torch.randn(4, 3, requires_grad=True), batch=3)


def _autocast(m: Model, x: torch.Tensor) -> Any:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        return m.layer(x)


def _gradients_off_within(m: Model, x: torch.Tensor) -> Any:
    with plain_autocast(), torch.no_grad():
        return m.layer(x)


def _gradients_on_within(m: Model, x: torch.Tensor) -> Any:
    with torch.no_grad():
        with plain_autocast(), plain_autocast(), torch.enable_grad():
            y = m.layer(x)
        return y * m.w


def _gradients_set_within(m: Model, x: torch.Tensor) -> Any:
    with torch.no_grad():
        y = m.layer(x)
        with plain_autocast():
            torch.set_grad_enabled(True)
        return y * m.w


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (_autocast, "turns autocast on"),
        (_gradients_off_within, "turns autocast off while"),
        (_gradients_on_within, "turns autocast off while"),
        (_gradients_set_within, "turns autocast off while"),
    ],
)
def test_autocast_under_which_a_trace_says_too_little_is_refused(forward: Forward, reason: str) -> None:
    with pytest.raises(CaptureError, match=f"^Model cannot be captured: its forward {reason}.*; it runs as it did.$"):
        capture(Model(forward), (torch.randn(4, 3),))


def test_a_forward_that_leaves_gradients_turned_off_is_refused() -> None:
    def forward(m: Model, x: torch.Tensor) -> Any:
        torch.set_grad_enabled(False)
        return m.layer(x)

    with pytest.raises(CaptureError, match="its forward leaves gradients turned off"):
        capture(Model(forward), (torch.randn(4, 3),))
    assert torch.is_grad_enabled()


def test_a_region_that_is_called_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "_REGIONS", {})
    with pytest.raises(CaptureError, match="holds a subprogram"):
        capture(Model(_rotary), (torch.randn(4, 3),))


class Backbone(nn.Module):
    """A frozen convolution with a mean that moves before it, and a trained one with another."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.trained = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            kept = self.frozen(x).mean((2, 3))
        return kept * self.trained(x).mean((2, 3))


@pytest.mark.parametrize("kernels", ["never", "always"])
def test_the_rewritten_program_has_eagers_gradients(kernels: str) -> None:
    torch.manual_seed(0)
    model, x = Backbone(), torch.randn(4, 3, 24, 24)
    optimised = fast(model, x, kernels=kernels, verify=True)
    found = _gradients(optimised, x)
    assert program_calls(optimised) == 1
    expected = _gradients(model, x)
    assert [g is None for g in found] == [g is None for g in expected] == [False, True, True, False, False]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def _gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Of the input and of the parameters."""
    leaf = x.clone().requires_grad_()
    return list(torch.autograd.grad(model(leaf).sin().sum(), [leaf, *model.parameters()], allow_unused=True))
