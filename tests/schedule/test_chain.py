"""Chains: source -> pointwise -> pool -> pointwise -> reduction, and where one ends."""

from __future__ import annotations

import sympy
import torch

from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Graph, Node, make
from fusewright.schedule.chain import Chain, Fold, Map, Window, chain_name, leaves, parse

CPU = torch.device("cpu")
F32 = torch.float32
X = make(ops.Input((2, 4, 8, 8), F32, CPU, "x", 0))
P = make(ops.Param((4, 1, 1), F32, CPU, "p"))


def pool(x: Node) -> Node:
    return make(ops.Pool("max", (2, 2), (2, 2), (0, 0), (1, 1)), x)


def fold(x: Node) -> Node:
    return make(ops.Reduce("sum", (2, 3), False), x)


def parsed(root: Node, *others: Node, source: Node = X) -> Chain | str:
    return parse(root, Graph((), (root, *others)).users(), lambda n: n is source)


def stages(root: Node) -> list[type]:
    chain = parsed(root)
    assert isinstance(chain, Chain), chain
    return [type(s) for s in chain.stages]


def test_stages_in_order() -> None:
    y = pointwise("tanh", pool(pointwise("relu", X)))
    assert stages(fold(y)) == [Map, Window, Map, Fold]
    assert stages(X) == []
    assert stages(fold(X)) == [Fold]


def test_a_tree_may_use_its_value_twice() -> None:
    y = pointwise("mul", X, pointwise("sigmoid", X))
    chain = parsed(y)
    assert isinstance(chain, Chain) and chain.operands == ()
    (stage,) = chain.stages
    assert isinstance(stage, Map) and stage.value is X and stage.root is y


def test_what_does_not_depend_on_the_value_is_an_operand() -> None:
    other = pointwise("sigmoid", P)
    y = pointwise("mul", pointwise("add", X, P), other)
    chain = parsed(y)
    assert isinstance(chain, Chain) and set(chain.operands) == {P, other}
    (stage,) = chain.stages
    assert isinstance(stage, Map) and set(leaves(stage)) == {X, P, other}


def test_numbers_are_no_operands() -> None:
    chain = parsed(pointwise("mul", X, make(ops.Number(2.0))))
    assert isinstance(chain, Chain) and chain.operands == ()


def test_another_user_ends_it() -> None:
    inner = pool(X)
    found = parsed(fold(inner), inner)
    assert isinstance(found, str) and "another user" in found
    assert isinstance(parsed(fold(inner)), Chain)
    inner = pointwise("relu", X)
    assert isinstance(parsed(fold(pool(inner)), inner), str)


def test_what_is_no_stage_is_named() -> None:
    moved = make(ops.Permute((0, 1, 3, 2)), X)
    found = parsed(fold(moved))
    assert isinstance(found, str) and "is no stage" in found


def test_numbers_that_depend_on_the_batch_end_it() -> None:
    """They are no constants of a kernel's text."""
    batch = make(ops.Number(sympy.Symbol("B", positive=True, integer=True)))
    chain = parsed(pointwise("div", pointwise("relu", X), batch))
    assert isinstance(chain, str) and "depends on a size" in chain


def test_names_say_repeated_words_once_and_stay_short() -> None:
    assert chain_name(["conv", "relu", "relu", "sum"]) == "fused_conv_relu_sum"
    assert len(chain_name(["hardswish", "tanh"] * 20)) <= 60
