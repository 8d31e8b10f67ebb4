"""What the tests of both ways of warpgroups share: the kernel of a tile, how it is judged, groups with tiles."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from contraction_cases import Case, Found, Model, draw, find, tolerance
from emulation.emulate import ORDERS, emulate

from fusewright.codegen.cuda import warpgroup as cuda
from fusewright.kernel import Kernel, ceil_div, evaluate
from fusewright.schedule import warpgroup_estimate
from fusewright.schedule.warpgroup_estimate import HOPELESS
from fusewright.schedule.warpgroup_staging import WarpgroupCut

F16, BF16 = torch.float16, torch.bfloat16
inf, nan = float("inf"), float("nan")

T = TypeVar("T", bound=WarpgroupCut)
Tiles = Callable[[Found], Sequence[T]]


def kernel(f: Found, t: cuda.Tile, blocks: int | None = None) -> Kernel:
    return cuda.generate(f.group, t, "fused_test", "def reference(*operands): ...", blocks=blocks)


def assert_several_tiles(f: Found, t: cuda.Tile) -> None:
    """Every block has at least two of a sample's."""
    launch = next(n for n in kernel(f, t).launches if n.entry == "fused_test")
    axes = ("in_d", "in_h", "in_w")[-f.case.n :]
    lengths = zip(("N", *axes), (f.case.batch, *f.case.sizes), strict=True)
    assert 2 * evaluate(launch.grid[1], dict(lengths)) <= prod(map(ceil_div, f.cells, t.cells))


# What a tile is given with its estimate, or after that.
WITH_ESTIMATE = ("producers", "twice", "unfolded", "halves")


@contextmanager
def only(wanted: dict[str, Any]) -> Iterator[None]:
    """Estimates, which take long, of tiles alone that may be as wanted: those of others change nothing about theirs."""
    scored, unfoldings = warpgroup_estimate._scored, warpgroup_estimate.unfoldings
    before = {key: value for key, value in wanted.items() if key not in WITH_ESTIMATE}

    def some(c: Any, plain: Any, *more: Any) -> Any:
        fits = all(getattr(plain, key) == value for key, value in before.items())
        return scored(c, plain, *more) if fits else ()

    def named(c: Any) -> Any:
        return [(name, group) for name, group in unfoldings(c) if wanted.get("unfolded", name) == name]

    with patch.object(warpgroup_estimate, "_scored", some), patch.object(warpgroup_estimate, "unfoldings", named):
        yield


def best(tiles: Tiles[T], case: Case, wanted: dict[str, Any]) -> tuple[Found, T]:
    """The group of a case, and the best tile that is as wanted, with taps as taps, no producers and nothing held where
    nothing else is said; how weights are staged is up to nobody else."""
    result = find(case)
    assert isinstance(result, Found), result
    staging = {key: wanted[key] for key in ("tap_rows", "stay") if key in wanted}
    others = {
        "unfolded": "",
        "producers": 0,
        "held": False,
        **{key: value for key, value in wanted.items() if key not in staging},
    }
    with only(others):
        fitting = (t for t in tiles(result) if all(getattr(t, key) == value for key, value in others.items()))
        return result, replace(next(fitting), **staging)


def first(way: Any, f: Found, count: int = 1) -> list[Any]:
    """The best tiles of a way to cut, of which those far from the best are not estimated."""
    found = way.candidates(f.group, f.cells, tf32=True, hopeless=HOPELESS)[:count]
    assert len(found) == count and all(score < HOPELESS * found[0][0] for score, _ in found)
    return [t for _, t in found]


def drawn(tiles: Tiles[T], seed: int) -> tuple[Found, random.Random, Sequence[T]]:
    """The first case drawn from `seed` that PyTorch and the family take, and its tiles."""
    rng = random.Random(seed)
    while True:
        dtype = rng.choice((torch.float32, torch.float32, BF16, F16))
        case = replace(draw(rng), tf32=True, dtype=dtype)
        if case.groups == 1 and rng.random() < 0.2:
            case = replace(case, softmax=rng.choice(("softmax", "log_softmax")))
        try:
            Model(case)(case.example())
        except RuntimeError:  # nothing is left of the image, or no such pooling in this dtype
            continue
        f = find(case)
        if isinstance(f, Found) and (found := tiles(f)):
            return f, rng, found


def assert_right(
    f: Found, t: cuda.Tile, order: str = "forward", sanitize: bool = False, blocks: int | None = None
) -> None:
    assert_kernel_right(f, kernel(f, t, blocks), f.case.example(), order, sanitize)


def assert_kernel_right(
    f: Found, k: Kernel, x: torch.Tensor, order: str = "forward", sanitize: bool = False
) -> torch.Tensor:
    """The same of a kernel and an input; what it gives."""
    want, size = f.reference(x)
    assert k.arch == "sm_90a" and "wgmma_" in k.source
    got = emulate(k, *f.tensors(x), order=order, sanitize=sanitize)
    assert got.shape == want.shape and got.dtype == f.case.dtype
    error = ((got.double() - want).abs() / (size + 1e-3)).nan_to_num(inf)
    assert error.max() <= tolerance(f.case), f"{error.max()} is beyond"
    return got


def assert_orders_agree(f: Found, t: cuda.Tile) -> None:
    """All orders of threads give the same bits."""
    first, *others = (emulate(kernel(f, t), *f.tensors(f.case.example()), order=o, seed=3) for o in ORDERS)
    assert all(torch.equal(first, other) for other in others)


def assert_not_finite_as_eager(f: Found, t: cuda.Tile) -> None:
    """NaN and infinities surface where eager has them."""
    assert_kernel_not_finite_as_eager(f, kernel(f, t))


def assert_kernel_not_finite_as_eager(f: Found, k: Kernel) -> torch.Tensor:
    """The same of a kernel; what is wanted."""
    x = replace(f.case, batch=4).example()
    for sample, value in zip(x, (nan, inf, -inf), strict=False):
        sample[tuple(n // 2 for n in sample.shape)] = value
    want, _ = f.reference(x)
    got = emulate(k, *f.tensors(x)).double()
    torch.testing.assert_close(got.isnan(), want.isnan())
    torch.testing.assert_close(got[want.isinf()], want[want.isinf()])
    assert got[3:].isfinite().all()
    return want
