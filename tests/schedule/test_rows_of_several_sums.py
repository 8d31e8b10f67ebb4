"""Rows that several reductions read: one kernel has them, however long rows are and however many of them there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gpu_build import as_on_a_gpu, emulated
from torch import Tensor

from fusewright import pipeline, tuning
from fusewright.pipeline import Built
from tests.capture.harness import Fn

Model = Callable[..., Tensor]


def overlap(x: Tensor, t: Tensor) -> Tensor:
    p, g = torch.sigmoid(x).flatten(1), t.flatten(1)
    return 1 - (2 * (p * g).sum(1) + 1) / (p.sum(1) + g.sum(1) + 1)


def cosine(x: Tensor, t: Tensor) -> Tensor:
    return (x * t).sum(1) / (x.norm(dim=1) * t.norm(dim=1))


def moments(x: Tensor) -> Tensor:
    return x.mean(1) + x.amax(1) * x.var(1)


ONE_PASS: dict[str, tuple[Model, int]] = {
    "an overlap": (overlap, 2),
    "an overlap of a batch": (lambda x, t: overlap(x, t).mean(), 2),
    "a cosine": (cosine, 2),
    "moments, one of which takes two passes elsewhere": (moments, 1),
    "of four": (lambda x, t: (x * t).sum(1) / (x.amax(1) + t.amax(1) + t.mean(1)), 2),
}


def planned(monkeypatch: pytest.MonkeyPatch, fn: Model, *given: Tensor) -> Built:
    """For Hopper, by estimate: nothing runs."""
    monkeypatch.setattr(pipeline, "kernel_target", lambda device: None)
    monkeypatch.setattr(tuning, "capability_of", lambda device: 90)
    target = torch.device("cuda")
    return pipeline.build(Fn(fn).eval(), given, {}, kernels="always", measure=False, target=target)


def kernels(built: Built) -> list[tuple[str, str]]:
    return [(c.family, c.path) for c in built.choices]


@pytest.mark.parametrize("length", [100, 1000, 3000, 6000, 12000, 16000, 24000])
@pytest.mark.parametrize("name", ONE_PASS)
def test_one_pass(monkeypatch: pytest.MonkeyPatch, name: str, length: int) -> None:
    """No sample program takes some of the sums."""
    fn, inputs = ONE_PASS[name]
    for rows in (64, 4096):
        built = planned(monkeypatch, fn, *(torch.empty(rows, length) for _ in range(inputs)))
        assert kernels(built)[0] == ("several reductions", "generated")
        assert len(built.choices) == 1 + name.endswith("batch")


@pytest.mark.parametrize("name", ONE_PASS)
def test_values(name: str) -> None:
    fn, inputs = ONE_PASS[name]
    torch.manual_seed(0)
    for length in (1000, 6001):
        model, given = Fn(fn), [torch.randn(3, length) + 1 for _ in range(inputs)]
        built = as_on_a_gpu(model, *given)
        assert "several reductions" in {c.family for c in built.choices}
        truth = fn(*(a.double() for a in given))
        torch.testing.assert_close(emulated(built, model, *given).double(), truth, rtol=2e-5, atol=2e-6)


def test_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    built = planned(monkeypatch, overlap, torch.empty(4096, 1, 110, 110), torch.empty(4096, 1, 110, 110))
    assert kernels(built) == [("several reductions", "generated")]


def test_what_a_sample_goes_on_with_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has a sample's sums, and what is made of them along other dimensions."""

    def fn(x: Tensor, t: Tensor) -> Tensor:
        return F.softmax((x * t).sum(2) / (x.sum(2) + t.sum(2)), 1)

    built = planned(monkeypatch, fn, torch.empty(512, 8, 300), torch.empty(512, 8, 300))
    assert kernels(built) == [("sample program", "generated")]


def divergence(x: Tensor, t: Tensor) -> Tensor:
    shares = F.softmax(t, 1)
    return (shares * (F.log_softmax(t, 1) - F.log_softmax(x, 1))).sum(1)


SOFTMAXES: dict[str, tuple[Model, int, tuple[int, ...]]] = {
    "an entropy": (lambda x: -(F.softmax(x, 1) * F.log_softmax(x, 1)).sum(1), 1, (3000, 16000, 20000, 32768, 50257)),
    "a divergence": (divergence, 2, (3000, 9000, 12000, 16384)),
    "a divergence of a batch": (lambda x, t: divergence(x, t).mean(), 2, (9000, 12000)),
}


