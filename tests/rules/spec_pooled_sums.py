"""Specs for `fusewright.rules.pooled_sums`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import B, RuleSpec, inp
from hypothesis import assume
from hypothesis import strategies as st
from linear_cases import Draw, avg_pool, conv, convs, reduce
from spec_windows import empty

from fusewright.ir import ops
from fusewright.ir.node import Node, make
from fusewright.rules import pooled_sums as rules

INPUTS = st.sampled_from([(B, 2, 6, 5), (2, 3, 7, 4), (1, 2, 4, 9), (B, 3, 7)]).map(lambda shape: inp(*shape))


def summed(draw: Draw, x: Node, kernel: tuple[int, ...], **options: Any) -> Node:
    """What windows that touch give, summed over all their dimensions and perhaps others."""
    first = 0 if isinstance(x.shape[0], int) else 1
    others = [d for d in range(first, x.ndim - len(kernel)) if draw(st.booleans())]
    divisor = {"divisor": draw(st.sampled_from([None, 3]))} if len(kernel) > 1 else {}
    kind, keepdim = draw(st.sampled_from(["sum", "mean"])), draw(st.booleans())
    y = avg_pool(x, *kernel, **divisor, **options)
    assume(all(not isinstance(d, int) or d > 0 for d in y.shape))
    return reduce(kind, y, *others, *range(x.ndim - len(kernel), x.ndim), keepdim=keepdim)


@st.composite
def sums_of_all(draw: Draw) -> Node:
    x = draw(INPUTS)
    lengths = [d for d in x.shape[2:] if isinstance(d, int)]
    kernel = tuple(draw(st.sampled_from([k for k in range(1, d + 1) if d % k == 0])) for d in lengths)
    return summed(draw, x, kernel)


@st.composite
def sums_of_convs(draw: Draw) -> Node:
    """Padded or not, and with a remainder or without."""
    y = draw(st.one_of(convs(), convs(transposed=True)))
    lengths = [d for d in y.shape[2:] if isinstance(d, int)]
    kernel = tuple(draw(st.integers(1, min(4, d))) for d in lengths)
    return summed(draw, y, kernel, padding=tuple(draw(st.integers(0, k // 2)) for k in kernel))


def image(*shape: Any, dtype: torch.dtype = torch.float64) -> Node:
    return inp(*(shape or (B, 3, 8, 4)), dtype=dtype)


def convolved(*shape: Any, dtype: torch.dtype = torch.float64, **options: Any) -> Node:
    x = image(*shape, dtype=dtype)
    return conv(x, inp(5, 3, 2, 1, dtype=dtype), inp(5, dtype=dtype), **options)


WINDOWS = "the windows overlap, leave gaps or are of several scales"


def refused(x: Callable[..., Node]) -> dict[str, Callable[[], Node]]:
    """Of both rules; windows of x along its first dimension, which has eight elements or seven."""
    return {
        "not all pooled dimensions are summed": lambda: reduce("mean", avg_pool(x(), 2, 2), 2),
        f"{WINDOWS} # overlap": lambda: reduce("sum", avg_pool(x(), 3, 2, stride=(2, 2)), 2, 3),
        f"{WINDOWS} # gaps": lambda: reduce("sum", avg_pool(x(), 2, 2, stride=(3, 2)), 2, 3),
        f"{WINDOWS} # padding is not counted": lambda: reduce(
            "sum", avg_pool(x(), 4, 2, padding=(2, 0), count_include_pad=False), 2, 3
        ),
        f"{WINDOWS} # the last one is cut off": lambda: reduce("sum", avg_pool(x(), 3, 2, ceil_mode=True), 2, 3),
        "sums in another dtype": lambda: reduce(
            "sum", avg_pool(x(dtype=torch.float32), 1, 2), 2, 3, dtype=torch.float64
        ),
        "the length of a reduced dimension is not known": lambda: reduce("sum", avg_pool(x(2, 3, B, 4), 1, 2), 2, 3),
        "# a max": lambda: reduce("max", avg_pool(x(), 1, 2), 2, 3),
        "# of a max": lambda: reduce("sum", make(ops.Pool("max", (1, 2), (1, 2), (0, 0), (1, 1)), x()), 2, 3),
    }


def few_positions() -> Node:
    """Seven taps, of which each sums a part of the one element that there is."""
    return conv(inp(2, 3, 1, 4), inp(5, 3, 17, 1), padding=((9, 9), (0, 0)))


SPECS = [
    RuleSpec(
        rules.sum_of_pool,
        lambda: reduce("mean", avg_pool(image(), 4, 2), 2, 3),
        sums_of_all(),
        {
            **refused(image),
            "the windows stop short of the end": lambda: reduce("mean", avg_pool(image(), 3, 2), 2, 3),
            "a reduced dimension is empty": lambda: reduce(
                "sum", avg_pool(image(2, 3, 0, 4), 2, 2, padding=(1, 0)), 2, 3
            ),
        },
        exact_example=lambda: reduce("sum", avg_pool(image(), 2, 2), 1, 2, 3),
    ),
    RuleSpec(
        rules.sum_of_pooled_conv,
        lambda: reduce("mean", avg_pool(convolved(stride=(1, 2)), 3, 2), 2, 3),
        sums_of_convs(),
        {
            **refused(convolved),
            "a reduced dimension is empty": lambda: reduce("sum", avg_pool(empty(), 2, 2, padding=(1, 0)), 2, 3),
            "one range sum per slot and tap would be more": lambda: reduce(
                "sum", avg_pool(few_positions(), 1, 2), 2, 3
            ),
            "# no convolution": lambda: reduce("sum", avg_pool(image(), 2, 2), 2, 3),
        },
        exact_example=lambda: reduce("sum", avg_pool(convolved(), 2, 2), 1, 2, 3),
    ),
]
