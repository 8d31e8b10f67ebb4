"""Rows that are seen with more dimensions: which view of them is found, and how what goes with them is seen there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from codegen.cuda.test_stream_kernels import inp
from torch import Tensor

from fusewright.capture import capture
from fusewright.ir import ops
from fusewright.ir.node import make
from fusewright.schedule.row_views import RowView, row_view
from tests.capture.harness import Fn

FOUND: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...] | None]] = {
    "an image": (lambda x: F.softmax(x, -1).view(2, 3, 6, 20), (2, 3)),
    "behind functions": (lambda x: (F.softmax(x, -1) * 2).exp().view(2, 3, 4, 5, 6), (2, 3, 4)),
    "one behind the other": (lambda x: F.softmax(x, -1).view(6, 12, 10), (1, 2)),
    "no view": (lambda x: F.softmax(x, -1) * 2, None),
    "another split": (lambda x: F.softmax(x, -1).view(2, 6, 60), None),
    "joined": (lambda x: F.softmax(x, -1).view(6, 120), None),
    "along another dimension": (lambda x: F.softmax(x, 1).view(2, 3, 6, 20), None),
    "behind a reduction": (lambda x: F.softmax(x, -1).cumsum(-1).view(2, 3, 6, 20), None),
}


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    fn, dims = FOUND[name]
    graph = capture(Fn(lambda x: fn(x[:2])), (torch.randn(4, 3, 120),)).graph
    shares = next(n for n in graph.nodes() if isinstance(n.op, ops.Softmax))
    found = row_view(shares, graph)
    assert found.flat == shares.shape
    assert found.dims == ((shares.op.dim,) if dims is None else dims)  # type: ignore[attr-defined]
    assert (found.shape == found.flat) == (dims is None)


IMAGES = RowView((2, 3, 120), 2, (2, 3, 6, 20), (2, 3))
BEHIND = RowView((6, 120), 1, (2, 3, 6, 20), (2, 3))


@pytest.mark.parametrize(
    "view, shape, seen",
    [
        (IMAGES, (2, 3, 120), (2, 3, 6, 20)),
        (IMAGES, (2, 3, 1), (2, 3, 1, 1)),
        (IMAGES, (3, 120), (3, 6, 20)),
        (IMAGES, (2, 1, 120), (2, 1, 6, 20)),
        (IMAGES, (120,), (6, 20)),
        (IMAGES, (1,), (1, 1)),
        (IMAGES, (), ()),
        (BEHIND, (6, 120), (2, 3, 6, 20)),
        (BEHIND, (6, 1), (2, 3, 1, 1)),
        (BEHIND, (1, 120), (6, 20)),
        (RowView((1, 6, 120), 2, (2, 3, 6, 20), (2, 3)), (6, 120), None),
    ],
    ids=str,
)
def test_what_goes_with_rows(view: RowView, shape: tuple[int, ...], seen: tuple[int, ...] | None) -> None:
    found = view.seen(inp(0, *shape), {})
    assert (None if found is None else found.shape) == seen


def test_a_view_of_a_view_is_one() -> None:
    x = inp(0, 2, 3, 6, 20)
    assert IMAGES.seen(make(ops.Reshape((2, 3, 120)), x), {}) is x
