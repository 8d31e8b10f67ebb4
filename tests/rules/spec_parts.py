"""Specs for `fusewright.rules.parts`."""

from __future__ import annotations

from typing import Any

import torch
from harness import B, RuleSpec, inp
from hypothesis import strategies as st
from linear_cases import Draw, conv, reduce
from spec_views import shaped

from fusewright.ir import ops
from fusewright.ir.node import Node, make
from fusewright.rules import parts as rules


def images(*channels: Any, h: int = 4, w: int = 6, **options: Any) -> Node:
    """A convolution's (B, O, H, W)."""
    return conv(inp(B, 2, h, w), inp(*channels, 2, 1, 1), **options)


def product(*lengths: int) -> Node:
    return make(ops.Matmul(), inp(B, 3, 2), inp(2, *lengths), None)


@st.composite
def split(draw: Draw) -> Node:
    """Parts of one dimension or of several, the inner ones or the outer ones; and whole ones beside them."""
    kind, keepdim = draw(st.sampled_from(["sum", "mean"])), draw(st.booleans())
    if draw(st.booleans()):
        y = product(12)
        shape, dims = draw(
            st.sampled_from(
                [((B, 3, 4, 3), (3,)), ((B, 3, 4, 3), (2,)), ((B, 3, 2, 3, 2), (3, 4)), ((B, 3, 2, 3, 2), (1, 2))]
            )
        )
        return reduce(kind, shaped(y, *shape), *dims, keepdim=keepdim)
    y = images(6, padding=draw(st.sampled_from([0, 1])), bias=inp(6) if draw(st.booleans()) else None)
    h, w = y.shape[2], y.shape[3]
    assert isinstance(h, int) and isinstance(w, int)
    shape, dims = draw(
        st.sampled_from(
            [
                ((B, 6, h // 2, 2, w), (3,)),
                ((B, 6, 2, h // 2, w), (2,)),
                ((B, 6, h // 2, 2, w // 2, 2), (3, 5)),
                ((B, 6, h // 2, 2, w // 2, 2), (1, 3, 5)),
                ((B, 6, h // 2, 2, w // 2, 2), (3, 4, 5)),
                ((B, 2, 3, h, w), (2,)),
                ((B, 2, 3, h, w), (1,)),
                ((B, 3, 2, 1, h, w // 2, 2), (2, 3, 6)),
            ]
        )
    )
    middle = shaped(y, B, 6, h * w) if draw(st.booleans()) else y
    return reduce(kind, shaped(middle, *shape), *dims, keepdim=keepdim)


def interpolated(x: Node, *lengths: int, aligned: bool = False) -> Node:
    return make(ops.Interpolate(lengths, aligned), x)


@st.composite
def halved(draw: Draw) -> Node:
    """Along one dimension or both, images or rows."""
    if draw(st.booleans()):
        return interpolated(conv(inp(B, 2, 8), inp(3, 2, 1), inp(3)), 4)
    return interpolated(images(6, padding=1), *draw(st.sampled_from([(3, 4), (6, 4), (3, 8)])))


ELSEWHERE = "an element lies elsewhere than halfway between two"
PART = "no part of a dimension is joined, or no range"
BELOW = "no convolution or product that goes with it lies below"

SPECS = [
    RuleSpec(
        rules.mean_of_split,
        lambda: reduce("mean", shaped(images(6), B, 6, 2, 2, 3, 2), 3, 5),
        split(),
        {
            f"{PART} # all of it": lambda: reduce("mean", shaped(images(6), B, 2, 3, 24), 1, 2, 3),
            f"{PART} # its middle": lambda: reduce("sum", shaped(product(12), B, 3, 2, 3, 2), 3),
            f"{PART} # both ends": lambda: reduce("sum", shaped(product(12), B, 3, 2, 3, 2), 2, 4),
            f"{PART} # of several": lambda: reduce("mean", shaped(product(12), B, 9, 4), 2),
            f"{PART} # samples": lambda: reduce("mean", shaped(conv(inp(4, 2, 3), inp(2, 2, 1)), 2, 2, 6), 1),
            f"{BELOW} # an input": lambda: reduce("mean", shaped(inp(B, 6, 4), B, 6, 2, 2), 3),
            f"{BELOW} # samples": lambda: reduce("mean", shaped(conv(inp(4, 2, 3), inp(2, 2, 1)), 2, 2, 2, 3), 1),
            "a dimension is empty": lambda: reduce("mean", shaped(images(6, h=0), B, 3, 2, 0, 6), 2),
            "sums in another dtype": lambda: reduce("sum", shaped(images(6), B, 3, 2, 4, 6), 2, dtype=torch.float32),
            "# a maximum": lambda: reduce("max", shaped(images(6), B, 3, 2, 4, 6), 2),
        },
        exact_example=lambda: reduce("sum", shaped(images(6), B, 6, 2, 2, 6), 3),
    ),
    RuleSpec(
        rules.interpolation_to_half,
        lambda: interpolated(images(6), 2, 3),
        halved(),
        {
            f"{ELSEWHERE} # to a third": lambda: interpolated(images(6, h=6), 2, 3),
            f"{ELSEWHERE} # to more": lambda: interpolated(images(6), 8, 3),
            f"{ELSEWHERE} # corners together": lambda: interpolated(images(6), 2, 3, aligned=True),
            "more than two neighbours weigh": lambda: make(ops.Interpolate((2, 3), kind="cubic"), images(6)),
            "# an input": lambda: interpolated(inp(B, 6, 4, 6), 2, 3),
        },
    ),
]
