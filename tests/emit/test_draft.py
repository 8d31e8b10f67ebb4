"""What the text of a solution file is made of."""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
from solutions import draft, load, problem, text_of
from torch import nn

from fusewright.emit.draft import Draft

INPUT = "[torch.rand(4, 3, 20, 24)]"


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Draft:
    """A model whose layers are in lists, one of them in another order than their names."""
    init = (
        "self.layers = nn.ModuleList([nn.Sequential(nn.ReLU(), nn.Conv2d(3, 8, 3))])\n"
        "self.turned = nn.Sequential()\n"
        "self.turned.add_module('1', nn.Conv2d(8, 4, 1))\n"
        "self.turned.add_module('0', nn.Conv2d(4, 2, 1))"
    )
    forward = "def forward(self, x):\n    return self.turned(self.layers[0](x)).mean((2, 3))"
    return draft(problem(tmp_path_factory.mktemp("layered"), init, forward, INPUT), target="cpu", kernels="always")


def test_layers_by_number(layered: Draft, tmp_path: Path) -> None:
    """As a person would write it, where that is the same layer."""
    solution = tmp_path / "solution.py"
    solution.write_text(text_of(layered))
    text = solution.read_text()
    assert "model.layers[0][1].weight" in text
    assert 'getattr(model.turned, "1").weight' in text
    for read, name in (
        ("self.layers[0][1].weight", "layers_0_1_weight"),
        ('(self.turned, "1").weight', "turned_1_weight"),
    ):
        # The kernel that measured faster takes it as it is, or something derived.
        assert read in text or re.search(rf"def fused\([^)]*\b{name}\b", text)
    assert load(solution).ModelNew().turned[0].out_channels == 4


def test_only_lists_are_read_by_number(layered: Draft) -> None:
    class Own(nn.Module):
        """A module whose parts have numbers for names."""

        def __init__(self) -> None:
            super().__init__()
            self.add_module("0", nn.ReLU())
            self.rest = nn.Sequential(OrderedDict([("0", nn.ReLU())]))

    made = replace(layered, model=Own())
    assert made.indexed("getattr(self, '0')") == "getattr(self, '0')"
    assert made.indexed("getattr(self.rest, '0')") == "self.rest[0]"
