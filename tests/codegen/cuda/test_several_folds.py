"""Several reductions in one pass: which are found, and the generated CUDA C++, which runs on the CPU."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from codegen.cuda.test_stream_kernels import (
    BF16,
    CPU,
    F16,
    F32,
    F64,
    cast,
    fold,
    graph_of,
    inp,
    pointwise,
    pool,
    random,
    reference,
)
from emulation.emulate import emulate
from torch import Tensor

from fusewright.codegen.cpu import options as cpu_options
from fusewright.codegen.cuda.several_folds import kernel
from fusewright.ir import ops
from fusewright.ir.node import Node, make
from fusewright.kernel import Kernel
from fusewright.runtime import nvrtc
from fusewright.schedule.beside import readers_of
from fusewright.schedule.group import Group
from fusewright.schedule.several_folds import SeveralFolds, parse, parse_beside

ORDERS = ("forward", "reverse", "shuffled")


def several(root: Node, shared: tuple[Node, ...] = ()) -> SeveralFolds | str:
    """What is found where those that are `shared` may be computed again."""
    return parse(root, {**graph_of(root).users(), **dict.fromkeys(shared, 1)})


def found(root: Node) -> SeveralFolds:
    s = several(root)
    assert isinstance(s, SeveralFolds), s
    return s


def overlap(x: Node, t: Node, *dims: int) -> Node:
    """A loss by the share of what two have in common."""
    p = pointwise("sigmoid", x)
    both, own = fold(pointwise("mul", p, t), "sum", *dims), fold(p, "sum", *dims)
    return pointwise("sub", 1, pointwise("div", pointwise("add", both, 1), pointwise("add", own, 3)))


def of_kinds(x: Node, *dims: int, kinds: tuple[str, ...], keepdim: bool = False) -> Node:
    """Reductions of functions of x, added up."""
    functions = ("tanh", "abs", "sigmoid", "square")
    root, *others = (
        fold(pointwise(f, x), kind, *dims, keepdim=keepdim) for f, kind in zip(functions, kinds, strict=False)
    )
    for other in others:
        root = pointwise("add", root, other)
    return root


CASES: dict[str, Callable[[], Node]] = {
    "rows": lambda: overlap(inp(0, 5, 300), inp(1, 5, 300), 1),
    "odd rows": lambda: overlap(inp(0, 7, 131), inp(1, 131), 1),
    "long rows, in parts": lambda: overlap(inp(0, 2, 3, 4096), inp(1, 3, 4096), 1, 2),
    "all": lambda: overlap(inp(0, 3, 5000), inp(1, 3, 5000), 0, 1),
    "columns": lambda: overlap(inp(0, 9, 64), inp(1, 9, 64), 0),
    "columns, in parts": lambda: overlap(inp(0, 700, 20), inp(1, 700, 1), 0),
    "a batch of channels": lambda: overlap(inp(0, 2, 33, 10), inp(1, 33, 1), 1),
    "other kinds": lambda: of_kinds(inp(0, 4, 260), 1, kinds=("max", "norm", "mean")),
    "kinds of two numbers": lambda: of_kinds(inp(0, 2, 20000), 1, kinds=("logsumexp", "min", "logsumexp", "sum")),
    "spreads of columns": lambda: of_kinds(inp(0, 40, 36), 0, kinds=("std", "mean", "var")),
    "spreads of columns, in parts": lambda: of_kinds(inp(0, 900, 12), 0, kinds=("mean", "std"), keepdim=True),
    "dimensions kept": lambda: of_kinds(inp(0, 2, 6, 50), 1, kinds=("mean", "logsumexp"), keepdim=True),
    "bfloat16": lambda: overlap(inp(0, 6, 320, dtype=BF16), inp(1, 6, 320, dtype=BF16), 1),
    "float16": lambda: overlap(inp(0, 320, 8, dtype=F16), inp(1, 320, 8, dtype=F16), 0),
    "an index of rows": lambda: with_index(inp(0, 5, 300), 1),
    "a quotient of indices": lambda: pointwise(
        "add",
        pointwise("div", *(fold(pointwise("sin", inp(0, 40, 64)), k, 1) for k in ("argmax", "argmin"))),
        fold(inp(0, 40, 64), "sum", 1),
    ),
    "an index of columns, in parts": lambda: with_index(inp(0, 900, 12), 0),
    "an index of long rows, in parts": lambda: with_index(inp(0, 2, 20_003), 1),
    "float64": lambda: overlap(inp(0, 6, 320, dtype=F64), inp(1, 320, dtype=F64), 1),
    "halves of rows": lambda: halves(inp(0, 5, 64), 32),
    "odd halves of rows": lambda: halves(inp(0, 7, 37), 13),
    "halves of long rows, in parts": lambda: halves(inp(0, 2, 30_000), 15_000),
}


def cut(x: Node, begin: int, length: int) -> Node:
    return make(ops.Slice(1, begin, begin + length), x)


def halves(x: Node, length: int) -> Node:
    return overlap(cut(x, 0, length), cut(x, length, length), 1)


def with_index(x: Node, *dims: int) -> Node:
    """A maximum and where it is, added up."""
    place = cast(fold(pointwise("abs", x), "argmax", *dims), x.dtype)
    return pointwise("add", fold(pointwise("abs", x), "max", *dims), place)


def check(root: Node, tensors: dict[Node, Tensor] | None = None, order: str = "forward") -> Kernel:
    """Against the same graph in float64."""
    s = found(root)
    given = tensors or {n: random(n, i) for i, n in enumerate(s.tensors)}
    made, want = kernel(s, "fused_test"), reference(root, given)
    got = emulate(made, *(given[n] for n in s.tensors), order=order)
    assert got.dtype == root.dtype and got.shape == want.shape
    torch.testing.assert_close(got.double(), want, equal_nan=True, rtol=8 * torch.finfo(root.dtype).eps, atol=1e-5)
    return made


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    made = check(CASES[name](), order=ORDERS[zlib.crc32(name.encode()) % 3])
    assert len(made.launches) == 1 + ("part" in name or name in ("all", "kinds of two numbers"))


def test_memory_is_read_once() -> None:
    source = check(CASES["long rows, in parts"]()).source
    assert source.count("load<VALUES<WIDE>>(d.x") == source.count("= sigmoid(") == 1


def test_other_batches() -> None:
    s = found(CASES["rows"]())
    x, t = torch.randn(2, 11, 77)
    given = {"a0": x, "a1": t}
    got = emulate(kernel(s, "fused_test"), *(given[n.op.name] for n in s.tensors))  # type: ignore[attr-defined]
    p = x.sigmoid()
    torch.testing.assert_close(got, 1 - ((p * t).sum(1) + 1) / (p.sum(1) + 3))


def test_what_is_not_finite() -> None:
    root = CASES["odd rows"]()
    given = {n: random(n, i) for i, n in enumerate(found(root).tensors)}
    (x,) = (given[n] for n in given if n.ndim == 2)
    x[0, 5], x[1, 7], x[2, 9] = nan, inf, -inf
    check(root, given)


def test_sanitizers_find_nothing() -> None:
    s = found(CASES["columns, in parts"]())
    emulate(kernel(s, "fused_test"), *(random(n, i) for i, n in enumerate(s.tensors)), order="reverse", sanitize=True)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", ["long rows, in parts", "kinds of two numbers", "columns", "bfloat16"])
def test_compiles_without_spills(name: str, arch: str) -> None:
    taken = nvrtc.resources(nvrtc.compile(kernel(found(CASES[name]()), "fused_test").source, arch)).values()
    assert all(r.stack == 0 for r in taken), taken


X, Y, Z = inp(0, 4, 6, 300), inp(1, 4, 6, 300), inp(0, 4, 300, 300)
REFUSED: dict[str, Callable[[], Node]] = {
    "is made of no results": lambda: fold(X, "sum", 2),
    "over the same dimensions": lambda: pointwise("add", fold(X, "sum", 2), 1),
    "over the same dimensions # others": lambda: pointwise("add", fold(Z, "sum", 2), fold(Z, "sum", 1)),
    "over the same dimensions # many": lambda: pointwise("add", of_kinds(X, 2, kinds=("sum",) * 4), fold(X, "sum", 2)),
    "no two reductions read the same": lambda: pointwise("div", fold(X, "sum", 2), fold(Y, "sum", 2)),
    "of more than pointwise": lambda: of_kinds(pool(X, "max", (2,)), 2, kinds=("sum", "max")),
    "has no gradient": lambda: pointwise("div", fold(X, "argmax", 2), fold(X, "argmin", 2)),
    "no reduction of a stream": lambda: pointwise("add", fold(X, "prod", 2), fold(X, "sum", 2)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused(reason: str) -> None:
    why = several(REFUSED[reason]())
    assert isinstance(why, str) and reason.partition(" #")[0] in why


def test_what_others_use_is_in_memory() -> None:
    """A result, and a value, unless it may be computed again."""
    p = pointwise("sigmoid", X)
    a, b = fold(pointwise("mul", p, Y), "sum", 2), fold(p, "sum", 2)
    root, outside = pointwise("div", a, b), pointwise("exp", p)
    users = graph_of(pointwise("add", pointwise("mul", fold(outside, "sum", 2), root), 0)).users()
    s = parse(root, users)
    assert isinstance(s, SeveralFolds) and s.tensors == (p, Y)
    s = parse(root, {**users, p: 1})
    assert isinstance(s, SeveralFolds) and set(s.tensors) == {X, Y}
    assert isinstance(parse(root, {**users, b: 2}), str)


def kinds(x: Node, *dims: int, of: tuple[str, ...] = ("mean", "max"), keepdim: bool = False) -> tuple[Node, ...]:
    return tuple(fold(x, kind, *dims, keepdim=keepdim) for kind in of)


BESIDE: dict[str, Callable[[], tuple[Node, ...]]] = {
    "rows": lambda: kinds(inp(0, 5, 300), 1),
    "odd rows": lambda: kinds(pointwise("mul", inp(0, 7, 131), inp(1, 131)), 1),
    "long rows, in parts": lambda: kinds(inp(0, 2, 3, 4096), 1, 2, of=("sum", "logsumexp")),
    "all": lambda: kinds(inp(0, 3, 5000), 0, 1, of=("min", "max", "mean")),
    "columns": lambda: kinds(inp(0, 3, 12, 40), 1, keepdim=True),
    "columns, in parts": lambda: kinds(inp(0, 700, 20), 0, of=("norm", "mean")),
    "wide columns of four": lambda: kinds(inp(0, 64, 64, dtype=BF16), 0, of=("logsumexp", "norm", "mean", "max")),
    "with what is made of each": lambda: (
        pointwise("sqrt", fold(pointwise("square", inp(0, 6, 260)), "sum", 1)),
        pointwise("add", pointwise("mul", fold(inp(0, 6, 260), "mean", 1), 2.0), make(ops.Full((6,), 1.5, F32, CPU))),
        pointwise("mul", fold(inp(0, 6, 260), "max", 1), make(ops.Param((6,), F32, CPU, "weight"))),
    ),
    "products": lambda: (
        fold(pointwise("mul", inp(0, 4, 200), inp(1, 4, 200)), "sum", 1),
        fold(pointwise("square", inp(1, 4, 200)), "sum", 1),
    ),
    "float64": lambda: kinds(inp(0, 6, 320, dtype=F64), 1, of=("sum", "min")),
    "deviations of columns": lambda: kinds(inp(0, 9, 64), 0, of=("std", "mean")),
    "spreads of columns, in parts": lambda: kinds(inp(0, 3, 700, 20), 1, of=("mean", "var", "max"), keepdim=True),
    "spreads in bfloat16": lambda: kinds(inp(0, 70, 64, dtype=BF16), 0, of=("mean", "std")),
    "many numbers of columns, in parts": lambda: kinds(inp(0, 700, 64), 0, of=("var", "std", "logsumexp", "mean")),
    "many numbers of odd columns, in parts": lambda: kinds(inp(0, 2500, 9, dtype=BF16), 0, of=("var", "std")),
    "many numbers in float64, in parts": lambda: kinds(
        inp(0, 700, 64, dtype=F64), 0, of=("var", "std", "logsumexp", "norm")
    ),
}
MANY = [name for name in BESIDE if name.startswith("many numbers")]


class TestBeside:
    """Reductions that have a result each."""

    @staticmethod
    def several(values: tuple[Node, ...], shared: tuple[Node, ...] = ()) -> SeveralFolds | str:
        graph = replace(graph_of(values[-1]), outputs=values)
        users = {**graph.users(), **dict.fromkeys(shared, 1)}
        return parse_beside(values[-1], users, readers_of(graph))

    @pytest.mark.parametrize("name", BESIDE)
    def test_case(self, name: str) -> None:
        values = BESIDE[name]()
        s = self.several(values)
        assert isinstance(s, SeveralFolds) and set(s.results) == set(values) and s.results[0] is values[-1]
        given = {n: random(n, i) for i, n in enumerate(s.tensors)}
        made = kernel(s, "fused_test")
        assert len(made.launches) == 1 + ("part" in name or name == "all")
        results = emulate(made, *(given[n] for n in s.tensors), order=ORDERS[len(name) % 3])
        for got, root in zip(results, s.results, strict=True):
            graph = graph_of(root)
            params = [n for n in graph.nodes() if isinstance(n.op, ops.Param)]
            for i, param in enumerate(params):  # a program would read it off its module
                stand_in = inp(9 + i, *param.shape)
                graph, given[stand_in] = graph.substitute(param, stand_in), given[param]
            want, eps = reference(graph.outputs[0], given), torch.finfo(root.dtype).eps
            assert got.dtype == root.dtype and got.shape == want.shape
            torch.testing.assert_close(got.double(), want, rtol=8 * eps, atol=1e-5)

    def test_memory_is_read_once(self) -> None:
        s = self.several(BESIDE["products"]())
        assert isinstance(s, SeveralFolds)
        source = kernel(s, "fused_test").source
        assert source.count("load<VALUES<WIDE>>(d.x ") == source.count("load<VALUES<WIDE>>(d.p1 ") == 1

    @pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
    @pytest.mark.parametrize(
        "name",
        [
            *("long rows, in parts", "wide columns of four", "with what is made of each"),
            *("spreads of columns, in parts", *MANY),
        ],
    )
    def test_compiles_without_spills(self, name: str, arch: str) -> None:
        """And what threads of one column join fits into shared memory."""
        s = self.several(BESIDE[name]())
        assert isinstance(s, SeveralFolds)
        taken = nvrtc.resources(nvrtc.compile(kernel(s, "fused_test").source, arch)).values()
        assert all(r.stack == 0 for r in taken), taken

    def test_refused(self) -> None:
        mean = fold(X, "mean", 2)
        for values in (
            (mean,),
            (fold(Y, "max", 2), mean),  # of other memory
            (fold(X, "max", 1, 2), mean),  # over other dimensions
            (fold(X, "max", 2, keepdim=True), mean),
            (fold(X, "prod", 2), mean),
            (fold(pointwise("mul", X, fold(X, "mean", 2, keepdim=True)), "sum", 2), fold(X, "mean", 2, keepdim=True)),
            (fold(X, "max", 2), pointwise("add", mean, fold(Y, "max", 2))),  # whose end is of more than one
        ):
            assert isinstance(self.several(values), str)

    @pytest.mark.parametrize("dims", [(0,), (0, 1), (2,), (0, 1, 2)])
    def test_reductions_of_what_others_gave(self, dims: tuple[int, ...]) -> None:
        """The parts of a softmax, or of a variance: the second has to wait for the first."""
        x = inp(0, 4, 6, 300)
        most, mean = (fold(x, kind, *dims, keepdim=True) for kind in ("max", "mean"))
        total = fold(pointwise("exp", pointwise("sub", x, most)), "sum", *dims, keepdim=True)
        spread = fold(pointwise("square", pointwise("sub", x, mean)), "mean", *dims, keepdim=True)
        for values in ((most, total), (total, most), (mean, spread), (spread, mean)):
            assert isinstance(self.several(values), str)
        s = self.several((most, total, mean))
        assert isinstance(s, SeveralFolds) and set(s.results) == {most, mean}

    def test_what_is_computed_again(self) -> None:
        p = pointwise("sigmoid", X)
        s = self.several(kinds(p, 2), shared=(p,))
        assert isinstance(s, SeveralFolds) and s.tensors == (X,)
        s = self.several((*kinds(p, 2), p)[::-1])
        assert isinstance(s, SeveralFolds) and s.tensors == (p,)

    def test_a_result_that_others_read_on_the_way(self) -> None:
        """What is made of it is made by others."""
        mean, most = kinds(X, 2)
        s = self.several((mean, pointwise("exp", mean), most))
        assert isinstance(s, SeveralFolds) and set(s.results) == {mean, most}


def test_not_on_cpus() -> None:
    root = CASES["rows"]()
    s = found(root)
    group = Group("several reductions", s, root, s.tensors)
    assert cpu_options(group, {}, {}) == []
