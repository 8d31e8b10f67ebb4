"""The precision contract on single tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusewright.verification.compare import Comparison, Rules, Sample, compare, worst_of
from fusewright.verification.inputs import Call, nudged
from fusewright.verification.numerics import round_to_tf32

EPS = torch.finfo(torch.float32).eps
NAN, INF = math.nan, math.inf


def judge(candidate: Tensor, eager: Tensor, truth: Tensor, rules: Rules | None = None, more: tuple[Sample, ...] = ()):
    return compare(Sample(candidate, (eager,), truth.double()), lambda times: more, rules or Rules())


def spread(size: float, count: int = 1000) -> Tensor:
    """Errors of one magnitude and both signs."""
    return size * (torch.arange(count) % 2 * 2 - 1).double()


@pytest.mark.parametrize(("factor", "ok"), [(1.9, True), (2.2, False)])
def test_root_mean_square_may_be_twice_eager_s(factor: float, ok: bool) -> None:
    truth = torch.ones(1000).double()
    eager = (truth + spread(1e-4)).float()
    assert judge((truth + factor * spread(1e-4)).float(), eager, truth).ok is ok


@pytest.mark.parametrize(("size", "ok"), [(0.8e-6, True), (1.6e-6, False)])
def test_root_mean_square_floor_is_relative_to_the_output(size: float, ok: bool) -> None:
    truth = 1000 * torch.ones(1000).double()
    assert judge((truth + 1000 * spread(size)).float(), truth.float(), truth).ok is ok


@pytest.mark.parametrize(("ulps", "ok"), [(25, True), (60, False)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_element_may_be_a_few_units_off_in_its_own_dtype(ulps: int, ok: bool, dtype: torch.dtype) -> None:
    truth = torch.ones(100_000, dtype=torch.float64)
    candidate = truth.to(dtype, copy=True)
    candidate[7] += ulps * torch.finfo(dtype).eps
    assert judge(candidate, truth.to(dtype), truth).ok is ok


def test_large_element_does_not_hide_an_error_in_a_small_one() -> None:
    truth = torch.ones(100_000).double()
    truth[0] = 200.0
    candidate = truth.float()
    candidate[1] += 100 * EPS
    assert not judge(candidate, truth.float(), truth).ok


CASES = [
    # candidate, eager, truth, planted, exact, ok
    (1.0, NAN, NAN, "nan", False, False),
    (NAN, NAN, NAN, "nan", False, True),
    (INF, NAN, NAN, "nan", False, False),
    (NAN, 1.0, 1.0, "nan", False, False),
    (INF, NAN, 1.0, "nan", False, True),
    (1.0, NAN, 1.0, "nan", False, True),
    (2.0, NAN, 1.0, "nan", False, False),
    (1.0, NAN, INF, "nan", False, False),
    (NAN, 1.0, 1.0, None, False, False),
    (INF, 1.0, 1.0, None, False, False),
    (NAN, 1.0, 1.0, "inf", False, True),
    (NAN, INF, INF, "inf", False, True),
    (INF, NAN, NAN, "inf", False, True),
    (NAN, INF, INF, "inf", True, False),
    (-INF, INF, INF, "inf", True, False),
    (INF, INF, INF, "inf", True, True),
    (INF, 1.0, 1.0, "inf", True, False),
    (1.0, INF, INF, None, False, False),
    (1.0, INF, 1.0, None, False, True),
    (2.0, INF, 1.0, None, False, False),
    (NAN, INF, INF, None, False, True),
]


@pytest.mark.parametrize(("candidate", "eager", "truth", "planted", "exact", "ok"), CASES)
def test_non_finite_values(candidate, eager, truth, planted, exact, ok) -> None:
    def row(value: float) -> Tensor:
        return torch.tensor([1.0, value, 1.0])

    assert judge(row(candidate), row(eager), row(truth), Rules(exact, planted)).ok is ok


def test_few_overflows_are_right_where_noise_makes_eager_overflow() -> None:
    """What leaves the range by a rounding, as eager's does for other roundings: there, and nowhere else."""
    eager = torch.ones(300)
    truth, candidate, moved = eager.double(), eager.clone(), eager.clone()
    candidate[7], moved[7], moved[9] = INF, NAN, -INF
    asked = []

    def more(times: int) -> list[Sample]:
        asked.append(times)
        return [Sample(eager, (moved if times > 1 else eager,), truth)]

    def found(candidate: Tensor, rules: Rules | None = None) -> Comparison:
        return compare(Sample(candidate, (eager,), truth), more, rules or Rules())

    assert found(candidate).ok and asked == [0, 1, 4]
    # A planted NaN reaches what noise does not: only an overflow comes and goes with it.
    assert found(candidate, Rules(planted="nan")).ok and not found(candidate, Rules(exact=True)).ok
    for place in (8, 11):
        other = candidate.clone()
        other[place] = NAN
        assert not found(other).ok
    other = candidate.clone()
    other[20] = 2.0  # and what is finite is judged as ever
    assert not found(other).ok
    asked.clear()
    assert not found(torch.full_like(eager, INF)).ok and asked == []  # too many for that


