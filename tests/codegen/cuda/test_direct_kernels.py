"""Direct contraction kernels: the generated CUDA C++ runs on the CPU, and is compared with the model in float64."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from contraction_cases import Case
from direct_cases import assert_right, error_of, found, kernel, precision, random_found, some, tiles
from emulation.emulate import ORDERS, emulate

from fusewright.runtime import nvrtc
from fusewright.schedule import direct_choice
from fusewright.schedule.direct import Cut, DirectTile, with_windows

GOLDEN = Path(__file__).parents[2] / "golden"
F16, BF16, F64 = torch.float16, torch.bfloat16, torch.float64
inf, nan = float("inf"), float("nan")

CASES = {
    "plain": Case((9, 13), channels=5, features=20, before=("relu", "add channel")),
    "depthwise": Case((12, 18), 1, 1, (5, 3), padding=(2, 1), groups=6, before=("times channel",)),
    "depthwise, overlapping windows, over channels": Case(
        (14, 19),
        1,
        1,
        (5, 5),
        padding=(1, 1),
        groups=7,
        before=("tanh",),
        pool="avg",
        window=(2, 2),
        step=(1, 1),
        after=("hardswish",),
        fold="logsumexp",
        fold_dims="c",
    ),
    "groups of one channel, over channels": Case(
        (70,),
        1,
        4,
        (7,),
        (2,),
        (5,),
        (3,),
        5,
        before=("gate",),
        pool="avg",
        window=(3,),
        step=(3,),
        fold="sum",
        fold_dims="c",
    ),
    "groups, over channels": Case(
        (17, 12), 6, 2, (5, 5), (1, 1), (3, 2), (3, 1), 4, before=("reverse",), fold="min", fold_dims="c"
    ),
    "groups, logsumexp over channels": Case(
        (61,), 11, 13, (1,), (3,), (0,), (3,), 3, before=("both",), fold="logsumexp", fold_dims="c"
    ),
    "groups, three dimensions, over positions": Case(
        (12, 14, 13),
        3,
        6,
        (2, 2, 2),
        (3, 3, 3),
        (0, 0, 0),
        (1, 1, 1),
        2,
        before=("hardswish",),
        pool="avg",
        window=(2, 3, 2),
        step=(2, 3, 2),
        after=("shift", "tanh"),
        fold="mean",
        fold_dims="p",
    ),
    "transposed to one feature": Case(
        (9, 11),
        9,
        1,
        (5, 5),
        (1, 1),
        (2, 0),
        (2, 2),
        transposed=True,
        output_padding=(0, 0),
        before=("times channel",),
        pool="avg",
        window=(2, 6),
        step=(2, 6),
    ),
    "a large window, over all": Case(
        (14, 15, 14),
        17,
        8,
        (1, 1, 1),
        (1, 1, 1),
        (0, 0, 0),
        (1, 1, 1),
        before=("scale",),
        pool="max",
        window=(7, 7, 7),
        step=(7, 7, 7),
        after=("hardswish",),
        fold="min",
        fold_dims="cp",
    ),
    "large windows that reach beyond the ends": Case(
        (21, 26),
        5,
        9,
        (2, 3),
        pool="max",
        window=(6, 7),
        step=(3, 5),
        pool_padding=(2, 3),
        ceil_mode=True,
        before=("minus one",),
    ),
    "windows and padding": Case(
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
    "transposed": Case((5, 9), 6, 10, (3, 3), (2, 2), (1, 1), transposed=True, before=("relu",)),
    "transposed, fewer taps than strides": Case(
        (4, 5), 9, 5, (1, 2), (3, 2), (0, 0), (1, 1), 2, True, (2, 1), before=("where",), fold="sum", fold_dims="p"
    ),
    "transposed, dilated": Case(
        (4, 4, 5), 3, 5, (2, 3, 2), (2, 2, 1), (1, 1, 0), (1, 2, 3), 1, True, (0, 1, 2), fold="sum", fold_dims="c"
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
    "windows that begin between strides": Case(
        (7, 9),
        1,
        5,
        (5, 5),
        (2, 2),
        (1, 0),
        groups=3,
        transposed=True,
        pool="max",
        window=(7, 7),
        step=(7, 1),
        after=("add channel",),
        fold="min",
        fold_dims="p",
    ),
    "windows that begin between strides, padding": Case(
        (9, 8),
        2,
        3,
        (3, 4),
        (3, 4),
        (1, 1),
        (2, 3),
        transposed=True,
        output_padding=(1, 2),
        before=("relu",),
        pool="avg",
        window=(4, 3),
        step=(1, 6),
        pool_padding=(2, 1),
        include_pad=False,
        fold="logsumexp",
        fold_dims="c",
    ),
    "windows of one row that begin between strides": Case(
        (5, 4, 6),
        1,
        2,
        (3, 2, 3),
        (2, 3, 2),
        (0, 1, 2),
        (1, 3, 1),
        4,
        True,
        (0, 0, 1),
        pool="avg",
        window=(1, 4, 2),
        step=(1, 1, 3),
        pool_padding=(0, 2, 0),
        ceil_mode=True,
    ),
    "many features, over positions": Case((11, 18), 3, 40, before=("gelu",), fold="max", fold_dims="p"),
    "logsumexp over positions": Case((11, 18), 3, 7, before=("large",), fold="logsumexp", fold_dims="p", groups=2),
    "logsumexp over positions, pooled": Case(
        (11, 18), 3, 7, pool="max", window=(2, 3), step=(2, 3), fold="logsumexp", fold_dims="p", groups=2
    ),
    "logsumexp over some features": Case((11, 18), 3, 22, before=("large",), fold="logsumexp", fold_dims="c"),
    "logsumexp over all": Case((11, 18), 3, 7, fold="logsumexp", fold_dims="cp", groups=2),
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
EACH = [pytest.param(case, id=name) for name, case in CASES.items()]


SOME = ("depthwise", "groups, over channels", "windows and padding", "transposed, dilated", "float64", "float16")


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=n, marks=() if n in SOME else pytest.mark.slow) for n, c in CASES.items()]
)
def test_as_the_model_in_float64(case: Case) -> None:
    """A tile that differs from the best."""
    f = found(case)
    assert_right(f, some(tiles(f), 2, random.Random(1))[-1])


@pytest.mark.slow
@pytest.mark.parametrize("case", EACH)
def test_more_tiles(case: Case) -> None:
    f = found(case)
    for t in some(tiles(f), 8, random.Random(2)):
        assert_right(f, t, "shuffled")


@pytest.mark.parametrize("seed", range(4))
def test_random_cases(seed: int) -> None:
    f, rng = random_found(seed)
    assert_right(f, some(tiles(f), 2, rng)[-1], ORDERS[seed % 3])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 104))
def test_more_random_cases(seed: int) -> None:
    f, rng = random_found(seed)
    for t in some(tiles(f), 3, rng):
        assert_right(f, t, ORDERS[seed % 3])


# Folds over channels whose running results stay in registers.
RUNNING = {
    "depthwise": Case((21, 18), 1, 1, (3, 5), (1, 1), (1, 2), groups=7, before=("gate",), fold="mean", fold_dims="c"),
    "phases": Case(
        (23,), 1, 1, (4,), (2,), (3,), (3,), 11, True, (1,), before=("clamp",), fold="sum", fold_dims="c", keepdim=True
    ),
    "phases, fewer taps than strides": Case(
        (6, 9), 1, 2, (2, 3), (3, 2), (0, 1), (1, 1), 5, True, (2, 1), before=("shift",), fold="min", fold_dims="c"
    ),
    "features that do not fill their blocks": Case(
        (13, 10), 3, 7, groups=3, before=("add channel",), fold="max", fold_dims="c"
    ),
    "sines": Case((17,), 2, 3, (3,), (1,), (1,), (1,), 5, before=("sine",), fold="sum", fold_dims="c"),
    "volumes": Case(
        (5, 6, 7), 1, 1, (3, 2, 3), (1, 2, 1), (1, 1, 0), (1, 1, 2), 6, before=("relu",), fold="sum", fold_dims="c"
    ),
    "logsumexp": Case((70,), 1, 3, (3,), (1,), (1,), (1,), 6, before=("large",), fold="logsumexp", fold_dims="c"),
    "sum of exponentials": Case((12, 9), 1, 1, groups=9, before=("tanh",), fold="logsumexp", fold_dims="c"),
    "functions behind": Case(
        (12, 9), 2, 4, groups=3, before=("relu",), fold="mean", fold_dims="c", behind=("sigmoid", "minus one")
    ),
    "bfloat16": Case((12, 18), 1, 2, groups=5, before=("reverse",), fold="max", fold_dims="c", dtype=BF16),
    "float64": Case(
        (9, 7), 1, 2, (3, 3), (2, 2), (1, 1), groups=5, transposed=True, fold="logsumexp", fold_dims="c", dtype=F64
    ),
    "one round": Case((13, 10), 3, 5, before=("hardswish",), fold="min", fold_dims="c"),
}


def of_rounds(cut: Cut) -> tuple[bool, bool, bool]:
    """What differs in the text: teams whose results are joined, blocks of features, and groups that are staged at once,
    of which a last step has fewer."""
    return cut.t.teams > 1, cut.o_blocks > 1, cut.at_once > 1 and cut.passes % cut.at_once > 0


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=n, marks=[] if n in ("phases", "logsumexp") else pytest.mark.slow) for n, c in RUNNING.items()],
)
def test_running_results_stay_in_registers(case: Case) -> None:
    """Values of threads meet in shared memory behind a tile's last round alone."""
    f = found(case)
    ways: dict[tuple[bool, bool, bool], list[DirectTile]] = {}
    for t in tiles(f):
        ways.setdefault(of_rounds(Cut.of(f.group, t)), []).append(t)
    rng = random.Random(4)
    for fit in ways.values():
        t = rng.choice(fit)
        assert "running[" not in kernel(f, t).source
        assert Cut.of(f.group, t).strips[1:] == (0, 0)
        assert_right(f, replace(t, buffers=rng.choice((1, 2))), "shuffled")
    assert any(way[0] for way in ways) and (any(way[2] for way in ways) or case.groups < 4)


