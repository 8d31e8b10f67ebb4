"""Error norms and the precision contract: how far a candidate's tensor may be from the truth, given eager's own error.

The truth is a float64 run.  Per tensor, the root mean square of the error stays within twice eager's or 1e-6 of the
tensor's own root mean square; the worst element within four times eager's worst or a few units in the last place of
the tensor's scale.  Both floors are float32's and scale with the dtype.

Eager's error is one sample of a random thing: on a tensor with few elements it may be zero by luck, and one switch
(relu, max, clamp) that rounding throws the other way makes it huge.  Whenever the first look is not conclusive, further
evidence is taken on inputs that differ by rounding-sized noise: errors are pooled over all of them, and an element that
the noise itself moves by far more than rounding explains is a near-tie, excluded from the norms, counted, and
held to the size of such movements, or of eager's own errors there.  Few elements may be NaN or Inf where eager's are
finite: those that are so as well, but not in truth, in eager's own results for some of that noise, or where eager's
operations are each rounded exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

_FLOAT32_EPS = torch.finfo(torch.float32).eps
_RMSE_FACTOR, _RMSE_FLOOR = 2.0, 1e-6
_WORST_FACTOR, _WORST_FLOOR_ULP = 4.0, 16.0
# A candidate's error beyond so many floors is excused by eager's own only once that is known to be rounding: a largest
# error so far above eager's root mean square, or the latter so far above its floor, may come from switches.
_BEYOND, _OUTLIER, _GROSS = 64.0, 8.0, 100.0
# How far beyond eager's ordinary error noise must move an element to call it a near-tie, and may then be believed.
# What a switch does is no number times the noise (a softmax of large products gives 1 for 0), and few samples do not
# throw all of them: as long as near-ties are rarer than this share, what the noise does to one it may do to another.
_TIE, _TIE_FACTOR, _RARE = 16.0, 4.0, 0.01
# How many times as much evidence, of so much more noise, is taken before few elements are called wrong: a candidate's
# roundings may be as large as eager's, and few samples of noise of that size do not reach as far as they may.
_FURTHER = 4
# Where the true value vanishes, eager's error is all there is, and it is a poor estimate of what rounding may do.
_VANISHING, _VANISHING_FACTOR = 0.1, 16.0


@dataclass(frozen=True)
class Rules:
    """What kind of agreement is asked for."""

    exact: bool = False
    planted: Literal["nan", "inf"] | None = None
    looseness: float = 1.0


@dataclass(frozen=True)
class Sample:
    """One tensor from the candidate, from eager (and what else may be as inexact as eager), and in truth."""

    candidate: Tensor
    baselines: tuple[Tensor, ...]
    truth: Tensor

    @property
    def eager(self) -> Tensor:
        """Eager's own value."""
        return self.baselines[0]


@dataclass(frozen=True)
class Comparison:
    """`error` and `tolerance` of the element nearest to its limit, in units of the truth's root mean square; how many
    elements are beyond theirs."""

    ok: bool
    error: float = 0.0
    tolerance: float = 0.0
    detail: str = ""
    ties: int = 0
    elements: int = 0
    wrong: int = 0

    @property
    def severity(self) -> tuple[bool, float]:
        """Orders comparisons, the worst one last."""
        ratio = self.error / self.tolerance if self.tolerance else (math.inf if self.error else 0.0)
        return (not self.ok, ratio)


def worst_of(comparisons: Sequence[Comparison]) -> Comparison:
    """The comparison nearest to, or furthest beyond, its limit, with the near-ties of all."""
    if not comparisons:
        return Comparison(True, detail="nothing to compare")
    worst = max(comparisons, key=lambda c: c.severity)
    ties, elements = sum(c.ties for c in comparisons), sum(c.elements for c in comparisons)
    return Comparison(worst.ok, worst.error, worst.tolerance, worst.detail, ties, elements)


def compare(first: Sample, more: Callable[[int], Sequence[Sample]], rules: Rules) -> Comparison:
    """Judges one tensor; `more` yields samples on inputs moved by rounding-sized noise, and is called only in doubt.

    Where few elements are wrong, it is asked for so many times as many, with so much more noise: a switch that rounding
    throws is one that a few samples of its own size may leave as it is.  Asked for 0 times as many, it gives eager with
    no error but that of rounding each operation's result, if it can.  The samples' tensors have one shape.  Integer
    and boolean tensors must be equal but where noise changes the truth, or, of that noise, makes it what was found.
    """
    count = first.candidate.numel()
    if count == 0:
        return Comparison(True)
    if not (first.eager.is_floating_point() or first.eager.is_complex()):
        return _compare_integers(first, more)
    fault = _non_finite_fault(first, rules)
    if fault and not _overflows_by_rounding(first, more, rules):
        return Comparison(False, math.inf, 0.0, fault, elements=count)
    limits = _Limits.of(first, rules)
    own = _Errors.of(first)
    quick = limits.judge([own], ties=None)
    if quick.ok and not limits.doubts(own):
        return quick
    samples = [first, *(s for s in more(1) if s.truth.shape == first.truth.shape)]
    if len(samples) == 1:
        return quick
    judged = limits.judge([_Errors.of(s) for s in samples], ties=_movement(samples))
    if judged.ok or judged.wrong > _RARE * count:
        return judged
    further = [s for s in more(_FURTHER) if s.truth.shape == first.truth.shape]
    if len(further) <= len(samples):
        return judged
    # Of the candidate only what was asked about: each further run would bring switches of its own, thrown by it alone.
    return limits.judge([own, *(_Errors.of(s).of_eager() for s in further)], ties=_movement([*samples, *further]))