def test_nan_at_the_border_of_a_domain_is_no_overflow() -> None:
    """The root of 1 - x, as that times its reciprocal: where x is 1, noise makes NaN of eager's, and of the truth."""
    x = torch.linspace(0, 1, 300)
    generator = torch.Generator().manual_seed(0)

    def sample(x: Tensor) -> Sample:
        return Sample((1 - x) * torch.rsqrt(1 - x), (torch.sqrt(1 - x),), torch.sqrt(1 - x.double()))

    def more(times: int) -> list[Sample]:
        noise = (torch.rand((8 * times, 300), generator=generator) - 0.5) * times * 2**-21
        return [sample(x + x * each) for each in noise]

    assert any(s.eager.isnan().any() for s in more(1))
    assert sample(x).candidate.isnan().sum() == 1 and sample(x).eager.isfinite().all()
    assert not compare(sample(x), more, Rules()).ok


def test_integers_are_equal_but_where_noise_changes_them() -> None:
    eager, candidate = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])
    moved = Sample(candidate, (eager,), torch.tensor([1, 2, 4]))
    first = Sample(candidate, (eager,), eager)
    assert not compare(first, lambda times: (), Rules()).ok
    tied = compare(first, lambda times: (moved,), Rules())
    assert tied.ok and tied.ties == 1
    assert not compare(Sample(torch.tensor([1, 9, 4]), (eager,), eager), lambda times: (moved,), Rules()).ok


def test_few_wrong_integers_are_right_where_more_noise_finds_them() -> None:
    eager = torch.arange(300)
    candidate, moved = eager.clone(), eager.clone()
    candidate[7], moved[7], moved[9] = 5, 5, 11
    asked = []

    def more(times: int) -> list[Sample]:
        asked.append(times)
        return [Sample(eager, (eager,), moved if times > 1 else eager)]

    found = compare(Sample(candidate, (eager,), eager), more, Rules())
    assert found.ok and found.ties == 1 and asked == [1, 4]
    for place, value in ((7, 6), (9, 12), (11, 5)):  # not what any of them gives there
        other = eager.clone()
        other[place] = value
        assert not compare(Sample(other, (eager,), eager), more, Rules()).ok
    assert not compare(Sample(eager.roll(1), (eager,), eager), more, Rules()).ok and asked[-1] == 1  # too many for that


def test_element_that_noise_moves_is_held_to_that_movement() -> None:
    truth = torch.ones(1000).double()
    other = truth.clone()
    other[3] = 0.0
    more = (Sample(other.float(), (other.float(),), other),)
    for value, ok in ((0.0, True), (-2.5, True), (-10.0, False)):
        candidate = truth.float()
        candidate[3] = value
        result = judge(candidate, truth.float(), truth, more=more)
        assert result.ok is ok and result.ties == 1
    candidate = truth.float()
    candidate[4] = 0.0
    assert not judge(candidate, truth.float(), truth, more=more).ok


