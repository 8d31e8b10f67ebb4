"""What a plan says about precision holds for the program it describes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fusewright import pipeline, tuning
from fusewright.advice import precision_notes
from fusewright.codegen import cuda
from fusewright.pipeline import Built, build


class Monotone(nn.Module):
    """A function that passes max pooling: an exact rule, and a convolution to make a kernel of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.max_pool2d(torch.relu(self.conv(x)), 4)


@pytest.fixture
def rewritten() -> Built:
    built = build(Monotone(), (torch.rand(2, 3, 32, 32),), {}, mode="always")
    assert {fired.exactness for fired in built.rewritten.fired} == {"exact"}
    return built


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> Built:
    monkeypatch.setattr(pipeline, "kernel_target", lambda device: None)
    monkeypatch.setitem(tuning.TARGETS, "cpu", cuda)
    built = build(Monotone(), (torch.rand(2, 3, 32, 32),), {}, mode="always", kernels="always", measure=False)
    assert {fired.exactness for fired in built.rewritten.fired} == {"exact"} and built.program.kernels
    return built


def test_exact_rules_give_the_same_bits(rewritten: Built) -> None:
    assert precision_notes(rewritten) == ("exact: the same bits as the original, non-finite values included",)


def test_products_in_batches_do_not(rewritten: Built) -> None:
    (note,) = precision_notes(replace(rewritten, batches=2))
    assert note == "values are read as they lie, not turned first: by 2 products of every sample by one weight"


def test_products_of_windows_do_not(rewritten: Built) -> None:
    (note,) = precision_notes(replace(rewritten, windows=1))
    assert note.startswith("a convolution is a product of all windows by the weight")


def test_taps_as_features_do_not(rewritten: Built) -> None:
    (note,) = precision_notes(replace(rewritten, features=2))
    assert note == "taps along a dimension are features, added up behind it: 2 convolutions; sums in another order"


def test_kernels_do_not(with_kernels: Built) -> None:
    (note,) = precision_notes(with_kernels)
    assert note.startswith("generated kernels: sums in another order")


def test_kernels_on_a_gpu_may_use_tf32(with_kernels: Built) -> None:
    notes = precision_notes(replace(with_kernels, device=torch.device("cuda", 0)))
    assert len(notes) == 2 and "tf32" in notes[1]


def test_kernels_without_products_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "kernel_target", lambda device: None)
    monkeypatch.setitem(tuning.TARGETS, "cpu", cuda)
    built = build(nn.Sequential(nn.ReLU(), nn.Tanh()), (torch.rand(2, 30),), {}, kernels="always", measure=False)
    assert built.program.kernels
    (note,) = precision_notes(replace(built, device=torch.device("cuda", 0)))
    assert note.startswith("generated kernels")
