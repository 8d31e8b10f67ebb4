"""Specs for `fusewright.rules.pooling`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import B, RuleSpec, graph_of, inp, param, run
from hypothesis import assume
from hypothesis import strategies as st

from fusewright.errors import GraphError
from fusewright.ir import ops
from fusewright.ir.build import pointwise as pw
from fusewright.ir.node import Node, make
from fusewright.rules import pooling as rules
from fusewright.rules.linear import reduced_dims
from fusewright.rules.rule import Rule

Draw = Callable[[st.SearchStrategy[Any]], Any]


def pool(x: Node, kind: str, *kernel: int, **options: Any) -> Node:
    """A pooling; options are tuples per dimension."""
    n = len(kernel)
    given = {"stride": kernel, "padding": (0,) * n, "dilation": (1,) * n, **options}
    return make(ops.Pool(kind, kernel, **given), x)  # type: ignore[arg-type]


def reduce(x: Node, kind: str, *dims: int, keepdim: bool = False, dtype: torch.dtype | None = None) -> Node:
    return make(ops.Reduce(kind, dims, keepdim, dtype=dtype), x)  # type: ignore[arg-type]


def first(x: Node, dim: int) -> Node:
    return make(ops.Reduce("max", (dim,), first=True), x)


TWO = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def windows(draw: Draw, kinds: tuple[str, ...] = ("max", "min")) -> Callable[[Node], Node]:
    """A pooling of the last dimensions, or a reduction over any."""
    kind = draw(st.sampled_from(kinds))
    if draw(st.booleans()):
        kernel = draw(TWO)
        options = {
            "stride": draw(TWO),
            "padding": tuple(draw(st.integers(0, k // 2)) for k in kernel),
            "dilation": (1, 1) if kind == "avg" else draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        }
        ceil_mode = draw(st.booleans())

        def pooled(x: Node) -> Node:
            cut = {name: values[: x.ndim - 2] for name, values in options.items()}
            return pool(x, kind, *kernel[: x.ndim - 2], **cut, ceil_mode=ceil_mode)

        return pooled
    dims = draw(st.sampled_from([(0,), (1,), (2,), (1, 2), (0, 2), (0, 1, 2)]))
    keepdim = draw(st.booleans())
    return lambda x: reduce(x, kind, *dims, keepdim=keepdim)


def over(window: Callable[[Node], Node], x: Node) -> Node:
    """The window over x, where it fits."""
    try:
        root = window(x)
    except GraphError:
        assume(False)
    assume(all(not isinstance(d, int) or d > 0 for d in root.shape))
    return root


INPUTS = st.sampled_from([(B, 2, 6, 5), (2, 3, 7, 4), (1, 1, 4, 9), (B, 3, 7)]).map(lambda shape: inp(*shape))
FUNCTIONS: list[tuple[str, tuple[Any, ...], str | None]] = [
    ("relu", (), None), ("relu6", (), None), ("hardtanh", (-0.5, 1.0), None), ("leaky_relu", (0.1,), None),
    ("sigmoid", (), None), ("tanh", (), None), ("exp", (), None), ("elu", (1.0,), None), ("softplus", (), None),
    ("neg", (), None), ("sqrt", (), "square"), ("sqrt", (), "sigmoid"), ("log1p", (), "relu"), ("square", (), "abs"),
    ("pow", (3,), None), ("pow", (2,), "relu"), ("floor", (), None), ("hardsigmoid", (), None), ("selu", (), None),
    ("threshold", (0.5, 0.2), None), ("log", (), "relu6"), ("silu", (), "tanh"), ("mish", (), "softplus"),
    ("hardswish", (), "hardswish"), ("gelu", (), "sigmoid"), ("sin", (), "softsign"), ("cos", (), "sigmoid"),
]  # fmt: skip


def again(root: Node, x: Node) -> Node:
    """The window of `root` over another operand."""
    return make(root.op, x)


@st.composite
def functions(draw: Draw) -> Node:
    fn, params, before = draw(st.sampled_from(FUNCTIONS))
    x = draw(INPUTS)
    root = over(draw(windows()), pw(fn, x if before is None else pw(before, x), params=params))
    ones = torch.ones([2 if d == B else d for d in root.arg(0).shape])
    seen = run(graph_of(again(root, inp(*ones.shape, dtype=torch.float32))), [ones])[0]
    assume(bool((seen == 1).all()))  # a window of padding alone shows an infinity
    return root


@st.composite
def scales(draw: Draw) -> Node:
    x, c = draw(INPUTS), draw(st.sampled_from([2, 0.5, -3.0, 0.1, -7]))
    scaled = draw(st.sampled_from([lambda: pw("mul", x, c), lambda: pw("mul", c, x), lambda: pw("div", x, c)]))()
    return over(draw(windows()), scaled)


@st.composite
def shifts(draw: Draw) -> Node:
    x, window = draw(INPUTS), draw(windows())
    root = over(window, x)
    dims = reduced_dims(root)
    shape = [1 if d in dims or draw(st.booleans()) else n for d, n in enumerate(x.shape)]
    b = draw(st.sampled_from([1.5, -2, inp(*shape), inp(*shape), inp()]))
    fn, swapped = draw(st.sampled_from(["add", "sub"])), draw(st.booleans())
    return over(window, pw(fn, b, x) if swapped else pw(fn, x, b))


@st.composite
def pools_of_pools(draw: Draw, kinds: tuple[str, ...]) -> Node:
    kind = draw(st.sampled_from(kinds))
    n = draw(st.integers(1, 2))

    def each(values: list[int]) -> tuple[int, ...]:
        return tuple(draw(st.sampled_from(values)) for _ in range(n))

    inner = draw(st.sampled_from([(2, 1), (3, 2), (2, 2), (3, 3), (1, 1), (4, 2)])), draw(st.booleans())
    (k, s), padded = inner
    if kind == "avg":
        s = k
    dilation = (1,) * n if kind == "avg" else each([1, 1, 2])
    padding = (k // 2 if padded else 0,) * n
    divisor = draw(st.sampled_from([None, 3])) if kind == "avg" and n == 2 else None
    x = inp(draw(st.sampled_from([B, 2])), 2, *(13, 17)[:n])
    options = {"stride": (s,) * n, "padding": padding, "dilation": dilation, "divisor": divisor}
    options["count_include_pad"] = padded or draw(st.booleans())
    first = pool(x, kind, *(k,) * n, **options)
    spread = (1,) * n if kind == "avg" else each([1, 2])
    root = over(lambda x: pool(x, kind, *each([1, 2, 3]), stride=each([1, 2, 3]), dilation=spread), first)
    if divisor and draw(st.booleans()):
        return make(ops.Pool("avg", (1,) * n, (2,) * n, (0,) * n, (1,) * n, divisor=3), first)
    assume(kind == "avg" or all((s * d) % e == 0 and s * d // e <= k for d, e in zip(spread, dilation, strict=True)))
    return root


@st.composite
def reductions(draw: Draw) -> Node:
    kind = draw(st.sampled_from(["sum", "mean", "max", "min", "prod", "logsumexp"]))
    inner = reduce(draw(INPUTS), kind, *draw(st.sampled_from([(0,), (1, 2), (1,), (2,)])), keepdim=draw(st.booleans()))
    dims = draw(st.sampled_from([(0,), (1,), (0, 1)]))
    assume(max(dims) < inner.ndim)
    return reduce(inner, kind, *dims, keepdim=draw(st.booleans()))


@st.composite
def sums_and_means(draw: Draw) -> Node:
    kinds = draw(st.sampled_from([("sum", "mean"), ("mean", "sum")]))
    x = draw(INPUTS)
    inner = reduce(x, kinds[0], *draw(st.sampled_from([(1, 2), (1,), (2,)])), keepdim=draw(st.booleans()))
    assume(all(isinstance(x.shape[d], int) for d in inner.op.dims))  # type: ignore[attr-defined]
    dims = draw(st.sampled_from([(0,), (1,), (0, 1)]))
    assume(max(dims) < inner.ndim)
    return reduce(inner, kinds[1], *dims, keepdim=draw(st.booleans()))


@st.composite
def extremes_of_pools(draw: Draw) -> Node:
    """A max over any dimensions of windows of its own kind."""
    kind, n = draw(st.sampled_from(["max", "min"])), draw(st.integers(1, 2))
    known = draw(st.sampled_from([5, 6, 7, 12, 13]))
    shape = (draw(st.sampled_from([B, 2])), 2, known, draw(st.sampled_from([8, 9, 10])))[: 2 + n]
    kernel, stride = (tuple(draw(st.integers(1, 4)) for _ in range(n)) for _ in "ks")
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    dilation = tuple(draw(st.sampled_from([1, 1, 2])) for _ in range(n))
    options = {"stride": stride, "padding": padding, "dilation": dilation, "ceil_mode": draw(st.booleans())}
    dims = draw(st.sampled_from([(1,), (2,), (1, 2), (0, 2), (2, 3), (0, 1, 2, 3), (1, 3), (3,)]))
    assume(max(dims) < 2 + n)
    keepdim = draw(st.booleans())
    return over(lambda x: reduce(pool(x, kind, *kernel, **options), kind, *dims, keepdim=keepdim), inp(*shape))


def taken(rule: Rule, roots: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    """Those that a rule is for."""

    def fires(root: Node) -> bool:
        match = rule.pattern.match(root)
        return match is not None and rule.condition(match) is None

    return roots.filter(fires)


def image(*shape: Any, dtype: torch.dtype = torch.float64) -> Node:
    return inp(*(shape or (B, 3, 6, 4)), dtype=dtype)


def of(fn: str, *params: Any, x: Node | None = None, kind: str = "max", **options: Any) -> Node:
    return pool(pw(fn, x if x is not None else image(), params=params), kind, 2, 2, **options)


HOLE = {"padding": (1, 1), "dilation": (2, 2), "stride": (1, 1)}  # over length 1, the window sees padding only
WHOLE = torch.int64

SPECS = [
    RuleSpec(
        rules.extreme_of_function,
        lambda: of("relu"),
        functions(),
        {
            "gelu is not monotone on all values it may get": lambda: of("gelu"),
            "silu is not monotone on all values it may get # below where it rises": lambda: of(
                "silu", x=pw("clamp", image(), params=(-1.3, 2.0))
            ),
            "cos is not monotone on all values it may get # beyond where it falls": lambda: of(
                "cos", x=pw("clamp", image(), params=(0.0, 3.15))
            ),
            "leaky_relu is not monotone # falling part": lambda: of("leaky_relu", -0.1),
            "elu is not monotone # falling part": lambda: of("elu", -1.0),
            "threshold is not monotone # value above the threshold": lambda: of("threshold", 1.0, 2.0),
            "square is not monotone on all values it may get": lambda: of("square"),
            "sqrt is not monotone on all values it may get": lambda: of("sqrt"),
            "reciprocal is not monotone on all values it may get # 1 / -0": lambda: of(
                "reciprocal", x=pw("relu", image())
            ),
            "sign of NaN is not NaN": lambda: of("sign"),
            "leaky_relu of an infinity is NaN": lambda: of("leaky_relu", 0.0),
            "softsign of an infinity is NaN": lambda: of("softsign"),
            "a window lies in the padding alone": lambda: of("relu", x=image(2, 3, 1, 1), **HOLE),
            "a window lies in the padding alone # on both sides": lambda: pool(
                pw("relu", image(2, 3, 2)), "max", 2, padding=(1,), dilation=(3,), stride=(1,)
            ),
            "a window lies in the padding alone # the length is not known": lambda: pool(
                pw("relu", image(2, 3, B)), "max", 2, padding=(1,)
            ),
            "the values are not floating point # whole numbers": lambda: of("relu", x=image(dtype=WHOLE)),
            "the values are not floating point # turned into floats": lambda: of("sigmoid", x=image(dtype=WHOLE)),
            "# two operands": lambda: pool(pw("maximum", image(), image()), "max", 2, 2),
            "# an average": lambda: of("relu", kind="avg"),
            "# a sum": lambda: reduce(pw("relu", image()), "sum", 1),
        },
        signed_zeros=False,
    ),
    RuleSpec(
        rules.extreme_of_scale,
        lambda: pool(pw("mul", image(), -0.5), "max", 2, 2),
        scales(),
        {
            "the scale is zero, not finite or not normal # zero": lambda: pool(pw("mul", image(), 0.0), "max", 2, 2),
            "the scale is zero, not finite or not normal # inf": lambda: pool(
                pw("mul", image(), torch.inf), "max", 2, 2
            ),
            "the scale is zero, not finite or not normal # nan": lambda: pool(
                pw("div", image(), torch.nan), "max", 2, 2
            ),
            "the scale is zero, not finite or not normal # small": lambda: pool(
                pw("mul", image(), 1e-310), "max", 2, 2
            ),
            "the scale is zero, not finite or not normal # large": lambda: pool(
                pw("mul", image(dtype=torch.float16), 1e5), "max", 2, 2
            ),
            "the scale is not known at plan time": lambda: pool(pw("mul", image(), B), "max", 2, 2),
            "the values are not floating point # whole numbers": lambda: pool(
                pw("mul", image(dtype=WHOLE), 2), "max", 2, 2
            ),
            "the values are not floating point # turned into floats": lambda: reduce(
                pw("mul", image(dtype=WHOLE), 0.5), "max", 2
            ),
            "# a number divided by x": lambda: pool(pw("div", 2.0, image()), "max", 2, 2),
            "# a tensor of unknown sign": lambda: pool(pw("mul", image(), param(3, 1, 1)), "max", 2, 2),
            "# an average": lambda: pool(pw("mul", image(), 2.0), "avg", 2, 2),
        },
        signed_zeros=False,
    ),
    RuleSpec(
        rules.extreme_of_shift,
        lambda: pool(pw("add", image(), inp(3, 1, 1)), "max", 2, 2),
        shifts(),
        {
            "the added value varies within a window": lambda: pool(pw("add", image(), inp(3, 1, 4)), "max", 2, 2),
            "the added value varies within a window # along a reduced dimension": lambda: reduce(
                pw("sub", image(), inp(3, 1, 1)), "max", 1
            ),
            "the added value varies within a window # both broadcast": lambda: reduce(
                pw("add", inp(3, 1), inp(1, 4)), "max", 0, 1
            ),
            "the added number is not finite # inf": lambda: pool(pw("add", image(), torch.inf), "max", 2, 2),
            "the added number is not finite # nan": lambda: reduce(pw("sub", torch.nan, image()), "max", 2),
            "the values are not floating point # whole numbers": lambda: reduce(
                pw("add", image(dtype=WHOLE), 1), "max", 2
            ),
            "the values are not floating point # turned into floats": lambda: reduce(
                pw("add", image(dtype=WHOLE), 0.5), "max", 2
            ),
            "# a product": lambda: pool(pw("mul", image(), inp(3, 1, 1)), "max", 2, 2),
            "# an average": lambda: pool(pw("add", image(), 1.0), "avg", 2, 2),
        },
        signed_zeros=False,
    ),
    RuleSpec(
        rules.max_pool_of_max_pool,
        lambda: pool(pool(image(B, 2, 13, 11), "max", 3, 3, stride=(2, 2), padding=(1, 0)), "max", 2, 3),
        pools_of_pools(("max", "min")),
        {
            "the two pool differently # kinds": lambda: pool(pool(image(), "min", 2, 2), "max", 2, 2),
            "the two pool differently # an average": lambda: pool(pool(image(), "avg", 2, 2), "max", 2, 2),
            "the two pool differently # dimensions": lambda: pool(pool(image(), "max", 2, 2), "max", 2),
            "the inner windows leave gaps # stride": lambda: pool(
                pool(image(2, 2, 13, 13), "max", 1, 1, stride=(2, 2)), "max", 2, 2
            ),
            "the inner windows leave gaps # dilation": lambda: pool(
                pool(image(2, 2, 13, 13), "max", 3, 3, dilation=(2, 2), stride=(1, 1)), "max", 2, 2
            ),
            "the inner windows leave gaps # one dimension": lambda: pool(
                pool(image(2, 2, 13, 13), "max", 2, 1, stride=(2, 2)), "max", 2, 2
            ),
            "the outer pooling is padded": lambda: pool(pool(image(), "max", 2, 2), "max", 2, 2, padding=(1, 0)),
            "a pooling rounds its length up # outer": lambda: pool(
                pool(image(), "max", 2, 2), "max", 2, 2, ceil_mode=True
            ),
            "a pooling rounds its length up # inner": lambda: pool(
                pool(image(), "max", 2, 2, ceil_mode=True), "max", 2, 2
            ),
            "# the outer one is an average": lambda: pool(pool(image(), "max", 2, 2), "avg", 2, 2),
        },
        signed_zeros=False,
    ),
    RuleSpec(
        rules.avg_pool_of_avg_pool,
        lambda: pool(pool(image(B, 2, 16, 12), "avg", 2, 4, padding=(1, 2)), "avg", 2, 2, stride=(1, 2)),
        pools_of_pools(("avg",)),
        {
            "the two pool differently # kinds": lambda: pool(pool(image(), "max", 2, 2), "avg", 2, 2),
            "the two pool differently # dimensions": lambda: pool(pool(image(), "avg", 2, 2), "avg", 2),
            "the inner windows overlap or leave gaps": lambda: pool(
                pool(image(), "avg", 2, 2, stride=(2, 1)), "avg", 2, 2
            ),
            "the inner pooling counts its padding out": lambda: pool(
                pool(image(), "avg", 2, 2, padding=(1, 0), count_include_pad=False), "avg", 2, 2
            ),
            "the outer pooling is padded": lambda: pool(pool(image(), "avg", 2, 2), "avg", 2, 2, padding=(0, 1)),
            "a pooling rounds its length up # outer": lambda: pool(
                pool(image(), "avg", 2, 2), "avg", 2, 2, ceil_mode=True
            ),
            "a pooling rounds its length up # inner": lambda: pool(
                pool(image(), "avg", 2, 2, ceil_mode=True), "avg", 2, 2
            ),
            "# the outer one is a max": lambda: pool(pool(image(), "avg", 2, 2), "max", 2, 2),
        },
    ),
    RuleSpec(
        rules.extreme_of_pool,
        lambda: reduce(pool(image(B, 2, 13, 12), "max", 4, 6, stride=(2, 3), padding=(1, 0)), "max", 1, 2, 3),
        taken(rules.extreme_of_pool, extremes_of_pools()),
        {
            "the two reduce differently # kinds": lambda: reduce(pool(image(), "min", 2, 2), "max", 2, 3),
            "the two reduce differently # an average": lambda: reduce(pool(image(), "avg", 2, 2), "max", 2, 3),
            "no smaller windows cover the same # other dimensions are reduced": lambda: reduce(
                pool(image(), "max", 2, 1, stride=(1, 1)), "max", 1, 3
            ),
            "no smaller windows cover the same # they leave gaps": lambda: reduce(
                pool(image(), "max", 1, 1, stride=(2, 3)), "max", 2, 3
            ),
            "no smaller windows cover the same # spread": lambda: reduce(
                pool(image(), "max", 2, 2, stride=(1, 1), dilation=(2, 2)), "max", 2, 3
            ),
            "no smaller windows cover the same # they stop short of the end": lambda: reduce(
                pool(image(2, 3, 8, 8), "max", 3, 3), "max", 2, 3
            ),
            "no smaller windows cover the same # smaller ones go on": lambda: reduce(
                pool(image(2, 3, 8, 8), "max", 3, 3, stride=(2, 2), padding=(0, 0)), "max", 2, 3
            ),
            "no smaller windows cover the same # lengths unknown": lambda: reduce(
                pool(image(2, 3, B, B), "max", 4, 4, stride=(2, 2)), "max", 2, 3
            ),
            "# a window over windows": lambda: pool(pool(image(), "max", 2, 2), "max", 2, 2),
        },
        signed_zeros=False,
    ),
    RuleSpec(
        rules.channels_before_extreme,
        lambda: reduce(pool(image(B, 3, 13, 12), "max", 4, 3, stride=(2, 3), padding=(1, 0)), "max", 1, 2),
        taken(rules.channels_before_extreme, extremes_of_pools()),
        {
            "the two reduce differently # kinds": lambda: reduce(pool(image(), "min", 2, 2, stride=(1, 1)), "max", 1),
            "# an index": lambda: reduce(pool(image(), "max", 2, 2, stride=(1, 1)), "argmax", 1),
            "all reduced dimensions are pooled": lambda: reduce(pool(image(), "max", 2, 2, stride=(1, 1)), "max", 2, 3),
            "the windows lie apart": lambda: reduce(pool(image(), "max", 2, 2), "max", 1),
            "the windows lie apart # and leave gaps": lambda: reduce(
                pool(image(), "max", 2, 2, stride=(3, 2)), "max", 0, 1
            ),
            "the windows lie apart # and reach between others": lambda: reduce(
                pool(image(), "max", 2, 2, stride=(2, 2), dilation=(3, 1)), "max", 1
            ),
        },
        lambda: first(pool(image(2, 3, 7, 6), "max", 3, 3, stride=(2, 2)), 1),
        signed_zeros=False,
    ),
    RuleSpec(
        rules.reduction_of_reduction,
        lambda: reduce(reduce(image(B, 4, 8, 3), "mean", 2), "mean", 1, keepdim=True),
        reductions(),
        {
            "the two reduce differently": lambda: reduce(reduce(image(), "max", 2), "min", 1),
            "the two reduce differently # not its own merger": lambda: reduce(reduce(image(), "var", 2), "var", 1),
            "the two sum in different dtypes": lambda: reduce(
                reduce(image(dtype=torch.float32), "sum", 2), "sum", 1, dtype=torch.float64
            ),
            "the gradient goes to the first of several": lambda: reduce(first(image(), 2), "max", 1),
            "the gradient goes to the first of several # of the outer": lambda: first(reduce(image(), "max", 2), 1),
            "# a single reduction": lambda: reduce(image(), "sum", 2),
        },
        signed_zeros=False,
    ),
    RuleSpec(
        rules.sum_and_mean,
        lambda: reduce(reduce(image(B, 4, 8, 3), "sum", 2), "mean", 1, keepdim=True),
        sums_and_means(),
        {
            "they are no sum and a mean": lambda: reduce(reduce(image(), "sum", 2), "sum", 1),
            "they are no sum and a mean # a maximum": lambda: reduce(reduce(image(), "max", 2), "mean", 1),
            "a sum of everything is rounded to few digits, and may be too large": lambda: reduce(
                reduce(image(dtype=torch.float16), "mean", 2), "sum", 1
            ),
            "the length of a reduced dimension is not known": lambda: reduce(reduce(image(), "sum", 0), "mean", 1),
            "a reduced dimension is empty": lambda: reduce(reduce(inp(2, 0, 5), "sum", 1), "mean", 1),
            "sums in another dtype than its operand's": lambda: reduce(
                reduce(image(dtype=torch.float32), "sum", 2, dtype=torch.float64), "mean", 1
            ),
            "they sum in two dtypes": lambda: reduce(
                reduce(image(dtype=torch.float32), "sum", 2), "mean", 1, dtype=torch.float64
            ),
            "# a single reduction": lambda: reduce(image(), "sum", 2),
        },
        signed_zeros=False,
    ),
]
