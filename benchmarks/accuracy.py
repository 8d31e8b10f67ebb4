"""One look at a candidate's error: some rows of a batch against float64, all rows against eager.

`fusewright.verify` looks at far more; here a row of a table must take seconds, at sizes where float64 runs of the whole
batch would take minutes.  Candidate and eager see the whole batch.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fusewright.verification.compare import Rules, Sample, compare
from fusewright.verification.inputs import Call, nudged
from fusewright.verification.numerics import WideArithmetic, tf32_allowed

# FLOPs, and bytes of the largest value, that one float64 run may take (a row is the least there is).
_FLOPS = {"cuda": 2e11, "cpu": 2e9}
_BYTES = 4e9
# Further draws, on inputs moved by rounding-sized noise, are taken where the first is not conclusive: so many, and none
# after so many seconds.
_MORE, _SECONDS = 2, 3.0
# All rows must agree with eager to this share of its largest magnitude: other precisions do, wrong results do not.
# The least of millions of values near zero is what rounding leaves of it: there, to so many times what eager, or eager
# in tf32, is away from the truth in the rows whose truth is known.
_SAME_ANSWER, _AS_INEXACT = 1e-2, 4.0


@dataclass(frozen=True)
class Checked:
    """`error` and `eager` are root mean square errors against float64, in units of the truth's root mean square."""

    right: bool
    error: float
    eager: float
    rows: int
    reason: str = ""


class Accuracy:
    """The candidate's error on `x` of shape (N, C, *).

    `flops`, and `size` in bytes of the largest value, are those of a run of the whole batch in float32.
    """

    def __init__(self, model: nn.Module, candidate: nn.Module, x: Tensor, flops: float, size: float) -> None:
        self.model, self.candidate, self.x = model, candidate, x
        self.oracle = copy.deepcopy(model).double()
        batch = x.shape[0]
        share = min(_FLOPS[x.device.type] / max(flops, 1.0), _BYTES / (2.0 * size))
        count = max(1, min(batch, int(share * batch)))
        # The first and the last row and some between: an edge case of the grid is most likely at an end.
        self.rows = torch.linspace(0, batch - 1, count, device=x.device).round().long() if count > 1 else [batch - 1]

    def checked(self) -> Checked:
        """The verdict."""
        with torch.no_grad():
            given, eager = self.candidate(self.x), self.model(self.x)
            if _form(given) != _form(eager):
                return Checked(False, float("inf"), 0.0, 0, f"it returns {_form(given)}, not {_form(eager)}")
            first = self._sample(self.x, given, eager)
            verdict = compare(first, self._more, Rules())
            reason = verdict.detail or _elsewhere(given, eager, first)
            errors = _distance(first.candidate, first.truth), _distance(first.eager, first.truth)
            return Checked(verdict.ok and not reason, *errors, len(self.rows), reason)

    def _sample(self, x: Tensor, given: Tensor, eager: Tensor) -> Sample:
        baselines = [eager[self.rows]]
        if x.is_cuda and any(tf32_allowed("eager")):
            baselines.append(self._truth(x, *tf32_allowed("eager")))
        return Sample(given[self.rows], tuple(baselines), self._truth(x))

    def _truth(self, x: Tensor, convolutions: bool = False, matmuls: bool = False) -> Tensor:
        with WideArithmetic(convolutions=convolutions, matmuls=matmuls):
            wide: Tensor = self.oracle(x[self.rows].double())
        return wide

    def _more(self, times: int) -> list[Sample]:
        start, samples = time.monotonic(), []
        for seed in range(times * _MORE):
            if time.monotonic() - start < times * _SECONDS:
                (x,) = nudged(Call.of((self.x,)), times * _MORE + seed, times=times).tensors()
                samples.append(self._sample(x, self.candidate(x), self.model(x)))
        return samples


def _elsewhere(given: Tensor, eager: Tensor, known: Sample) -> str:
    """What is wrong with rows that no float64 run saw."""
    gap, size = float((given - eager).abs().max()), float(eager.abs().max())
    inexact = max(float((baseline - known.truth).abs().max()) for baseline in known.baselines)
    if gap <= max(_SAME_ANSWER * size, _AS_INEXACT * inexact):
        return ""
    return f"the whole batch differs from eager by {gap / size:.1e} of its scale"


def _distance(x: Tensor, truth: Tensor) -> float:
    scale = float(truth.double().square().mean().sqrt()) or 1.0
    return float((x.double() - truth).square().mean().sqrt()) / scale


def _form(x: Tensor) -> str:
    strides = tuple(step for length, step in zip(x.shape, x.stride(), strict=True) if length > 1)
    return f"{x.dtype} {tuple(x.shape)} of strides {strides}"
