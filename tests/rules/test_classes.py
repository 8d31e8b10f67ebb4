"""The class each kind of instance gets: no stronger than what holds, no weaker than what is known."""

from __future__ import annotations

from math import inf

import pytest
from harness import B, classes, fired, graph_of, inp
from linear_cases import conv, reduce
from spec_padding import padded
from spec_pooling import of, pool
from spec_views import normed

from fusewright.ir.build import pointwise as pw
from fusewright.rules import padding, pointwise, pooled_sums, pooling, sizes, views


def x():
    return inp(2, 3, 6, 4)


@pytest.mark.parametrize(
    ("rule", "build", "expected"),
    [
        (pooling.extreme_of_function, lambda: of("relu"), "exact"),
        (pooling.extreme_of_function, lambda: of("sqrt", x=pw("relu", x())), "exact"),
        (pooling.extreme_of_function, lambda: of("sigmoid"), "reassociates"),
        (pooling.extreme_of_scale, lambda: pool(pw("mul", x(), 0.3), "max", 2, 2), "exact"),
        (pooling.extreme_of_shift, lambda: pool(pw("add", x(), 0.3), "max", 2, 2), "exact"),
        (pooling.extreme_of_shift, lambda: pool(pw("add", x(), inp(3, 1, 1)), "max", 2, 2), "reassociates"),
        (pooling.max_pool_of_max_pool, lambda: pool(pool(x(), "max", 2, 2), "max", 2, 2), "exact"),
        (pooling.avg_pool_of_avg_pool, lambda: pool(pool(x(), "avg", 2, 2), "avg", 2, 2), "reassociates"),
        (pooled_sums.sum_of_pool, lambda: reduce("mean", pool(x(), "avg", 2, 2), 2, 3), "reassociates"),
        (pooling.reduction_of_reduction, lambda: reduce("max", reduce("max", x(), 2), 1), "exact"),
        (pooling.reduction_of_reduction, lambda: reduce("sum", reduce("sum", x(), 2), 1), "reassociates"),
        (padding.padding_of_conv, lambda: conv(padded(x(), d2=(1, 1)), inp(2, 3, 2, 2)), "finite"),
        (padding.padding_of_average, lambda: pool(padded(x(), d2=(1, 1)), "avg", 2, 2), "reassociates"),
        (padding.padding_of_extreme, lambda: pool(padded(x(), -inf, d2=(1, 1)), "max", 2, 2), "exact"),
        (views.pool_between_reshapes, lambda: normed(B, 1, 4, 3, 5), "reassociates"),
        (views.pool_between_reshapes, lambda: normed(B, 1, 4, 3, 5, kind="max"), "exact"),
        (sizes.single_value, lambda: reduce("min", inp(2, 1), 1), "exact"),
        (sizes.single_value, lambda: reduce("sum", inp(2, 1), 1), "reassociates"),
        (pointwise.neutral, lambda: pw("mul", x(), 1), "exact"),
        (pointwise.neutral, lambda: pw("sub", x(), 0), "exact"),
        (pointwise.neutral, lambda: pw("add", x(), -0.0), "exact"),
        (pointwise.neutral, lambda: pw("add", x(), 0.0), "reassociates"),
        (pointwise.neutral, lambda: pw("sub", x(), -0.0), "reassociates"),
        (pointwise.even_of_negated, lambda: pw("square", pw("neg", x())), "exact"),
        (pointwise.even_of_negated, lambda: pw("cos", pw("neg", x())), "reassociates"),
        (pointwise.repeated, lambda: pw("floor", pw("floor", x())), "exact"),
        (pointwise.clip_of_clip, lambda: pw("relu6", pw("relu", x())), "exact"),
        (pointwise.scale_of_scale, lambda: pw("mul", pw("mul", x(), 0.1), 0.1), "reassociates"),
        (pointwise.shift_of_shift, lambda: pw("add", pw("add", x(), 0.1), 0.1), "reassociates"),
        (pointwise.zero, lambda: pw("mul", x(), 0.0), "finite"),
    ],
)
def test_class(rule, build, expected):
    assert classes(fired(rule, graph_of(build()))) == {expected}
