"""What a GPU asserts is refused on the host, for the reasons that a CPU has."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusewright.verification.asserted import OnHost

nan = float("nan")
X, Y = torch.rand(4, 6), torch.rand(4, 6, 5)


def i(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


CASES: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "embedding": (lambda: F.embedding(i(0, 3), X), lambda: F.embedding(i(0, 4), X)),
    "embedding, negative": (lambda: F.embedding(i(0), X), lambda: F.embedding(i(-1), X)),
    "bag": (lambda: F.embedding_bag(i(0, 3), X, i(0)), lambda: F.embedding_bag(i(0, 4), X, i(0))),
    "index_select": (lambda: X.index_select(1, i(5)), lambda: X.index_select(1, i(6))),
    "gather": (lambda: X.gather(-1, i(5)[None]), lambda: X.gather(-1, i(-1)[None])),
    "take": (lambda: X.take(i(-24, 23)), lambda: X.take(i(24))),
    "index": (lambda: Y[:, i(-6, 5)], lambda: Y[:, i(-7)]),
    "index behind one": (lambda: Y[i(3), :, i(4)], lambda: Y[i(3), :, i(5)]),
    "index behind a mask": (lambda: Y[X > -1, i(4)], lambda: Y[X > -1, i(5)]),
    "index, written": (lambda: X.clone().index_put((i(3),), X[0]), lambda: X.clone().index_put((i(4),), X[0])),
    "scatter": (lambda: X.scatter(1, i(5)[None], 1.0), lambda: X.scatter(1, i(6)[None], 1.0)),
    "scatter in place": (lambda: X.clone().scatter_(1, i(5)[None], 1.0), lambda: X.clone().scatter_(1, i(6)[None], 1)),
    "scatter_add": (
        lambda: X.scatter_add(1, i(5)[None], X[:1, :1]),
        lambda: X.scatter_add(1, i(6)[None], X[:1, :1]),
    ),
    "index_add": (lambda: X.index_add(0, i(3), X[:1]), lambda: X.index_add(0, i(4), X[:1])),
    "classes": (lambda: F.cross_entropy(X, i(0, 5, -100, 1)), lambda: F.cross_entropy(X, i(0, 6, 1, 1))),
    "classes, negative": (lambda: F.nll_loss(X, i(0, 5, 2, 1)), lambda: F.nll_loss(X, i(0, -1, 1, 1))),
    "a class": (lambda: F.nll_loss(X[0], torch.tensor(5)), lambda: F.nll_loss(X[0], torch.tensor(6))),
    "classes of positions": (
        lambda: F.nll_loss(Y, torch.full((4, 5), 5)),
        lambda: F.nll_loss(Y, torch.full((4, 5), 6)),
    ),
    "margins of classes": (
        lambda: F.multi_margin_loss(X, i(0, 5, 1, 1)),
        lambda: F.multi_margin_loss(X, i(0, 6, 1, 1)),
    ),
    "probabilities": (lambda: F.binary_cross_entropy(X, X), lambda: F.binary_cross_entropy(X + 1, X)),
    "probabilities that are wanted": (lambda: F.binary_cross_entropy(X, X), lambda: F.binary_cross_entropy(X, -X)),
    "bernoulli": (lambda: torch.bernoulli(X), lambda: torch.bernoulli(-X)),
    "bernoulli in place": (lambda: X.clone().bernoulli_(X), lambda: X.clone().bernoulli_(X + 1)),
    "multinomial": (lambda: torch.multinomial(X, 2), lambda: torch.multinomial(-X, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_refused_as_on_a_cpu(name: str) -> None:
    right, wrong = CASES[name]
    for mode in (nullcontext(), OnHost()):
        with mode:
            torch.manual_seed(0)
            right()
            with pytest.raises((IndexError, ValueError, RuntimeError)) as refused:
                wrong()
    assert refused.type is not RuntimeError


def test_other_numbers_are_none_of_these() -> None:
    """Masks are drawn in memory that holds anything, and a stranger's operation has arguments of its own."""

    @torch.library.custom_op("tests_of_asserted::gather", mutates_args=())
    def gather(rows: Tensor, at: Tensor) -> Tensor:
        return rows + at

    with OnHost():
        for draw in (lambda x: x.bernoulli_(0.3), lambda x: x.bernoulli_(), lambda x: torch.bernoulli(x, 0.5)):
            assert set(draw(X + 7).unique().tolist()) <= {0.0, 1.0}
        assert torch.equal(gather(X, X), X + X)


def test_nan_is_no_probability() -> None:
    x = torch.tensor([0.5, nan])
    with OnHost(), pytest.raises(ValueError, match="no probability"):
        F.binary_cross_entropy(x, x)
