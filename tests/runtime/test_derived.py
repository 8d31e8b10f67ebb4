"""Derived weights are computed anew exactly when something moved."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import Tensor, nn

from fusewright.runtime import derived as runtime
from fusewright.runtime.derived import PLACES, WHOLE, DerivedWeights


class Derivation:
    """Counts how often it derives the sum of a weight's rows."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: nn.Module) -> tuple[Tensor, ...]:
        self.count += 1
        return (module.weight.sum(0),)  # type: ignore[union-attr, operator]


@pytest.fixture
def parts() -> tuple[nn.Linear, Derivation, DerivedWeights]:
    derive = Derivation()
    return nn.Linear(3, 4), derive, DerivedWeights(derive, ["weight"])


def _replace(m: nn.Linear) -> None:
    m.weight = nn.Parameter(torch.randn(4, 3))


EDITS = {
    "in place": lambda m: m.weight.mul_(2),
    "through data": lambda m: m.weight.data.mul_(2),
    "new data": lambda m: setattr(m.weight, "data", torch.randn(4, 3)),
    "one element through data": lambda m: m.weight.data.view(-1)[5:6].add_(1),
    "to NaN through data": lambda m: m.weight.data.fill_(float("nan")),
    "new parameter": _replace,
    "loaded": lambda m: m.load_state_dict(nn.Linear(3, 4).state_dict()),
}


@pytest.mark.parametrize("edit", EDITS)
@torch.no_grad()
def test_an_edit_is_seen(parts, edit: str) -> None:
    module, derive, derived = parts
    derived(module), derived(module)
    assert derive.count == 1
    EDITS[edit](module)
    torch.testing.assert_close(derived(module)[0], module.weight.sum(0), equal_nan=True)
    derived(module)
    assert derive.count == 2


@torch.no_grad()
def test_tensors_are_looked_up_once_for_each_state_of_the_module(parts, monkeypatch: pytest.MonkeyPatch) -> None:
    module, derive, derived = parts
    looked: list[str] = []
    read = runtime._read
    monkeypatch.setattr(runtime, "_read", lambda *args: looked.append(args[-1]) or read(*args))
    first, second = object(), object()
    derived(module)
    looked.clear()
    for state, times in ((first, 1), (first, 1), (second, 2), (second, 2), (None, 3), (None, 4)):
        derived(module, state)
        assert len(looked) == times and derive.count == 1
    derived(module, first)
    module.weight.mul_(2)
    torch.testing.assert_close(derived(module, first)[0], module.weight.sum(0))
    other = nn.Linear(3, 4)
    torch.testing.assert_close(derived(other, first)[0], other.weight.sum(0))


@torch.no_grad()
def test_values_are_of_the_tensors_that_are_there(parts) -> None:
    """A program that goes ahead may have been told a state that its module has left."""
    module, _, derived = parts
    state, old = object(), module.weight
    derived(module, state)
    old.mul_(2)
    _replace(module)
    derived(module, state)
    module.weight = old
    torch.testing.assert_close(derived(module, object())[0], old.sum(0))


@torch.no_grad()
def test_a_weight_of_nan_is_kept(parts) -> None:
    module, derive, derived = parts
    module.weight.fill_(float("nan"))
    derived(module), derived(module)
    assert derive.count == 1


@torch.no_grad()
@pytest.mark.parametrize("stride", [1, 2])
def test_large_weights_are_probed(stride: int) -> None:
    module, derive = nn.Linear(3, 4), Derivation()
    module.weight = nn.Parameter(torch.randn(8 * WHOLE, 3)[:, ::stride].t()[:1].t())
    derived = DerivedWeights(derive, ["weight"])
    derived(module)
    module.weight.data.mul_(2)  # what an optimizer's step touches is everything
    derived(module)
    assert derive.count == 2


@torch.no_grad()
@pytest.mark.parametrize(("rows", "columns"), [(100, 3000), (PLACES, 5), (2, WHOLE // 2), (1, 1)])
def test_an_edited_row_is_noticed(rows: int, columns: int) -> None:
    module, derive = nn.Linear(columns, rows), Derivation()
    derived = DerivedWeights(derive, ["weight"])
    for count, row in enumerate((0, rows // 2, rows - 1), 1):
        derived(module)
        assert derive.count == count
        module.weight.data[row] += 1


def test_gradients_flow(parts) -> None:
    module, derive, derived = parts
    for count in (1, 2):
        derived(module)[0].sum().backward()
        assert derive.count == count
    assert torch.equal(module.weight.grad, torch.full((4, 3), 2.0))


def test_kept_while_frozen_and_from_inference(parts) -> None:
    module, derive, derived = parts
    with torch.inference_mode():
        (first,) = derived(module)
    assert not first.is_inference()
    module.requires_grad_(False)
    assert derived(module)[0] is first and derive.count == 1
    module.requires_grad_(True)
    assert derived(module)[0].requires_grad


def test_stand_ins_are_never_kept(parts) -> None:
    module, derive, derived = parts
    del module._parameters["weight"]
    module.weight = torch.randn(4, 3).as_subclass(type("Other", (Tensor,), {}))
    with torch.no_grad():
        derived(module), derived(module)
    assert derive.count == 2
    with torch.inference_mode():
        module.weight = torch.randn(4, 3)
        derived(module), derived(module)
    assert derive.count == 4


@torch.no_grad()
def test_a_weight_turned_in_its_place_is_seen_without_reading_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_same_bits", lambda *_: True)  # as on a GPU
    module, derive = nn.Linear(4, 4), Derivation()
    derived = DerivedWeights(derive, ["weight"])
    derived(module), derived(module)
    module.weight.data = module.weight.data.t()
    torch.testing.assert_close(derived(module)[0], module.weight.sum(0))
    assert derive.count == 2


@torch.no_grad()
def test_a_parameter_that_became_an_inference_tensor_where_it_lay_is_not_kept(parts) -> None:
    """Its edits are not counted."""
    module, derive, derived = parts
    values = numpy.ones((4, 3), numpy.float32)
    module.weight.data = torch.from_numpy(values)
    derived(module), derived(module)
    assert derive.count == 1
    with torch.inference_mode():
        module.weight.data = torch.from_numpy(values)
    assert module.weight.is_inference()
    derived(module), derived(module)
    assert derive.count == 3


@torch.no_grad()
def test_inner_paths_and_held_constants() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(3, 4)))
    held = torch.ones(3)
    calls: list[int] = []

    def derive(owner: nn.Module) -> tuple[Tensor, ...]:
        calls.append(1)
        return (owner.get_submodule("0.0").weight.sum(0) * held,)  # type: ignore[union-attr, operator]

    derived = DerivedWeights(derive, ["0.0.weight", "literal"], {"literal": held})
    derived(module), derived(module)
    assert len(calls) == 1
    held.add_(1)
    torch.testing.assert_close(derived(module)[0], module[0][0].weight.sum(0) * 2)
    module[0][0].weight.zero_()
    assert not derived(module)[0].any() and len(calls) == 3