def _compare_integers(first: Sample, more: Callable[[int], Sequence[Sample]]) -> Comparison:
    count = first.candidate.numel()
    wrong = first.candidate.ne(first.eager)
    if not bool(wrong.any()):
        return Comparison(True, elements=count)
    ties = torch.zeros_like(wrong)
    for sample in more(1):
        ties |= sample.truth.ne(first.truth) | sample.eager.ne(first.eager)
    for times in (_FURTHER, _FURTHER**2):
        if not 0 < int((wrong & ~ties).sum()) <= _RARE * count:
            break
        # Such as indices of the greatest of values that differ by a rounding: those that this noise gives are right.
        for sample in more(times):
            ties |= sample.truth.eq(first.candidate) | sample.eager.eq(first.candidate)
    bad = int((wrong & ~ties).sum())
    return Comparison(
        bad == 0, float(bad), 0.0, f"{bad} of {count} integers differ" if bad else "", int((wrong & ties).sum()), count
    )


def _non_finite_fault(sample: Sample, rules: Rules) -> str:
    """Why the candidate's NaN and Inf are not where they belong, or nothing."""
    candidate, eager = _parts(sample.candidate), _parts(sample.eager)
    if rules.exact:
        same = torch.eq(candidate, eager) | ~(candidate.isinf() | eager.isinf())
        wrong = ~same | candidate.isnan().ne(eager.isnan())
        return f"NaN or Inf differ from eager's at {int(wrong.sum())} elements" if bool(wrong.any()) else ""
    if rules.planted == "inf":
        return ""
    invented = ~candidate.isfinite() & eager.isfinite()
    if bool(invented.any()):
        return f"{int(invented.sum())} elements are NaN or Inf where eager's are finite"
    truth = _parts(sample.truth)
    if rules.planted == "nan":  # which reaches the truth as well: other NaN of eager's come from overflows
        lost = truth.isnan() & eager.isnan() & ~candidate.isnan()
        if bool(lost.any()):
            return f"{int(lost.sum())} NaN of eager's are missing"
    # Eager overflowed: the candidate may too, or may have found the finite truth, which the norms then judge.
    lost = ~eager.isfinite() & candidate.isfinite() & ~truth.isfinite()
    return f"{int(lost.sum())} elements are finite where eager's are not" if bool(lost.any()) else ""


def _overflows_by_rounding(first: Sample, more: Callable[[int], Sequence[Sample]], rules: Rules) -> bool:
    """Whether the candidate's only fault are few NaN and Inf, and exact rounding, or rounding-sized noise, gives eager
    one where each is, while the truth is finite: whether something leaves the range on the way is a matter of rounding
    there.  Where the noise leaves what a function is defined for, as of a root of 0, the truth is NaN, too, and a
    candidate that is NaN at the border itself is wrong."""
    invented = ~_parts(first.candidate).isfinite() & _parts(first.eager).isfinite()
    if rules.exact or first.eager.is_complex() or not 0 < int(invented.sum()) <= _RARE * invented.numel():
        return False
    if _non_finite_fault(replace(first, candidate=torch.where(invented, first.eager, first.candidate)), rules):
        return False
    for times in (0, 1, _FURTHER):
        for sample in more(times):
            if sample.eager.shape == sample.truth.shape == first.eager.shape:
                invented &= _parts(sample.eager).isfinite() | ~_parts(sample.truth).isfinite()
        if not bool(invented.any()):
            return True
    return False


def _parts(x: Tensor) -> Tensor:
    """`x` in float64, a complex tensor as its real and imaginary parts."""
    x = x.detach()
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).to(torch.float64)


