"""Rows that are kept: the generated CUDA C++ runs on the CPU."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from math import inf, nan

import pytest
import torch
import torch.nn.functional as F
from codegen.cuda.kept_rows_cases import (
    CASES,
    IMAGE,
    PLACES,
    SEVERAL,
    normalized,
    of_whole_numbers,
    over,
    place,
    rms,
    scaled_to_one,
    similar,
    standardized,
    with_norm,
    without_best,
)
from codegen.cuda.test_stream_kernels import BF16, F16, F64, inp, pointwise, random, reference
from emulation.emulate import emulate
from gpu_build import built_for_a_gpu, emulated
from torch import Tensor

from fusewright.codegen.cpu import options as cpu_options
from fusewright.codegen.cuda.kept_rows import kernel, options
from fusewright.ir import ops
from fusewright.ir.node import Graph, Node, make
from fusewright.kernel import Kernel
from fusewright.runtime import nvrtc
from fusewright.schedule.beside import readers_of
from fusewright.schedule.group import Group
from fusewright.schedule.kept_rows import LONGEST, parse
from fusewright.schedule.kept_rows_record import KeptRows
from tests.capture.harness import Fn

ORDERS = ("forward", "reverse", "shuffled")


def kept(root: Node) -> KeptRows:
    found = parse(root, Graph((), (root,)).users())
    assert isinstance(found, KeptRows), found
    return found


def check(root: Node, tensors: dict[Node, Tensor] | None = None, order: str = "forward") -> list[Kernel]:
    """The first ways to share rows out, against the same graph in float64."""
    k = kept(root)
    given = tensors or {n: random(n, i) for i, n in enumerate(k.tensors)}
    kernels = [kernel(k, "fused_test", **option) for option in options(k)[:2]]
    assert kernels
    want = reference(root, given)
    for made in kernels:
        got = emulate(made, *(given[n] for n in k.tensors), order=order)
        assert got.dtype == root.dtype and got.shape == want.shape
        special = ~want.isfinite()
        torch.testing.assert_close(got.double()[special], want[special], equal_nan=True, rtol=0, atol=0)
        if not special.all():
            scale = want[~special].abs().max().clamp(min=1e-3)
            assert (got.double() - want)[~special].abs().max() <= scale * 8 * torch.finfo(root.dtype).eps
    return kernels


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_value(name: str) -> None:
    check(CASES[name](), order=ORDERS[zlib.crc32(name.encode()) % 3])


def several(roots: tuple[Node, ...]) -> KeptRows:
    """What is found from any of these, which are alike but for their order."""
    graph = Graph((), roots)
    found = [parse(root, graph.users(), readers_of(graph)) for root in roots]
    first = found[0]
    assert isinstance(first, KeptRows), first
    assert all(isinstance(k, KeptRows) and set(k.roots) == set(roots) for k in found)
    return first


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.sampled
def test_several_results(name: str) -> None:
    k = several(SEVERAL[name]())
    given = {n: random(n, i) for i, n in enumerate(k.tensors)}
    for option in options(k)[:2]:
        made = kernel(k, "fused_test", **option)
        results = emulate(made, *(given[n] for n in k.tensors), order=ORDERS[zlib.crc32(name.encode()) % 3])
        for root, got in zip(k.roots, results, strict=True):
            own = Graph((), (root,)).nodes()
            want = reference(root, {n: t for n, t in given.items() if n in own})
            assert got.dtype == root.dtype and got.shape == want.shape
            assert (got.double() - want).abs().max() <= want.abs().max() * 8 * torch.finfo(root.dtype).eps


@pytest.mark.parametrize("special", [None, nan, inf, -inf])
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.sampled
def test_places(name: str, special: float | None) -> None:
    """Of equals, and of several NaN, the first; where all are infinite, the very first."""
    root = PLACES[name]()
    k = kept(root)
    x, positions = (next(n for n in k.tensors if n.op.index == i) for i in (0, 1))  # type: ignore[attr-defined]
    given = random(x, 1).round()  # many are alike
    if special is not None:
        given[0] = special
        given.view(-1)[-40] = given.view(-1)[-7] = special
    tensors = {x: given, positions: torch.arange(k.length).reshape(positions.shape).float()}
    want = reference(root, tensors)
    for option in options(k)[:2]:
        got = emulate(kernel(k, "fused_test", **option), *(tensors[n] for n in k.tensors), order="shuffled")
        torch.testing.assert_close(got.double(), want, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["greatest, and where", "columns, greatest, and where"])
def test_an_extreme_is_found_with_its_place(name: str) -> None:
    """In one pass over the elements."""
    k = kept(PLACES[name]())
    assert [p.kind for p in k.passes] == ["argmax", "max"]
    source = kernel(k, "fused_test", **options(k)[0]).source
    assert "pass0<WIDE>(d" in source and "pass1<WIDE>(d" not in source


@pytest.mark.parametrize("dtype", [BF16, F16, F64], ids=str)
@pytest.mark.parametrize("name", ["rows", "columns"])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    check(
        {
            "rows": lambda: rms(inp(0, 5, 96, dtype=dtype), 1),
            "columns": lambda: rms(inp(0, 2, 70, 4, 8, dtype=dtype), 1),
        }[name]()
    )


def test_one_kernel_serves_other_batches() -> None:
    made = kernel(kept(normalized(inp(0, 5, 96), 1)), "fused_test", team=8)
    for rows in (1, 31, 70):
        x = torch.randn(rows, 96)
        torch.testing.assert_close(emulate(made, x), torch.nn.functional.normalize(x))


def test_rows_are_read_once_and_sixteen_bytes_at_a_time() -> None:
    source = check(normalized(inp(0, 5, 96), 1))[0].source
    assert source.count("load<VALUES<WIDE>>(d.x") == 1 and "n1 % VALUES<true> == 0" in source


SPECIAL = {
    "normalized": lambda x: normalized(x, 1),
    "standardized": lambda x: standardized(x, 1),
    "to one": lambda x: scaled_to_one(x, 1),
    "logarithms": lambda x: over(pointwise("sub", over(x, "logsumexp", 1), x), "logsumexp", 1),
    "columns": lambda x: normalized(x, 1),
    "columns, to one": lambda x: scaled_to_one(x, 1),
}


@pytest.mark.parametrize("value", [nan, inf, -inf], ids=str)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(name: str, value: float) -> None:
    x = inp(0, 3, 70, 6) if name.startswith("columns") else inp(0, 5, 96)
    t = random(x, 3)
    t.view(-1)[5] = t.view(-1)[-40] = value
    check(SPECIAL[name](x), {x: t})


@pytest.mark.parametrize("name", ["a norm beside, no vector", "columns, moments beside"])
def test_several_results_lie_side_by_side(name: str) -> None:
    k = several(SEVERAL[name]())
    given = [random(n, i) for i, n in enumerate(k.tensors)]
    emulate(kernel(k, "fused_test", **options(k)[0]), *given, order="reverse", sanitize=True)


@pytest.mark.parametrize("name", ["normalized, no vector", "columns, no vector", "standardized, of a population"])
def test_nothing_is_read_or_written_outside(name: str) -> None:
    k = kept(CASES[name]())
    given = [random(n, i) for i, n in enumerate(k.tensors)]
    emulate(kernel(k, "fused_test", **options(k)[0]), *given, order="reverse", sanitize=True)


@pytest.mark.parametrize("value", [inf, -inf, nan], ids=str)
def test_logarithms_of_sums_of_what_is_infinite(value: float) -> None:
    """Whole rows of it: infinite as they are, where a difference of two such would be NaN."""
    x = inp(0, 3, 70)
    t = random(x, 3)
    t[0] = t[1, :69] = value
    root = over(pointwise("add", pointwise("mul", over(x, "max", 1), 0.0), x), "logsumexp", 1)
    check(over(pointwise("minimum", over(x, "logsumexp", 1), x), "max", 1), {x: t})
    assert kept(root).passes[-1].kind == "sum"
    check(root, {x: t})


SHORT: dict[str, Callable[[Tensor], Tensor]] = {
    "a norm": lambda x: x / x.norm(dim=1, keepdim=True),
    "a mixture": lambda x: torch.logsumexp(x.sin() - torch.logsumexp(x, 1, keepdim=True), 1),
    "deviations": lambda x: (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-6),
}


@pytest.mark.parametrize("name", SHORT)
def test_samples_that_are_one_short_row(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A few threads have each; a sample program would be a block for each."""
    model, x = Fn(SHORT[name]), torch.randn(70, 32)
    built = built_for_a_gpu(monkeypatch, model, x)
    assert [(c.family, c.path) for c in built.choices] == [("kept rows", "generated")]
    torch.testing.assert_close(emulated(built, model, x), model(x))


