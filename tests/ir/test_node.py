"""Nodes and graphs: equal ones are the same, and what is made anew is what would have been made."""

from __future__ import annotations

import pytest
import sympy
import torch

from fusewright.errors import GraphError
from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Graph, Node, make, remade

CPU, F32, F64 = torch.device("cpu"), torch.float32, torch.float64
B = sympy.Symbol("B", positive=True, integer=True)


def inp(index: int, *shape: int | sympy.Expr, dtype: torch.dtype = F32) -> Node:
    return make(ops.Input(shape, dtype, CPU, f"a{index}", index))


def param(path: str, *shape: int) -> Node:
    return make(ops.Param(shape, F32, CPU, path))


X, Y, W = inp(0, B, 4), inp(1, B, 4), param("w", 4)


def test_equal_nodes_are_the_same() -> None:
    assert pointwise("add", X, Y) is pointwise("add", X, Y) is not pointwise("add", Y, X)
    assert pointwise("mul", X, 1) is not pointwise("mul", X, 1.0)
    assert make(ops.Full((), 0.0, F32, CPU)) is not make(ops.Full((), -0.0, F32, CPU))


def test_repr_tells_operation_shape_and_dtype() -> None:
    assert repr(pointwise("add", X, Y)) == "<Pointwise (B, 4) float32>"


def test_what_varies_is_computed_from_an_input() -> None:
    fixed = pointwise("relu", pointwise("mul", W, 2.0))
    assert not fixed.varies and not W.varies
    assert X.varies and pointwise("add", pointwise("tanh", X), fixed).varies


class TestRemade:
    def test_of_the_same_arguments(self) -> None:
        node = pointwise("add", X, W)
        assert remade(node, [X, W]) is node

    @pytest.mark.parametrize(
        "other", [Y, inp(2, B, 1), inp(3, 1, 4), inp(4, B, 4, dtype=F64), W, make(ops.Number(2)), make(ops.Number(2.5))]
    )
    def test_of_others(self, other: Node) -> None:
        """As `make` makes it, whatever the type."""
        for second in (Y, make(ops.Number(3)), make(ops.Number(0.5))):
            node = pointwise("mul", X, second)
            assert remade(node, [X, other]) is make(node.op, X, other)

    def test_of_an_argument_that_is_not_there(self) -> None:
        x, w, b = inp(0, B, 3, 8, 8), param("conv.weight", 5, 3, 1, 1), param("conv.bias", 5)
        node = make(ops.Conv((1, 1), ((0, 0), (0, 0)), (1, 1)), x, w, b)
        assert remade(node, [x, w, None]) is make(node.op, x, w, None)
        assert remade(remade(node, [x, w, None]), [x, w, b]) is node

    def test_of_what_does_not_fit(self) -> None:
        with pytest.raises(GraphError):
            remade(pointwise("add", X, Y), [X, inp(5, B, 3)])

    def test_keeps_its_place(self) -> None:
        node = make(ops.Pointwise("exp"), inp(6, 2, 3), where="model.layer")
        assert remade(node, [inp(7, 2, 3)]).where == "model.layer"


def test_several_values_are_replaced_at_once() -> None:
    """By values of the old operands; those that read both are made once."""
    a, b = pointwise("exp", X), pointwise("tanh", X)
    both = pointwise("add", a, b)
    graph = Graph((X,), (both, a), symbols={})
    new, became = graph.substituted({a: pointwise("neg", X), b: Y})
    assert new.outputs == (pointwise("add", pointwise("neg", X), Y), pointwise("neg", X))
    assert became[both] is new.outputs[0]
