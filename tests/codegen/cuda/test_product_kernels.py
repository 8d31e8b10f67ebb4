"""Kernels of products: the generated CUDA C++ runs on the CPU, and is compared with the model in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
from contraction_cases import some
from emulation.emulate import ORDERS, emulate
from product_cases import CASES, F16, Case, Found, draw, found
from torch import Tensor

from fusewright.codegen.cuda import contraction
from fusewright.codegen.cuda import warpgroup as cuda
from fusewright.codegen.product import of_tensors
from fusewright.kernel import Kernel
from fusewright.schedule import product, tiling, warpgroup, warpgroup_positions
from fusewright.schedule.tiling import Tiling


def tilings(f: Found) -> list[Tiling]:
    return tiling.candidates(f.group.contraction, (1, 1, f.rows), tf32=f.case.tf32)


def generated(f: Found, t: Tiling, blocks: int | None = None) -> Kernel:
    reference = "def reference(*operands): ..."
    view = contraction.generate(f.group.contraction, t, "fused_test", reference, tf32=f.case.tf32, blocks=blocks)
    return of_tensors(view, f.group)


def assert_right(
    f: Found, t: Tiling, order: str = "forward", blocks: int | None = None, batch: int | None = None
) -> None:
    def run(*operands: Tensor) -> Tensor:
        return emulate(generated(f, t, blocks), *operands, order=order)

    f.assert_right(run, batch)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_as_the_model_in_float64(name: str) -> None:
    """The best tiling and one that differs from it, in two orders of threads."""
    f = found(CASES[name])
    for t, order in zip(some(tilings(f), 2, random.Random(1)), ORDERS[1:], strict=True):
        assert_right(f, t, order)


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize(
    "name", ["rows, logsumexp", "tokens, over tokens", "more features than a block has", "turned, over features"]
)
def test_another_batch(name: str, batch: int) -> None:
    """Rows, be they positions or samples, are counted at run time."""
    f = found(CASES[name])
    assert_right(f, tilings(f)[0], batch=batch)


@pytest.mark.parametrize("over", ["f", "t", "ft"])
@pytest.mark.parametrize("keepdim", [False, True])
def test_what_was_one_row_may_be_many(over: str, keepdim: bool) -> None:
    """A leading length that was a constant of the program is none of the kernel: its output follows its operand."""
    f = found(Case((1, 4, 256), 136, (), "max", over, keepdim=keepdim))
    assert_right(f, tilings(f)[0], batch=11)


@pytest.mark.parametrize("blocks", [1, 2])
def test_one_launch_over_tokens(blocks: int) -> None:
    f = found(CASES["tokens, over tokens"])
    t = next(t for t in tilings(f) if t.block_m >= f.case.features and t.warps in (4, 8, 16))
    assert len(generated(f, t, blocks).launches) == 1
    for order in ORDERS:
        assert_right(f, t, order, blocks)


def test_rows_of_one_sample_are_counted() -> None:
    """Inside a sample a thread counts in 32 bits."""
    f, g = found(CASES["rows, mean"]), found(CASES["tokens, over tokens"])
    assert generated(f, tilings(f)[0]).counts == ("rows_0 * 64",)
    assert generated(g, tilings(g)[0]).counts == ("rows_1 * 131",)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(i, marks=pytest.mark.slow) for i in range(6, 66))])
@pytest.mark.sampled
def test_random_products(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "SMALL", 0)
    rng = random.Random(seed)
    f = found(draw(rng))
    assert_right(f, some(tilings(f), 2, rng)[-1], ORDERS[seed % 3])


# -- on Hopper's tensor cores


WARPGROUPS = {
    "rows, logsumexp": (replace(CASES["rows, logsumexp"], tf32=True), warpgroup_positions),
    "tokens, over features": (CASES["tokens, over features"], warpgroup),
    "bfloat16": (CASES["bfloat16"], warpgroup),
    "turned": (replace(CASES["turned, over features"], dtype=F16), warpgroup),
    "turned, positions": (replace(CASES["turned, over features"], tf32=True, features=130), warpgroup_positions),
    "float16": (replace(CASES["float16"], features=130), warpgroup_positions),
    "rows that are no whole vectors": (replace(CASES["bfloat16"], shape=(5, 30, 131)), warpgroup),
}


@pytest.mark.parametrize("name", WARPGROUPS)
@pytest.mark.sampled
def test_by_warpgroups(name: str) -> None:
    """The rows of x are channels-last positions, whose features lie as vectors already."""
    case, way = WARPGROUPS[name]
    f = found(case)
    tiles = [t for _, t in way.candidates(f.group.contraction, (1, 1, f.rows), tf32=case.tf32)]
    for t in (tiles[0], tiles[len(tiles) // 2]):
        record = of_tensors(
            cuda.generate(f.group.contraction, t, "fused_test", "def reference(*operands): ..."), f.group
        )
        assert record.arch == "sm_90a" and "wgmma_" in record.source
        for order in ORDERS:
            f.assert_right(partial(emulate, record, order=order))
