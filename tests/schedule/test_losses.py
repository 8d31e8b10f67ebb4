"""Losses of classes as streams over logits: what eager gives, its gradients, and one read of what is large."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_build import built_for_a_gpu
from torch import Tensor
from torch.testing import assert_close

from fusewright.capture import capture
from fusewright.codegen.aten import lower
from fusewright.ir.node import Graph
from fusewright.ir.ops import Nll
from fusewright.runtime.device import LARGE_GPU, DeviceFacts
from fusewright.schedule.losses import of_logits
from tests.capture.harness import Fn

EVERY = DeviceFacts("any", conv=1.0, matmul=1.0, wide=1.0, memory=1.0, reduce=1.0, window=1.0, launch=0.0)


def placed(graph: Graph, facts: DeviceFacts = EVERY) -> Graph:
    return of_logits(graph, facts, dict.fromkeys(graph.symbols, 64))


def streamed(fn: Callable[..., Any], *args: Tensor) -> Graph:
    graph = capture(Fn(fn), args).graph
    found = placed(graph)
    assert found is not graph
    return found


def of(graph: Graph, *args: Tensor) -> Tensor:
    result: Tensor = lower(graph).functions()[1](None, *args)[0]
    return result


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("shape", [(6, 9), (2, 5, 3, 4)])
def test_as_in_eager(shape: tuple[int, ...], reduction: str, weighted: bool, ignored: int, smoothing: float) -> None:
    torch.manual_seed(0)
    x = (torch.randn(shape).double() * 3 + 100).requires_grad_()
    classes = torch.randint(5, (shape[0], *shape[2:]))
    weight = torch.rand(shape[1]).double() if weighted else None

    def loss(x: Tensor, classes: Tensor) -> Tensor:
        how: dict[str, Any] = {"ignore_index": ignored, "reduction": reduction, "label_smoothing": smoothing}
        return F.cross_entropy(x, classes, weight, **how)

    captured = capture(Fn(loss), (x, classes))
    graph = placed(captured.graph)
    assert graph is not captured.graph
    derive, forward = lower(graph, None, captured.constants).functions()
    (found,), want = forward(None, x, classes, *derive(None)), loss(x, classes)
    assert_close(found, want, rtol=1e-12, atol=1e-12)
    seed = torch.linspace(0.5, 1.5, want.numel()).double().reshape(want.shape)
    assert_close(*(torch.autograd.grad(y, x, seed)[0] for y in (found, want)), rtol=1e-11, atol=1e-11)


def each(x: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(x, classes, reduction="none")


def smoothed(x: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(x, classes, reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize("each", [each, smoothed])
@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_special_values(value: float, each: Callable[..., Tensor]) -> None:
    """In the place of the class, in another, in all, and in a row that is ignored."""
    x, classes = torch.randn(5, 6), torch.tensor([0, 1, 2, -100, 4])
    x[0, 0] = x[1, 3] = value
    x[2] = x[3] = value
    assert_close(of(streamed(each, x, classes), x, classes), each(x, classes), equal_nan=True)


def test_what_is_no_class_is_an_error() -> None:
    x, classes = torch.randn(5, 6), torch.arange(5)
    graph = streamed(each, x, classes)
    with pytest.raises(IndexError, match="out of bounds"):
        of(graph, x, classes + 2)


@pytest.mark.parametrize("each", [each, smoothed])
@pytest.mark.parametrize("shift", [0.0, 100.0, 1e4])
def test_as_exact_as_eager(shift: float, each: Callable[..., Tensor]) -> None:
    """However large logits are, and however sure."""
    torch.manual_seed(0)
    x, classes = torch.randn(256, 1024) + shift, torch.arange(256)
    x[:128, :128] += 20 * torch.eye(128)
    truth = each(x.double(), classes)
    error, eager = ((y - truth).abs() for y in (of(streamed(each, x, classes), x, classes), each(x, classes)))
    assert (error.square().mean().sqrt() <= 2 * eager.square().mean().sqrt()) and error.max() <= 4 * eager.max()


def test_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of two reductions does all that is large, behind what is picked, where rows are too long to be kept;
    small ones stay as they were."""
    model = Fn(lambda x: F.cross_entropy(x, torch.arange(x.shape[0], device=x.device)))
    built = built_for_a_gpu(monkeypatch, model, torch.empty(2048, 50_257), "auto")
    assert [c.path for c in built.choices if "logsumexp" in c.name] == ["generated"]
    assert [c.family for c in built.choices if "logsumexp" in c.name] == ["stream"]
    assert "log_softmax" not in built.program.source
    small = capture(model, (torch.randn(64, 100),)).graph
    assert placed(small, LARGE_GPU) is small


def test_one_read_of_smoothed_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are too long to be kept: one stream has the logarithm and the mean of all."""
    model = Fn(lambda x: F.cross_entropy(x, torch.arange(x.shape[0], device=x.device), label_smoothing=0.1))
    built = built_for_a_gpu(monkeypatch, model, torch.empty(2048, 50_257), "auto")
    assert [(c.family, c.path) for c in built.choices if "logsumexp" in c.name] == [("several reductions", "generated")]
    assert "log_softmax" not in built.program.source


def test_of_a_wider_type() -> None:
    """Elements are picked from logits as they lie in memory."""
    model = Fn(lambda x, t: F.cross_entropy(x.float(), t))
    x, classes = torch.randn(6, 9, dtype=torch.bfloat16), torch.arange(6)
    graph = streamed(model.fn, x, classes)
    assert graph.inputs[0] in [n.arg(0) for n in graph.nodes() if isinstance(n.op, Nll)]
    assert_close(of(graph, x, classes), model(x, classes))


@pytest.mark.parametrize("ignored", [-100, 1])
def test_of_functions_of_logits(ignored: int) -> None:
    """Elements are picked from what lies in memory, and then scaled; what is ignored has no gradient, whatever that
    would come to."""
    model = Fn(lambda x, t: F.cross_entropy(1 / (x.float() / 0.5), t, ignore_index=ignored))
    x, classes = torch.rand(6, 9, dtype=torch.bfloat16) + 0.5, torch.arange(6)
    graph = streamed(model.fn, x, classes)
    assert graph.inputs[0] in [n.arg(0) for n in graph.nodes() if isinstance(n.op, Nll)]
    x.requires_grad_()
    found, want = of(graph, x, classes), model(x, classes)
    assert_close(found, want)
    assert_close(*(torch.autograd.grad(y, x)[0] for y in (found, want)))


def test_functions_that_others_read_are_in_memory() -> None:
    def both(x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = x / 0.5
        return F.cross_entropy(y, t), y

    graph = streamed(both, torch.randn(6, 9), torch.arange(6))
    (nll,) = (n for n in graph.nodes() if isinstance(n.op, Nll))
    assert nll.arg(0) is graph.outputs[1]
