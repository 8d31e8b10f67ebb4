"""Products of two computed values, in float32: of all rows or of each sample, what follows, and reductions to one
number.  The generated CUDA C++ runs on the CPU, and is compared with the same graph in float64."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial

import pytest
import sympy
import torch
from emulation.emulate import ORDERS, emulate
from torch import Tensor

from fusewright.codegen.aten import lower
from fusewright.codegen.cuda import matmul as cuda
from fusewright.ir import ops
from fusewright.ir.build import permute
from fusewright.ir.build import pointwise as pw
from fusewright.ir.node import Graph, Node, Symbol, make
from fusewright.runtime import nvrtc
from fusewright.schedule.matmul import Extent, Linear, MatmulTile, match, tiles

# Rows, rows of the other operand and samples, of which it is not known how many there are; and how many there are.
P, R, S = (sympy.Symbol(name, integer=True, positive=True) for name in "PRS")
LENGTHS = {P: 70, R: 45, S: 3}


def inp(index: int, *shape: object, dtype: torch.dtype = torch.float32) -> Node:
    return make(ops.Input(tuple(map(ops.size, shape)), dtype, torch.device("cpu"), f"a{index}", index))


def product(x: Node, y: Node, *, transposed: bool = True) -> Node:
    return make(ops.Matmul(transpose_w=transposed), x, y, None)


def distances(x: Node, y: Node, rows: Node, columns: Node) -> Node:
    squared = pw("add", pw("sub", columns, pw("mul", product(x, y), 2.0)), rows)
    return pw("sqrt", pw("relu", squared))


def fold(x: Node, kind: str, keepdim: bool = False) -> Node:
    return make(ops.Reduce(kind, tuple(range(x.ndim)), keepdim), x)


def of_rows(k: int = 20) -> Node:
    return distances(inp(0, P, k), inp(1, R, k), inp(2, P, 1), inp(3, 1, R))


def of_samples(k: int = 20, rows: object = P) -> Node:
    return distances(inp(0, S, rows, k), inp(1, S, R, k), inp(2, S, rows, 1), inp(3, S, 1, R))


def with_itself(k: int = 20) -> Node:
    x = inp(0, P, k)
    return distances(x, x, inp(1, P, 1), inp(2, 1, P))


X, Y = inp(0, S, P, 20), inp(1, S, R, 20)
CASES: dict[str, Callable[[], Node]] = {
    # all rows
    "rows": of_rows,
    "one number each": lambda: of_rows(1),
    "more than a chunk": lambda: of_rows(67),
    "with itself": with_itself,
    "nothing behind": lambda: product(inp(0, P, 20), inp(1, R, 20)),
    "columns": lambda: pw("tanh", product(inp(0, P, 20), inp(1, 20, R), transposed=False)),
    "turned": lambda: pw("mul", product(permute(inp(0, 20, 50), (1, 0)), inp(1, R, 20)), inp(2, 50, R)),
    "rows of samples": lambda: pw("add", product(inp(0, S, P, 20), inp(1, R, 20)), inp(2, S, P, R)),
    "the same for every sample": lambda: pw(
        "mul", product(inp(0, S, 30, 20), make(ops.Expand((S, 40, 20)), inp(1, 40, 20))), inp(2, 30, 40)
    ),
    # samples
    "samples": of_samples,
    "samples of known rows": lambda: of_samples(33, 50),
    "samples with themselves": lambda: (lambda x: pw("tanh", product(x, x)))(inp(0, S, P, 20)),
    "columns of samples": lambda: pw("tanh", product(inp(0, S, P, 20), inp(1, S, 20, R), transposed=False)),
    "turned samples": lambda: pw("relu", product(permute(inp(0, S, 20, 50), (0, 2, 1)), inp(1, S, R, 20))),
    "both turned": lambda: product(
        permute(inp(0, S, 20, 50), (0, 2, 1)), permute(inp(1, S, R, 20), (0, 2, 1)), transposed=False
    ),
    "samples of samples": lambda: pw("mul", product(inp(0, 2, S, P, 9), inp(1, 2, S, R, 9)), inp(2, 2, S, P, R)),
    "a number per feature": lambda: pw("add", product(inp(0, S, P, 9), inp(1, S, R, 9)), inp(2, R)),
    "elements of every sample": lambda: pw("mul", product(inp(0, S, 30, 9), inp(1, S, 25, 9)), inp(2, 30, 25)),
    "masks": lambda: pw("where", inp(2, 30, 25, dtype=torch.bool), product(inp(0, S, 30, 9), inp(1, S, 25, 9)), 0.0),
    "masks of samples": lambda: pw(
        "where", inp(2, S, 1, R, dtype=torch.bool), pw("mul", product(X, Y), 0.5), inp(3, S, P, 1)
    ),
    "its own input": lambda: (lambda x: pw("sub", product(x, inp(1, S, 45, 45)), x))(inp(0, S, P, 45)),
    # one for all samples, ahead of what differs
    "across": lambda: distances(inp(0, P, 20), inp(1, S, 40, 20), inp(2, P, 1), inp(3, S, 1, 40)),
    "across, turned": lambda: product(inp(0, P, 20), inp(1, S, 20, 40), transposed=False),
    # reduced
    **{f"rows, {kind}": partial(lambda kind: fold(of_rows(), kind), kind) for kind in ("sum", "mean", "max", "min")},
    "samples, mean": lambda: fold(of_samples(), "mean"),
    "samples, logsumexp": lambda: fold(of_samples(), "logsumexp"),
    "samples, std": lambda: fold(of_samples(), "std"),
    "norm of a product": lambda: fold(product(inp(0, P, 20), inp(1, R, 20)), "norm", keepdim=True),
    "elements reduced": lambda: fold(pw("mul", product(inp(0, S, P, 9), inp(1, S, R, 9)), inp(2, S, P, R)), "sum"),
    "rows across, mean": lambda: fold(
        distances(inp(0, P, 20), inp(1, S, 40, 20), inp(2, P, 1), inp(3, S, 1, 40)), "mean"
    ),
    "numbers behind": lambda: pw(
        "sub", pw("mul", fold(of_rows(), "mean"), inp(4)), pw("add", inp(5), fold(of_samples(9), "mean"))
    ),
}  # fmt: skip
TILES = [MatmulTile(32, 1, 1), MatmulTile(16, 2, 1), MatmulTile(64, 1, 1)]


def group_of(root: Node) -> Linear:
    found = match(root, Graph((), (root,)).users())
    assert isinstance(found, Linear), found
    return found


def drawn(node: Node) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(node.op.name.encode()))
    shape = [d if isinstance(d, int) else int(d.subs(LENGTHS)) for d in node.shape]
    found = torch.randn(shape, generator=generator)
    return found > 0 if node.dtype == torch.bool else found


def inputs(root: Node) -> list[Node]:
    found = (n for n in Graph((), (root,)).nodes() if isinstance(n.op, ops.Input))
    return sorted(found, key=lambda n: n.op.index)


def values(root: Node, wanted: list[Node], given: dict[Node, Tensor]) -> list[Tensor]:
    """What nodes of a graph are, for inputs of it."""
    read = tuple(given)
    places = ((d, Symbol(i, dim, 1, None)) for i, n in enumerate(read) for dim, d in enumerate(n.shape) if d in LENGTHS)
    graph = Graph(read, tuple(wanted), (), dict(places))
    results: list[Tensor] = list(lower(graph).functions()[1](None, *given.values()))
    return results


def check(root: Node, t: MatmulTile, order: str, given: dict[Node, Tensor] | None = None) -> None:
    group = group_of(root)
    given = given or {n: drawn(n) for n in inputs(root)}
    operands = [given[n] if n in given else values(root, [n], given)[0] for n in group.tensors]
    got = emulate(cuda.kernel(group, t, "fused_test", "def reference(*operands): ..."), *operands, order=order)
    (want,) = values(root, [root], {n: x if x.dtype == torch.bool else x.double() for n, x in given.items()})
    assert got.shape == want.shape and got.dtype == torch.float32
    size = want[want.isfinite()].abs().max().item()
    torch.testing.assert_close(got.double(), want, rtol=4e-6, atol=4e-6 * size, equal_nan=True)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_as_in_float64(name: str) -> None:
    seed = zlib.crc32(name.encode())
    check(CASES[name](), TILES[seed % 3], ORDERS[seed // 3 % 3])


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("t", TILES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_as_in_float64_with_every_tile(name: str, t: MatmulTile, order: str) -> None:
    check(CASES[name](), t, order)


@pytest.mark.parametrize("name", ["rows", "samples", "across"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite(name: str, value: float) -> None:
    """It is in the rows and columns that read it, and nowhere else."""
    root = CASES[name]()
    given = {n: drawn(n) for n in inputs(root)}
    x, y = list(given.values())[:2]
    x[..., 3, 5], y[..., 7, 2] = value, -value
    check(root, TILES[0], "forward", given)


@pytest.mark.parametrize("name", ["rows", "nothing behind"])
def test_in_parts(name: str) -> None:
    """Of what is summed, where no sample has a weight of its own and nothing is reduced."""
    wide = {"rows": lambda: of_rows(200), "nothing behind": lambda: product(inp(0, P, 200), inp(1, R, 200))}
    check(wide[name](), MatmulTile(16, 1, 3), "reversed" if "reversed" in ORDERS else ORDERS[-1])
    parts = {name: {t.parts for t in tiles(group_of(root), Extent(16, 64))} for name, root in wides().items()}
    assert parts["rows"] != {1} and parts["samples"] == parts["reduced"] == {1}


def wides() -> dict[str, Node]:
    return {"rows": of_rows(4096), "samples": of_samples(4096), "reduced": fold(of_rows(4096), "mean")}


@pytest.mark.parametrize(
    ("reason", "root"),
    [
        ("unlike samples", product(inp(0, S, P, 20), inp(1, 2, S, R, 20))),
        ("unlike samples", product(inp(0, 4, 1, P, 20), inp(1, 4, 3, R, 20))),
        ("sums nobody knows how many", product(inp(0, P, R), inp(1, P, R))),
        ("leaves more than one number", make(ops.Reduce("sum", (2,)), product(X, Y))),
        ("leaves more than one number", make(ops.Reduce("argmax", (0, 1, 2)), product(X, Y))),
        ("is neither a number", pw("mul", product(X, Y), inp(2, P, 1))),
        ("is neither a number", pw("mul", fold(product(X, Y), "mean"), inp(2, 4))),
        ("and then reduced", fold(pw("mul", make(ops.Reduce("max", (2,)), product(X, Y)), 2.0), "sum")),
        ("is not of float32 alone", product(inp(0, P, 20, dtype=torch.float64), inp(1, R, 20, dtype=torch.float64))),
    ],
)
def test_what_is_none(reason: str, root: Node) -> None:
    refused = match(root, Graph((), (root,)).users())
    assert isinstance(refused, str) and (reason in refused or "combines values" in refused), refused


@pytest.mark.parametrize("t", [MatmulTile(128, 2, 1), MatmulTile(64, 3, 1)], ids=str)
@pytest.mark.parametrize("name", ["rows", "samples", "across", "rows, mean", "samples, logsumexp"])
@pytest.mark.sampled
def test_compiles_without_spills(name: str, t: MatmulTile) -> None:
    kernel = cuda.kernel(group_of(CASES[name]()), t, "fused_test", "def reference(*operands): ...")
    taken = nvrtc.resources(nvrtc.compile(kernel.source, "sm_90a"))
    assert taken.keys() == {launch.entry for launch in kernel.launches}
    assert all(entry.stack == 0 for entry in taken.values()), taken


@pytest.mark.parametrize("mean", [0.0, 1.0, 10.0])
def test_sums_lean_to_neither_side(mean: float) -> None:
    """What tensor cores truncate is a part of all that was added up, while a distance is a small difference of that."""
    root = product(inp(0, P, 64), inp(1, R, 64))
    given = {n: drawn(n) + mean for n in inputs(root)}
    got = emulate(cuda.kernel(group_of(root), TILES[2], "fused_test", ""), *given.values())
    (want,) = values(root, [root], {n: x.double() for n, x in given.items()})
    assert (got - want).mean().abs() <= 6e-8 * want.abs().mean()