def test_groups_whose_weights_do_not_stay_are_staged_one_by_one() -> None:
    f = found(Case((40, 40), 1, 8, (7, 7), groups=64, fold="sum", fold_dims="c"))
    cuts = [Cut.of(f.group, t) for t in tiles(f)]
    assert all(cut.at_once == 1 or cut.weights_stay for cut in cuts) and not all(cut.weights_stay for cut in cuts)


WINDOWS = Case((20, 26), 1, 1, padding=(1, 1), groups=5, before=("times channel",), window=(2, 2), step=(2, 2))
OWNED = {
    "written": replace(WINDOWS, pool="max", after=("both",)),
    "over channels": replace(WINDOWS, pool="avg", pool_padding=(1, 1), include_pad=False, fold="sum", fold_dims="c"),
    "over positions": replace(WINDOWS, pool="max", pool_padding=(1, 1), ceil_mode=True, fold="mean", fold_dims="p"),
    "over all": replace(
        WINDOWS, pool="avg", pool_padding=(1, 0), after=("gate",), fold="max", fold_dims="cp", groups=1
    ),
}


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in OWNED.items()])
@pytest.mark.sampled
def test_windows_that_a_thread_folds_itself(case: Case) -> None:
    f = found(case)
    fit = [t for t in tiles(f) if Cut.of(f.group, t).owned == (1, 2, 2)]
    assert_right(f, random.Random(1).choice(fit), "shuffled")


