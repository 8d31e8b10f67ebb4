"""Specs for `fusewright.rules.padding`."""

from __future__ import annotations

from typing import Any

from harness import B, RuleSpec, inp
from hypothesis import assume
from hypothesis import strategies as st
from linear_cases import Draw, conv, convs
from spec_pooling import over, pool

from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Node, make
from fusewright.rules import padding as rules
from fusewright.rules.rule import Rule

INF = float("inf")


def padded(x: Node, value: float = 0.0, mode: str = "constant", **pads: tuple[int, int]) -> Node:
    """x padded; ``d2=(1, 2)`` pads dimension 2 by one on the left and two on the right."""
    return make(ops.Pad(tuple((int(d[1:]), *sides) for d, sides in pads.items()), mode, value), x)  # type: ignore[arg-type]


def image(*shape: Any) -> Node:
    return inp(*(shape or (B, 3, 6, 5)))


def convolved(value: float = 0.0, mode: str = "constant", transposed: bool = False, **pads: tuple[int, int]) -> Node:
    """A convolution of a padded image."""
    return conv(padded(image(2, 3, 6, 5), value, mode, **pads), inp(3, 3, 2, 2), transposed=transposed)


@st.composite
def sides(draw: Draw, first: int, ndim: int) -> dict[str, tuple[int, int]]:
    """Some padding from dimension `first` on, most often as much on either side."""
    found = {}
    for d in range(first, ndim):
        left, right = draw(st.integers(0, 2)), draw(st.integers(0, 2))
        if draw(st.integers(0, 2)):  # a dimension may be left out
            found[f"d{d}"] = (left, draw(st.sampled_from((left, right))))
    assume(any(map(any, found.values())))
    return found


@st.composite
def padded_convs(draw: Draw) -> Node:
    """Any convolution of any padded input."""
    y = draw(convs())
    return make(y.op, padded(y.arg(0), **draw(sides(2, y.ndim))), *y.args[1:])


