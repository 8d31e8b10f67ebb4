"""Rearrangements: the places that indices lead to, computed in Python, against ATen; and which groups there are."""

from __future__ import annotations

import random
from math import prod

import pytest
import sympy
import torch
from codegen.cuda.rearrangement_cases import (
    CASES,
    again,
    along,
    cat,
    folded,
    grid,
    padded,
    pixels,
    shuffled,
    taken,
    turned,
    unfolded,
)
from codegen.cuda.test_stream_kernels import CPU, graph_of, inp, reference
from codegen.cuda.test_stream_kernels import random as numbers
from torch import Tensor

from fusewright.ir import indices, ops
from fusewright.ir.build import permute, pointwise, reshape
from fusewright.ir.fused import Fused
from fusewright.ir.memory_order import output_orders
from fusewright.ir.node import Graph, Node, make
from fusewright.schedule import rearrangement
from fusewright.schedule.group import Group
from fusewright.schedule.groups import cut
from fusewright.schedule.rearrangement import (
    Between,
    Computed,
    Load,
    Padded,
    Rearrangement,
    Selected,
    Summed,
    Value,
    copies,
    parse,
    waste,
)


def found(root: Node) -> Rearrangement:
    r = parse(root, graph_of(root).users())
    assert isinstance(r, Rearrangement), r
    return r


def cubic(t: Tensor) -> tuple[Tensor, ...]:
    """The weights of four neighbours, `t` of the way between the middle two."""

    def near(x: Tensor) -> Tensor:
        return 1.25 * x**3 - 2.25 * x**2 + 1

    def far(x: Tensor) -> Tensor:
        return -0.75 * (x**3 - 5 * x**2 + 8 * x - 4)

    return far(t + 1), near(t), near(1 - t), far(2 - t)


def computed(r: Rearrangement, tensors: dict[Node, Tensor]) -> Tensor:
    """What a group computes, all elements at once."""
    count = prod(r.root.shape)  # type: ignore[arg-type]
    memory = {t: tensors[t].double() if t.dtype.is_floating_point else tensors[t] for t in r.tensors}

    def places(index: indices.Index) -> Tensor:
        return torch.tensor([index.at({r.at: i}) for i in range(count)])

    def at(value: Value) -> Tensor:
        match value:
            case Load():
                lying = memory[value.tensor].flatten()
                return lying[
                    places(value.address).clamp(0, len(lying) - 1)
                ]  # what a branch that is not taken would read
            case Computed():
                stand_ins = {n: inp(k, count, dtype=n.dtype) for k, (n, _) in enumerate(value.leaves)}
                root = rebuilt(value.root, stand_ins)
                return reference(root, {stand_ins[n]: at(v) for n, v in value.leaves})
            case Selected():
                index = places(value.index)
                result = at(value.parts[-1])
                for part, end in reversed([*zip(value.parts, value.ends, strict=True)][:-1]):
                    result = torch.where(index < end, at(part), result)
                return result
            case Padded():
                within = [(places(index), n) for index, n in value.inside]
                inside = torch.stack([(i >= 0) & (i < n) for i, n in within]).all(0)
                return torch.where(inside, at(value.value), value.outside)
            case Between():
                part = places(value.part).double() / value.per
                taps = [at(tap) for tap in value.taps]
                weights = (1 - part, part) if len(taps) == 2 else cubic(part)
                return sum(n * tap for n, tap in zip(weights, taps, strict=True))
            case Summed():
                return torch.stack([at(part) for part in value.parts]).sum(0)

    return at(r.value).reshape(r.root.shape)  # type: ignore[arg-type]


def rebuilt(node: Node, stand_ins: dict[Node, Node]) -> Node:
    """The same pointwise operations of values in a row."""
    if node in stand_ins or isinstance(node.op, ops.Number):
        return stand_ins.get(node, node)
    if isinstance(node.op, ops.Full):
        return make(ops.Full((1,), node.op.value, node.dtype, node.device))
    return make(node.op, *(rebuilt(a, stand_ins) for a in node.inputs))


def check(root: Node) -> Rearrangement:
    r = found(root)
    given = {n: numbers(n, i) for i, n in enumerate(graph_of(root).inputs)}
    torch.testing.assert_close(computed(r, given), reference(root, given))
    return r


@pytest.mark.parametrize("name", CASES)
def test_where_elements_lie(name: str) -> None:
    check(CASES[name]())


