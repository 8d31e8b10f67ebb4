"""In-place operations and shared memory: a value where nobody can tell, a call in its order everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusewright.ir.ops import Opaque
from tests.capture.harness import Fn, check, kinds, opaque, program_of


def fresh(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


def _statement(x: torch.Tensor) -> torch.Tensor:
    h = fresh(x)
    F.relu_(h)
    return h * 2


def _chain(x: torch.Tensor) -> torch.Tensor:
    h = fresh(x)
    h.add_(1).mul_(2)
    h.relu_()
    return h + 1


def _view_then_write(x: torch.Tensor) -> torch.Tensor:
    h = fresh(x).view(x.shape[0], -1)
    return h.relu_() * 2


def _augmented(x: torch.Tensor) -> torch.Tensor:
    h = fresh(x)
    h += x
    h *= 3
    return h


def _returned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = fresh(x)
    return h.add_(1), x


def _contiguous_used(x: torch.Tensor) -> torch.Tensor:
    h = fresh(x)
    other = h.contiguous()
    h.add_(1)
    return other * 2


def _clone_written(x: torch.Tensor) -> torch.Tensor:
    return x.clone().mul_(2).relu_() + x


def _clone_of_what_is_written(x: torch.Tensor) -> torch.Tensor:
    h = fresh(x)
    old = h.clone()
    h.add_(1)
    return old * h


VALUES: dict[str, Callable[..., Any]] = {
    "statement": _statement,
    "chain": _chain,
    "view, then write": _view_then_write,
    "augmented assignment": _augmented,
    "returned": _returned,
    "dropout": lambda x: F.dropout(fresh(x), 0.5, True, inplace=True),
    "leaky_relu": lambda x: F.leaky_relu(fresh(x), 0.2, inplace=True) + x,
    "clamp": lambda x: fresh(x).clamp_(-0.5, 0.5),
    "another name": _contiguous_used,
    "clone": _clone_written,
    "clone before": _clone_of_what_is_written,
    "unsqueeze": lambda x: fresh(x).unsqueeze_(1),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_write_that_nobody_can_see_becomes_a_value(name: str) -> None:
    captured = check(Fn(VALUES[name]), torch.randn(4, 3, 5, requires_grad=True), batch=2)
    assert not any(n.endswith("_") for n in opaque(captured))
    assert Opaque not in kinds(captured)


def _column(x: torch.Tensor) -> torch.Tensor:
    z = fresh(x)
    z[:, 0] = 1
    return z * 2


def _base_used(x: torch.Tensor) -> torch.Tensor:
    h = fresh(x)
    h.view(-1).mul_(2)
    return h + 1


def _view_used(x: torch.Tensor) -> torch.Tensor:
    h = fresh(x)
    row = h[:, 0]
    h.mul_(2)
    return h.sum((1, 2)) + row.sum(1)


def _maybe_view_used(x: torch.Tensor) -> torch.Tensor:
    h = fresh(x)
    flat = h.reshape(x.shape[0], -1)
    h.add_(1)
    return flat * 2


def _random(x: torch.Tensor) -> torch.Tensor:
    return x + torch.empty(3, 5).normal_()


def _mixed_dtype(x: torch.Tensor) -> torch.Tensor:
    h = fresh(x)
    h.add_(torch.ones(5, dtype=torch.float64))
    return h * 2


def _both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    h = fresh(x)
    view = h[0]
    h.add_(1)
    return h, view


def _windows_used(x: torch.Tensor) -> torch.Tensor:
    h = fresh(x)
    windows = h.unfold(2, 3, 1)
    h.add_(1)
    return windows * 2


def _windows_written(x: torch.Tensor) -> torch.Tensor:
    h = fresh(x)
    h.unfold(2, 2, 2).mul_(3)
    h.unfold(2, 1, 3).add_(1)
    return h * 2


CALLS: dict[str, Callable[..., Any]] = {
    "windows used": _windows_used,
    "windows written": _windows_written,
    "column": _column,
    "base used": _base_used,
    "view used": _view_used,
    "perhaps a view": _maybe_view_used,
    "random": _random,
    "another dtype": _mixed_dtype,
    "both returned": _both,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_write_that_can_be_seen_stays_a_call(name: str) -> None:
    captured = check(Fn(CALLS[name]), torch.randn(4, 3, 5, requires_grad=True), batch=3)
    assert any(n.endswith("_") for n in opaque(captured))
    assert any("written in place" in reason for reason in captured.reasons)


def test_a_modified_input_is_modified() -> None:
    captured = check(Fn(lambda x: x.add_(1) * 2), torch.randn(4, 3), batch=2)
    assert opaque(captured) == ["add_", "mul"]


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))
        self.scale = torch.full((3,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        before = x.detach() * self.mean
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return before + x / self.steps * self.scale


class Assigning(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x * self.mean + self.steps
        self.mean = 0.5 * self.mean + x.detach().mean(0)
        self.steps = self.steps + 1
        return before * self.mean / self.steps * self.scale


def test_buffers_written_in_the_forward() -> None:
    captured = check(Counting(), torch.randn(4, 3, requires_grad=True), batch=2)
    assert {"add_", "lerp_"} <= set(opaque(captured))


def test_buffers_assigned_in_the_forward() -> None:
    captured = check(Assigning(), torch.randn(4, 3, requires_grad=True), batch=2)
    assert opaque(captured) == ["clone", "clone", "copy_", "copy_"]


class Storing(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mean * x
        self.mean.copy_(y.detach()[0])
        return self.mean


def test_a_buffer_that_is_written_and_returned_has_its_new_value() -> None:
    model = Storing()
    captured = check(model, torch.randn(4, 3))
    assert program_of(captured)(model, (torch.randn(4, 3),), {}) is model.mean


def test_a_plain_tensor_attribute_is_the_same_tensor() -> None:
    model = Counting()
    captured = check(model, torch.randn(4, 3))
    assert captured.constants["scale"] is model.scale


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.norm.running_mean * 1
        y = self.norm(self.norm(x))
        return y + before, self.norm.running_mean * 1


def test_running_statistics_read_elsewhere_keep_their_order() -> None:
    captured = check(Statistics(), torch.randn(4, 3, requires_grad=True), batch=3)
    assert opaque(captured) == ["mul", "add_", "add_", "mul"]


def test_inputs_and_parameters_come_back_as_such() -> None:
    layer = nn.Linear(3, 3)
    captured = check(Fn(lambda x, y: [y, x.to(torch.float32), x]), torch.randn(4, 3), torch.randn(4, 3))
    assert captured.graph.outputs == (captured.graph.inputs[1], captured.graph.inputs[0], captured.graph.inputs[0])

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.layer(x), self.layer.weight

    captured = check(Tied(), torch.randn(4, 3))
    assert getattr(captured.graph.outputs[1].op, "path", None) == "layer.weight"  # type: ignore[union-attr]


def test_equal_outputs_stay_two_tensors() -> None:
    captured = check(Fn(lambda x: (x * 2, x * 2)), torch.randn(4, 3))
    first, second = captured.graph.outputs
    assert first is not second


@pytest.mark.parametrize("size, step", [(3, 1), (2, 2), (1, 2)])
def test_windows_that_are_returned_are_a_view(size: int, step: int) -> None:
    model, x = Fn(lambda x: x.unfold(1, size, step)), torch.randn(4, 7)
    found, want = program_of(check(model, x))(model, (x,), {}), model(x)
    assert (found.data_ptr(), found.stride(), found.shape) == (x.data_ptr(), want.stride(), want.shape)


def test_a_view_of_the_same_shape_is_not_the_input() -> None:
    captured = check(Fn(lambda x: x.view(x.shape)), torch.randn(4, 3))
    assert captured.graph.outputs[0] is not captured.graph.inputs[0]


def test_literals_are_constants_unless_someone_writes_to_them() -> None:
    assert opaque(check(Fn(lambda x: x + torch.tensor([1.0, 2.0])), torch.randn(4, 2), batch=3)) == []
    assert "lift_fresh_copy" in opaque(check(Fn(lambda x: torch.tensor([1.0, 2.0])), torch.randn(4, 2)))
    assert opaque(check(Fn(lambda x: torch.tensor([1.0, 2.0]).add_(1) * x), torch.randn(4, 2))) == []
    assert "erfinv_" in opaque(check(Fn(lambda x: torch.tensor([0.1, 0.2]).erfinv_() * x), torch.randn(4, 2)))