@st.composite
def windows(draw: Draw, rule: Rule, kinds: tuple[str, ...]) -> Node:
    """Any pooling of a padded value that the rule is about."""
    kind, n = draw(st.sampled_from(kinds)), draw(st.integers(1, 3))
    shape = (draw(st.sampled_from((B, 2))), 2, *(draw(st.integers(2, 7 - n)) for _ in range(n)))
    x, value = (inp(*shape), 0.0) if kind == "avg" else draw(bounded(inp(*shape), kind))
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(n))
    options: dict[str, Any] = {
        "stride": tuple(draw(st.integers(1, 3)) for _ in range(n)),
        "padding": tuple(draw(st.sampled_from((0, 0, k // 2))) for k in kernel),
        "ceil_mode": draw(st.booleans()),
    }
    if kind == "avg":
        options |= {
            "count_include_pad": draw(st.booleans()),
            "divisor": draw(st.sampled_from((None, 3)[: 1 + (n > 1)])),
        }
        fits = n < 3 or all(k <= length for k, length in zip(kernel, shape[2:], strict=True))  # type: ignore[operator]
        assume(fits)
    else:
        options["dilation"] = tuple(draw(st.sampled_from((1, 1, 2))) for _ in range(n))
    first = draw(st.sampled_from((2, 2, max(1, 4 - n))))  # windows may run over channels as well
    if first == 1 and n < 3:
        kernel, options = _one_more(kernel, options)
    value_padded = padded(x, value, **draw(sides(first, x.ndim)))
    root = over(lambda x: pool(x, kind, *kernel, **options), value_padded)
    match = rule.pattern.match(root)
    assert match is not None
    assume(rule.condition(match) is None)
    return root


def _one_more(kernel: tuple[int, ...], options: dict[str, Any]) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The same windows, over two elements of the dimension before as well."""
    more = {"stride": 1, "padding": 0, "dilation": 1}
    return (2, *kernel), {k: (more[k], *v) if k in more else v for k, v in options.items()}


@st.composite
def bounded(draw: Draw, x: Node, kind: str) -> tuple[Node, float]:
    """A value, and one that none of it is below, or above for a min."""
    sign = 1 if kind == "max" else -1
    low = draw(st.sampled_from([(x, -INF), (pointwise("relu", x), 0.0), (pointwise("sigmoid", x), -1.0)]))
    return (low[0], low[1]) if sign == 1 else (pointwise("neg", low[0]), -low[1])


def average(x: Node, *kernel: int, **options: Any) -> Node:
    return pool(x, "avg", *kernel, **options)


def largest(value: float = -INF, mode: str = "constant", kind: str = "max", **pads: tuple[int, int]) -> Node:
    """A max pool of a padded image."""
    return pool(padded(image(2, 3, 6, 5), value, mode, **pads), kind, 3, 3, stride=(2, 2))


OUTSIDE = "a dimension is padded that no window runs over"
MORE = "there would be more windows, or fewer"
HALF = "more than half of a window would be padding"

SPECS = [
    RuleSpec(
        rules.padding_of_conv,
        lambda: conv(
            padded(image(B, 4, 7, 6), d2=(1, 1), d3=(2, 0)), inp(6, 2, 3, 2), inp(6), stride=(1, 2), padding=1, groups=2
        ),
        padded_convs(),
        {
            "the convolution is transposed": lambda: convolved(transposed=True, d2=(1, 1)),
            "it is not padded with zeros # ones": lambda: convolved(1.0, d2=(1, 1)),
            "it is not padded with zeros # mirrored": lambda: convolved(mode="reflect", d2=(1, 1)),
            f"{OUTSIDE} # channels": lambda: conv(padded(image(2, 2, 6, 5), d1=(0, 1), d2=(1, 1)), inp(3, 3, 2, 2)),
            f"{OUTSIDE} # the batch": lambda: convolved(d0=(1, 0)),
            "# a padding of the weight": lambda: conv(image(2, 3, 6, 5), padded(inp(3, 3, 2, 2), d2=(1, 1))),
            "# a transposed image": lambda: conv(make(ops.Permute((0, 1, 3, 2)), image()), inp(3, 3, 2, 2)),
        },
    ),
    RuleSpec(
        rules.padding_of_average,
        lambda: average(padded(image(B, 3, 7, 6), d2=(1, 1), d3=(0, 1)), 2, 4, stride=(2, 3)),
        windows(rules.padding_of_average, ("avg",)),
        {
            "it is not padded with zeros # ones": lambda: average(padded(image(), 1.0, d2=(1, 1)), 2, 2),
            "it is not padded with zeros # mirrored": lambda: average(padded(image(), mode="reflect", d2=(1, 1)), 2, 2),
            "the pooling counts its own padding out": lambda: average(
                padded(image(), d2=(1, 1)), 4, 2, padding=(0, 1), count_include_pad=False
            ),
            f"{OUTSIDE} # channels": lambda: average(padded(image(), d1=(1, 1), d2=(1, 1)), 2, 2),
            f"{OUTSIDE} # one of two": lambda: average(padded(image(), d2=(1, 1)), 2),
            MORE: lambda: average(padded(image(B, 96, 8, 5), d1=(2, 1)), 4, 1, 1, stride=(1, 1, 1)),
            f"{MORE} # of one dimension, and no divisor": lambda: average(
                padded(inp(2, 3, 6), d2=(0, 1)), 3, stride=(2,)
            ),
            f"{MORE} # the length is not known": lambda: average(padded(image(2, 3, B, 6), d2=(0, 1)), 3, 2),
            HALF: lambda: average(padded(image(), d2=(2, 2)), 3, 3),
            f"{HALF} # with the pooling's own": lambda: average(padded(image(), d2=(1, 1)), 3, 3, padding=(1, 0)),
            "windows are cut off elsewhere": lambda: average(
                padded(inp(2, 3, 2), d2=(0, 1)), 3, stride=(2,), ceil_mode=True
            ),
            "PyTorch averages no volumes that are smaller than a window": lambda: average(
                padded(image(2, 3, 8, 8), d1=(2, 2)), 5, 1, 1, stride=(1, 1, 1)
            ),
            "PyTorch averages no volumes that are smaller than a window # perhaps": lambda: average(
                padded(image(2, 3, B, 8), d2=(1, 1)), 1, 3, 1, stride=(1, 1, 1)
            ),
            "PyTorch sums gradients of padded volumes in any order": lambda: average(
                padded(image(2, 3, 8, 8), d1=(1, 1)), 3, 1, 3, stride=(1, 1, 1)
            ),
            "# a max": lambda: largest(d2=(1, 1)),
        },
    ),
    RuleSpec(
        rules.padding_of_extreme,
        lambda: pool(padded(pointwise("relu", image(B, 3, 8, 7)), d2=(0, 1), d3=(1, 1)), "max", 3, 3, stride=(2, 2)),
        windows(rules.padding_of_extreme, ("max", "min")),
        {
            "it is not padded with one value": lambda: largest(mode="replicate", d2=(1, 1)),
            "the padding may be what is returned": lambda: largest(0.0, d2=(1, 1)),
            "the padding may be what is returned # of a min": lambda: largest(-INF, kind="min", d2=(1, 1)),
            "the padding may be what is returned # above what a relu leaves": lambda: pool(
                padded(pointwise("relu", image()), 0.5, d2=(1, 1)), "max", 3, 3
            ),
            "the padding may be what is returned # NaN": lambda: largest(float("nan"), d2=(1, 1)),
            OUTSIDE: lambda: largest(d1=(1, 1)),
            MORE: lambda: pool(padded(image(), -INF, d2=(2, 1)), "max", 4, 4, stride=(1, 1)),
            HALF: lambda: largest(d3=(2, 2)),
            "a window lies in the padding alone": lambda: pool(
                padded(image(2, 3, 2), -INF, d2=(1, 1)), "max", 2, dilation=(3,)
            ),
            "a window lies in the padding alone # the length is not known": lambda: pool(
                padded(image(2, 3, B), -INF, d2=(1, 1)), "max", 2, stride=(1,)
            ),
            "# an average": lambda: average(padded(image(), d2=(1, 1)), 2, 2),
        },
        signed_zeros=False,
    ),
]
