"""What a GPU asserts of values, asked on the host first: there an error is raised, where the GPU would end the process.

A CPU refuses an index of no row and a probability of NaN with an exception.  A GPU finds out in a kernel, and whatever
the process does there afterwards fails.  Verification runs models on inputs that may be refused: NaN, or a batch of
another size, whose positions are the classes of a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Given = Mapping[str, Any]
"""The arguments of a call by the names of its parameters."""


class OnHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises `IndexError` or `ValueError` ahead of an operation that would fail an assertion on a GPU.

    What an operation is written as for this purpose `written_out` says: a kernel that ends the process like the
    operations that it stands for is these.  `refuses` is whether any came across may refuse real numbers.
    """

    def __init__(self, written_out: Callable[[Any], Callable[..., Any] | None] = lambda func: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written_out = written_out
        self.refuses = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs one operation."""
        program = self.written_out(func)
        if program is not None:
            with self:
                return program(*args, **dict(kwargs or {}))
        name = getattr(func, "overloadpacket", func).__name__
        check = _CHECKS.get(name.removesuffix("_")) if getattr(func, "namespace", "") == "aten" else None
        if check is not None:
            self.refuses |= check in (_probabilities, _weights)
            parameters = func._schema.arguments  # type: ignore[attr-defined]
            given = {p.name: p.default_value for p in parameters if p.has_default_value()}
            given |= dict(zip((p.name for p in parameters), args, strict=False))
            check(name, given | dict(kwargs or {}))
        return func(*args, **dict(kwargs or {}))


def _indices(pairs: Callable[[Given], Iterator[tuple[Tensor, int]]], *, from_end: bool = False) -> Callable[..., None]:
    """Of an operation some of whose tensors are indices into so many; `from_end`: negative ones count from there."""

    def check(name: str, given: Given) -> None:
        for index, count in pairs(given):
            if index.numel() and bool(((index < (-count if from_end else 0)) | (index >= count)).any()):
                raise IndexError(f"{name}: an index is none of {count}")

    return check


def _along_dim(given: Given) -> Iterator[tuple[Tensor, int]]:
    x = given["self"]
    yield given["index"], x.shape[given["dim"]] if x.ndim else 1


def _rows(given: Given) -> Iterator[tuple[Tensor, int]]:
    yield given["indices"], given["weight"].shape[0]


def _everywhere(given: Given) -> Iterator[tuple[Tensor, int]]:
    yield given["index"], given["self"].numel()


def _per_dim(given: Given) -> Iterator[tuple[Tensor, int]]:
    """Of ``x[i, :, j]``: a mask stands for as many dimensions as it has, and cannot be wrong."""
    dim = 0
    for index in given["indices"]:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if index is not None and not is_mask:
            yield index, given["self"].shape[dim]
        dim += index.ndim if is_mask else 1


def _classes(given: Given) -> Iterator[tuple[Tensor, int]]:
    x, target = given["self"], given["target"]
    kept = target if given.get("ignore_index") is None else target[target != given["ignore_index"]]
    yield kept, x.shape[min(1, x.ndim - 1)]


def _probabilities(name: str, given: Given) -> None:
    for p in (given.get("p", given["self"]), given.get("target")):
        if isinstance(p, Tensor) and not bool(((p >= 0) & (p <= 1)).all()):  # NaN is neither
            raise ValueError(f"{name}: a number is no probability")


def _weights(name: str, given: Given) -> None:
    p = given["self"]
    if not bool(((p >= 0) & (p < torch.inf)).all()):
        raise ValueError(f"{name}: a number is no weight")


_CHECKS: dict[str, Callable[[str, Given], None]] = {
    **dict.fromkeys(("gather", "index_select", "index_add", "index_copy", "index_fill"), _indices(_along_dim)),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), _indices(_along_dim)),
    **dict.fromkeys(("embedding", "_embedding_bag", "_embedding_bag_forward_only"), _indices(_rows)),
    **dict.fromkeys(("take", "put"), _indices(_everywhere, from_end=True)),
    **dict.fromkeys(("index", "index_put", "_unsafe_index", "_index_put_impl"), _indices(_per_dim, from_end=True)),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss"), _indices(_classes)),
    **dict.fromkeys(("binary_cross_entropy", "bernoulli"), _probabilities),
    "multinomial": _weights,
}