def test_short_rows_of_longer_programs_stay_there(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(8, 32)
    built = built_for_a_gpu(monkeypatch, Fn(lambda x: torch.tanh(F.normalize(x) @ w.mT)), torch.randn(70, 32))
    assert [c.family for c in built.choices] == ["sample program"]


def test_left_to_others_on_a_cpu() -> None:
    root = CASES["normalized"]()
    k = kept(root)
    assert cpu_options(Group("kept rows", k, root, k.tensors), {}, {}) == []


def more(*indices: int) -> list[Node]:
    return [inp(i, 5, 96) for i in indices]


X = inp(0, 5, 96)
REFUSED: dict[str, tuple[Node, str]] = {
    "one reduction": (over(pointwise("tanh", X), "sum", 1), "there is one reduction and nothing of the rows behind it"),
    "no reduction": (pointwise("tanh", X), "follows no reduction"),
    "short rows": (normalized(inp(0, 5, 3, 12), 2), "rows of 12 elements are not kept"),
    "samples of one short row": (normalized(inp(0, 5, 1, 40), 2), "rows of 40 elements are not kept"),
    "very long rows": (normalized(inp(0, 5, 60_000), 1), "rows of 60000 elements are not kept"),
    "very long columns": (normalized(inp(0, 5, 40_000, 2), 1), "rows of 40000 elements are not kept"),
    "two rows too long for both": (
        similar(inp(0, 5, 30_000), inp(1, 5, 30_000)),
        "nothing is kept, or more than there are registers for",
    ),
    "the batch": (normalized(X, 0), "the rows are whole batches, or of no known length"),
    "dimensions apart": (normalized(inp(0, 5, 8, 9, 10), 1, 3), "the rows are neither the last dimensions nor columns"),
    "a product": (pointwise("div", X, over(X, "prod", 1)), "there is one reduction and nothing of the rows behind it"),
    "four tensors": (
        normalized(pointwise("mul", pointwise("mul", X, inp(1, 5, 96)), pointwise("mul", *more(2, 3))), 1),
        "nothing is kept, or more than there are registers for",
    ),
    "an index of what is rounded": (
        without_best(pointwise("tanh", inp(0, 5, 96, dtype=BF16)), "argmax", 1),
        "may be rounded otherwise than what is compared",
    ),
    "an index of what is made of a number": (
        without_best(normalized(X, 1), "argmax", 1),
        "may be rounded otherwise than what is compared",
    ),
    "an index that is computed with": (
        pointwise("mul", X, make(ops.Cast(torch.float64), place(X, "argmax", 1))),
        "is computed with in torch.int64",
    ),
    "one hot": (
        make(ops.Cast(torch.float32), pointwise("eq", inp(1, 96), place(X, "argmax", 1))),
        "has no gradient",
    ),
    "sums that one pass has": (
        pointwise("div", *(over(X, kind, 1, keepdim=False) for kind in ("sum", "max"))),
        "all results are reductions of what is read",
    ),
    "a number along other dimensions": (
        pointwise("div", inp(0, 96, 96), over(inp(0, 96, 96), "sum", 1, keepdim=False)),
        "a number of a row is read along other dimensions",
    ),
    "rounded on the way": (
        pointwise("mul", X, make(ops.Cast(torch.float32), make(ops.Cast(BF16), over(X, "sum", 1)))),
        "is rounded to a narrower type on the way",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    root, reason = REFUSED[name]
    found = parse(root, Graph((), (root,)).users())
    assert isinstance(found, str) and reason in found


def test_what_others_use_is_read_from_memory() -> None:
    """A sum that somebody else asks for is no pass of this chain."""
    total = over(X, "norm", 1)
    root = pointwise("div", X, total)
    assert isinstance(parse(root, Graph((), (root, total)).users()), str)


def shares(x: Node) -> Node:
    """A softmax by eager's steps."""
    away = pointwise("exp", pointwise("sub", x, over(x, "max", 1)))
    return pointwise("div", away, over(away, "sum", 1))


def entropy(x: Node) -> Node:
    p = shares(x)
    return over(pointwise("mul", p, pointwise("log", p)), "sum", 1, keepdim=False)


def apart(x: Node, y: Node) -> Node:
    """How far two softmaxes are from their mean, each by a sum of its own."""
    p, q = shares(x), shares(y)
    mean = pointwise("mul", pointwise("add", p, q), 0.5)
    each = (pointwise("mul", a, pointwise("log", pointwise("div", a, mean))) for a in (p, q))
    return pointwise("add", *(over(a, "sum", 1) for a in each))


def weighed(*shape: int, dtype: torch.dtype = torch.float32) -> Node:
    """Two tensors that only what is written reads, beside one that is kept."""
    x, w, t = (inp(i, *shape, dtype=dtype) for i in range(3))
    return pointwise("add", pointwise("mul", standardized(x, 1), pointwise("sigmoid", w)), t)


def correlated(*shape: int, dtype: torch.dtype = torch.float32) -> Node:
    """What a pass alone reads, of rows whose numbers have lost the dimension, and a number that is made of these."""
    x, w = (inp(i, *shape, dtype=dtype) for i in range(2))
    away = pointwise("sub", x, over(x, "mean", 1))
    both = over(pointwise("mul", away, pointwise("tanh", w)), "sum", 1, keepdim=False)
    return pointwise("div", both, pointwise("add", over(x, "std", 1, keepdim=False), 1.0))


LATE: dict[str, Callable[[], Node]] = {
    "rows": lambda: weighed(5, 256),
    "odd rows": lambda: weighed(4, 251),
    "bfloat16": lambda: weighed(5, 256, dtype=BF16),
    "float64": lambda: weighed(3, 256, dtype=F64),
    "columns": lambda: weighed(2, 256, 12),
    "odd columns": lambda: weighed(2, 256, 7, 5),
    "a pass": lambda: correlated(5, 256),
    "a pass over odd rows": lambda: correlated(4, 255),
    "a pass over columns": lambda: correlated(2, 256, 6),
}


@pytest.mark.parametrize("name", LATE)
def test_what_there_are_no_registers_for_is_read_late(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Once still, by the pass, or the result, that alone wants it."""
    assert len(kept(LATE[name]()).kept) == len(kept(LATE[name]()).tensors)
    monkeypatch.setattr("fusewright.schedule.kept_rows.LONGEST", 256)
    monkeypatch.setattr("fusewright.schedule.kept_rows_record.SHARED", 0)
    root = LATE[name]()
    k = kept(root)
    assert len(k.kept) == 1 and len(k.tensors) == (2 if "pass" in name else 3)
    for made in check(root, order=ORDERS[len(name) % 3]):
        for tensor in ("p1", "p2")[: len(k.tensors) - 1]:
            assert len(re.findall(rf"load<VALUES<WIDE>>\(d\.{tensor}\b", made.source)) == 1


PARTS_APART: dict[str, Callable[[], Node]] = {
    "rows": lambda: standardized(inp(0, 3, 1500), 1),
    "odd rows": lambda: standardized(inp(0, 3, 1501), 1),
    "two rows": lambda: similar(inp(0, 3, 700), inp(1, 3, 700)),
    "a row of each type": lambda: correlated(3, 700, dtype=BF16),
    "float64": lambda: normalized(inp(0, 3, 600, dtype=F64), 1),
    "a place": lambda: without_best(inp(0, 3, 1501), "argmax", 1),
    "whole numbers": lambda: of_whole_numbers(inp(0, 3, 700, dtype=torch.int64), inp(1, 3, 700)),
    "what takes its place": lambda: entropy(inp(0, 3, 1504)),
    "tokens": lambda: rms(inp(0, 2, 3, 1500), 2),
}


@pytest.mark.parametrize("name", PARTS_APART)
def test_a_part_of_each_row_lies_in_shared_memory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Read once still, whatever its place."""
    monkeypatch.setattr("fusewright.schedule.kept_rows_record.SHARING", (64,))
    monkeypatch.setattr("fusewright.schedule.kept_rows_record.HELD", (12,))
    monkeypatch.setattr("fusewright.codegen.cuda.kept_rows.MANY", 0)
    monkeypatch.setattr("fusewright.codegen.cuda.kept_rows.LONGEST", 0)
    root = PARTS_APART[name]()
    assert [sorted(option) for option in options(kept(root))] == [["registers", "team"]]
    for made in check(root, order=ORDERS[len(name) % 3]):
        assert "Kept<" in made.source and made.launches[0].shared > 0
        assert len(re.findall(r"load<VALUES<WIDE>>\(d\.x\b", made.source)) == 1


@pytest.mark.parametrize("length", [32_768, 32_769, 50_257, 57_344])
@pytest.mark.parametrize("tensors", [1, 2, 3])
def test_no_more_lies_in_shared_memory_than_there_is(length: int, tensors: int) -> None:
    length //= tensors
    x, y, z = (inp(i, 5, length) for i in range(3))
    root = similar(*(x, y) if tensors > 1 else (x, x))
    root = root if tensors < 3 else pointwise("add", root, similar(y, z))
    if tensors == 3 and length * tensors > 50_000:  # whole groups of three do not fit
        assert "more than there are registers for" in parse(root, Graph((), (root,)).users())  # type: ignore[operator]
        return
    k = kept(root)
    assert len(k.kept) == tensors
    ways = options(k)
    assert ways and all("registers" in way for way in ways if length * tensors > LONGEST)
    for way in ways:
        shared = kernel(k, "fused_test", **way).launches[0].shared
        assert (0 < shared <= 96 * 1024) if "registers" in way else shared == 0


def test_four_tensors_of_which_one_is_kept() -> None:
    y = pointwise("mul", pointwise("mul", normalized(X, 1), inp(1, 5, 96)), pointwise("mul", *more(2, 3)))
    assert len(kept(y).kept) == 1
    check(y)


NUMBERS: dict[str, Callable[[Node], Node]] = {
    "a correlation": lambda x: correlated(*map(int, x.shape)),
    "sent back": lambda x: pointwise(
        "div",
        x,
        make(ops.Reshape((*x.shape[:1], 1)), pointwise("add", over(x, "norm", 1, keepdim=False), 0.5)),
    ),
    "more than one pass has": lambda x: pointwise(
        "add",
        *(
            pointwise("mul", *(over(pointwise(f, x), kind, 1, keepdim=False) for kind in ("sum", "max")))
            for f in ("tanh", "square")
        ),
    ),
}


def five(x: Node) -> Node:
    return pointwise("sub", NUMBERS["more than one pass has"](x), over(x, "var", 1, keepdim=False))


@pytest.mark.parametrize("length", [96, 101, 1500])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_lost_the_dimension(name: str, length: int) -> None:
    """What is made of them is part of the chain."""
    x = inp(0, 5, length)
    check(five(x) if name.startswith("more") else NUMBERS[name](x))


def test_numbers_of_what_others_use_are_in_memory() -> None:
    """A number without the dimension is no operand of a row: it would be one of its elements."""
    x = inp(0, 96, 96)
    norm, mean = (over(x, kind, 1, keepdim=False) for kind in ("norm", "mean"))
    back = make(ops.Reshape((96, 1)), pointwise("add", norm, mean))
    root = pointwise("div", pointwise("sub", x, over(x, "max", 1)), back)
    k = parse(root, Graph((), (root, norm)).users())
    assert isinstance(k, KeptRows) and back in k.tensors and len(k.passes) == 1
    check(root)


REPLACED: dict[str, tuple[Callable[[], Node], list[tuple[int, int, str]]]] = {
    "shares": (lambda: shares(inp(0, 5, 96)), [(1, 0, "exp")]),
    "an entropy": (lambda: entropy(inp(0, 5, 101)), [(1, 0, "exp")]),
    "two softmaxes": (
        lambda: apart(inp(0, 5, 96), inp(1, 5, 96)),
        [(1, 0, "exp"), (2, 0, "div"), (3, 1, "exp"), (4, 1, "div")],
    ),
    "two softmaxes of columns": (
        lambda: apart(inp(0, *IMAGE), inp(1, *IMAGE)),
        [(1, 0, "exp"), (2, 0, "div"), (3, 1, "exp"), (4, 1, "div")],
    ),
    "a distance from the mean": (
        lambda: pointwise("mul", shares(pointwise("sub", inp(0, 5, 96), over(inp(0, 5, 96), "mean", 1))), 2.0),
        [(1, 0, "sub"), (2, 0, "exp")],
    ),
    "nothing that two read": (lambda: normalized(inp(0, 5, 96), 1), []),
    "what is read as it is": (lambda: pointwise("mul", inp(0, 5, 96), shares(inp(0, 5, 96))), []),
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16, F64], ids=str)
@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.sampled
def test_what_several_passes_read_is_kept(name: str, dtype: torch.dtype) -> None:
    """In the place of what it is made of, as far as nobody wants that any more."""
    build, want = REPLACED[name]
    root = build()
    given = {n: make(replace(n.op, dtype=dtype)) for n in kept(root).tensors}
    (root,) = Graph((), (root,)).substituted(given)[0].outputs
    assert isinstance(root, Node)
    functions = [(r.known, r.kept, r.tree.root.op.fn) for r in kept(root).replaced]  # type: ignore[attr-defined]
    assert functions == want
    check(root, order=ORDERS[len(name) % 3])


def test_what_waits_is_no_result_beside() -> None:
    """A number that another result reads by a way of its own is in memory by then."""
    x = inp(0, 5, 96)
    first, norm = with_norm(x, 1)
    turned = make(ops.Permute((1, 0)), norm)
    second = pointwise("div", x, over(pointwise("mul", x, make(ops.Reshape((5, 1)), turned)), "sum", 1))
    graph = Graph((), (second, first))
    for root in (first, second):
        k = parse(root, graph.users(), readers_of(graph))
        assert isinstance(k, KeptRows) and not {norm, second} <= set(k.roots)


def test_reductions_alone_are_left_to_streams() -> None:
    x = inp(0, 5, 96)
    roots = (over(x, "max", 1), over(x, "mean", 1))
    graph = Graph((), roots)
    assert isinstance(parse(roots[0], graph.users(), readers_of(graph)), str)


LARGE = {
    "rows": lambda: standardized(inp(0, 64, 2048), 1),
    "two rows": lambda: similar(inp(0, 64, 2048), inp(1, 64, 2048)),
    "two softmaxes": lambda: apart(inp(0, 64, 1024), inp(1, 64, 1024)),
    "places": lambda: without_best(inp(0, 64, 1024), "argmax", 1),
    "places of columns": lambda: without_best(inp(0, 4, 128, 64, 64), "argmax", 1),
    "columns": lambda: rms(inp(0, 4, 128, 64, 64), 1),
    "columns of bfloat16": lambda: normalized(inp(0, 4, 256, 64, 64, dtype=BF16), 1),
    "what is read late": lambda: weighed(64, 12000),
    "many numbers": lambda: five(inp(0, 64, 12000)),
    "more than registers": lambda: entropy(inp(0, 64, 50_257)),
    "two of which there are more": lambda: apart(inp(0, 64, 20_000), inp(1, 64, 20_000)),
}


LARGE_OF_SEVERAL = {
    "a norm beside rows": lambda: with_norm(inp(0, 64, 2048), 1),
    "a norm beside columns": lambda: with_norm(inp(0, 4, 128, 64, 64), 1),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", [*LARGE, *LARGE_OF_SEVERAL])
def test_compiles_without_spills(name: str, arch: str) -> None:
    k = kept(LARGE[name]()) if name in LARGE else several(LARGE_OF_SEVERAL[name]())
    for option in options(k):
        taken = nvrtc.resources(nvrtc.compile(kernel(k, "fused_test", **option).source, arch)).values()
        assert all(r.stack == 0 for r in taken), option


@pytest.mark.parametrize("size", [1.0, 1e-35, 1e30], ids=str)
def test_quotients_are_those_of_divisions(size: float) -> None:
    """By the reciprocal of a row's number, to the last bit, down to the smallest number; of zeros, infinities and what
    is not a number as well."""
    x, odd = inp(0, 64, 96), torch.tensor([0.0, -0.0, inf, -inf, nan, 1.0, 1e-45, 3e38, -1e-30])
    root = pointwise("div", x, over(inp(1, 64, 96), "max", 1))
    k = kept(root)
    made = kernel(k, "fused_test", **options(k)[0])
    assert "quotient(" in made.source
    given, by = random(x, 1) * 10, random(x, 2).abs() * size
    given[:, :9], by[:9] = odd, odd[:, None]
    got = emulate(made, *({0: given, 1: by}[t.op.index] for t in k.tensors))  # type: ignore[attr-defined]
    want = given / by.amax(1, keepdim=True)
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=2.0**-149, equal_nan=True)
    assert torch.equal(got.signbit()[~got.isnan()], want.signbit()[~want.isnan()])
