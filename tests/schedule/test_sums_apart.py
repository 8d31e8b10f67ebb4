"""Sums of windows that a convolution reads only some of: the same values, where they lie, and where that pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gpu_build import as_on_a_gpu, built_for_a_gpu, emulated, plan_for_hopper
from graph_passes import given, value
from torch import Tensor, nn

from fusewright import trial, tuning
from fusewright.dispatch import Options
from fusewright.ir import ops
from fusewright.ir.node import Graph, Node
from fusewright.rules import RULES
from fusewright.rules.engine import rewrite
from fusewright.runtime.device import LARGE_GPU
from fusewright.schedule.contraction import window_sums
from fusewright.schedule.cost import CostModel
from fusewright.schedule.sums_apart import with_sums_apart
from fusewright.schedule.wishes import Wishes
from fusewright.trial import Trial

CONVOLUTIONS: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, Any] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
POOLS: dict[int, Any] = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
BOX = "avg_pool(conv(x, w)) = conv_strided(box(x), w)"


@dataclass(frozen=True)
class Case:
    """x of this shape, a convolution of it, a pool of so many positions so far apart; how far apart sums are then."""

    shape: tuple[int, ...]
    kernel: tuple[int, ...]
    how: dict[str, Any]
    window: tuple[int, ...]
    stride: tuple[int, ...]
    apart: tuple[int, ...]
    then: Callable[[Tensor], Tensor] = torch.tanh

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Model(self)


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        how = {name: value for name, value in case.how.items() if name != "transposed"}
        kinds = TRANSPOSED if case.how.get("transposed") else CONVOLUTIONS
        self.conv, self.case = kinds[len(case.kernel)](case.shape[1], 6, case.kernel, **how), case

    def forward(self, x: Tensor) -> Tensor:
        case = self.case
        return case.then(POOLS[len(case.kernel)](self.conv(x), case.window, case.stride))


CASES = {
    "an image": Case((2, 3, 21, 24), (3, 2), {"dilation": 2}, (4, 6), (4, 6), (2, 2)),
    "padded": Case((2, 3, 19, 23), (3, 3), {"dilation": (3, 1), "padding": (3, 1)}, (5, 3), (6, 2), (3, 1)),
    "in strides": Case((2, 4, 25, 31), (2, 3), {"dilation": (2, 6), "stride": (2, 3)}, (3, 2), (1, 4), (2, 6)),
    "in groups": Case((2, 4, 17, 22), (3, 3), {"dilation": 2, "groups": 2}, (2, 2), (2, 2), (2, 2)),
    "one tap along a dimension": Case((2, 3, 19, 24), (1, 3), {"dilation": (1, 4)}, (3, 4), (2, 4), (2, 4)),
    "a signal": Case((2, 5, 83), (4,), {"dilation": 6, "padding": 5}, (4,), (4,), (2,)),
    "a volume": Case((2, 3, 13, 12, 15), (3, 2, 2), {"dilation": (2, 1, 3)}, (2, 3, 3), (2, 3, 3), (2, 1, 3)),
    "transposed": Case((2, 3, 15, 17), (3, 2), {"dilation": 2, "transposed": True}, (4, 4), (4, 4), (2, 2)),
    "then a sum": Case(
        (2, 3, 21, 24), (3, 2), {"dilation": 2}, (4, 6), (4, 6), (2, 2), lambda y: torch.sin(y).sum((2, 3))
    ),
}  # fmt: skip


def moved(model: nn.Module, x: Tensor) -> tuple[Any, Graph, CostModel, Any]:
    """What is captured of a call, its graph with the windows ahead of the convolution, and how that is to be taken."""
    captured, hints, orders = given(model, x)
    cost = CostModel(LARGE_GPU, hints, derived_ahead=True, fusing=True)
    rules = [rule for rule in RULES if rule.name == BOX]
    found = rewrite(captured.graph, rules, cost, mode="always", fusing=True).graph
    return captured, found, cost, orders


def run(model: nn.Module, x: Tensor, seconds: Callable[[Node], float], **how: Any) -> tuple[Graph, Graph, Tensor]:
    """The graph before and after, and what that gives."""
    captured, before, cost, orders = moved(model, x)
    after, _ = with_sums_apart(before, cost, orders, seconds, **how)
    return before, after, value(after, captured, model, x)


def shares(graph: Graph) -> tuple[Node, Node]:
    """The convolution and the window sums that it reads."""
    (conv,) = (n for n in graph.nodes() if isinstance(n.op, ops.Conv))
    assert isinstance(conv.arg(0).op, ops.RangeSum)
    return conv, conv.arg(0)


def dense(conv: Node) -> float:
    """As if what reads all that is there were fastest."""
    assert isinstance(conv.op, ops.Conv)
    return float(sum(conv.op.stride))


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small as these are, nothing but launches would count; a GPU has no strips."""
    monkeypatch.setattr("fusewright.schedule.contraction.has_strips", lambda device: False)
    monkeypatch.setattr("fusewright.schedule.sums_apart._passing", lambda sums, cost: 0.0)