def test_lucky_eager_is_judged_by_its_other_errors() -> None:
    one = torch.ones(1).double()
    first = Sample((one + 1e-5).float(), (one.float(),), one)
    more = [Sample((one + 1e-5 * s).float(), (one.float() + 1e-5 * s,), one) for s in (-1, 1, -1)]
    assert not compare(first, lambda times: (), Rules()).ok
    assert compare(first, lambda times: more, Rules()).ok


def test_complex_and_empty_tensors() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert compare(Sample(z, (z,), z.to(torch.complex128)), lambda times: (), Rules()).ok
    assert not compare(Sample(z * (1 + 1e-4j), (z,), z.to(torch.complex128)), lambda times: (), Rules()).ok
    assert judge(torch.empty(0), torch.empty(0), torch.empty(0)).ok


def test_zero_truth_allows_what_eager_does() -> None:
    zero, noise = torch.zeros(64).double(), 1e-9 * torch.randn(64)
    assert judge(noise * 3, noise, zero).ok
    assert not judge(noise * 1e3, noise, zero).ok
    assert not judge(noise, zero.float(), zero).ok


def test_worst_of_takes_the_failure() -> None:
    good, bad = Comparison(True, 1.0, 1.1, ties=1, elements=4), Comparison(False, 2.0, 1.0, "bad", 2, 4)
    assert worst_of([good, bad, good]).detail == "bad" and worst_of([good, bad]).ties == 3
    assert worst_of([]).ok


def test_softmax_of_large_products_in_tf32_is_held_to_what_that_rounding_does() -> None:
    """Operands cut off to tf32 and rounded to it give other winners of a softmax; a wrong weight gives more of them."""
    generator = torch.Generator().manual_seed(0)
    x = 1e4 * torch.randn(20_000, 64, generator=generator)
    w = (torch.rand(64, 32, generator=generator) - 0.5) / 4

    def softmax(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(x.double() @ w.double(), 1)

    def sample(candidate: Callable[[Tensor], Tensor], seed: int | None) -> Sample:
        moved = x if seed is None else nudged(Call((x,), {}), seed, tf32=True).args[0]
        assert isinstance(moved, Tensor)
        baselines = softmax(cut(moved), cut(w)).float(), softmax(round_to_tf32(moved), round_to_tf32(w))
        return Sample(candidate(moved).float(), baselines, softmax(moved, w))

    def cut(x: Tensor) -> Tensor:
        return (x.view(torch.int32) & ~0x1FFF).view(torch.float32)

    def judged(candidate: Callable[[Tensor], Tensor]) -> Comparison:
        return compare(sample(candidate, None), lambda times: [sample(candidate, seed) for seed in range(8)], Rules())

    right = judged(lambda x: softmax(cut(x), round_to_tf32(w)))
    assert right.ok and right.ties, right
    assert not judged(lambda x: softmax(cut(x), round_to_tf32(w * torch.linspace(1, 1.02, 32)))).ok


def test_few_wrong_elements_are_looked_at_longer() -> None:
    """Switches that rounding throws: what noise of that size leaves in 8 samples, more of it throws in 32; what none
    does is wrong still."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200_000, generator=generator).double()
    x[:2000] = 1e-6 * torch.randn(2000, generator=generator).double()  # near 0, where the sign is one of rounding's

    def sample(seed: int, times: int, fault: float) -> Sample:
        noise = torch.Generator().manual_seed(seed)
        moved = x + times * 4e-7 * torch.randn(len(x), generator=noise).double()
        gate = (moved + 4e-7 * torch.randn(len(x), generator=noise).double() > 0).double()
        gate[-1] += fault
        return Sample(gate.float(), ((moved > 0).float(),), (moved > 0).double())

    asked: list[int] = []

    def judged(fault: float = 0.0) -> Comparison:
        def more(times: int) -> list[Sample]:
            asked.append(times)
            return [sample(seed, times, fault) for seed in range(8 * times)]

        return compare(sample(100, 0, fault), more, Rules())

    right = judged()
    assert right.ok and right.ties and asked == [1, 4], (right, asked)
    assert judged(0.01).wrong == 1
