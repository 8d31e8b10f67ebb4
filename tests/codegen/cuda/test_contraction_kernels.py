"""Contraction kernels: the generated CUDA C++ runs on the CPU, and is compared with the model in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from contraction_cases import Case, Found, Model, draw, draw_boxed, find, some, tolerance
from emulation.emulate import ORDERS, emulate

from fusewright.codegen.cuda import contraction as cuda
from fusewright.kernel import evaluate
from fusewright.runtime import nvrtc
from fusewright.schedule.tiling import Tiling

GOLDEN = Path(__file__).parents[2] / "golden"
F16, BF16, F64 = torch.float16, torch.bfloat16, torch.float64
inf, nan = float("inf"), float("nan")

CASES = {
    "plain": Case((9, 13), channels=5, features=20, before=("relu", "add channel")),
    "padded": Case((7, 11), channels=3, kernel=(2, 5), stride=(2, 1), padding=(1, 3), dilation=(2, 1), bias=False),
    "same": Case((6, 9), channels=9, features=17, kernel=(4, 3), padding="same", tf32=False),
    "grouped": Case((8, 12), channels=2, features=3, groups=4, before=("times channel",), fold="mean", fold_dims="p"),
    "one dimension": Case((37,), 5, 40, (5,), (2,), (2,), (1,), pool="max", window=(3,), step=(2,), pool_padding=(1,)),
    "pool, then all": Case(
        (17, 23),
        3,
        24,
        before=("tanh", "scale"),
        pool="max",
        window=(4, 2),
        step=(4, 2),
        after=("gate",),
        fold="sum",
        fold_dims="cp",
        tf32=False,
    ),
    "overlapping windows": Case(
        (12, 11),
        4,
        9,
        pool="avg",
        window=(3, 2),
        step=(2, 1),
        pool_padding=(1, 1),
        ceil_mode=True,
        include_pad=False,
        before=("shift",),
        after=("both",),
    ),
    "windows apart": Case((14, 15), 2, 8, pool="avg", window=(2, 3), step=(3, 4), divisor=7, fold="max", fold_dims="p"),
    "three dimensions": Case(
        (5, 6, 9),
        3,
        16,
        (3, 3, 3),
        (1, 1, 1),
        (1, 1, 1),
        (1, 1, 1),
        before=("divide",),
        pool="max",
        window=(2, 2, 2),
        step=(2, 2, 2),
        fold="mean",
        fold_dims="p",
        keepdim=True,
    ),
    "over channels": Case((6, 10), 6, 33, before=("sigmoid",), fold="min", fold_dims="c", tf32=False),
    "over channels of groups": Case((9, 11), 2, 5, groups=3, before=("relu",), fold="mean", fold_dims="c", tf32=False),
    "maximum of groups, pooled": Case(
        (10, 13), 1, 2, groups=6, pool="avg", window=(2, 3), step=(2, 3), after=("tanh",), fold="max", fold_dims="c"
    ),
    "logsumexp over groups": Case((23,), 2, 20, (3,), (2,), (1,), (1,), 2, fold="logsumexp", fold_dims="c"),
    "over groups and positions": Case((9, 9), 3, 17, groups=2, transposed=True, fold="sum", fold_dims="cp"),
    "logsumexp over positions": Case((7, 21), 5, 20, before=("scale",), fold="logsumexp", fold_dims="p"),
    "logsumexp over positions, pooled": Case(
        (11, 17), 3, 24, before=("large",), pool="avg", window=(2, 2), step=(2, 2), fold="logsumexp", fold_dims="p"
    ),
    "logsumexp over all of some features": Case((7, 21), 5, 20, before=("large",), fold="logsumexp", fold_dims="cp"),
    "functions": Case((7, 11), 5, 20, before=("divide", "mish", "selu", "sine"), tf32=False),
    "more functions": Case((7, 11), 5, 20, before=("celu", "softplus", "cosine", "arc tangent"), tf32=False),
    "logsumexp over channels": Case((9, 10), 6, 33, before=("square",), fold="logsumexp", fold_dims="c", keepdim=True),
    "logsumexp over all": Case(
        (11, 17), 3, 24, before=("large",), pool="max", window=(2, 2), step=(2, 2), fold="logsumexp", fold_dims="cp"
    ),
    "logsumexp in float64": Case(
        (6, 9), 5, 12, dtype=F64, transposed=True, stride=(2, 2), fold="logsumexp", fold_dims="p", tf32=False
    ),
    "logsumexp in bfloat16": Case((9, 16), 8, 24, dtype=BF16, after=(), fold="logsumexp", fold_dims="c"),
    "transposed": Case((5, 9), 6, 24, (3, 3), (2, 2), (1, 1), transposed=True, before=("relu",), tf32=False),
    "transposed, cropped": Case(
        (5, 9),
        6,
        24,
        (4, 3),
        (2, 1),
        (1, 0),
        transposed=True,
        before=("relu",),
        fold="sum",
        fold_dims="p",
        cropped=((0, 2), (1, 0)),
        tf32=False,
    ),
    "transposed, fewer taps than strides": Case(
        (4, 5), 9, 5, (1, 2), (3, 2), (0, 0), (1, 1), 2, True, (2, 1), before=("where",), fold="sum", fold_dims="p"
    ),
    "transposed, dilated": Case(
        (4, 4, 5),
        3,
        5,
        (2, 3, 2),
        (2, 2, 1),
        (1, 1, 0),
        (1, 2, 3),
        1,
        True,
        (0, 1, 2),
        fold="sum",
        fold_dims="c",
    ),
    "transposed, pool": Case(
        (6, 7),
        4,
        18,
        (5, 4),
        (2, 1),
        (2, 1),
        transposed=True,
        pool="max",
        window=(3, 2),
        step=(4, 2),
        fold="mean",
        fold_dims="cp",
    ),
    "float64": Case(
        (8, 9), 5, 7, dtype=F64, before=("gelu",), pool="avg", window=(2, 2), step=(2, 2), fold="sum", fold_dims="p"
    ),
    "bfloat16": Case((9, 16), 8, 24, dtype=BF16, before=("hardswish",), fold="mean", fold_dims="p"),
    "float16": Case(
        (9, 15),
        5,
        9,
        dtype=F16,
        transposed=True,
        stride=(2, 2),
        before=("minus one",),
        pool="max",
        window=(2, 2),
        step=(2, 2),
    ),
}
BOXED = {
    "box": Case(
        (22, 20), 3, 24, pool="avg", window=(4, 4), step=(4, 4), after=("sigmoid",), fold="sum", fold_dims="cp"
    ),
    "box of strides": Case(
        (21, 24),
        2,
        5,
        (2, 3),
        (2, 1),
        dilation=(1, 2),
        groups=2,
        bias=False,
        pool="avg",
        window=(3, 2),
        step=(2, 3),
        tf32=False,
    ),
    "one box along one dimension": Case(
        (16, 12), 5, 9, (4, 3), (2, 1), pool="avg", window=(4, 3), step=(4, 2), fold="max", fold_dims="c", tf32=False
    ),
    "box in float16": Case((30,), 4, 8, (3,), (1,), (0,), (1,), pool="avg", window=(4,), step=(2,), dtype=F16),
}
# Channels and chunks that copies of 16, 8, 4 and 2 bytes take, images that none divides.
LAST = {
    "columns": replace(CASES["plain"], channels=24, channels_last=True),
    "columns in bfloat16": Case(
        (14, 14), 40, 24, (1, 1), dtype=BF16, before=("hardswish",), fold="mean", fold_dims="p", channels_last=True
    ),
    "columns in float16": replace(CASES["float16"], channels=12, channels_last=True),
    "columns in float64": replace(CASES["float64"], channels=6, channels_last=True),
    "columns of groups": replace(CASES["grouped"], fold="", fold_dims="", channels_last=True),
    **{
        f"columns, {name}": replace(CASES[name], channels_last=True)
        for name in (
            *("padded", "same", "pool, then all", "overlapping windows", "three dimensions", "over channels"),
            *("transposed", "transposed, dilated", "transposed, pool", "windows apart"),
        )
    },
}
CASES |= LAST
ALL = [(name, case, False) for name, case in CASES.items()] + [(name, case, True) for name, case in BOXED.items()]
EACH = [pytest.param(case, boxed, id=name) for name, case, boxed in ALL]


def found(case: Case, boxed: bool) -> Found:
    result = find(case, boxed)
    assert isinstance(result, Found), result
    assert (result.group.box is not None) == boxed
    return result


def assert_right(
    f: Found, t: Tiling, boxed: bool, order: str = "forward", sanitize: bool = False, blocks: int | None = None
) -> None:
    x = f.case.example()
    want, size = f.reference(x)
    got = emulate(f.kernel(t, blocks), *f.tensors(x), order=order, sanitize=sanitize)
    assert got.shape == want.shape and got.dtype == f.case.dtype
    written = f.case.last if f.group.layout_written == "channels_last" else torch.contiguous_format
    assert got.is_contiguous(memory_format=written)
    error = ((got.double() - want).abs() / (size + 1e-3)).nan_to_num(inf)
    assert error.max() <= tolerance(f.case, boxed), t


@pytest.mark.parametrize(("case", "boxed"), EACH)
@pytest.mark.sampled
def test_as_the_model_in_float64(case: Case, boxed: bool) -> None:
    """The best tiling and one that differs from it."""
    f = found(case, boxed)
    for t in some(f.tilings(), 2, random.Random(1)):
        assert_right(f, t, boxed)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "boxed"), EACH)
def test_more_tilings(case: Case, boxed: bool) -> None:
    f = found(case, boxed)
    for t in some(f.tilings(), 8, random.Random(2)):
        assert_right(f, t, boxed, "shuffled")


def random_found(seed: int) -> tuple[Found, bool, random.Random]:
    """The first case that is drawn from `seed` and that PyTorch and the family take."""
    rng = random.Random(seed)
    boxed = seed % 4 == 3
    while True:
        case = (draw_boxed if boxed else draw)(rng)
        try:
            Model(case)(case.example())
        except RuntimeError:  # nothing is left of the image, or no such pooling in this dtype
            continue
        f = find(case, boxed)
        if isinstance(f, Found) and (f.group.box is not None) == boxed:
            return f, boxed, rng


@pytest.mark.parametrize("seed", range(8))
def test_random_cases(seed: int) -> None:
    f, boxed, rng = random_found(seed)
    assert_right(f, some(f.tilings(), 2, rng)[-1], boxed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 108))
def test_more_random_cases(seed: int) -> None:
    f, boxed, rng = random_found(seed)
    for t in some(f.tilings(), 3, rng):
        assert_right(f, t, boxed, ORDERS[seed % 3])


def test_planes_that_32_bits_do_not_count_are_refused() -> None:
    """Places in a sample of the input are 32-bit numbers, and those in a plane of the output."""
    f = found(CASES["transposed"], False)
    k = f.kernel(f.tilings()[0])

    def beyond(side: int) -> list[bool]:
        return [evaluate(text, {"N": 1, "in_h": side, "in_w": side}) >= 2**31 for text in k.counts]

    assert beyond(2**14) == [False, False]
    assert beyond(2**15) == [True, True]


def test_no_random_case_is_refused() -> None:
    """What is drawn is what the family is for."""
    rng = random.Random(5)
    cases = [replace(draw(rng), batch=1) for _ in range(40)]
    refused = []
    for case in cases:
        try:
            model = Model(case)
            model(case.example())
        except RuntimeError:  # nothing is left of the image, or no such pooling in this dtype
            continue
        if not model.conv(case.example()).numel():
            continue
        f = find(case)
        if isinstance(f, str) or not f.tilings():
            refused.append((f, case))
    assert not refused


@pytest.mark.parametrize(("case", "boxed"), EACH)
def test_orders_of_threads_agree(case: Case, boxed: bool) -> None:
    f = found(case, boxed)
    kernel, operands = f.kernel(f.tilings()[0]), f.tensors(case.example())
    first, *others = (emulate(kernel, *operands, order=order, seed=3) for order in ORDERS)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(("case", "boxed"), EACH)
def test_what_is_not_finite(case: Case, boxed: bool) -> None:
    """NaN and infinities surface where eager has them; window sums promise the first (rules of class reassociates)."""
    f, x = found(case, boxed), replace(case, batch=4).example()
    for sample, value in zip(x, (nan, inf, -inf), strict=False):
        sample[tuple(n // 2 for n in sample.shape)] = value
    want, _ = f.reference(x)
    got = emulate(f.kernel(f.tilings()[0]), *f.tensors(x)).double()
    assert not (want.isnan() & ~got.isnan()).any()
    if not boxed:
        torch.testing.assert_close(got.isnan(), want.isnan())
        torch.testing.assert_close(got[want.isinf()], want[want.isinf()])
    assert got[3:].isfinite().all()


@pytest.mark.parametrize("weight", [0.0, 1e-10])
def test_the_largest_numbers_are_finite(weight: float) -> None:
    """A mask's number is beyond those of tf32, of which two make one of float32; a weight makes it none, or less."""
    f = found(Case((9, 11), 4, 8, tf32=False), False)
    x = f.case.example()
    x[0, 1, 4, 5], x[1, 1, 4, 5] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
    with torch.no_grad():
        f.model.conv.weight[:, 1] = weight
    want, _ = f.reference(x)
    got = emulate(f.kernel(f.tilings()[0]), *f.tensors(x)).double()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def joined(f: Found, t: Tiling) -> bool:
    """Whether blocks may form a cluster that finishes a sample."""
    return cuda.blocks_per_sample(f.group, t, f.case.batch, f.cells) is not None


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("fold", ["mean", "min", "logsumexp"])
@pytest.mark.parametrize("name", ["float64", "pool, then all", "three dimensions"])
@pytest.mark.sampled
def test_clusters_finish_samples_in_one_launch(name: str, fold: str, blocks: int) -> None:
    f = found(replace(CASES[name], fold=fold), False)
    t = next(t for t in f.tilings() if joined(f, t))
    assert len(f.kernel(t, blocks).launches) == 1
    for order in ORDERS:
        assert_right(f, t, False, order, blocks=blocks)