@pytest.mark.parametrize("name", SOFTMAXES)
def test_softmaxes_are_seen_together(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """While one of them was read from memory, there were no registers for the rest."""
    fn, inputs, lengths = SOFTMAXES[name]
    for length in lengths:
        built = planned(monkeypatch, fn, *(torch.empty(4096, length) for _ in range(inputs)))
        assert kernels(built)[0] == ("kept rows", "generated")
        assert len(built.choices) == 1 + name.endswith("batch")


@pytest.mark.parametrize("name, length", [("an entropy", 20000), ("a divergence", 12000)])
def test_values_of_softmaxes(monkeypatch: pytest.MonkeyPatch, name: str, length: int) -> None:
    fn, inputs, _ = SOFTMAXES[name]
    torch.manual_seed(0)
    monkeypatch.setattr("fusewright.schedule.reduced_shares.pays", lambda *_: True)
    model, given = Fn(fn), [torch.randn(2, length) for _ in range(inputs)]
    built = as_on_a_gpu(model, *given)
    assert kernels(built) == [("kept rows", "generated")]
    truth = fn(*(a.double() for a in given))
    torch.testing.assert_close(emulated(built, model, *given).double(), truth, rtol=1e-5, atol=1e-6)


def test_softmaxes_that_no_registers_are_for_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is computed with what would read the others late: their own kernels have that."""
    built = planned(monkeypatch, divergence, torch.empty(4096, 40000), torch.empty(4096, 40000))
    assert kernels(built) == [("normalization", "generated")] * 3


def test_a_softmax_of_a_parameter_is_read_by_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no row of its own, and takes no registers."""
    t = torch.nn.Parameter(torch.randn(4096))
    built = planned(monkeypatch, lambda x: divergence(x, t.expand_as(x)).mean(), torch.empty(16384, 4096))
    assert [family for family, _ in kernels(built)] == ["kept rows", "stream"]


def correlation(x: Tensor, t: Tensor) -> Tensor:
    a, b = x - x.mean(1, keepdim=True), t - t.mean(1, keepdim=True)
    return (a * b).sum(1) / (x.std(1) * t.std(1) + 1e-6)


def standardized(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-6) * w + t


def likeness(x: Tensor, t: Tensor) -> Tensor:
    """By five sums, one more than a pass has."""
    mean, other = x.mean(1), t.mean(1)
    both = (2 * mean * other + 1) * (2 * (x * t).mean(1) + 1)
    return both / ((mean.square() + other.square() + 1) * (x.var(1) + t.var(1) + 1))


KEPT: dict[str, tuple[Model, int, tuple[int, ...]]] = {
    "a correlation": (correlation, 2, (1000, 6000, 12000, 16000)),
    "a norm without the dimension": (lambda x: x / (x.norm(dim=1) + 1e-6).unsqueeze(1), 1, (1000, 6000, 16000, 24000)),
    "weighed and shifted": (standardized, 3, (1000, 6000, 12000, 16000, 24000, 32768)),
    "a softmax with more": (
        lambda x, t, w: F.softmax(x, 1) * t + x.mean(1, keepdim=True) * w,
        3,
        (1000, 12000, 16000, 24000),
    ),
    "a likeness": (likeness, 2, (100, 1000, 6000, 12000, 16000)),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept_rows(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fn, inputs, lengths = KEPT[name]
    for length in lengths:
        built = planned(monkeypatch, fn, *(torch.empty(4096, length) for _ in range(inputs)))
        assert kernels(built) == [("kept rows", "generated")]


@pytest.mark.parametrize("name", KEPT)
def test_values_of_kept_rows(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fn, inputs, _ = KEPT[name]
    torch.manual_seed(0)
    monkeypatch.setattr("fusewright.schedule.reduced_shares.pays", lambda *_: True)
    model, given = Fn(fn), [torch.randn(2, 12001) for _ in range(inputs)]
    built = as_on_a_gpu(model, *given)
    assert kernels(built) == [("kept rows", "generated")]
    truth = fn(*(a.double() for a in given))
    torch.testing.assert_close(emulated(built, model, *given).double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [30000, 40000])
def test_what_is_read_again_rather_than_written(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """Two rows that there are no registers for: deviations of one would be written for the sum of products."""
    built = planned(monkeypatch, correlation, torch.empty(4096, length), torch.empty(4096, length))
    assert [family for family, _ in kernels(built)].count("kept rows") == 0 and len(built.choices) == 3
