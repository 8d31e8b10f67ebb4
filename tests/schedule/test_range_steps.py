"""Range sums in two steps: which are, that the input is read once, and the same value in the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulation.emulate import emulate
from torch import Tensor, nn

from fusewright.ir import ops
from fusewright.ir.node import Graph, Node, make
from fusewright.ir.ops import Slot
from fusewright.pipeline import build
from fusewright.schedule import range_sums
from fusewright.schedule.group import Group
from fusewright.schedule.groups import cut
from fusewright.schedule.range_steps import in_steps

Slots = tuple[Slot, ...]


def nearly_all(n: int, taps: int = 7) -> Slots:
    """What a sum over all positions of a convolution takes of its input, tap by tap."""
    return tuple(Slot(max(0, t - 2), min(n, n - 5 + t), 1, 1.0) for t in range(taps))


def strided(n: int, step: int = 3) -> Slots:
    """The same of every third position: tap by tap other residues, or one for all taps of a dilation of three."""
    return tuple(Slot(t, n - 8 + t, step, 1.0) for t in range(7))


def inp(*shape: int, dtype: torch.dtype = torch.float32) -> Node:
    return make(ops.Input(shape, dtype, torch.device("cpu"), name="x", index=0))


def summed(x: Node, table: dict[int, Slots], dtype: torch.dtype = torch.float64) -> Node:
    return make(ops.RangeSum(tuple(table.items()), dtype), x)


def record(root: Node) -> range_sums.RangeReduction:
    found = range_sums.parse(root, lambda node: True)
    assert isinstance(found, range_sums.RangeReduction), found
    return found


def windows(n: int) -> Slots:
    return tuple(Slot(i, i + 4, 1, 0.25) for i in range(0, n - 4, 4))


LARGE, LARGER = (2, 3, 40, 50, 60), (2, 1, 60, 64, 68)
CASES = {
    "volumes": (lambda: summed(inp(*LARGE), {d: nearly_all(LARGE[d]) for d in (2, 3, 4)}), True),
    "strided, for which a block has no room": (
        lambda: summed(inp(*LARGER), {d: strided(LARGER[d]) for d in (2, 3, 4)}),
        True,
    ),
    "strided, for which it has": (lambda: summed(inp(*LARGE), {d: strided(LARGE[d]) for d in (2, 3, 4)}), False),
    "half precisions": (
        lambda: summed(inp(*LARGE, dtype=torch.bfloat16), {d: nearly_all(LARGE[d]) for d in (2, 3, 4)}, torch.bfloat16),
        False,
    ),
    "few, in one pass": (lambda: summed(inp(*LARGE), {2: nearly_all(40, 2), 3: nearly_all(50, 1)}), False),
    "windows, read once": (lambda: summed(inp(*LARGE), {d: windows(LARGE[d]) for d in (2, 3, 4)}), False),
    "much left": (lambda: summed(inp(2, 3, 20, 20, 20), {d: nearly_all(20) for d in (2, 3, 4)}), False),
    "a line": (lambda: summed(inp(2, 3, 4000), {2: nearly_all(4000, 80)}), False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_which_are(name: str) -> None:
    root, wanted = CASES[name][0](), CASES[name][1]
    assert in_steps(record(root)) is wanted


def groups_of(root: Node, taken: bool) -> list[Group]:
    """The groups that are offered, where each is taken, or none."""
    found: list[Group] = []

    def decide(group: Group) -> Node | None:
        found.append(group)
        return group.fused(f"fused_{len(found)}") if taken else None

    cut(Graph((root.arg(0),), (root,)), decide)
    return found


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("name", [name for name, (_, wanted) in CASES.items() if wanted])
def test_inner_dimensions_come_first(name: str, taken: bool) -> None:
    """If nobody wants the first step, the sum stays as it is."""
    root = CASES[name][0]()
    *kept, length = root.arg(0).shape[:3]
    found = groups_of(root, taken)
    assert [g.record.root.shape for g in found] == [(*kept, length, 7, 7), (*kept, 7, 7, 7)][: 1 + taken]


class Mean(nn.Module):
    """The mean of a convolution: its ranges are nearly whole planes."""

    def __init__(self, *options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 5, 7, *options)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((1, 2, 3, 4), keepdim=True)


MODELS = {
    "dilated": (lambda: Mean(1, (2, 1, 3), 2), (2, 2, 24, 33, 36)),
    "strided, of many different sums": (lambda: Mean(3, (6, 2, 2), (2, 1, 3)), (1, 2, 58, 65, 71)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_reads_its_input_once(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name][0]().eval().requires_grad_(False), torch.randn(MODELS[name][1])
    built = build(model, (x,), {}, mode="always", kernels="always", measure=False, target=torch.device("cuda"))
    first, second = (k for k in built.program.kernels if "rangesum" in k.name)
    left = emulate(first, x)
    assert left.shape == (*x.shape[:3], 7, 7) and left.dtype == torch.float64
    namespace: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    for kernel, operand in ((first, x), (second, left)):
        exec(kernel.reference, namespace)
        torch.testing.assert_close(emulate(kernel, operand), namespace["reference"](operand), rtol=1e-6, atol=1e-5)
