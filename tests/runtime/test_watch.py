"""What counts as a change of a module, and what does not."""

from __future__ import annotations

import copy
import functools
import gc
import logging

import pytest
import torch
from torch import nn

from fusewright.runtime.watch import Watch, fingerprint, freeze, has_inner_hooks, has_plain_parameters


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.inner = nn.Conv2d(3, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.table = {"a": [1.0, (2, [3])]}
        self.names = {"x"}
        self.activation = functools.partial(torch.clamp, min=0.0)


@pytest.fixture
def model() -> Model:
    return Model()


CHANGES = {
    "flag": lambda m: m.norm.eval(),
    "attribute": lambda m: setattr(m.norm, "eps", 1e-3),
    "new attribute": lambda m: setattr(m, "extra", 1),
    "list within": lambda m: m.table["a"][1][1].append(4),
    "element": lambda m: m.table["a"].__setitem__(0, 5.0),
    "key": lambda m: m.table.update(b=1),
    "set": lambda m: m.names.add("y"),
    "keywords of a partial": lambda m: m.activation.keywords.update(min=1.0),
    "sign of a zero": lambda m: setattr(m.norm, "momentum", -0.0),
    "first submodule of one": lambda m: m.norm.add_module("own", nn.ReLU()),
    "flag that is equal": lambda m: setattr(m.norm, "training", 1),
    "submodule": lambda m: setattr(m, "conv", nn.Conv2d(1, 3, 3)),
    "name of a submodule": lambda m: setattr(m, "other", m._modules.pop("norm")),
    "kind of parameter": lambda m: m.conv.double(),
    "shape of a parameter": lambda m: setattr(m.conv.weight, "data", torch.ones(2, 1, 5, 5)),
    "shape of a parameter in its memory": lambda m: setattr(m.conv.weight, "data", m.conv.weight.data[:, :, :2]),
    "memory format": lambda m: m.inner.to(memory_format=torch.channels_last),
    "parameter removed": lambda m: setattr(m.conv, "bias", None),
    "buffer": lambda m: m.register_buffer("extra", torch.ones(1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_seen_and_another_state(model: Model, name: str) -> None:
    model.norm.momentum = 0.0
    watch = Watch(model)
    assert watch.unchanged()
    CHANGES[name](model)
    assert not watch.unchanged()
    assert fingerprint(model) != watch.fingerprint


HARMLESS = {
    "memory of a parameter": lambda m: setattr(m.conv.weight, "data", torch.ones(2, 1, 3, 3)),
    "values of parameters": lambda m: nn.init.ones_(m.conv.weight),
    "running statistics": lambda m: m.norm.running_mean.add_(1.0),
    "gradients": lambda m: setattr(m.conv.weight, "grad", torch.ones_like(m.conv.weight)),
    "hooks of the root": lambda m: m.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_not_a_change(model: Model, name: str) -> None:
    watch = Watch(model)
    HARMLESS[name](model)
    assert watch.unchanged()


SAME_STATE = {
    "new parameter of the kind": lambda m: setattr(m.conv, "weight", nn.Parameter(torch.ones(2, 1, 3, 3))),
    "submodule of the kind": lambda m: setattr(m, "conv", nn.Conv2d(1, 2, 3)),
    "given to torch.compile": lambda m: setattr(m, "_is_torch_compile", True),
    "there and back": lambda m: (m.eval(), m.train(), setattr(m, "table", copy.deepcopy(m.table))),
}


@pytest.mark.parametrize("name", SAME_STATE)
def test_a_change_to_an_equal_state(model: Model, name: str) -> None:
    watch = Watch(model)
    SAME_STATE[name](model)
    assert not watch.unchanged()
    assert fingerprint(model) == watch.fingerprint


def test_a_copy_is_in_the_same_state(model: Model) -> None:
    assert fingerprint(copy.deepcopy(model)) == fingerprint(model)
    assert hash(fingerprint(model)) == hash(fingerprint(copy.deepcopy(model)))


def test_hooks(model: Model) -> None:
    watch = Watch(model)
    assert not has_inner_hooks(model)
    handle = model.conv.register_forward_hook(lambda *_: None)
    assert has_inner_hooks(model) and not watch.unchanged()
    handle.remove()
    assert not has_inner_hooks(model) and watch.unchanged()
    model.register_forward_pre_hook(lambda *_: None)
    assert not has_inner_hooks(model)


def test_plain_parameters(model: Model) -> None:
    assert has_plain_parameters(model)
    model.conv._parameters["weight"] = torch.ones(2, 1, 3, 3)  # type: ignore[assignment]
    assert not has_plain_parameters(model)


def test_cycles(model: Model) -> None:
    model.table["self"] = model.table  # type: ignore[assignment]
    model.conv.parent = [model]
    assert Watch(model).unchanged()
    assert fingerprint(model) == fingerprint(model)


def test_generic_types_are_no_state() -> None:
    """`list[int].__dict__` is the list's own, and another object whenever it is asked for."""

    class Annotated(nn.Linear):
        sizes: list[int]
        kinds = (dict[str, int], tuple[int, ...])

        def __init__(self) -> None:
            super().__init__(2, 2)
            self.kind = list[float]

    model = Annotated()
    assert fingerprint(model) == fingerprint(model)
    assert Watch(model).unchanged()
    before = fingerprint(model)
    model.kind = list[int]  # type: ignore[assignment]
    assert fingerprint(model) != before


def test_loggers_and_modules_are_not_looked_into(model: Model) -> None:
    model.log, model.library = logging.getLogger("one"), torch.nn.functional  # type: ignore[assignment]
    watch = Watch(model)
    assert len(watch._values) < 500
    model.log = logging.getLogger("two")  # type: ignore[assignment]
    assert not watch.unchanged()
    assert fingerprint(model) != watch.fingerprint


def test_a_watch_keeps_no_dead_parameters(model: Model) -> None:
    pictures = [fingerprint(model)]
    weights = torch.ones(10)
    model.extra = weights
    pictures.append(fingerprint(model))
    found = [id(weights)]
    del model.extra, weights
    gc.collect()
    model.extra = torch.ones(10)
    assert fingerprint(model) not in pictures, found


@pytest.mark.parametrize(
    "a, b",
    [(1, 1.0), (1, True), (0.0, -0.0), ([1], (1,)), ({"a": 1}, {"b": 1}), (torch.float32, torch.float64), ("1", b"1")],
)
def test_freeze_tells_apart(a: object, b: object) -> None:
    assert freeze(a) == freeze(a) and freeze(a) != freeze(b)


def test_freeze_of_nan_equals_itself() -> None:
    assert freeze(float("nan")) == freeze(float("nan"))