VOLUMES = {
    "strides": Case(
        (14, 11, 16), 1, 1, (5, 3, 4), (1, 2, 3), (2, 1, 0), (1, 1, 1), 3, before=("mish",), fold="max", fold_dims="p"
    ),
    "dilated": Case((16, 9, 11), 2, 3, (3, 2, 3), (2, 1, 1), (1, 0, 1), (3, 1, 2), before=("add channel",)),
    "transposed": Case((5, 6, 7), 3, 2, (5, 3, 3), (2, 1, 2), (1, 0, 1), (1, 2, 1), 1, True, (1, 0, 0)),
    "over channels": Case(
        (9, 8, 12), 1, 2, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), 4, fold="logsumexp", fold_dims="c"
    ),
    "overlapping windows": Case(
        (12, 9, 11),
        2,
        1,
        (4, 2, 3),
        (1, 1, 1),
        (1, 0, 1),
        (1, 1, 1),
        2,
        before=("relu",),
        pool="avg",
        window=(4, 3, 3),
        step=(3, 3, 1),
        after=("hardswish",),
        fold="min",
        fold_dims="cp",
    ),
    "bfloat16": Case((12, 7, 10), 1, 2, (6, 3, 2), (1, 1, 1), (0, 0, 0), (1, 1, 1), 2, dtype=BF16),
    "float64": Case((11, 5, 6), 1, 3, (3, 1, 2), (2, 1, 1), (0, 0, 0), (1, 1, 1), 2, dtype=F64),
}


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in VOLUMES.items()])
def test_planes_of_a_thread_share_their_input(case: Case) -> None:
    """A few planes or many, the weights of all their taps at hand, from one buffer."""
    f = found(case)
    fit = [t for t in tiles(f) if t.planes > 1 and t.rows == 1 and t.together]
    for planes in {2, max(t.planes for t in fit)}:
        t = replace(random.Random(planes).choice([t for t in fit if t.planes == planes]), buffers=1)
        assert Cut.of(f.group, t).weights.together == (True, False, True)
        assert_right(f, t, "shuffled")


