"""Outputs in containers of a model's own, as `transformers` has them: served as they are, not written into files."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import fusewright
from fusewright import pipeline
from fusewright.errors import CaptureError
from tests.dropin import program_calls

Pair = namedtuple("Pair", ["mean", "rest"])


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...]
    loss: Tensor | None = None


torch.export.register_dataclass(Output, serialized_type_name="tests.test_outputs.Output")


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.conv = kind, nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        found = y.mean((2, 3)), y.sum(1)
        return Pair(found[0], {"sum": found[1]}) if self.kind == "namedtuple" else Output(found[0], (found[1],))


def parts(output: Any) -> list[Tensor]:
    return [output.mean, output.rest["sum"]] if isinstance(output, Pair) else [output.logits, *output.hidden]


@pytest.mark.parametrize("kind", ["namedtuple", "dataclass"])
def test_outputs_are_of_their_class(kind: str) -> None:
    model, x = Model(kind).eval(), torch.randn(4, 3, 12, 12)
    fast = fusewright.optimize(model, (x,), rewrite="always", measure=False)
    assert fusewright.explain(fast).status == "rewritten"
    for module in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        with torch.no_grad():
            found, want = module(x), model(x)
        assert type(found) is type(want) and program_calls(module) == 1
        assert_close(parts(found), parts(want))
        assert kind == "namedtuple" or found.loss is None
    assert "arranged([" in fusewright.explain(fast).program


@pytest.mark.parametrize(("kind", "name"), [("namedtuple", "Pair"), ("dataclass", "Output")])
def test_files_have_plain_containers_alone(kind: str, name: str) -> None:
    x = torch.randn(4, 3, 12, 12)
    with pytest.raises(CaptureError, match=f"cannot be written down: it returns a {name}; return tensors in dicts"):
        pipeline.build(Model(kind), (x,), {}, plain=True)
