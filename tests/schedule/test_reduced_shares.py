"""Softmaxes that are only reduced: which are functions of kept rows, what eager gives, its gradients, and one read."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_build import as_on_a_gpu, built_for_a_gpu, emulated
from torch import Tensor
from torch.testing import assert_close

from fusewright.capture import capture
from fusewright.codegen.aten import lower
from fusewright.ir.node import Graph
from fusewright.ir.ops import Pointwise, Softmax
from fusewright.pipeline import Built
from fusewright.runtime.device import LARGE_GPU, DeviceFacts
from fusewright.schedule import reduced_shares
from fusewright.schedule.reduced_shares import of_kept_rows
from fusewright.tree import tree_flatten
from tests.capture.harness import Fn

EVERY = DeviceFacts("any", conv=1.0, matmul=1.0, wide=1.0, memory=1.0, reduce=1.0, window=1.0, launch=0.0)
Model = Callable[..., Any]


def placed(graph: Graph, facts: DeviceFacts = EVERY) -> Graph:
    return of_kept_rows(graph, facts, dict.fromkeys(graph.symbols, 64))


def classes_of(x: Tensor) -> Tensor:
    """A class for each row of x."""
    rows = torch.arange(x.shape[0]).reshape(-1, *(1,) * (x.ndim - 2))
    return (rows * 7 % x.shape[1]).expand(x.shape[0], *x.shape[2:])


def smoothed(**options: Any) -> Model:
    return lambda x: F.cross_entropy(x, classes_of(x), label_smoothing=0.1, **options)


def by_hand(x: Tensor) -> Tensor:
    shares = F.log_softmax(x, -1)
    return -(0.9 * shares.mean(-1) + 0.1 * shares[..., 3]).mean()


def entropy(x: Tensor) -> Tensor:
    return -(F.softmax(x, 1) * F.log_softmax(x, 1)).sum(1).mean()


def of_likelihoods(x: Tensor) -> Tensor:
    return F.cross_entropy(x, F.softmax(x.flip(0) * 0.5, 1))


def mixture(x: Tensor) -> Tensor:
    """How unlikely a number is, given weights, means and logarithms of deviations."""
    s = 0.1 * x.sin()
    return -torch.logsumexp(F.log_softmax(x, -1) - 0.5 * ((0.3 - x.cos()) / s.exp()).square() - s, -1).mean()


def divergence(x: Tensor) -> Tensor:
    return F.kl_div(F.log_softmax(x / 2, -1), F.softmax(x.flip(0), -1), reduction="batchmean")


def jensen_shannon(x: Tensor, t: Tensor | None = None) -> Tensor:
    """Two rows that are kept, combined, and reduced twice."""
    p, q = F.softmax(x, 1), F.softmax(x.flip(0) if t is None else t, 1)
    m = 0.5 * (p + q)
    return 0.5 * ((p * (p / m).log()).sum(1) + (q * (q / m).log()).sum(1)).mean()


def between(x: Tensor) -> Tensor:
    """The spread of shares, about means that are kept, with the dimension."""
    p = F.softmax(2 * x, 1)
    return ((p - p.mean(1, keepdim=True)) ** 2).sum(1, keepdim=True).sqrt() * p.amax(1, keepdim=True)


WEIGHT = torch.arange(80) % 8 / 4 + 0.25  # of any type
CASES: dict[str, tuple[Model, tuple[int, ...]]] = {
    "classes": (lambda x: F.cross_entropy(x, classes_of(x)), (6, 80)),
    "classes of positions": (lambda x: F.cross_entropy(x, classes_of(x), WEIGHT.to(x.dtype)), (2, 80, 3, 4)),
    "classes, of functions": (lambda x: F.cross_entropy(x.tanh() * 9, classes_of(x), reduction="sum"), (6, 80)),
    "positions": (lambda x: F.cross_entropy(x, torch.arange(x.shape[0])), (6, 80)),
    "positions, weighted": (
        lambda x: F.cross_entropy(x, torch.arange(x.shape[0]) % x.shape[1], WEIGHT.to(x.dtype), label_smoothing=0.1),
        (6, 80),
    ),
    "positions, one ignored": (lambda x: F.cross_entropy(x, torch.arange(x.shape[0]), ignore_index=3), (6, 80)),
    "smoothed": (smoothed(), (6, 80)),
    "smoothed, each": (smoothed(reduction="none"), (6, 80)),
    "smoothed, summed": (smoothed(reduction="sum"), (6, 80)),
    "smoothed, weighted": (lambda x: smoothed(weight=WEIGHT.to(x.dtype))(x), (6, 80)),
    "smoothed, some ignored": (smoothed(ignore_index=7), (6, 80)),
    "smoothed, of positions": (lambda x: smoothed(weight=WEIGHT.to(x.dtype), ignore_index=7)(x), (2, 80, 3, 4)),
    "long rows": (smoothed(), (3, 3000)),
    "by hand": (by_hand, (6, 80)),
    "of more dimensions": (by_hand, (2, 3, 80)),
    "loss of classes and all": (
        lambda x: F.nll_loss(F.log_softmax(x, 1), classes_of(x)) + F.log_softmax(x * 2, 1).mean(),
        (6, 80),
    ),
    "entropy": (entropy, (6, 80)),
    "of columns": (entropy, (2, 40, 12)),
    "likelihoods": (of_likelihoods, (6, 80)),
    "divergence": (divergence, (6, 80)),
    "between softmaxes": (jensen_shannon, (6, 80)),
    "between softmaxes of columns": (jensen_shannon, (2, 40, 12)),
    "about means": (between, (6, 80)),
    "a mixture": (mixture, (6, 80)),
    "a mixture of few": (mixture, (70, 32)),
    "entropy of few": (entropy, (70, 32)),
    "classes, few": (lambda x: F.cross_entropy(x, classes_of(x)), (70, 20)),
}


@pytest.mark.parametrize("name", CASES)
def test_as_in_eager(name: str) -> None:
    """The graph by ATen's operations, and gradients."""
    fn, shape = CASES[name]
    torch.manual_seed(0)
    x = (torch.randn(shape).double() * 3 + 100).requires_grad_()
    captured = capture(Fn(fn), (x,))
    graph = placed(captured.graph)
    assert graph is not captured.graph
    derive, forward = lower(graph, None, captured.constants).functions()
    (found,), want = forward(None, x, *derive(None)), fn(x)
    assert_close(found, want, rtol=1e-12, atol=1e-12)
    seed = torch.linspace(0.5, 1.5, want.numel()).double().reshape(want.shape)
    assert_close(*(torch.autograd.grad(y, x, seed)[0] for y in (found, want)), rtol=1e-10, atol=1e-12)