def test_windows_in_three_dimensions_that_a_thread_folds_itself() -> None:
    volumes = replace(VOLUMES["strides"], stride=(1, 1, 1), pool="avg", window=(2, 2, 2), step=(2, 2, 2))
    f = found(replace(volumes, pool_padding=(1, 0, 1), after=("both",), fold="", fold_dims=""))
    fit = [t for t in tiles(f) if Cut.of(f.group, t).owned == (2, 2, 2)]
    assert_right(f, next(t for t in fit if t.together), "shuffled")


@pytest.mark.parametrize(
    ("window", "step", "padding", "owned"),
    [((6, 6), (2, 2), (3, 0), (2, 2)), ((4, 9), (2, 3), (1, 4), (2, 3)), ((7, 5), (1, 1), (0, 2), (1, 1))],
)
@pytest.mark.parametrize("pool", ["max", "avg"])
def test_windows_that_overlap(
    pool: str, window: tuple[int, ...], step: tuple[int, ...], padding: tuple[int, ...], owned: tuple[int, ...]
) -> None:
    """A thread folds those of its values that windows have all or none of; others fold several windows at once."""
    f = found(replace(WINDOWS, pool=pool, window=window, step=step, pool_padding=padding, after=("both",)))
    cuts = [Cut.of(f.group, t) for t in tiles(f)]
    cuts = [cut for cut in cuts if cut.owned[1:] == owned]
    several = [cut for cut in cuts if any(cut.neighbours(i) > 1 for i in cut.window_passes)]
    rng = random.Random(3)
    for cut in [rng.choice(cuts), *([rng.choice(several)] if several else [])]:
        assert_right(f, cut.t, "shuffled")
    assert several or owned != (1, 1)


def test_windows_between_strides_that_a_thread_folds_in_part() -> None:
    """Along the dimension whose positions are a thread's own."""
    f = found(replace(CASES["windows that begin between strides"], stride=(2, 1), window=(3, 4), step=(3, 2)))
    fit = [t for t in tiles(f) if Cut.of(with_windows(f.group), t).owned == (1, 1, 2)]
    for t in random.Random(1).sample(fit, 2):
        assert_right(f, t, "shuffled")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(CASES["groups, logsumexp over channels"], id="along one dimension"),
        pytest.param(CASES["depthwise, overlapping windows, over channels"], id="over channels"),
        pytest.param(CASES["bfloat16"], id="bfloat16"),
        pytest.param(Case((7, 8), 40, 40, before=("relu",)), id="weights that do not stay"),
    ],
)
@pytest.mark.sampled
def test_one_buffer(case: Case) -> None:
    """What is staged waits until all threads have read what was there."""
    f = found(case)
    assert_right(f, replace(random.Random(1).choice(tiles(f)[:20]), buffers=1), "shuffled")


