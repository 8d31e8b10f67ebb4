"""Range reductions: the generated CUDA C++ runs on the CPU, and is compared with sums in float64."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
import sympy
import torch
from emulation.emulate import ORDERS, emulate
from torch import Tensor

from fusewright.codegen.cuda.ranges import kernel, worth_measuring
from fusewright.ir import ops
from fusewright.ir.build import cast, pointwise
from fusewright.ir.node import Node, make
from fusewright.ir.ops import Slot
from fusewright.kernel import Kernel
from fusewright.schedule.range_sums import Axis, RangeReduction, in_one_pass, parse

CPU = torch.device("cpu")
GOLDEN = Path(__file__).parents[2] / "golden"
inf, nan = float("inf"), float("nan")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
Slots = tuple[Slot, ...]


def inp(*shape: int, dtype: torch.dtype = F32) -> Node:
    return make(ops.Input(shape, dtype, CPU, "x", 0))


def sums(x: Node, table: dict[int, Slots], dtype: torch.dtype = F64) -> Node:
    return make(ops.RangeSum(tuple(sorted(table.items())), dtype), x)


def reduce(x: Node, kind: str, *dims: int, **more: object) -> Node:
    return make(ops.Reduce(kind, dims, **more), x)  # type: ignore[arg-type]


def whole(n: int, scale: float = 1.0) -> Slots:
    return (Slot(0, n, 1, scale),)


def borders(n: int, k: int, scale: float = 1.0) -> Slots:
    """Slots of a convolution of k taps without padding: they differ at the ends."""
    return tuple(Slot(u, n - k + 1 + u, 1, scale) for u in range(k))


def strided(n: int, k: int, step: int) -> Slots:
    count = (n - k) // step + 1
    return tuple(Slot(u, u + (count - 1) * step + 1, step if count > 1 else 1, 0.5) for u in range(k))


def windows(n: int, size: int) -> Slots:
    return tuple(Slot(i, min(i + size, n), 1, 1 / size) for i in range(0, n, size))


def expected(op: ops.Op, value: Tensor) -> Tensor:
    """The sums by their definition."""
    if isinstance(op, ops.Reduce):
        total = value.sum(op.dims, keepdim=op.keepdim)
        return total / (value.numel() / max(total.numel(), 1)) if op.kind == "mean" else total
    assert isinstance(op, ops.RangeSum)
    for dim, slots in op.table:
        picked = [
            value.narrow(dim, 0, 0) if not s.count else value.index_select(dim, torch.arange(s.start, s.stop, s.step))
            for s in slots
        ]
        value = torch.cat([p.sum(dim, keepdim=True) * s.scale for p, s in zip(picked, slots, strict=True)], dim)
    return value


def _value(node: Node, leaf: Node, x: Tensor) -> Tensor:
    if node is leaf:
        return x
    if isinstance(node.op, ops.Cast):
        return _value(node.arg(0), leaf, x)
    assert isinstance(node.op, ops.Pointwise)
    args = [a.op.value if isinstance(a.op, ops.Number) else _value(a, leaf, x) for a in node.inputs]
    names = {f"v{i}": a for i, a in enumerate(args)}
    return eval(node.op.traits.torch.format(*names), {"torch": torch, "F": torch.nn.functional, **names})


def parsed(root: Node) -> RangeReduction:
    found = parse(root, lambda node: True)
    assert isinstance(found, RangeReduction), found
    return found


def random(node: Node, seed: int, offset: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(node.shape, generator=generator, dtype=F64) + offset).to(node.dtype)


def check(root: Node, x: Tensor | None = None, order: str = "forward", threads: int = 256) -> Kernel:
    r = parsed(root)
    k = kernel(r, "fused_test", threads=threads)
    x = random(r.x, 1) if x is None else x
    value = _value(r.value, r.x, x.double())
    got, want = emulate(k, x, order=order), expected(root.op, value)
    assert got.dtype == root.dtype and got.shape == want.shape
    special = ~want.isfinite()
    torch.testing.assert_close(got.double()[special], want[special], equal_nan=True, rtol=0, atol=0)
    # what the parts of a sum are rounded to in chains of eight additions, and the result itself
    magnitude = expected(root.op, value.abs())
    compute = torch.finfo(F64 if r.value.dtype == F64 else F32).eps
    bound = magnitude * compute * (1.5 if r.value is r.x else 8) + want.abs() * torch.finfo(root.dtype).eps / 2 + 1e-300
    wrong = ((got.double() - want).abs() > bound)[~special]
    assert not wrong.any(), ((got.double() - want).abs() / bound)[~special].max()
    return k


P = (2, 3)
CASES = {
    # totals: teams of every size, ends that are not aligned
    "one element": lambda: sums(inp(*P, 1), {2: whole(1, 0.5)}),
    "three elements": lambda: reduce(inp(*P, 3), "sum", 2),
    "five elements": lambda: reduce(inp(7, 5), "mean", 1),
    "7x7": lambda: reduce(inp(2, 37, 7, 7), "mean", 2, 3, keepdim=True),
    "8x8": lambda: reduce(inp(*P, 8, 8), "sum", 2, 3),
    "13x21": lambda: reduce(inp(*P, 13, 21), "sum", 2, 3),
    "32x32": lambda: sums(inp(*P, 32, 32), {2: whole(32), 3: whole(32)}),
    "shared planes": lambda: reduce(inp(*P, 150, 150), "mean", 2, 3),
    "shared planes, scaled": lambda: sums(inp(1, 3, 151, 151), {2: whole(151, 0.1), 3: whole(151, 0.2)}),
    "3-d": lambda: reduce(inp(*P, 5, 6, 7), "sum", 2, 3, 4),
    "everything": lambda: reduce(inp(5, 7, 9), "sum", 0, 1, 2),
    "everything, many": lambda: reduce(inp(3, 12_345), "mean", 0, 1),
    "last of four": lambda: reduce(inp(2, 3, 4, 33), "sum", 3, keepdim=True),
    "float64": lambda: reduce(inp(*P, 17, 9, dtype=F64), "mean", 2, 3),
    "float64, odd": lambda: sums(inp(*P, 17, 9, dtype=F64), {2: whole(17), 3: whole(9)}),
    "bf16": lambda: reduce(inp(*P, 25, 9, dtype=BF16), "mean", 2, 3),
    "fp16": lambda: reduce(inp(*P, 31, 9, dtype=F16), "sum", 2, 3),
    "bf16 in float32": lambda: sums(inp(*P, 14, 14, dtype=BF16), {2: whole(14), 3: whole(14)}, F32),
    "fp16, shared planes": lambda: sums(inp(1, 2, 250, 201, dtype=F16), {2: whole(250), 3: whole(201)}, F32),
    # pointwise operations before the sum
    "of squares": lambda: reduce(pointwise("square", inp(*P, 9, 9)), "mean", 2, 3),
    "of sigmoids": lambda: reduce(pointwise("sigmoid", pointwise("mul", inp(*P, 9, 9), 2.0)), "sum", 2, 3),
    "of a cast": lambda: reduce(cast(inp(*P, 9, 9), F64), "sum", 2, 3),
    "of x times itself": lambda: reduce((lambda x: pointwise("mul", x, pointwise("tanh", x)))(inp(*P, 40)), "sum", 2),
    "of exp, ranges": lambda: sums(pointwise("exp", inp(*P, 9, 12)), {2: borders(9, 2), 3: borders(12, 3)}),
    # ranges of one axis
    "crop": lambda: sums(inp(*P, 37), {2: (Slot(3, 30, 1, 0.25),)}),
    "crop of rows": lambda: sums(inp(*P, 12, 10), {2: (Slot(2, 9, 1, 1.0),), 3: whole(10)}),
    "borders of rows": lambda: sums(inp(*P, 12, 10), {2: borders(12, 3), 3: whole(10, 0.5)}),
    "1-d borders": lambda: sums(inp(*P, 63), {2: borders(63, 4)}),
    "1-d borders, long": lambda: sums(inp(1, 3, 20_001), {2: borders(20_001, 3)}),
    "1-d step 2": lambda: sums(inp(*P, 61), {2: strided(61, 3, 2)}),
    "1-d step 4": lambda: sums(inp(*P, 250), {2: strided(250, 5, 4)}),
    "1-d step 2, float64": lambda: sums(inp(*P, 50, dtype=F64), {2: strided(50, 4, 2)}),
    "1-d step 8, bf16": lambda: sums(inp(*P, 203, dtype=BF16), {2: strided(203, 3, 8)}, F32),
    "1-d windows": lambda: sums(inp(*P, 50), {2: windows(50, 7)}),
    "1-d of all dimensions": lambda: sums(inp(40), {0: borders(40, 3)}),
    # ranges of two axes
    "crop of both": lambda: sums(inp(*P, 9, 13), {2: (Slot(1, 8, 1, 0.5),), 3: (Slot(2, 13, 1, 0.5),)}),
    "crop of columns": lambda: sums(inp(*P, 9, 12), {2: whole(9), 3: (Slot(4, 9, 1, 1.0),)}),
    "borders": lambda: sums(inp(*P, 16, 20), {2: borders(16, 4), 3: borders(20, 4)}),
    "borders, odd": lambda: sums(inp(*P, 11, 13), {2: borders(11, 3), 3: borders(13, 2)}),
    "borders, even": lambda: sums(inp(*P, 11, 14), {2: borders(11, 3), 3: borders(14, 2)}),
    "other scales": lambda: sums(inp(*P, 8, 8), {2: (Slot(0, 7, 1, 1.0), Slot(1, 8, 1, 2.0)), 3: borders(8, 2)}),
    "step 2": lambda: sums(inp(*P, 17, 18), {2: strided(17, 3, 2), 3: strided(18, 3, 2)}),
    "step 3": lambda: sums(inp(*P, 17, 19), {2: strided(17, 5, 3), 3: strided(19, 4, 3)}),
    "steps 2 and 1": lambda: sums(inp(*P, 17, 16), {2: strided(17, 3, 2), 3: borders(16, 3)}),
    "windows of both": lambda: sums(inp(*P, 24, 24), {2: windows(24, 8), 3: windows(24, 5)}),
    "an empty slot": lambda: sums(inp(*P, 8, 8), {2: (Slot(0, 0, 1, 1.0), Slot(0, 8, 1, 1.0)), 3: borders(8, 2)}),
    "shared, borders": lambda: sums(inp(1, 2, 130, 140), {2: borders(130, 3), 3: borders(140, 3)}),
    "blocks of one plane": lambda: sums(inp(1, 1, 70, 64), {2: borders(70, 3), 3: borders(64, 3)}),
    "wide rows": lambda: sums(inp(1, 2, 3, 4100), {2: borders(3, 2), 3: borders(4100, 2)}),
    "wide odd rows": lambda: sums(inp(1, 1, 4, 1027), {2: borders(4, 2), 3: borders(1027, 2)}),
    "float64 borders": lambda: sums(inp(*P, 9, 10, dtype=F64), {2: borders(9, 3), 3: borders(10, 3)}),
    "bf16 borders": lambda: sums(inp(*P, 9, 24, dtype=BF16), {2: borders(9, 3), 3: borders(24, 3)}, F32),
    "fp16 to fp16": lambda: sums(inp(*P, 9, 18, dtype=F16), {2: borders(9, 3, 0.1), 3: borders(18, 3, 0.1)}, F16),
    # ranges of three axes
    "3-d borders": lambda: sums(inp(*P, 5, 6, 8), {2: borders(5, 3), 3: borders(6, 3), 4: borders(8, 3)}),
    "3-d step 2": lambda: sums(inp(*P, 7, 6, 9), {2: strided(7, 3, 2), 3: strided(6, 2, 2), 4: strided(9, 3, 2)}),
    "3-d, one merged": lambda: sums(inp(*P, 7, 6, 9), {2: borders(7, 3), 3: whole(6), 4: whole(9)}),
    "3-d, two merged": lambda: sums(inp(*P, 7, 6, 9), {2: whole(7), 3: whole(6), 4: borders(9, 2)}),
    "3-d, middle": lambda: sums(inp(*P, 7, 6, 9), {2: whole(7), 3: borders(6, 2), 4: whole(9)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_value(name: str) -> None:
    check(CASES[name](), order=ORDERS[zlib.crc32(name.encode()) % 3])


# Planes that a block has to itself, whose sums of rows are parked in shared memory.
PARKED = {
    "steps 2 and 3": lambda: sums(inp(*P, 61, 64), {2: strided(61, 3, 2), 3: strided(64, 4, 3)}),
    "odd rows": lambda: sums(inp(*P, 50, 51), {2: borders(50, 3), 3: borders(51, 2)}),
    "rows of no slot": lambda: sums(
        inp(*P, 48, 52), {2: (Slot(5, 30, 1, 0.5), Slot(33, 44, 2, 2.0)), 3: borders(52, 3)}
    ),
    "crop of both": lambda: sums(
        inp(*P, 48, 52), {2: (Slot(3, 40, 1, 0.5),), 3: (Slot(5, 49, 1, 1.0), Slot(6, 50, 1, 1.0))}
    ),
    "windows of both": lambda: sums(inp(1, 2, 60, 60), {2: windows(60, 20), 3: windows(60, 7)}),
    "volumes": lambda: sums(inp(1, 2, 9, 18, 27), {2: strided(9, 3, 2), 3: strided(18, 2, 2), 4: strided(27, 3, 2)}),
    "volumes, borders": lambda: sums(inp(1, 2, 6, 20, 24), {2: borders(6, 2), 3: borders(20, 3), 4: borders(24, 2)}),
    "several turns": lambda: sums(inp(1, 2, 5, 4100), {2: borders(5, 2), 3: borders(4100, 3)}),
    "several turns, step 2": lambda: sums(inp(1, 1, 6, 2100), {2: strided(6, 3, 2), 3: strided(2100, 3, 2)}),
    "shared": lambda: sums(inp(1, 2, 200, 140), {2: strided(200, 3, 2), 3: borders(140, 3)}),
    "bf16": lambda: sums(inp(*P, 60, 88, dtype=BF16), {2: borders(60, 3), 3: borders(88, 3)}, F32),
    "fp16 to fp16": lambda: sums(inp(*P, 60, 90, dtype=F16), {2: borders(60, 3, 0.1), 3: strided(90, 3, 2)}, F16),
    "float64": lambda: sums(inp(*P, 40, 34, dtype=F64), {2: borders(40, 3), 3: borders(34, 2)}),
    "of exp": lambda: sums(pointwise("exp", inp(*P, 45, 48)), {2: borders(45, 2), 3: borders(48, 3)}),
}  # fmt: skip


@pytest.mark.parametrize("threads", [64, 256])
@pytest.mark.parametrize("name", PARKED)
@pytest.mark.sampled
def test_parked_sums(name: str, threads: int) -> None:
    k = check(PARKED[name](), order=ORDERS[(zlib.crc32(name.encode()) + threads) % 3], threads=threads)
    assert "parked[set][down]" in k.source and k.launches[0].threads == threads


@pytest.mark.parametrize("name", ["steps 2 and 3", "shared", "several turns"])
def test_parked_sums_have_one_order(name: str) -> None:
    r = parsed(PARKED[name]())
    k, x = kernel(r, "fused_test"), random(r.x, 2)
    first = emulate(k, x)
    assert all(torch.equal(first, emulate(k, x, order=order, seed=3)) for order in ORDERS[1:])


@pytest.mark.parametrize("value", [nan, inf])
@pytest.mark.parametrize("name", ["steps 2 and 3", "rows of no slot", "odd rows"])
def test_parked_values_that_are_not_finite_reach_their_slots_alone(name: str, value: float) -> None:
    root = PARKED[name]()
    x = random(parsed(root).x, 3)
    x.view(-1)[0], x.view(-1)[-1], x[0, 1, 4] = value, -value, value
    check(root, x)


def test_many_sums_of_rows_are_not_parked() -> None:
    """Where they do not fit: each has a number per column, and a copy for all threads that share it."""
    k = kernel(parsed(sums(inp(*P, 200, 500), {2: borders(200, 40), 3: borders(500, 3)})), "fused_test")
    assert "parked" not in k.source


@pytest.mark.parametrize(("shape", "threads"), [((512, 512), 256), ((64, 64), 128), ((28, 28), 64)])
def test_small_planes_have_small_blocks(shape: tuple[int, int], threads: int) -> None:
    h, w = shape
    r = parsed(sums(inp(256, 64, h, w), {2: borders(h, 3), 3: borders(w, 3)}))
    assert worth_measuring(r)[0] == {"threads": threads, "parks": True}


def test_few_sums_of_large_planes_are_joined_by_sets() -> None:
    r = parsed(sums(inp(32, 64, 256, 256), {2: borders(256, 2), 3: borders(256, 2)}))
    assert worth_measuring(r)[:2] == [{"threads": 256, "parks": False}, {"threads": 256, "parks": True}]
    total = parsed(sums(inp(32, 64, 256, 256), {2: whole(256), 3: whole(256)}))
    assert worth_measuring(total) == [{"threads": 256, "parks": False}]


@pytest.mark.parametrize(
    "name", ["13x21", "shared planes", "1-d step 2", "borders, odd", "shared, borders", "wide rows"]
)
def test_every_order_gives_the_same_bits(name: str) -> None:
    r = parsed(CASES[name]())
    k, x = kernel(r, "fused_test"), random(r.x, 2)
    first = emulate(k, x)
    assert all(torch.equal(first, emulate(k, x, order=order, seed=3)) for order in ORDERS[1:])


@pytest.mark.parametrize("name", ["7x7", "shared planes", "everything, many", "1-d borders", "borders", "3-d borders"])
@pytest.mark.parametrize("value", [nan, inf])
def test_values_that_are_not_finite_reach_their_slots_alone(name: str, value: float) -> None:
    root = CASES[name]()
    x = random(parsed(root).x, 3)
    x.view(-1)[0] = value
    x.view(-1)[-1] = -value
    check(root, x)


def test_an_offset_costs_no_digits() -> None:
    """A large mean: the float32 chains are short, and all else is float64."""
    r = parsed(reduce(inp(2, 300_000), "mean", 1))
    x = random(r.x, 4, offset=10.0)
    got = emulate(kernel(r, "fused_test"), x).double()
    assert ((got - x.double().mean(1)).abs() <= 1.2e-6).all()  # one ulp of the result


@pytest.mark.parametrize("shape", [(2, 3, 7, 7), (1, 1, 1, 1), (3, 5, 150, 149), (400, 1, 3, 5)])
def test_sizes_of_totals_are_arguments(shape: tuple[int, ...]) -> None:
    """One text serves every size; whether blocks share planes was decided for the size it was written for."""
    root = reduce(inp(2, 3, 150, 150), "mean", 2, 3, keepdim=True)
    x = torch.randn(shape)
    got = emulate(kernel(parsed(root), "fused_test"), x)
    torch.testing.assert_close(got, x.double().mean((2, 3), keepdim=True).float(), rtol=3e-7, atol=1e-7)


def test_symbolic_batch() -> None:
    b = sympy.Symbol("B", positive=True, integer=True)
    x = make(ops.Input((b, 3, 20, 24), F32, CPU, "x", 0))
    k = kernel(parsed(sums(x, {2: borders(20, 3), 3: borders(24, 3)})), "fused_test")
    assert [s[0] for s in k.sizes] == ["n0", "n1"] and k.output.shape == ("n0", "n1", "3", "3")
    assert k.shapes == (("n0", "n1", "20", "24"),) and k.dtypes == (F32,)
    given = torch.randn(4, 3, 20, 24)
    want = expected(sums(inp(4, 3, 20, 24), {2: borders(20, 3), 3: borders(24, 3)}).op, given.double())
    torch.testing.assert_close(emulate(k, given), want, rtol=1e-5, atol=1e-5)


def test_two_launches_only_where_planes_are_few() -> None:
    few, many = (kernel(parsed(reduce(inp(n, 256, 256), "sum", 1, 2)), "fused_test") for n in (16, 1024))
    assert [launch.entry for launch in few.launches] == ["fused_test", "fused_test_finish"]
    assert [launch.entry for launch in many.launches] == ["fused_test"] and not many.scratch


NO = {
    "no sum": (lambda: reduce(inp(2, 3), "max", 1), "is no sum"),
    "inner dimensions": (lambda: reduce(inp(2, 3, 4), "sum", 1), "not over the last dimensions"),
    "a large kept dimension": (lambda: sums(inp(2, 3, 4, 5000), {2: whole(4)}), "keeps 5000 indices of dimension 3"),
    "two tensors": (lambda: reduce(pointwise("add", inp(2, 3), inp_other(2, 3)), "sum", 1), "reads 2 tensors"),
    "a broadcast": (lambda: reduce(pointwise("add", inp(3), inp(3)), "sum", 0), None),
    "integers": (lambda: reduce(inp(2, 3, dtype=torch.int64), "sum", 1), "is summed in torch.int64"),
    "nothing": (lambda: sums(inp(2, 5, 7), {1: (Slot(0, 0, 1, 1.0),), 2: whole(7)}), "sums nothing"),
    "four axes": (lambda: sums(inp(2, 4, 4, 4, 4), {d: borders(4, 2) for d in (1, 2, 3, 4)}), "is over 4 axes"),
}  # fmt: skip


def inp_other(*shape: int) -> Node:
    return make(ops.Input(shape, F32, CPU, "y", 1))


@pytest.mark.parametrize("name", NO)
def test_refuses(name: str) -> None:
    root, why = NO[name]
    found = parse(root(), lambda node: True)
    if why is None:
        assert isinstance(found, RangeReduction)
    else:
        assert isinstance(found, str) and why in found, found


ELSEWHERE = {
    "every third element of a line": (lambda: sums(inp(2, 30), {1: strided(30, 3, 3)}), "takes one element in 3"),
    "many windows": (lambda: sums(inp(2, 96, 96), {1: windows(96, 2), 2: windows(96, 2)}), "too many borders"),
    "many slots": (lambda: sums(inp(2, 200), {1: windows(200, 2)}), "too many slots"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_one_pass_refuses(name: str) -> None:
    root, why = ELSEWHERE[name]
    assert why in (in_one_pass(parsed(root())) or "")


def test_a_value_with_another_user_is_read_from_memory() -> None:
    y = pointwise("relu", inp(2, 30))
    found = parse(reduce(pointwise("mul", y, 2.0), "sum", 1), lambda node: node is not y)
    assert isinstance(found, RangeReduction) and found.x is y


def test_segments_cover_what_slots_hold() -> None:
    for slots, length in ((strided(17, 5, 3), 17), (borders(9, 4), 9), (windows(20, 6), 20), (strided(11, 3, 2), 11)):
        axis = Axis((0,), slots)
        held = dict.fromkeys(range(length), 0)
        for s in axis.segments:
            held |= {i: s.members[i % axis.period] for i in range(s.begin, s.end)}
        want = {i: sum(1 << n for n, s in enumerate(slots) if i in range(s.start, s.stop, s.step)) for i in held}
        assert held == want


GOLDENS = {
    "ranges_total": lambda: sums(inp(16, 64, 512, 512), {2: whole(512), 3: whole(512)}),
    "ranges_borders": lambda: sums(inp(32, 64, 256, 256), {2: borders(256, 3), 3: borders(256, 3)}),
    "ranges_small_planes": lambda: sums(inp(32, 64, 16, 20), {2: borders(16, 3), 3: borders(20, 3)}),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str) -> None:
    assert kernel(parsed(GOLDENS[name]()), "fused_rangesum").source == (GOLDEN / f"{name}.cu").read_text()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    "name",
    [
        "ranges_total",
        "ranges_borders",
        "ranges_small_planes",
        "volumes",
        "3-d step 2",
        "fp16, shared planes",
        "1-d step 8, bf16",
        "of exp, ranges",
    ],
)
def test_compiles(name: str, arch: str) -> None:
    core = pytest.importorskip("cuda.core")
    source = kernel(parsed((CASES | PARKED | GOLDENS)[name]()), "fused_test").source
    core.Program(source, "c++", core.ProgramOptions(arch=arch, std="c++17")).compile("cubin")
