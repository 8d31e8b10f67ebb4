"""Direct contraction kernels of random and given groups: their tiles, their kernels, how exact they are to be."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from contraction_cases import Case, Found, Model, draw, find, tolerance
from emulation.emulate import emulate
from torch import Tensor

from fusewright.codegen.cuda import direct as cuda
from fusewright.kernel import Kernel
from fusewright.schedule import direct_choice
from fusewright.schedule.direct import DirectTile

REFERENCE = "def reference(*operands): ..."


def found(case: Case) -> Found:
    result = find(case)
    assert isinstance(result, Found), result
    return result


def tiles(f: Found) -> list[DirectTile]:
    fit = direct_choice.candidates(f.group, f.cells, f.case.batch)
    assert fit
    return fit


def some(fit: list[DirectTile], count: int, rng: random.Random) -> list[DirectTile]:
    """The first of `fit`, and others that differ from it and from each other."""
    chosen = fit[:1]
    for t in rng.sample(fit[1:], min(len(fit) - 1, 60)):
        if len(chosen) < count and all(
            sum(a != b for a, b in zip(vars(t).values(), vars(c).values(), strict=True)) > 3 for c in chosen
        ):
            chosen.append(t)
    return chosen


def kernel(f: Found, t: DirectTile) -> Kernel:
    return cuda.generate(f.group, t, "fused_test", REFERENCE)


def precision(case: Case) -> float:
    """Products are float32 whatever the flags allow."""
    return tolerance(replace(case, tf32=False))


def error_of(got: Tensor, want: Tensor, size: Tensor) -> float:
    """The worst error over the size of what is added up; infinite where something is not finite."""
    return ((got.double() - want).abs() / (size + 1e-3)).nan_to_num(float("inf")).max().item()


def assert_right(f: Found, t: DirectTile, order: str = "forward", sanitize: bool = False) -> None:
    x = f.case.example()
    want, size = f.reference(x)
    got = emulate(kernel(f, t), *f.tensors(x), order=order, sanitize=sanitize)
    assert got.shape == want.shape and got.dtype == f.case.dtype
    assert error_of(got, want, size) <= precision(f.case), t


def random_found(
    seed: int,
    fit: Callable[[Found], Sequence[object]] = lambda f: direct_choice.candidates(f.group, f.cells, f.case.batch),
    *,
    few_channels: bool = False,
) -> tuple[Found, random.Random]:
    """The first case that is drawn from `seed`, that PyTorch and the family take, and that some tile does `fit`."""
    rng = random.Random(seed)
    while True:
        case = replace(draw(rng), channels_last=False)
        if few_channels:
            case = replace(case, channels=rng.choice((1, 1, 2, 3)), groups=rng.choice((1, 3)))
        try:
            Model(case)(case.example())
        except RuntimeError:  # nothing is left of the image, or no such pooling in this dtype
            continue
        f = find(case)
        if isinstance(f, Found) and fit(f):
            return f, rng