@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    """As the model has it, and as that lies in memory; of the sums, those are left that are read."""
    case = CASES[name]
    model, x = case.model().eval(), torch.randn(case.shape)
    before, after, result = run(model, x, dense)
    (conv, sums), (less, left) = shares(before), shares(after)
    assert less.shape == conv.shape and after.symbols
    for d, apart in enumerate(case.apart, start=2):
        assert left.shape[d] == -(-int(sums.shape[d]) // apart)
    with torch.no_grad():
        torch.testing.assert_close(result, model(x), check_stride=True, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("share", "changes"), [(0.7, True), (0.9, False)])
def test_it_has_to_be_clearly_faster(share: float, changes: bool) -> None:
    case = CASES["an image"]
    first: list[Node] = []

    def seconds(conv: Node) -> float:
        first.append(conv)
        return share if conv is first[0] else 1.0

    before, after, _ = run(case.model(), torch.randn(case.shape), seconds)
    assert (after is not before) == changes and len(first) == 2


def test_what_no_kernel_forms_is_always_less() -> None:
    case = Case((2, 2, 31, 33), (8, 8), {"dilation": 2, "padding": 1}, (2, 2), (2, 2), ())
    before, after, _ = run(case.model(), torch.randn(case.shape), lambda conv: pytest.fail("was asked"))
    assert after is not before


STAYS = {
    "no dilation": Case((2, 3, 21, 24), (3, 2), {}, (4, 6), (4, 6), ()),
    "nothing in common": Case((2, 3, 25, 26), (3, 2), {"dilation": (2, 3)}, (3, 4), (3, 4), ()),
}


@pytest.mark.parametrize("name", STAYS)
def test_others_stay(name: str) -> None:
    case = STAYS[name]
    before, after, _ = run(case.model(), torch.randn(case.shape), dense)
    assert after is before


def test_left_alone() -> None:
    case = CASES["an image"]
    how = {"always": True, "alone": lambda n: isinstance(n.op, ops.Conv)}
    before, after, _ = run(case.model(), torch.randn(case.shape), dense, **how)
    assert after is before


@pytest.mark.parametrize("always", [True, False])
def test_sums_that_are_all_read_may_be_apart(always: bool) -> None:
    """Then no kernel forms them on its way, and the convolution is what it was; of others it is told how many."""
    case = STAYS["nothing in common"]
    model, x = case.model().eval(), torch.randn(case.shape)
    captured, before, cost, orders = moved(model, x)
    after, formed = with_sums_apart(before, cost, orders, dense, always=always)
    (conv, _), (other, sums) = shares(before), shares(after)
    assert isinstance(sums.op, ops.RangeSum) and sums.op.written == always and formed == (not always)
    assert other.op == conv.op and (window_sums(other) is None) == always and window_sums(conv) is not None
    with torch.no_grad():
        torch.testing.assert_close(value(after, captured, model, x), model(x), rtol=1e-4, atol=1e-5)


def test_a_program_with_sums_apart_is_tried_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_for_hopper(monkeypatch)
    monkeypatch.setattr(tuning.Tuner, "seconds", lambda self, conv: dense(conv))
    model = STAYS["no dilation"].model().eval().requires_grad_(False)
    of = Trial(model, (torch.empty(2, 3, 42, 48),), {}, Options(rewrite="always", verify=False, measure=False), print)
    built = trial._built(of)
    variants = trial._variants(of, built, 2)
    (apart,) = (v for v in variants if v.sums_apart)
    assert built.formed == 1 and apart.formed == 0
    assert len(apart.program.kernels) == len(built.program.kernels) + 1
    assert trial._built(of, apart).sums_apart and not trial._built(of, built).sums_apart


@pytest.mark.parametrize("name", ["padded", "a volume", "transposed", "then a sum"])
def test_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels, which are emulated."""
    monkeypatch.setattr(tuning, "capability_of", lambda device: 90)
    monkeypatch.setattr(tuning.Tuner, "seconds", lambda self, conv: dense(conv))
    case = CASES[name]
    model, x = case.model().eval(), torch.randn(case.shape)
    built = as_on_a_gpu(model, x, tf32=(True, False), mode="always", only={BOX})
    assert "range reduction" in {choice.family for choice in built.choices}
    assert [choice.path for choice in built.choices] == ["generated"] * len(built.choices)
    result = emulated(built, model, x)
    with torch.no_grad():
        torch.testing.assert_close(result, model(x), rtol=2e-2, atol=2e-3)


# Features, what else is as above, and whether there are two kernels on Hopper by estimate: row 4 of seed 83 and rows 18
# and 4 of seed 13 of random configurations, of smaller batches, and a model of benchmarks/tiles.py whose one kernel is
# near the pace of memory.
PAYS: dict[str, tuple[int, Case, bool]] = {
    "weights for two blocks": (98, Case((16, 79, 110, 105), (3, 3), {"dilation": 3}, (2, 2), (2, 2), ()), True),
    "many taps": (105, Case((4, 17, 502, 574), (6, 6), {"dilation": 2}, (4, 4), (4, 4), ()), True),
    "large windows": (60, Case((4, 71, 238, 257), (6, 2), {"dilation": (3, 1)}, (8, 6), (6, 1), ()), True),
    "few taps": (78, Case((16, 24, 352, 360), (3, 2), {"dilation": 2}, (6, 6), (6, 6), ()), False),
}


def test_a_single_launch_has_none_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though two kernels were faster, as below."""
    monkeypatch.undo()
    features, case, _ = PAYS["weights for two blocks"]
    model = case.model().requires_grad_(False)
    model.conv = nn.Conv2d(case.shape[1], features, case.kernel, **case.how, device="meta")
    x = torch.empty(case.shape, device="meta")
    built = built_for_a_gpu(monkeypatch, model, x, wishes=Wishes(single=True))
    assert [choice.path for choice in built.choices] == ["generated"]


@pytest.mark.parametrize("name", PAYS)
def test_where_it_pays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    features, case, pays = PAYS[name]
    model = case.model().requires_grad_(False)
    model.conv = nn.Conv2d(case.shape[1], features, case.kernel, **case.how, device="meta")
    built = built_for_a_gpu(monkeypatch, model, torch.empty(case.shape, device="meta"))
    assert (len(built.choices) == 2) == pays