@pytest.mark.parametrize("case", EACH)
@pytest.mark.sampled
def test_orders_of_threads_agree(case: Case) -> None:
    """The best tile, into memory that holds one poison after the other."""
    f = found(case)
    k, operands = kernel(f, tiles(f)[0]), f.tensors(case.example())
    first, *others = (emulate(k, *operands, order=order, seed=3) for order in ORDERS)
    assert all(torch.equal(first, other) for other in others)
    assert error_of(first, *f.reference(case.example())) <= precision(case)


@pytest.mark.parametrize("case", EACH)
@pytest.mark.sampled
def test_what_is_not_finite(case: Case) -> None:
    """NaN and infinities surface where eager has them."""
    f, x = found(case), replace(case, batch=4).example()
    for sample, value in zip(x, (nan, inf, -inf), strict=False):
        sample[tuple(n // 2 for n in sample.shape)] = value
    want, _ = f.reference(x)
    got = emulate(kernel(f, tiles(f)[0]), *f.tensors(x)).double()
    torch.testing.assert_close(got.isnan(), want.isnan())
    torch.testing.assert_close(got[want.isinf()], want[want.isinf()])
    assert got[3:].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "depthwise, overlapping windows, over channels",
        "groups of one channel, over channels",
        "groups, three dimensions, over positions",
        "large windows that reach beyond the ends",
        "transposed, dilated",
        "float16",
    ],
)
def test_stays_inside_its_arrays(name: str) -> None:
    """Under AddressSanitizer, every array in an allocation of its own size."""
    f = found(CASES[name])
    assert_right(f, some(tiles(f), 2, random.Random(1))[-1], sanitize=True)


LARGE = {
    "depthwise": Case((62, 62), 1, 1, (7, 7), (1, 1), (3, 3), groups=64, before=("relu", "times channel")),
    "logsumexp": replace(CASES["depthwise, overlapping windows, over channels"], sizes=(62, 62), groups=64),
    "over channels": replace(
        CASES["depthwise, overlapping windows, over channels"], sizes=(62, 62), groups=64, fold="mean"
    ),
    "in registers": Case(
        (5446,), 1, 1, (4,), (2,), (3,), (3,), 92, True, (0,), before=("clamp",), fold="sum", fold_dims="c", batch=64
    ),
    "logsumexp in registers": Case((62, 62), 1, 1, groups=64, before=("gate",), fold="logsumexp", fold_dims="c"),
    "volume": replace(VOLUMES["strides"], sizes=(52, 51, 49), kernel=(7, 7, 7), padding=(1, 1, 1), groups=64),
    "window": replace(CASES["a large window, over all"], sizes=(28, 28, 28), channels=64),
    "transposed": Case((32, 32), 16, 4, (3, 3), (2, 2), (1, 1), transposed=True, before=("relu",)),
    "float64": Case((62, 62), 4, 4, dtype=F64, pool="avg", window=(2, 2), step=(2, 2)),
    "bfloat16": Case((62, 62), 1, 1, groups=64, dtype=BF16, before=("hardswish",), fold="mean", fold_dims="p"),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize(
    "name", ["depthwise", *(pytest.param(n, marks=pytest.mark.slow) for n in LARGE if n != "depthwise")]
)
def test_compiles_without_spills(name: str, arch: str) -> None:
    f = found(LARGE[name])
    for t in direct_choice.shortlist(f.group, f.cells, f.case.batch, None).tiles[:2]:
        k = kernel(f, t)
        taken = nvrtc.resources(nvrtc.compile(k.source, arch))
        assert taken.keys() == {launch.entry for launch in k.launches}
        assert all(entry.stack == 0 for entry in taken.values()), (taken, t)


@pytest.mark.parametrize("name", ["depthwise", "over channels"])
def test_reads_as_it_did(name: str) -> None:
    """Golden texts: a change of the generator shows as a difference of these files."""
    text = kernel(found(LARGE[name]), GOLDEN_TILES[name]).source
    path = GOLDEN / f"direct_{name.replace(' ', '_')}.cu"
    assert text == path.read_text(), f"write the text to {path} if it is meant to change"


GOLDEN_TILES = {
    "depthwise": DirectTile(1, 1, 1, 4, 4, 1, 32, 64, 1, True, 2),
    "over channels": DirectTile(1, 1, 1, 2, 4, 1, 15, 60, 1, True, 2),
}
