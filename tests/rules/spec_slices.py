"""Specs for `fusewright.rules.slices`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness import B, RuleSpec, inp
from hypothesis import assume
from hypothesis import strategies as st
from linear_cases import Draw, conv
from spec_views import permuted, shaped

from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Node, make
from fusewright.rules import slices as rules


def cut(x: Node, dim: int, start: int = 0, stop: int = 1, step: int = 1) -> Node:
    """Something of a part, since nothing is done to what is returned."""
    return pointwise("neg", make(ops.Slice(dim, start, stop, step), x))


def layer(x: Node, trailing: int = 1, kind: str = "layer") -> Node:
    shape = x.shape[-trailing:]
    bias = None if kind == "rms" else inp(*shape)
    return make(ops.Norm(kind, 1e-5, trailing=trailing), x, inp(*shape), bias, None, None)  # type: ignore[arg-type]


def product(x: Node, *w: Any, bias: bool = False) -> Node:
    return make(ops.Matmul(), x, inp(*w), inp(w[-1]) if bias else None)


def attention(*, turned: bool = False, mask: tuple[Any, ...] | None = None) -> Node:
    q, k, v = inp(B, 2, 5, 3), inp(B, 2, 4, 3), inp(B, 2, 4, 6)
    return make(ops.Attention(0.5, turned), q, k, v, None if mask is None else inp(*mask))


@st.composite
def parts(draw: Draw, x: Node, dims: tuple[int, ...]) -> Node:
    """A part along one of these dimensions."""
    dim = draw(st.sampled_from([d for d in dims if isinstance(x.shape[d], int) and x.shape[d] > 1]))
    length = x.shape[dim]
    assert isinstance(length, int)
    start = draw(st.integers(0, length - 1))
    stop = draw(st.integers(start + 1, length - (start == 0)))
    return cut(x, dim, start, stop, draw(st.sampled_from([1, 1, 2])))


def part(x: Node, dim: int, start: Any, stop: Any, step: int = 1) -> Node:
    return make(ops.Slice(dim, start, stop, step), x)


@st.composite
def of_parts(draw: Draw) -> Node:
    """A convolution of a part, which is padded where nothing is left out."""
    n, g = draw(st.integers(1, 3)), draw(st.sampled_from((1, 1, 2)))
    lengths = [draw(st.integers(3, 8)) for _ in range(n)]
    dim = draw(st.integers(0, n - 1))
    start = draw(st.integers(0, lengths[dim] - 1))
    stop = draw(st.integers(start + 1, lengths[dim]))
    assume(stop - start < lengths[dim])
    padding = [(draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(n)]
    padding[dim] = (0 if start else padding[dim][0], 0 if stop < lengths[dim] else padding[dim][1])
    taps = [draw(st.integers(1, 3)) for _ in range(n)]
    op = ops.Conv(
        tuple(draw(st.integers(1, 2)) for _ in range(n)),
        tuple(padding),
        tuple(draw(st.integers(1, 2)) for _ in range(n)),
        g,
    )
    x = part(inp(draw(st.sampled_from((B, 1, 3))), 2 * g, *lengths), dim + 2, start, stop)
    assume(all(length >= 1 for length in op.spatial(x.shape[2:], taps)))  # type: ignore[operator]
    return make(op, x, inp(2 * g, 2, *taps), inp(2 * g) if draw(st.booleans()) else None)


@st.composite
def functions(draw: Draw) -> Node:
    y = layer(inp(B, 3, 4))
    other = draw(st.sampled_from([inp(B, 3, 4), inp(3, 4), inp(4), inp(B, 1, 4), inp(1, 3, 1), 2.5, y]))
    f = pointwise(draw(st.sampled_from(["add", "mul", "sub"])), *draw(st.permutations([y, other])))
    return draw(parts(draw(st.sampled_from([f, pointwise("tanh", f), pointwise("tanh", y)])), (1,)))


@st.composite
def norms(draw: Draw) -> Node:
    x = inp(*draw(st.sampled_from([(B, 3, 4), (2, 3, 4), (3, 2, 2, 4)])))
    trailing = draw(st.integers(1, x.ndim - 2))
    if draw(st.booleans()):
        dim = draw(st.integers(1, x.ndim - 1))
        return draw(parts(make(ops.Softmax(dim, draw(st.booleans())), x), tuple({*range(1, x.ndim)} - {dim} or {0})))
    norm = layer(x, trailing, draw(st.sampled_from(["layer", "rms"])))
    return draw(parts(norm, tuple(range(1, x.ndim - trailing))))


@st.composite
def products(draw: Draw) -> Node:
    x, w = draw(
        st.sampled_from(
            [
                ((B, 3, 4), (4, 2)),
                ((3, 4), (4, 2)),
                ((B, 3, 5, 4), (3, 4, 2)),
                ((5, 4), (3, 4, 2)),
                ((3, 1, 4), (3, 4, 2)),
            ]
        )
    )
    y = product(inp(*x), *w, bias=len(w) == 2 and draw(st.booleans()))
    return draw(parts(y, tuple(range(y.ndim - 1))))


@st.composite
def attentions(draw: Draw) -> Node:
    turned = draw(st.booleans())
    mask = draw(st.sampled_from([None, (4,), (5, 4), (1, 4), (2, 5, 4), (B, 1, 5, 4), (B, 2, 1, 4)]))
    return draw(parts(attention(turned=turned, mask=mask), (1 if turned else 2,)))


@st.composite
def seen_otherwise(draw: Draw) -> Node:
    """Views of what a product gives."""
    y = product(inp(B, 3, 4), 4, 6)
    view, dims = draw(
        st.sampled_from(
            [
                (permuted(y, 0, 2, 1), (2,)),
                (permuted(y, 1, 0, 2, copy=True), (0,)),
                (shaped(y, B, 3, 2, 3), (1,)),
                (shaped(y, B, 1, 3, 6), (2,)),
                (permuted(shaped(y, B, 3, 2, 3), 2, 0, 1, 3), (2,)),
                (shaped(permuted(shaped(y, B, 3, 2, 3), 0, 2, 1, 3), B, 2, 3, 1, 3), (2,)),
            ]
        )
    )
    return draw(parts(view, dims))


@st.composite
def concatenated(draw: Draw) -> Node:
    """Rows of what is concatenated, of which some are read."""
    first = draw(st.sampled_from([(), (1,)]))
    widths = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3))
    cat = make(ops.Cat(len(first) + 1), *(pointwise("tanh", inp(*first, 5, n)) for n in widths))
    return draw(parts(cat, (len(first),)))


@st.composite
def convolutions(draw: Draw) -> Node:
    """Cut where windows reach into the padding, or every few."""
    n = draw(st.integers(1, 2))
    d = draw(st.integers(0, n - 1))
    (kernel, stride, dilation, left, right), step = (draw(st.integers(1, 3)) for _ in range(5)), draw(st.integers(1, 2))
    length = dilation * (kernel - 1) + 4
    pads = tuple((left, right) if i == d else (0, 1) for i in range(n))
    shape = tuple(length if i == d else 3 for i in range(n))
    w = tuple(kernel if i == d else 2 for i in range(n))
    steps = {
        "stride": (1,) * d + (stride,) + (1,) * (n - d - 1),
        "dilation": (1,) * d + (dilation,) + (1,) * (n - d - 1),
    }
    bias = inp(4) if draw(st.booleans()) else None
    y = conv(inp(B, 2, *shape), inp(4, 1, *w), bias, padding=pads, groups=2, **steps)
    count = y.shape[d + 2]
    assert isinstance(count, int)
    start = draw(st.integers(0, min(left // stride, count - 1)))
    stop = draw(st.integers(start + 1, count))
    reach = (start + (stop - 1 - start) // step * step) * stride + dilation * (kernel - 1) + 1 - left
    assume((start, stop, step) != (0, count, 1) and length - reach < stride * step)  # nothing of x is cut off
    return cut(y, d + 2, start, stop, step)


@st.composite
def transposed_convolutions(draw: Draw) -> Node:
    """Cropped by no more than the taps reach beyond the input."""
    kernel, stride, dilation = (draw(st.integers(1, 3)) for _ in range(3))
    reach, extra = dilation * (kernel - 1), draw(st.integers(0, max(stride, dilation) - 1))
    left = draw(st.integers(0, reach))
    options = {"stride": (stride, 1), "dilation": (dilation, 1), "padding": ((left, left), (0, 1)), "groups": 2}
    x, w = inp(B, 4, draw(st.integers(3, 5)), 3), inp(4, 2, kernel, 2)
    y = conv(x, w, inp(4) if draw(st.booleans()) else None, transposed=True, extra=0, **options)
    assert isinstance(y.op, ops.Conv)
    y = make(replace(y.op, output_padding=(extra, 0)), *y.args)
    count = y.shape[2]
    assert isinstance(count, int)
    start, end = draw(st.integers(0, reach - left)), draw(st.integers(0, reach - left))
    assume(start + end > 0 and start + end < count)
    return cut(y, 2, start, count - end)


UNKNOWN = "nothing is left out, or it is not known how much"
BARE = "nothing that computes row by row lies below"
JOINED = "it is cut along what a row joins"
WINDOWS = "it is cut along no dimension of windows"
PART = "what is left out is part of a dimension, or of several"

SPECS = [
    RuleSpec(
        rules.slice_of_function,
        lambda: cut(pointwise("add", inp(3, 4), product(inp(B, 3, 4), 4, 4)), 1, 1, 3),
        functions(),
        {
            f"{UNKNOWN} # a batch": lambda: cut(pointwise("tanh", layer(inp(B, 3, 4))), 0),
            f"{UNKNOWN} # all of it": lambda: cut(pointwise("tanh", layer(inp(B, 3, 4))), 1, 0, 3),
            f"{BARE} # an input": lambda: cut(pointwise("tanh", inp(B, 3, 4)), 1),
            f"{BARE} # a convolution, that a kernel has the function behind": lambda: cut(
                pointwise("relu", conv(inp(B, 2, 5), inp(3, 2, 2))), 2
            ),
            f"{BARE} # channels that are normalised": lambda: cut(pointwise("tanh", layer(inp(B, 3, 4))), 2),
            f"{BARE} # columns": lambda: cut(pointwise("tanh", product(inp(B, 3, 4), 4, 2)), 2),
            f"{BARE} # what is broadcast along it": lambda: cut(pointwise("add", inp(B, 3, 4), layer(inp(1, 4))), 1),
            "# what is returned": lambda: make(ops.Slice(1, 0, 1), pointwise("tanh", layer(inp(B, 3, 4)))).arg(0),
        },
    ),
    RuleSpec(
        rules.slice_of_norm,
        lambda: cut(layer(inp(B, 3, 4)), 1),
        norms(),
        {
            JOINED: lambda: cut(layer(inp(B, 3, 4)), 2),
            f"{JOINED} # one of two": lambda: cut(layer(inp(B, 3, 4), 2), 1),
            f"{JOINED} # shares": lambda: cut(make(ops.Softmax(1), inp(B, 3, 4)), 1),
            f"{JOINED} # channels of an image": lambda: cut(make(ops.Norm("group", 1e-5, groups=3), inp(B, 3, 4)), 1),
            f"{UNKNOWN} # a batch": lambda: cut(layer(inp(B, 3, 4)), 0),
        },
        exact_example=lambda: cut(make(ops.Softmax(2), inp(B, 3, 1)), 1),
    ),
    RuleSpec(
        rules.slice_of_matmul,
        lambda: cut(product(inp(B, 3, 4), 4, 2, bias=True), 1, 2, 3),
        products(),
        {
            "columns are left out": lambda: cut(product(inp(B, 3, 4), 4, 2), 2),
            f"{UNKNOWN} # a batch": lambda: cut(product(inp(B, 4), 4, 2), 0),
            f"{UNKNOWN} # all of it": lambda: cut(product(inp(B, 3, 4), 4, 2), 1, 0, 3),
        },
    ),
    RuleSpec(
        rules.slice_of_conv,
        lambda: cut(conv(inp(B, 2, 5), inp(3, 2, 3), inp(3), padding=2), 2, 0, 5),
        st.one_of(convolutions(), transposed_convolutions()),
        {
            f"{WINDOWS} # channels": lambda: cut(conv(inp(B, 2, 5), inp(3, 2, 3)), 1),
            "the input would have to be cut # transposed": lambda: cut(
                conv(inp(B, 2, 5), inp(2, 3, 3), transposed=True), 2, 3, 7
            ),
            "the input would have to be cut # every other position": lambda: cut(
                conv(inp(B, 2, 5), inp(2, 3, 3), transposed=True), 2, 0, 7, 2
            ),
            "the input would have to be cut": lambda: cut(conv(inp(B, 2, 5), inp(3, 2, 3)), 2, 1, 3),
            "the input would have to be cut # behind": lambda: cut(
                conv(inp(B, 2, 5), inp(3, 2, 3), padding=1), 2, 0, 3
            ),
            f"{UNKNOWN} # all of it": lambda: cut(conv(inp(B, 2, 5), inp(3, 2, 3)), 2, 0, 3),
        },
    ),
    RuleSpec(
        rules.conv_of_slice,
        lambda: conv(part(inp(B, 2, 7, 6), 2, 2, 6), inp(3, 2, 3, 2), inp(3), padding=((0, 0), (1, 1)), stride=2),
        of_parts(),
        {
            "the convolution is transposed": lambda: conv(part(inp(B, 2, 7), 2, 2, 6), inp(2, 3, 3), transposed=True),
            "channels or samples are left out": lambda: conv(part(inp(B, 3, 7), 1, 1, 3), inp(3, 2, 3)),
            "channels or samples are left out # every other": lambda: conv(
                part(inp(B, 2, 7), 2, 0, 7, 2), inp(3, 2, 3)
            ),
            "it is not known how much is left out": lambda: conv(part(inp(2, 2, B), 2, 0, B - 1), inp(3, 2, 1)),
            "what is left out is padded": lambda: conv(part(inp(B, 2, 7), 2, 1, 7), inp(3, 2, 3), padding=1),
            "what is left out is padded # behind": lambda: conv(
                part(inp(B, 2, 7), 2, 0, 6), inp(3, 2, 3), padding=((0, 1),)
            ),
        },
    ),
    RuleSpec(
        rules.slice_of_attention,
        lambda: cut(attention(mask=(B, 1, 5, 4)), 2, 4, 5),
        attentions(),
        {
            "it is not queries that are left out": lambda: cut(attention(), 3),
            "it is not queries that are left out # heads": lambda: cut(attention(turned=True), 2),
            f"{UNKNOWN} # all of it": lambda: cut(attention(), 2, 0, 5),
        },
        exact_example=lambda: cut(
            make(ops.Attention(1.0), inp(B, 2, 5, 3), inp(B, 2, 1, 3), inp(B, 2, 1, 6), None), 2, 1, 4
        ),
    ),
    RuleSpec(
        rules.slice_of_view,
        lambda: cut(permuted(shaped(product(inp(B, 3, 4), 4, 6), B, 3, 2, 3), 0, 2, 1, 3), 2),
        seen_otherwise(),
        {
            PART: lambda: cut(shaped(product(inp(B, 3, 4), 4, 6), B, 3, 2, 3), 2),
            f"{PART} # of several": lambda: cut(shaped(product(inp(2, 3, 4), 4, 6), 6, 6), 0),
            f"{UNKNOWN} # a batch": lambda: cut(permuted(layer(inp(B, 3, 4)), 1, 0, 2), 1),
            f"{BARE} # an input": lambda: cut(permuted(inp(B, 3, 4), 0, 2, 1), 1),
            f"{BARE} # channels": lambda: cut(permuted(layer(inp(B, 3, 4)), 0, 2, 1), 1),
            "# an expansion": lambda: cut(make(ops.Expand((3, 4)), inp(4)), 0),
        },
    ),
    RuleSpec(
        rules.slice_of_cat,
        lambda: cut(make(ops.Cat(1), inp(B, 3), inp(B, 4)), 0, 0, B - 1),
        concatenated(),
        {
            "it is cut along the dimension of the parts": lambda: cut(make(ops.Cat(0), inp(B, 3), inp(2, 3)), 0, 0, 5),
            "nothing is left out": lambda: cut(make(ops.Cat(1), inp(5, 3), inp(5, 4)), 0, 0, 5),
            "what is left of a part would not lie side by side": lambda: cut(
                make(ops.Cat(2), inp(B, 3, 4), inp(B, 3, 2)), 1, 0, 2
            ),
        },
    ),
]