@dataclass(frozen=True)
class _Errors:
    """Elementwise errors of one sample; zero where a value is not finite, which is judged elsewhere."""

    candidate: Tensor
    eager: Tensor
    valid: Tensor

    @classmethod
    def of(cls, sample: Sample) -> _Errors:
        truth, candidate = _parts(sample.truth), _parts(sample.candidate)
        valid = truth.isfinite() & candidate.isfinite()
        eager = torch.zeros_like(truth)
        for baseline in sample.baselines:
            eager = torch.maximum(eager, (_parts(baseline) - truth).abs().nan_to_num(0.0, 0.0, 0.0))
        return cls(torch.where(valid, (candidate - truth).abs(), 0.0), torch.where(valid, eager, 0.0), valid)

    def of_eager(self) -> _Errors:
        """Eager's alone."""
        return replace(self, candidate=torch.zeros_like(self.candidate))


@dataclass(frozen=True)
class _Limits:
    """The floors of one tensor's tolerance, from the truth's own size."""

    rms: float
    worst_floor: Tensor
    rmse_floor: float

    @classmethod
    def of(cls, sample: Sample, rules: Rules) -> _Limits:
        info = torch.finfo(sample.eager.dtype)
        size = _parts(sample.truth).abs().nan_to_num(0.0, 0.0, 0.0)
        rms = _rms(size)
        # The root mean square, not the maximum, is the scale: a large element must not hide an error in a small one.
        worst_floor = rules.looseness * _WORST_FLOOR_ULP * info.eps * (size + rms) + info.tiny
        return cls(rms, worst_floor, rules.looseness * _RMSE_FLOOR * (info.eps / _FLOAT32_EPS) * rms + info.tiny)

    def doubts(self, errors: _Errors) -> bool:
        """Whether a large error is excused by an error of eager's that rounding alone may not explain."""
        if not bool((errors.candidate > _BEYOND * self.worst_floor).any()):
            return False
        spread = _rms(errors.eager)
        return float(errors.eager.max()) > _OUTLIER * spread or spread > _GROSS * self.rmse_floor

    def judge(self, samples: Sequence[_Errors], ties: Tensor | None) -> Comparison:
        """Holds the candidate's pooled errors against eager's; `ties` is how far noise moves each element."""
        eager = torch.stack([s.eager for s in samples])
        candidate = torch.stack([s.candidate for s in samples])
        movement = torch.zeros_like(self.worst_floor) if ties is None else ties
        tied = movement > self.worst_floor.clamp(min=_TIE * _typical(eager))
        clear_eager, clear = eager[:, ~tied], candidate[:, ~tied]
        spread, worst = _rms(clear_eager), float(clear_eager.max()) if clear_eager.numel() else 0.0
        factor = _VANISHING_FACTOR if spread > _VANISHING * self.rms else 1.0
        allowed = self.worst_floor.clamp(min=factor * _WORST_FACTOR * worst)
        reach = torch.maximum(movement, eager.amax(0))
        if 0 < int(tied.sum()) < _RARE * tied.numel():
            reach = reach[tied].max()
        allowed = torch.where(tied, allowed + _TIE_FACTOR * reach, allowed)
        rmse, rmse_allowed = _rms(clear), max(factor * _RMSE_FACTOR * spread, self.rmse_floor)
        return self._verdict(candidate, allowed, rmse, rmse_allowed, int(tied.sum()))

    def _verdict(self, errors: Tensor, allowed: Tensor, rmse: float, rmse_allowed: float, ties: int) -> Comparison:
        unit = self.rms or 1.0
        excess = errors / allowed
        at = int(excess.argmax())
        error, tolerance = float(errors.flatten()[at]) / unit, float(allowed.flatten()[at % allowed.numel()]) / unit
        wrong = int((excess.amax(0) > 1).sum())
        if wrong:
            detail = f"{wrong} of {allowed.numel()} elements beyond tolerance"
            return Comparison(False, error, tolerance, detail, ties, allowed.numel(), wrong)
        if rmse > rmse_allowed:
            detail = f"root mean square error {rmse / unit:.1e} beyond {rmse_allowed / unit:.1e}"
            return Comparison(False, rmse / unit, rmse_allowed / unit, detail, ties, allowed.numel())
        return Comparison(True, error, tolerance, "", ties, allowed.numel())


def _rms(x: Tensor) -> float:
    # A maximum is taken out first, or squares of large or tiny values leave float64.
    top = float(x.max()) if x.numel() else 0.0
    return top * float((x / top).square().mean().sqrt()) if top > 0 else 0.0


def _typical(errors: Tensor) -> float:
    """The median of the errors that are not zero: unlike the mean, a few thrown switches do not move it."""
    some = errors[errors > 0]
    return float(some.median()) if some.numel() else 0.0


def _movement(samples: Sequence[Sample]) -> Tensor:
    """How far noise on the inputs moved the truth, elementwise."""
    base = _parts(samples[0].truth)
    moved = torch.zeros_like(base)
    for sample in samples[1:]:
        moved = torch.maximum(moved, (_parts(sample.truth) - base).abs().nan_to_num(0.0, 0.0, 0.0))
    return moved