# What a logsumexp is of, and what it comes to as PyTorch has it.
EXTREMES = [
    [-inf] * 6, [-inf, 2.0, -inf, -inf, 1.0, -inf], [inf, 1.0, 2.0, 3.0, 4.0, 5.0], [1.0, inf, inf, 2.0, -inf, inf],
    [inf, 1.0, nan, 2.0, 3.0, -inf], [nan] * 6, [1e38, -1e38, 1e38, 0.0, 1.0, 2.0], [-1e38] * 6,
    [0.0, 100.0, -100.0, 99.0, 3.0, 100.0], [-80.0, -90.0, -85.0, -200.0, -81.0, -80.0],
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(("dims", "blocks"), [("p", None), ("p", 2), ("c", None), ("cp", None), ("cp", 1)])
@pytest.mark.sampled
def test_logsumexp_of_extremes(dims: str, blocks: int | None, dtype: torch.dtype) -> None:
    """The values come from the positions of x where those are reduced, else from the channels' biases."""
    case = Case((6,), 1, 6, (1,), (1,), (0,), (1,), tf32=False, fold="logsumexp", fold_dims=dims, dtype=dtype)
    f = found(case, False)
    t = next(t for t in f.tilings() if blocks is None or joined(f, t))
    weight, bias = f.model.conv.weight.detach().fill_(1), f.model.conv.bias.detach().zero_()
    for i, row in enumerate(torch.tensor(EXTREMES, dtype=dtype)):
        x = (0 * weight[:1] if dims == "c" else row).expand(2, 1, 6).clone()
        bias.copy_(row if dims == "c" else bias)
        got = emulate(f.kernel(t, blocks), *f.tensors(x), order=ORDERS[i % 3]).double()
        torch.testing.assert_close(got, f.reference(x)[0], rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("batch", [1, 5])
def test_another_batch(batch: int) -> None:
    f = found(CASES["pool, then all"], False)
    x = f.case.example(batch=batch)
    got = emulate(f.kernel(f.tilings()[0]), *f.tensors(x))
    torch.testing.assert_close(got.double(), f.reference(x)[0], rtol=1e-5, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "padded",
        "one dimension",
        "overlapping windows",
        "transposed, pool",
        "float16",
        "three dimensions",
        "over channels",
        "transposed, dilated",
        "box",
        "box of strides",
        "columns in bfloat16",
        "columns, padded",
        "columns, transposed, dilated",
        "logsumexp over groups",
        "maximum of groups, pooled",
        "logsumexp over positions",
        "logsumexp over all",
    ],
)
def test_stays_inside_its_arrays(name: str) -> None:
    """Under AddressSanitizer, every array in an allocation of its own size."""
    boxed = name in BOXED
    f = found(BOXED[name] if boxed else CASES[name], boxed)
    assert_right(f, some(f.tilings(), 2, random.Random(1))[-1], boxed, sanitize=True)


LARGE = {
    "plain": Case((62, 62), 8, 64, before=("relu", "add channel")),
    "pool": Case((62, 62), 8, 64, before=("tanh",), pool="max", window=(4, 4), step=(4, 4), fold="sum", fold_dims="cp"),
    "transposed": Case((32, 32), 16, 24, (3, 3), (2, 2), (1, 1), transposed=True, before=("relu",)),
    "3xTF32": Case((62, 62), 64, 128, tf32=False, before=("relu",)),
    "float64": Case((62, 62), 16, 32, dtype=F64, pool="avg", window=(2, 2), step=(2, 2)),
    "bfloat16": Case((62, 62), 64, 64, dtype=BF16, before=("hardswish",), fold="mean", fold_dims="p"),
    "logsumexp over channels": Case((62, 62), 8, 64, before=("relu",), fold="logsumexp", fold_dims="c"),
    "logsumexp over all": Case(
        (62, 62), 8, 64, pool="max", window=(2, 2), step=(2, 2), fold="logsumexp", fold_dims="cp"
    ),
    "logsumexp over positions": Case((62, 62), 64, 128, tf32=False, fold="logsumexp", fold_dims="p"),
    "over groups": Case((62, 62), 8, 32, groups=4, before=("square",), fold="sum", fold_dims="c"),
    "box": Case(
        (66, 66), 8, 64, pool="avg", window=(4, 4), step=(4, 4), after=("sigmoid",), fold="sum", fold_dims="cp"
    ),
    "padded box": Case((66, 64), 8, 64, padding=(1, 1), pool="avg", window=(4, 4), step=(4, 4), after=("sigmoid",)),
    "three dimensions": Case(
        (14, 30, 30),
        8,
        16,
        (3, 3, 3),
        (1, 1, 1),
        (0, 0, 0),
        (1, 1, 1),
        pool="max",
        window=(2, 2, 2),
        step=(2, 2, 2),
        fold="mean",
        fold_dims="p",
    ),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "box",
        *(pytest.param(n, marks=pytest.mark.slow) for n in LARGE if n not in ("plain", "box")),
    ],
)
def test_compiles_without_spills(name: str, arch: str) -> None:
    f = found(LARGE[name], "box" in name)
    kernel = f.kernel(f.tilings()[0])
    taken = nvrtc.resources(nvrtc.compile(kernel.source, arch))
    assert taken.keys() == {launch.entry for launch in kernel.launches}
    assert all(entry.stack == 0 for entry in taken.values()), taken


@pytest.mark.parametrize("name", ["plain", "transposed", "box", "box_by_warp"])
def test_reads_as_it_did(name: str) -> None:
    """Golden texts: a change of the generator shows as a difference of these files."""
    case = name.removesuffix("_by_warp")
    f = found(LARGE[case], case == "box")
    text = f.kernel(GOLDEN_TILINGS[name]).source
    path = GOLDEN / f"contraction_{name}.cu"
    assert text == path.read_text(), f"write the text to {path} if it is meant to change"


GOLDEN_TILINGS = {
    "plain": Tiling(2, 2, 1, 2, 1, 4, 4, 1, 1, 8, False, True),
    "transposed": Tiling(2, 1, 2, 2, 1, 4, 4, 1, 1, 16, False, True),
    "box": Tiling(1, 4, 1, 1, 1, 2, 2, 1, 1, 8, False, False),
    "box_by_warp": Tiling(4, 1, 4, 1, 1, 2, 4, 1, 1, 8, False, False, by_warp=True),
}