def moved(x: Node, rng: random.Random) -> Node:
    """x after one more operation that moves elements, or a function."""
    d = rng.randrange(x.ndim)
    length = x.shape[d]
    assert isinstance(length, int)
    match rng.randrange(12):
        case 0:
            return permute(x, rng.sample(range(x.ndim), x.ndim))
        case 1:
            return reshape(x, factors(prod(x.shape), rng))  # type: ignore[arg-type]
        case 2 if length > 2:
            start = rng.randrange(length - 1)
            return taken(x, d, start, rng.randrange(start + 1, length + 1), rng.choice((1, 1, 2, 3)))
        case 3:
            return make(ops.Roll(((d, rng.randrange(-length, 2 * length)),)), x)
        case 4:
            return make(ops.Flip((d,)), x)
        case 5:
            return cat(d, *rng.sample([x, pointwise("neg", x), make(ops.Flip((d,)), x)], rng.choice((2, 3))))
        case 6:
            return padded(x, (d, rng.randrange(3), rng.randrange(3)), value=1.5)
        case 7 if x.ndim in (2, 3) and d == x.ndim - 1:  # PyTorch has the others for no other dimensions
            most, mode = min(length, 3), rng.choice(("reflect", "replicate", "circular"))
            return make(ops.Pad(((d, rng.randrange(most), rng.randrange(most)),), mode), x)
        case 7 if 2 < x.ndim < 6 and rng.randrange(2):
            lengths = tuple(rng.randrange(1, 9) for _ in x.shape[2:])
            aligned = rng.random() < 0.5
            some = [ops.Interpolate(lengths, aligned), ops.Upsample(lengths)]
            some += [ops.Interpolate(lengths, aligned, "cubic")] if x.ndim == 4 else []
            return make(rng.choice(some), x)
        case 7 if 2 < x.ndim < 6:
            return make(ops.Upsample(tuple(rng.choice((1, 2, 3)) * n for n in x.shape[2:])), x)  # type: ignore[misc]
        case 8:
            wide = (*x.shape[:d], rng.choice((2, 3)), *x.shape[d:])
            return make(ops.Expand(wide), reshape(x, (*x.shape[:d], 1, *x.shape[d:])))
        case 9 if length > 2 and x.ndim < 5:
            return along(x, d, rng.randrange(1, min(length, 5)), rng.choice((1, 2, 3)))
        case 10 if x.ndim == 4:
            return unfolded(x, *lattice(rng, *x.shape[2:]))  # type: ignore[arg-type]
        case 10 if x.ndim == 3:
            lengths = rng.choice((3, 4, 6, 7)), rng.choice((4, 6, 8))
            given = lattice(rng, *lengths)
            taps, count = (prod(v) for v in (given[0], grid(*given).windows(lengths)))
            fits = x.shape[1] % taps == 0 and x.shape[2] == count  # type: ignore[operator]
            return folded(x if fits else inp(0, 2, 2 * taps, count), lengths, *given)
        case _:
            return pointwise("tanh", x)
    return x


def lattice(rng: random.Random, *lengths: int) -> list[tuple[int, int]]:
    """How windows lie in images that are so long: taps, their distance, padding, and steps."""
    ways = ((1, 2, 3), (1, 1, 2), (0, 1, 2), (1, 2, 3))
    while True:
        kernel, apart, padding, _ = given = [(rng.choice(some), rng.choice(some)) for some in ways]
        if all(n + 2 * p > d * (k - 1) for n, k, d, p in zip(lengths, kernel, apart, padding, strict=True)):
            return given


def factors(n: int, rng: random.Random) -> tuple[int, ...]:
    """Up to four numbers whose product is n."""
    shape: list[int] = []
    for _ in range(rng.randrange(3)):
        shape.append(rng.choice([k for k in range(1, 13) if n % k == 0]))
        n //= shape[-1]
    return (*shape, n)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.sampled
def test_random_moves(seed: int) -> None:
    rng, groups = random.Random(seed), 0
    for _ in range(60):
        x = inp(0, *rng.choice([(2, 4, 6), (3, 8), (2, 6, 4, 6), (24,), (1, 5, 7)]))
        for _ in range(rng.randrange(2, 7)):
            x = moved(x, rng)
            if prod(x.shape) > 20_000:  # type: ignore[arg-type]
                break
        root = pointwise("exp", x)
        if isinstance(parse(root, graph_of(root).users()), Rearrangement):
            check(root)
            groups += 1
    assert groups > 25


@pytest.mark.parametrize("op", [ops.Interpolate((70001,)), ops.Interpolate((70001,), True), ops.Upsample((70001,))])
def test_large_numbers_are_refused(op: ops.Op) -> None:
    root = pointwise("relu", make(op, inp(0, 1, 1, 50000)))
    assert not isinstance(parse(root, graph_of(root).users()), Rearrangement)


