"""Pointwise values side by side: which are found, and the generated CUDA C++, which runs on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from codegen.cuda.test_stream_kernels import BF16, F16, F32, F64, fold, graph_of, inp, pointwise, random, reference
from emulation.emulate import ORDERS, emulate
from torch import Tensor

from fusewright.codegen.cuda.several_elements import kernel
from fusewright.ir import ops
from fusewright.ir.build import cast, reshape
from fusewright.ir.node import Node, make
from fusewright.kernel import Kernel
from fusewright.runtime import nvrtc
from fusewright.schedule.beside import readers_of
from fusewright.schedule.several_elements import SeveralElements, parse

Values = tuple[Node, ...]


def several(values: Values, root: Node | None = None, shared: Values = ()) -> SeveralElements | str:
    """What is found from `root`, the last of these values, in a graph that returns all of them; those that are `shared`
    may be computed again."""
    root = root or values[-1]
    graph = replace(graph_of(root), outputs=values)
    return parse(root, {**graph.users(), **dict.fromkeys(shared, 1)}, readers_of(graph))


def found(values: Values) -> SeveralElements:
    s = several(values)
    assert isinstance(s, SeveralElements), s
    assert set(s.results) == set(values) and s.results[0] is values[-1]
    return s


def complex_product(*shape: int, dtype: torch.dtype = F32) -> Values:
    a, b, c, d = (inp(i, *shape, dtype=dtype) for i in range(4))

    def product(p: Node, q: Node, fn: str, r: Node, s: Node) -> Node:
        return pointwise(fn, pointwise("mul", p, q), pointwise("mul", r, s))

    return product(a, c, "sub", b, d), product(a, d, "add", b, c)


def cell(*shape: int, dtype: torch.dtype = F32) -> Values:
    """The two states of a recurrent cell, the one computed from the other."""
    i, f, g, o, c = (inp(k, *shape, dtype=dtype) for k in range(5))
    kept = pointwise("mul", pointwise("sigmoid", f), c)
    state = pointwise("add", kept, pointwise("mul", pointwise("sigmoid", i), pointwise("tanh", g)))
    return state, pointwise("mul", pointwise("sigmoid", o), pointwise("tanh", state))


def functions(*shape: int, count: int = 3, dtype: torch.dtype = F32) -> Values:
    x = inp(0, *shape, dtype=dtype)
    return tuple(pointwise(fn, x) for fn in ("tanh", "exp", "sigmoid", "abs")[:count])


def of_channels(*shape: int) -> Values:
    x, w, b = inp(0, *shape), inp(1, shape[1], 1), inp(2)
    return pointwise("mul", x, w), pointwise("relu", pointwise("add", x, b))


def of_two_types(*shape: int) -> Values:
    x = inp(0, *shape)
    return pointwise("tanh", x), cast(pointwise("mul", x, 2.0), BF16)


CASES: dict[str, Callable[[], Values]] = {
    "complex product": lambda: complex_product(4, 6, 64),
    "complex product, odd": lambda: complex_product(3, 7, 5),
    "cell": lambda: cell(5, 33, 48),
    "cell, odd": lambda: cell(7, 37),
    "four": lambda: functions(3, 1000, count=4),
    "of channels": lambda: of_channels(3, 6, 40),
    "of two types": lambda: of_two_types(9, 64),
    "one element": lambda: functions(1, 1),
    "bfloat16": lambda: cell(6, 320, dtype=BF16),
    "float16": lambda: complex_product(6, 40, dtype=F16),
    "float64": lambda: cell(6, 30, dtype=F64),
}


def check(values: Values, tensors: dict[Node, Tensor] | None = None, order: str = "forward", **more: bool) -> Kernel:
    """Every result, against the same graph in float64."""
    s = found(values)
    given = tensors or {n: random(n, i) for i, n in enumerate(s.tensors)}
    made = kernel(s, "fused_test")
    for got, root in zip(emulate(made, *(given[n] for n in s.tensors), order=order, **more), s.results, strict=True):
        want, eps = reference(root, given), torch.finfo(root.dtype).eps
        assert got.dtype == root.dtype and got.shape == want.shape
        torch.testing.assert_close(got.double(), want, equal_nan=True, rtol=8 * eps, atol=8 * eps)
    return made


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    made = check(CASES[name](), order=ORDERS[len(name) % 3])
    assert len(made.launches) == 1 and not made.scratch


def test_memory_is_read_once() -> None:
    source = check(CASES["cell"]()).source
    assert all(source.count(f"load<VALUES<WIDE>>(d.{name} ") == 1 for name in ("x", "p1", "p2", "p3", "p4"))
    assert source.count("= tanh(") == 2 and source.count("= sigmoid(") == 3


def test_what_is_not_finite() -> None:
    values = CASES["cell, odd"]()
    given = {n: random(n, i) for i, n in enumerate(found(values).tensors)}
    for i, x in enumerate(given.values()):
        x[i, 5], x[i, 7], x[i, 9] = nan, inf, -inf
    check(values, given)


def test_other_batches() -> None:
    s = found(CASES["complex product"]())
    a, b, c, d = torch.randn(4, 9, 6, 20)
    given = {"a0": a, "a1": b, "a2": c, "a3": d}
    results = emulate(kernel(s, "fused_test"), *(given[n.op.name] for n in s.tensors))  # type: ignore[attr-defined]
    torch.testing.assert_close(results, (a * d + b * c, a * c - b * d))


def test_sanitizers_find_nothing() -> None:
    check(CASES["of channels"](), order="reverse", sanitize=True)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", ["cell", "four", "bfloat16", "of two types"])
def test_compiles_without_spills(name: str, arch: str) -> None:
    taken = nvrtc.resources(nvrtc.compile(kernel(found(CASES[name]()), "fused_test").source, arch)).values()
    assert all(r.stack == 0 for r in taken), taken


X, Y = inp(0, 4, 6, 300), inp(1, 4, 6, 300)
TANH, EXP = pointwise("tanh", X), pointwise("exp", X)


class TestFound:
    def test_nothing_else_is_computed_of_it(self) -> None:
        assert isinstance(several((TANH,)), str)
        assert isinstance(several((pointwise("tanh", Y), TANH)), str)
        other = pointwise("tanh", fold(X, "sum", 2, keepdim=True))
        assert isinstance(several((other, TANH)), str)

    def test_what_is_on_the_way_is_no_result(self) -> None:
        s = several((pointwise("mul", pointwise("relu", EXP), Y), TANH))
        assert isinstance(s, SeveralElements) and len(s.results) == 2 and len(s.tensors) == 2

    def test_no_root_is_on_the_way(self) -> None:
        assert isinstance(several((pointwise("relu", EXP), TANH), EXP), str)

    def test_no_operand_waits_for_a_result(self) -> None:
        """The mean of one value is read with the other."""
        mean = fold(TANH, "mean", 2, keepdim=True)
        s = several((TANH, EXP, pointwise("mul", X, mean)))
        assert isinstance(s, SeveralElements) and TANH not in s.results and EXP in s.results

    def test_what_a_rearrangement_takes_in(self) -> None:
        """A function whose results are only moved is computed while they are."""
        rolled = make(ops.Roll(((3, 1),)), EXP)
        assert isinstance(several((rolled, TANH)), str)
        assert isinstance(several((reshape(rolled, (24, 300)), TANH)), str)
        assert isinstance(several((reshape(EXP, (24, 300)), TANH)), SeveralElements)
        assert isinstance(several((rolled, EXP, TANH)), SeveralElements)

    def test_what_is_computed_again_is_no_result(self) -> None:
        """It is computed for every one that reads it, once."""
        a, b = pointwise("mul", EXP, Y), pointwise("add", EXP, 1)
        s = several((a, b), shared=(EXP,))
        assert isinstance(s, SeveralElements) and set(s.results) == {a, b} and set(s.tensors) == {X, Y}
        assert several((a, b)) == s
        assert set(several((EXP, a, b)).results) == {EXP, a, b}  # type: ignore[union-attr]

    def test_nothing_is_written_that_nobody_reads(self) -> None:
        """A value that two operations of one result read, computed again or not, and one that two results read."""
        mask = pointwise("gt", EXP, 1.0)
        chosen = pointwise("where", mask, EXP, pointwise("mul", EXP, 0.1))
        for shared in ((), (EXP,)):
            assert isinstance(several((chosen,), shared=shared), str)
            s = several((chosen, TANH), shared=shared)
            assert isinstance(s, SeveralElements) and set(s.results) == {chosen, TANH}
        a, b = pointwise("mul", EXP, Y), pointwise("add", EXP, TANH)
        s = several((a, b))
        assert isinstance(s, SeveralElements) and set(s.results) == {a, b}

    def test_so_many_at_most(self) -> None:
        values = tuple(pointwise(fn, X) for fn in ("tanh", "exp", "sigmoid", "abs", "relu", "silu"))
        s = several(values)
        assert isinstance(s, SeveralElements) and len(s.results) == 4

    def test_what_memory_does_not_hold(self) -> None:
        mask = pointwise("gt", X, 0.0)
        assert isinstance(several((mask, TANH)), str)