def built_of_rows(monkeypatch: pytest.MonkeyPatch, model: Fn, x: Tensor) -> Built:
    """With CUDA kernels for a CPU's tensors, one of which has the softmaxes and keeps rows."""
    monkeypatch.setattr(reduced_shares, "pays", lambda *_: True)
    built = as_on_a_gpu(model, x)
    assert [c.path for c in built.choices if c.family == "kept rows" and "exp" in c.name] == ["generated"]
    assert not {"softmax(", "nll_loss("} & set(re.findall(r"\w+\(", built.program.source.partition("def forward")[2]))
    return built


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", [n for n in CASES if n != "loss of classes and all"])
@pytest.mark.sampled
def test_kernels(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    """As exact as eager, which rounds log-softmaxes to what they are of."""
    fn, shape = CASES[name]
    torch.manual_seed(1)
    model, x = Fn(fn), (torch.randn(shape) * 2 + 10).to(dtype)
    built = built_of_rows(monkeypatch, model, x)
    truth, found, eager = fn(x.double()), emulated(built, model, x), model(x)
    assert found.dtype == eager.dtype and found.shape == eager.shape
    error, allowed = ((y.double() - truth).abs().max() for y in (found, eager))
    roundings = 8 if dtype == torch.float64 else 4  # there what is taken for the truth has as many of its own
    assert error <= 2 * allowed + roundings * torch.finfo(dtype).eps * truth.abs().max()


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    """An entropy, and how likely the most likely is."""
    p = F.softmax(x, 1)
    return -(p * (p + 1e-6).log()).sum(1), p.amax(1)


def soft_argmax(x: Tensor) -> Tensor:
    """Where the mass of each row is, along two axes."""
    p, places = F.softmax(x, 1), torch.linspace(-1, 1, x.shape[1], dtype=x.dtype)
    places = places.reshape(-1, *(1,) * (x.ndim - 2))
    return torch.stack(((p * places).sum(1), (p * places.cos()).sum(1)), -1)


def sharpened(x: Tensor) -> Tensor:
    p = F.softmax(x, 1).square()
    return p / p.sum(1, keepdim=True)


def places_of(x: Tensor, ahead: float = 1.0) -> Tensor:
    """Where the mass of each image is, which is a row of all its positions."""
    p = F.softmax(x.flatten(2) * ahead, -1).view(x.shape)
    across = torch.linspace(-1, 1, x.shape[3], dtype=x.dtype)
    down = torch.linspace(-1, 1, x.shape[2], dtype=x.dtype)[:, None]
    return torch.stack(((p * across).sum((2, 3)), (p * down).sum((2, 3))), -1)


def regrouped(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of images one behind the other, as images of several channels."""
    p = F.softmax(x.reshape(-1, x.shape[2] * x.shape[3]), -1)
    return (p.reshape(x.shape) * x).mean((2, 3)), p.amax(-1)


def weighed_in_both(x: Tensor) -> Tensor:
    """Shares that are weighed as a row, then seen as an image, and numbers of both."""
    p = F.softmax(x.flatten(2), -1)
    p = p * torch.linspace(0.5, 1.5, p.shape[-1], dtype=x.dtype)
    p = p / p.sum(-1, keepdim=True)
    return (p.view(x.shape) * torch.linspace(0, 1, x.shape[3], dtype=x.dtype)).sum((2, 3)) + p.amax(-1)


def straight_through(x: Tensor) -> Tensor:
    hard, soft = F.one_hot(x.argmax(-1), x.shape[-1]).to(x.dtype), F.softmax(x, -1)
    return hard - soft.detach() + soft


def norm_and_place(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What an index and a number that others read as well are made into."""
    place, norm = x.argmax(-1), x.norm(dim=-1)
    p = F.softmax(x, -1)
    best = torch.arange(x.shape[-1]) == place[..., None]
    return torch.where(best, 0, p * p.amax(-1, keepdim=True)) / norm[..., None], norm * 2, place.to(x.dtype)


SEVERAL: dict[str, tuple[Model, tuple[int, ...]]] = {
    "two numbers": (both, (6, 80)),
    "two numbers of odd rows": (both, (1, 83)),
    "two numbers of columns": (both, (2, 40, 12)),
    "two means": (lambda x: tuple(y.mean() for y in both(x)), (6, 80)),
    "side by side": (soft_argmax, (6, 80)),
    "side by side, of columns": (soft_argmax, (2, 40, 7)),
    "elements and a number": (lambda x: (lambda y: (y, y.sum(1)))(F.log_softmax(x, 1)), (6, 80)),
    "elements and a number of columns": (lambda x: (lambda y: (y, y.amax(1)))(F.softmax(x, 1)), (2, 40, 12)),
    "elements": (sharpened, (6, 80)),
    "elements of columns": (sharpened, (2, 40, 5)),
    "elements of long rows": (sharpened, (2, 3000)),
    "straight through": (straight_through, (6, 80)),
    "straight through, odd rows": (straight_through, (3, 2, 83)),
    "beside what others read": (norm_and_place, (6, 80)),
    "of an image": (places_of, (2, 3, 6, 20)),
    "of an odd image": (places_of, (1, 3, 5, 21)),
    "of an image, a function ahead": (lambda x: places_of(x, 0.5), (2, 3, 6, 20)),
    "of images one behind the other": (regrouped, (2, 3, 6, 20)),
    "of a row in two views": (
        lambda x: (lambda p: (p.view(2, 3, 6, 20).amax((2, 3)), p.view(2, 3, 20, 6).sum(3)))(F.softmax(x, -1)),
        (2, 3, 120),
    ),
    "of an image and a row": (weighed_in_both, (2, 3, 6, 20)),
    "beside what is of the same rows": (lambda x: (F.log_softmax(x, 1).amin(1), x.mean(1, keepdim=True)), (6, 80)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.sampled
def test_several_results(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    """One kernel reads the rows, and writes all that comes of them."""
    fn, shape = SEVERAL[name]
    torch.manual_seed(3)
    model, x = Fn(fn), (torch.randn(shape) * 2).to(dtype)
    built = built_of_rows(monkeypatch, model, x)
    everything = zip(*(tree_flatten(y)[0] for y in (fn(x.double()), emulated(built, model, x), fn(x))), strict=True)
    for truth, found, eager in everything:
        assert found.dtype == eager.dtype and found.shape == eager.shape
        error, allowed = ((y.double() - truth).abs().max() for y in (found, eager))
        assert error <= 2 * allowed + 8 * torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.parametrize("name", SEVERAL)
def test_gradients_of_several_results(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fn, shape = SEVERAL[name]
    torch.manual_seed(4)
    model, x = Fn(fn), torch.randn(shape).double().requires_grad_()
    derive, forward = built_of_rows(monkeypatch, model, x.detach()).program.functions()
    found, want = (tree_flatten(y)[0] for y in (forward(model, x, *derive(model)), model(x)))
    sums = [sum((i + 1) * y.square().sum() for i, y in enumerate(each)) for each in (found, want)]
    assert_close(*(torch.autograd.grad(y, x)[0] for y in sums), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["two numbers", "elements and a number", "elements", "straight through"])
@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.sampled
def test_special_values_of_several_results(monkeypatch: pytest.MonkeyPatch, name: str, value: float) -> None:
    model, x = Fn(SEVERAL[name][0]), torch.randn(4, 80)
    x[0, 5] = x[2] = value
    built = built_of_rows(monkeypatch, model, x)
    assert_close(emulated(built, model, x), model(x), equal_nan=True)


@pytest.mark.parametrize("name", ["smoothed", "smoothed, of positions", "by hand", "entropy", "likelihoods"])
def test_gradients_of_kernels(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Through operators, whose gradients are those of their references."""
    fn, shape = CASES[name]
    torch.manual_seed(2)
    model, x = Fn(fn), torch.randn(shape).requires_grad_()
    derive, forward = built_of_rows(monkeypatch, model, x.detach()).program.functions()
    found, want = forward(model, x, *derive(model)), model(x)
    assert_close(found, want)
    assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (found, want)), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("ignored", [-100, 3])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.sampled
def test_special_values(monkeypatch: pytest.MonkeyPatch, value: float, ignored: int, weighted: bool) -> None:
    """In the place of the class, in another, in all, and in a row that may be ignored."""
    x, classes = torch.randn(5, 80), torch.tensor([0, 1, 2, 3, 4])
    x[0, 0] = x[1, 3] = value
    x[2] = x[3] = value
    options: dict[str, Any] = {"ignore_index": ignored, "weight": WEIGHT if weighted else None, "reduction": "none"}
    model = Fn(lambda x: F.cross_entropy(x, classes, label_smoothing=0.1, **options))
    assert_close(emulated(built_of_rows(monkeypatch, model, x), model, x), model(x), equal_nan=True)


@pytest.mark.parametrize("fn", [by_hand, entropy], ids=["by hand", "entropy"])
@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.sampled
def test_special_values_of_others(monkeypatch: pytest.MonkeyPatch, fn: Model, value: float) -> None:
    model, x = Fn(lambda x: fn(x[:, None].mean(1))), torch.randn(3, 80)
    for places in ((0, 3), (0, 5), (0, slice(None))):
        given = x.clone()
        given[places] = value
        assert_close(emulated(built_of_rows(monkeypatch, model, given), model, given), model(given), equal_nan=True)


def test_all_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Fn(lambda x: F.cross_entropy(x, torch.full((x.shape[0],), 5), ignore_index=5, label_smoothing=0.1))
    x = torch.randn(4, 80)
    assert model(x).isnan() and emulated(built_of_rows(monkeypatch, model, x), model, x).isnan()


def test_what_is_no_class_is_an_error() -> None:
    model = Fn(lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1))
    x, classes = torch.randn(5, 80), torch.arange(5)
    captured = capture(model, (x, classes))
    graph = placed(captured.graph)
    assert graph is not captured.graph
    with pytest.raises(IndexError, match="out of bounds"):
        lower(graph).functions()[1](None, x, classes + 77)


@pytest.mark.parametrize("shift", [0.0, 100.0, 1e4])
def test_as_exact_as_eager(monkeypatch: pytest.MonkeyPatch, shift: float) -> None:
    """However large logits are, however sure, and where some are ruled out by a large number."""
    torch.manual_seed(0)
    x, classes = torch.randn(64, 256) + shift, torch.arange(64)
    x[:32, :32] += 20 * torch.eye(32)
    x[:, 0] = -1e9
    model = Fn(lambda x: F.cross_entropy(x[:, 1:] * 1, classes, label_smoothing=0.1, reduction="none"))
    for fn in (model, Fn(lambda x: (F.log_softmax(x, 1) * F.softmax(x, 1)).sum(1))):
        truth = fn(x.double())
        found = emulated(built_of_rows(monkeypatch, fn, x), fn, x)
        error, eager = ((y - truth).abs() for y in (found, fn(x)))
        assert error.square().mean().sqrt() <= 2 * eager.square().mean().sqrt() and error.max() <= 4 * eager.max()


@pytest.mark.parametrize("name", ["positions", "positions, weighted", "positions, one ignored", "predictions"])
def test_what_is_never_ignored(name: str) -> None:
    """Positions are classes, so that none is compared with a negative number, and a mean is one."""
    fn = CASES[name][0] if name in CASES else lambda x: F.cross_entropy(x, x.argmax(1))
    functions = [
        n.op.fn for n in placed(capture(Fn(fn), (torch.randn(6, 80),)).graph).nodes() if isinstance(n.op, Pointwise)
    ]
    assert ("ne" in functions) == (name == "positions, one ignored")


PLANNED: dict[str, Model] = {
    "smoothed": smoothed(),
    "by hand": by_hand,
    "entropy": entropy,
    "likelihoods": lambda x: F.cross_entropy(x, F.softmax(x.flip(0), 1)),
}


@pytest.mark.parametrize("name", PLANNED)
def test_one_read(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One kernel reads all that is large and writes a number per row; small softmaxes stay as they were."""
    built = built_for_a_gpu(monkeypatch, Fn(PLANNED[name]), torch.empty(8192, 4096), "auto")
    assert [(c.family, c.path) for c in built.choices if "exp" in c.name] == [("kept rows", "generated")]
    assert "softmax(" not in built.program.source.partition("def forward")[2]
    small = capture(Fn(PLANNED[name]), (torch.randn(64, 100),)).graph
    assert placed(small, LARGE_GPU) is small


@pytest.mark.parametrize("rows, apart", [(16384, False), (256, True)])
def test_what_pays(rows: int, apart: bool) -> None:
    """What is written and read is weighed against what begins beside the chain, which is nothing here."""
    facts = replace(LARGE_GPU, memory=2.8e12, launch=6e-6)
    captured = capture(Fn(jensen_shannon), (torch.empty(rows, 1024), torch.empty(rows, 1024))).graph
    graph = of_kept_rows(captured, facts, dict.fromkeys(captured.symbols, rows))
    assert any(isinstance(n.op, Softmax) for n in graph.nodes()) == apart


def test_softmaxes_of_parameters_are_derived() -> None:
    model = Fn(lambda x: jensen_shannon(x, model.t), t=torch.randn(6, 80))
    softmaxes = [n for n in placed(capture(model, (torch.randn(6, 80),)).graph).nodes() if isinstance(n.op, Softmax)]
    assert len(softmaxes) == 1 and not softmaxes[0].varies


LEFT: dict[str, tuple[Model, tuple[int, ...]]] = {
    "elements are read": (lambda x: F.softmax(x, 1) * 2, (6, 80)),
    "elements are returned": (lambda x: (lambda y: (y, y.sum(0)))(F.log_softmax(x, 1)), (6, 80)),
    "elements of an image are read": (lambda x: F.softmax(x.flatten(2), -1).view(x.shape) * 2, (2, 3, 6, 20)),
    "a part of an image is reduced": (lambda x: F.softmax(x.flatten(2), -1).view(x.shape).sum(3), (2, 3, 6, 20)),
    "of one dimension": (lambda x: F.softmax(x.sum(1), 0) * 2, (6, 80)),
    "another dimension is reduced": (lambda x: F.softmax(x, 1).sum(0), (6, 80)),
    "five numbers are read": (
        lambda x: (lambda y: [(y * i).sum(1) for i in range(2, 7)])(F.softmax(x, 1)),
        (6, 80),
    ),
    "a view of it is returned": (lambda x: F.log_softmax(x, 1)[:, 2], (6, 80)),
    "losses of long rows": (lambda x: F.cross_entropy(x, classes_of(x)), (2, 60_000)),
    "of another shape": (lambda x: (F.softmax(x[..., :1], 1) * x).sum(1), (6, 40, 4)),
    "left to a convolution": (
        lambda x: F.softmax(F.conv2d(x, x.new_ones(80, 3, 3, 3)), 1).square().sum(1),
        (2, 3, 9, 9),
    ),
    "rows too long": (by_hand, (2, 60_000)),
    "a number comes back to elements": (
        lambda x: (lambda y: (y - y.amax(1).flip(0)[:, None]).sum(1))(F.log_softmax(x, 1)),
        (6, 80),
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_as_they_are(name: str) -> None:
    fn, shape = LEFT[name]
    graph = capture(Fn(fn), (torch.randn(shape),)).graph
    assert any(isinstance(n.op, Softmax) for n in graph.nodes())
    assert placed(graph) is graph


def test_not_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rows are kept there."""
    from fusewright import pipeline

    monkeypatch.setattr(reduced_shares, "pays", lambda *_: True)
    built = pipeline.build(Fn(entropy), (torch.randn(64, 400),), {}, kernels="always", measure=False)
    assert all("exp" not in c.name for c in built.choices)


def test_what_a_sample_s_block_goes_on_with_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few logits, of which one number is made that a product of the same sample reads."""
    monkeypatch.setattr(reduced_shares, "pays", lambda *_: True)
    w = torch.randn(5, 1)
    model = Fn(lambda x: torch.logsumexp(F.log_softmax(x, 1) * 2, 1, keepdim=True) @ w.mT)
    assert [c.family for c in as_on_a_gpu(model, torch.randn(70, 32)).choices] == ["sample program"]


@pytest.mark.parametrize("length", [32, 80])
def test_what_cancels_in_eager_cancels(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """The logarithm of a number, and that of as many parts of it, are alike: nothing is left, not even a rounding."""
    model, x = Fn(lambda x: torch.logsumexp(F.log_softmax(x, 1), 1)), torch.randn(70, length) * 1e-19
    built = built_of_rows(monkeypatch, model, x)
    assert torch.equal(emulated(built, model, x), model(x))


def test_short_rows_are_kept_whatever_it_takes_to_begin_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduced_shares, "pays", lambda *_: False)
    families = [c.family for c in as_on_a_gpu(Fn(mixture), torch.randn(70, 32)).choices]
    assert "kept rows" in families and "sample program" not in families
