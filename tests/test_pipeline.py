"""The passes in their order, each handed a valid value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fusewright import pipeline
from fusewright.errors import CaptureError, GraphError
from fusewright.pipeline import build
from tests.dropin import Gap, images

PASSES = ("capture", "check", "rewrite", "check", "lower")


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    for name in set(PASSES):
        real = getattr(pipeline, name)

        def spy(*args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> Any:
            calls.append(_name)
            return _real(*args, **kwargs)

        monkeypatch.setattr(pipeline, name, spy)
    return calls


def test_order(order: list[str]) -> None:
    build(Gap(), (images(),), {})
    assert tuple(order) == PASSES


@pytest.mark.parametrize("position", [0, 1])
def test_an_invalid_graph_goes_no_further(monkeypatch: pytest.MonkeyPatch, order: list[str], position: int) -> None:
    checked: list[object] = []

    def refuse(graph: object) -> object:
        checked.append(graph)
        if len(checked) > position:
            raise GraphError("broken on purpose")
        return graph

    monkeypatch.setattr(pipeline, "check", refuse)
    with pytest.raises(GraphError, match="on purpose"):
        build(Gap(), (images(),), {})
    assert order == ["capture", "rewrite"][: 1 + position]


def test_never_means_as_captured() -> None:
    built = build(Gap(), (images(),), {}, mode="never")
    assert built.rewritten.fired == () and built.before == built.after and built.program.derived == ()


def test_always_rewrites_and_counts() -> None:
    built = build(Gap(), (images(),), {}, mode="always")
    assert built.rewritten.fired and built.after.flops < built.before.flops
    assert built.device == torch.device("cpu")


def test_rules_can_be_left_out() -> None:
    fired = {f.rule for f in build(Gap(), (images(),), {}, mode="always").rewritten.fired}
    built = build(Gap(), (images(),), {}, mode="always", without=frozenset(fired))
    assert not fired & {f.rule for f in built.rewritten.fired} and built.without == fired


def test_attributes_are_read_from_the_module() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = torch.ones(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.shift + torch.tensor([1.0] * 8)

    program = build(Shifted(), (torch.ones(2, 8),), {}).program
    assert "self.shift" in program.source and "shift" not in program.constants and len(program.constants) == 1


def test_writing_to_one_of_several_inputs_is_left_alone() -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            y = sum(other.sum(1) for other in others) + x.sum(1)
            x[:, 1:].add_(1.0)
            return y

    with pytest.raises(CaptureError, match="Writes cannot be planned: it writes to an input"):
        build(Writes(), (torch.ones(2, 8), torch.ones(2, 8)), {})
    assert build(Writes(), (torch.ones(2, 8),), {}).captured.reasons


def test_what_an_input_is_the_pattern_of_is_no_input() -> None:
    class Shifted(nn.Module):
        """As decoders shift their labels."""

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            shifted = labels.new_zeros(labels.shape)
            shifted[..., 1:] = labels[..., :-1].clone()
            return x + shifted.masked_fill_(shifted == -100, 3)

    args = torch.randn(2, 8), torch.randint(-101, -99, (2, 8))
    built = build(model := Shifted(), args, {})
    derive, forward = built.program.functions()
    assert torch.equal(forward(model, *args, *derive(model)), model(*args))


def test_what_cannot_be_captured_is_said() -> None:
    class Reads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * x.sum().item()

    with pytest.raises(CaptureError, match="Reads cannot be captured"):
        build(Reads(), (torch.ones(2, 8),), {})