X = inp(0, 2, 8, 4, 8)
VIEWS: dict[str, tuple[Node, bool]] = {
    "joined dimensions": (reshape(X, (2, 32, 8)), False),
    "parted dimensions": (reshape(X, (2, 2, 4, 4, 8)), False),
    "turned and parted": (reshape(permute(X, (0, 2, 3, 1)), (2, 4, 8, 2, 4)), False),
    "turned and joined": (reshape(permute(X, (0, 2, 3, 1)), (2, 32, 8)), False),
    "turned and joined elsewhere": (reshape(permute(X, (0, 2, 3, 1)), (2, 4, 64)), True),
    "copied and joined": (reshape(permute(X, (0, 2, 3, 1), copy=True), (2, 4, 64)), False),
    "cut and joined": (reshape(taken(X, 2, 0, 3), (2, 8, 24)), False),
    "cut and joined elsewhere": (reshape(taken(X, 2, 0, 3), (2, 24, 8)), True),
    "repeated": (reshape(make(ops.Expand((2, 8, 4, 2, 8)), reshape(X, (2, 8, 4, 1, 8))), (2, 8, 8, 8)), True),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_what_eager_copies_for(name: str) -> None:
    root, copied = VIEWS[name]
    assert copies(root) == copied
    x = torch.randn(2, 8, 4, 8)
    assert isinstance(root.op, ops.Reshape)
    views = [root]
    while not isinstance(views[-1].op, ops.Input):
        views.append(views[-1].arg(0))
    given = reference_view(views[1:], x)
    seen = given.reshape(root.shape)  # type: ignore[arg-type]
    assert (seen.data_ptr() != given.data_ptr()) == copied


def reference_view(views: list[Node], x: Tensor) -> Tensor:
    """These views of x, the last one first."""
    for node in reversed(views[:-1]):
        match node.op:
            case ops.Permute(dims=dims, copy=copy):
                x = x.permute(dims).contiguous() if copy else x.permute(dims)
            case ops.Slice(dim=dim, start=start, stop=stop):
                x = x.narrow(dim, start, stop - start)  # type: ignore[arg-type]
            case ops.Expand(shape=shape):
                x = x.expand(shape)  # type: ignore[arg-type]
            case ops.Reshape(shape=shape):
                x = x.reshape(shape)  # type: ignore[arg-type]
    return x


@pytest.mark.parametrize("order, copied", [((0, 2, 3, 1), True), ((0, 1, 2, 3), False), ((1, 0, 2, 3), False)])
def test_orders_of_reshapes(order: tuple[int, ...], copied: bool) -> None:
    root = reshape(X, (2, 8, 32)) if copied is False else reshape(X, (2, 32, 8))
    assert indices.is_view((2, 8, 4, 8), order, tuple(root.shape)) is not copied
    (seen,) = output_orders(Graph((X,), (root,)), {X: order}, kernels=False)
    assert (seen == (0, 1, 2)) == (copied or order == (0, 1, 2, 3))


def test_rolls_lie_as_a_concatenation_on_a_cpu() -> None:
    order = (0, 2, 3, 1)
    x = make(ops.Input(X.shape, X.dtype, torch.device("cuda"), "x", 0))
    seen = [output_orders(Graph((n,), (make(ops.Roll(((2, 1),)), n),)), {n: order}, kernels=False)[0] for n in (X, x)]
    assert seen[0] != (0, 1, 2, 3) and seen[1] == (0, 1, 2, 3)


def test_an_index_that_is_rolled_is_split_again() -> None:
    start = indices.flat((24,))
    assert start is not None
    (i, at), x = start, inp(0, 4, 6)
    roll = make(ops.Roll(((0, 5),)), reshape(x, (24,)))
    rolled = indices.of_argument(roll, at)
    assert rolled is not None
    row, column = indices.of_argument(roll.arg(0), rolled) or ()
    assert [(row.at({i: k}), column.at({i: k})) for k in (0, 4, 5, 23)] == [(3, 1), (3, 5), (0, 0), (3, 0)]


# Which groups there are.


def groups_of(root: Node) -> list[Group]:
    offered: list[Group] = []

    def take(group: Group) -> Node:
        offered.append(group)
        return group.fused(group.name)

    cut(graph_of(root), take)
    return offered


def test_functions_and_moves_are_one_group() -> None:
    (group,) = groups_of(pointwise("relu", shuffled(X, 4)))
    assert group.family == "rearrangement" and group.name == "fused_relu"
    (group,) = groups_of(pixels(X, 2))
    assert group.family == "rearrangement" and group.name == "fused_rearrange"
    (group,) = groups_of(turned(inp(0, 2, 3, 4, 16), inp(1, 4, 8), inp(2, 4, 8)))
    assert group.name == "fused_mul_sub_mul_add_cat"


def test_functions_of_what_is_copied_are_a_stream_where_there_is_no_other_kernel() -> None:
    """As on CPUs."""
    offered: list[str] = []

    def take(group: Group) -> Node | None:
        offered.append(group.family)
        return None if group.family == "rearrangement" else group.fused(group.name)

    graph = cut(graph_of(pointwise("exp", pointwise("tanh", shuffled(X, 4)))), take)
    assert offered == [*["rearrangement"] * 3, "stream"]
    assert sum(isinstance(n.op, Fused) for n in graph.nodes()) == 1


def test_none_are_looked_for_where_no_kernel_moves_elements() -> None:
    offered: list[str] = []

    def take(group: Group) -> Node:
        offered.append(group.family)
        return group.fused(group.name)

    cut(graph_of(pointwise("exp", pointwise("tanh", shuffled(X, 4)))), take, moves=False)
    assert offered == ["stream"]


def test_what_lies_along_another_dimension_is_turned() -> None:
    r = found(pointwise("add", permute(inp(0, 2, 64, 9, 8), (0, 2, 3, 1)), inp(1, 2, 9, 8, 64)))
    assert r.turn is not None and (r.turn.step, r.turn.length) == (64, 72)
    assert [load.tensor.op.index for load in r.turn.loads] == [0]  # type: ignore[attr-defined]


def test_what_is_broadcast_is_not_turned() -> None:
    """Its digit has a length that depends on the batch."""
    b = sympy.Symbol("B", integer=True, positive=True)
    x, y = (make(ops.Input((b, n), torch.float32, CPU, f"a{n}", k)) for k, n in enumerate((32, 1)))
    r = found(pointwise("mul", make(ops.Slice(1, 0, 32, 2), x), y))
    assert r.turn is None and waste(r) > 1.5


def test_what_was_narrowed_stays_so() -> None:
    moves = make(ops.Roll(((1, 3),)), make(ops.Cast(torch.bfloat16), X))
    root = make(ops.Cast(torch.float32), pointwise("relu", reshape(moves, (2, 32, 8))))
    assert [n.dtype for n in found(root.arg(0)).tensors] == [torch.float32]
    widened = make(ops.Cast(torch.float32), reshape(moves, (2, 32, 8)))
    assert found(pointwise("add", widened, shuffled(inp(1, 2, 32, 8), 2))).tensors[0] is widened


def test_kernels_read_copies_of_what_is_turned() -> None:
    """Not those that take images whose channels lie last as they are, nor norms that turn rows themselves."""

    def norm(length: int) -> Node:
        x = permute(inp(0, 2, length, 72), (0, 2, 1))
        return make(ops.Norm("layer", 1e-5), x, inp(1, length), inp(2, length), None, None)

    assert [g.name for g in groups_of(norm(64))] == ["fused_layernorm"]
    assert [g.name for g in groups_of(norm(1100))] == ["fused_layernorm", "fused_rearrange"]  # it would fit in no block


def test_what_a_stream_reads_where_it_lies_is_a_stream() -> None:
    (group,) = groups_of(pointwise("relu", cat(1, inp(0, 2, 3, 4, 8), inp(1, 2, 5, 4, 8))))
    assert group.family == "stream"
    (group,) = groups_of(make(ops.Pool("max", (2, 2), (2, 2), (0, 0), (1, 1)), cat(1, X, inp(1, 2, 8, 4, 8))))
    assert group.family == "stream"


def test_what_is_as_long_as_a_batch_is_not_turned() -> None:
    b = sympy.Symbol("B", integer=True, positive=True)
    x, v = (make(ops.Input((b, n), torch.float32, CPU, f"a{n}", k)) for k, n in enumerate((128, 1)))
    assert waste(r := found(pointwise("mul", taken(x, 1, 0, 128, 2), v))) > 1.5 and r.turn is None


def test_what_is_read_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often groups of other nodes are looked for."""
    counted: list[Node] = []
    monkeypatch.setattr(rearrangement, "waste", lambda r: (counted.append(r.root), 1.0)[1])
    root = inp(0, 4, 40)
    for k in range(5):
        root = pointwise("exp", make(ops.Roll(((1, k + 1),)), pointwise("cos", root)))
    cut(graph_of(root), lambda group: None)
    assert len(counted) == len(set(counted))


def test_a_batch_behind_a_dimension_of_one() -> None:
    b = sympy.Symbol("B", integer=True, positive=True)
    r = found(make(ops.Flip((2,)), make(ops.Input((1, b, 8), torch.float32, CPU, "x", 0))))
    assert isinstance(r.value, Load) and [r.value.address.at({r.at: i}) for i in (0, 6, 17)] == [7, 1, 22]


def test_one_number() -> None:
    check(pointwise("exp", reshape(taken(inp(0, 4), 0, 1, 4, 5), ())))


def test_long_chains_are_given_up_soon() -> None:
    """Each step would read twice as many places, or indices be made of twice as many digits."""
    y = z = inp(0, 4, 24)
    for k in range(40):
        y = pointwise("add", y, make(ops.Roll(((1, 1),)), y))
        apart = reshape(z, (4, 4, 6) if k % 2 else (4, 6, 4))
        z = reshape(make(ops.Roll(((1, 1), (2, 1))), apart), (4, 24))
    for root, reason in ((y, "too many places"), (z, "by no constants")):
        r = parse(root, graph_of(root).users())
        assert isinstance(r, str) and reason in r


def test_what_others_use_is_read_from_memory() -> None:
    y = pointwise("tanh", X)
    root = pointwise("relu", shuffled(y, 4))
    users = Graph((X,), (root, y)).users()
    r = parse(root, users)
    assert isinstance(r, Rearrangement) and r.tensors == (y,)


def test_functions_on_both_sides_of_a_reshape() -> None:
    """Scores with a bias of their own and a mask of their window: no stream has both shapes."""
    y = reshape(pointwise("add", inp(0, 64, 3, 16, 16), inp(1, 1, 3, 16, 16)), (2, 32, 3, 16, 16))
    masked = pointwise("add", y, inp(2, 1, 32, 1, 16, 16))
    r = parse(masked, graph_of(masked).users())
    assert isinstance(r, Rearrangement) and len(r.tensors) == 3
    graph = cut(graph_of(masked), lambda group: group.fused(group.name))
    assert [n.op.name for n in graph.nodes() if isinstance(n.op, Fused)] == ["fused_add"]


REFUSED: dict[str, tuple[Node, str]] = {
    "no copy": (pointwise("relu", reshape(X, (2, 32, 8))), "nothing is copied"),
    "a view": (permute(X, (0, 2, 3, 1)), "nothing is copied"),
    "turned in one of several parts": (
        cat(1, inp(0, 4, 64, 64), permute(inp(1, 4, 64, 256), (0, 2, 1))),
        "lie too far apart",
    ),
    "turned in two ways": (
        pointwise("add", permute(inp(0, 64, 64, 64), (2, 1, 0)), permute(inp(1, 64, 64, 64), (0, 2, 1))),
        "lie too far apart",
    ),
    "of parameters": (
        pointwise("relu", cat(0, *(make(ops.Param((2, 3), torch.float32, CPU, f"p{k}")) for k in range(2)))),
        "nothing is copied",
    ),
    "empty": (pointwise("relu", reshape(inp(0, 0, 4), (0, 2, 2))), "nothing is copied"),
    "windows alone": (along(pointwise("relu", X), 3, 4, 2), "is a view"),
    "windows, seen in another way": (permute(along(padded(X, (3, 1, 1)), 3, 4, 2), (0, 2, 1, 3, 4)), "is a view"),
    "every other row, seen in another way": (reshape(taken(X, 1, 0, 8, 2), (2, 1, 4, 4, 8)), "is a view"),
    "too many taps": (folded(inp(0, 1, 81, 144), (12, 12), (9, 9), (1, 1), (4, 4)), "too many places"),
    "too many taps, of windows": (
        again(inp(0, 1, 2, 12, 12), (9, 9), (1, 1), (4, 4)),
        "too many places",
    ),
    "too many parts": (cat(0, *(inp(k, 1, 8) for k in range(70))), "too many places"),
    "of integers": (cat(0, inp(0, 2, 8, dtype=torch.int64), inp(1, 2, 8, dtype=torch.int64)), "lies in memory as"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    root, reason = REFUSED[name]
    r = parse(root, graph_of(root).users())
    assert isinstance(r, str) and reason in r


def test_neighbours_that_lie_apart_are_counted() -> None:
    assert waste(found(pointwise("relu", shuffled(X, 4)))) == 1.0
    assert waste(found(pointwise("relu", pixels(inp(0, 2, 8, 32, 64), 2)))) == 1.0
