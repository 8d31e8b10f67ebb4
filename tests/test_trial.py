"""Which path a trial keeps, from what it measured."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from gpu_build import plan_for_hopper
from torch import nn

from fusewright import pipeline, trial, tuning
from fusewright.codegen import cuda
from fusewright.dispatch import Options
from fusewright.measure import Sample
from fusewright.plan import Plan
from fusewright.runtime.device import LARGE_GPU
from fusewright.trial import Trial
from fusewright.verification.verdict import Check, Verdict

# Seconds of the original, the rewritten program and its replay; the path that is kept, whether calls are replayed, and
# whether the program answers calls that are no replays.
TIMES: dict[str, tuple[tuple[float, float, float], str, bool, bool]] = {
    "a replay that is slower than both": ((1.30, 1.22, 2.36), "rewritten", False, True),
    "a replay that is as fast as the program": ((1.30, 1.22, 1.225), "recorded", True, True),
    "a replay that is hardly slower": ((1.30, 1.22, 1.25), "rewritten", False, True),
    "a replay that is hardly faster than the original": ((1.30, 1.36, 1.28), "original", False, False),
    "a replay that is faster": ((1.30, 1.22, 0.80), "recorded", True, True),
    "a replay of what is slower by itself": ((1.30, 1.50, 0.80), "recorded", True, False),
    "nothing that is faster": ((1.30, 1.29, 1.28), "original", False, False),
}


@pytest.mark.parametrize("name", TIMES)
def test_what_serves_is_what_measured_faster(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (before, after, replayed), path, records, alone = TIMES[name]
    seconds = {"original": before, "rewritten": after, "recorded": replayed}

    def compared(calls: dict[str, Any], **_: Any) -> dict[str, Sample]:
        return {key: Sample(seconds[key], seconds[key], seconds[key], 1) for key in calls}

    monkeypatch.setattr(trial, "compare", compared)
    monkeypatch.setattr(trial, "_recorded", lambda of, built, candidate: candidate)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(2), nn.Flatten(2)).eval()
    of = Trial(model, (torch.rand(2, 3, 16, 16),), {}, Options(rewrite="cost", verify=False, kernels="never"), print)
    built = trial._built(of)
    monkeypatch.setattr(trial, "_is_rewritten", lambda built: True)
    entry = trial._judge(of, built, Plan("Sequential", "rewritten", "", "cpu", ""))
    assert entry.plan is not None and entry.plan.kept[0].path == path
    assert (entry.runner is not None) == (path != "original")
    if entry.runner is not None:
        assert (entry.runner.recorder is not None) == records and entry.runner.alone == alone


@pytest.mark.parametrize("refused", [1, 2])
def test_a_plan_tells_which_programs_were_refused(refused: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What measured faster than the program kept, and was wrong; where all are, the reason says so of the first."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(2), nn.Flatten(2)).eval()
    of = Trial(model, (torch.rand(2, 3, 16, 16),), {}, Options(rewrite="always", kernels="never", measure=False), print)
    rows = [Check("values", i >= refused, detail="" if i >= refused else "3e-1") for i in range(2)]
    verdicts = iter([Verdict((row,), "", 0.0) for row in rows])
    monkeypatch.setattr(trial, "_variants", lambda of, built, most: [built, built])
    monkeypatch.setattr(trial, "_verified", lambda of, built: next(verdicts))
    plan = trial.tried(of, Plan("Sequential", "rewritten", "", "cpu", "")).plan
    assert plan is not None
    said = "verification failed (values: 3e-1)"
    if refused == 1:
        (line,) = plan.refused
        assert plan.status == "rewritten" and line.startswith("avg_pool(conv(x, w))") and line.endswith(said)
        assert "Refused" in str(plan)
    else:
        assert plan.status == "unchanged" and plan.reason.startswith(said) and not plan.refused


def test_a_convolution_that_became_a_product_is_tried_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them is faster, estimates do not know; a smaller call is verified in the way of the larger one."""
    monkeypatch.setattr(pipeline, "kernel_target", lambda device: None)
    monkeypatch.setattr(pipeline, "device_facts", lambda device: LARGE_GPU)
    monkeypatch.setitem(tuning.TARGETS, "cpu", cuda)
    model = nn.Sequential(nn.Conv2d(64, 64, 16, stride=16), nn.GELU(), nn.Softplus()).eval()
    of = Trial(model, (torch.rand(8, 64, 64, 64),), {}, Options(verify=False, measure=False), print)
    built = trial._built(of)
    assert built.windows == 1 and trial._is_rewritten(built)
    variants = trial._variants(of, built, 0)
    assert [v.windows for v in variants[:2]] == [1, 0] and "F.linear" in variants[0].program.source
    assert "F.conv2d" in variants[1].program.source and variants[1].program.kernels
    assert trial._built(of, built).windows == 1 and trial._built(of, variants[1]).windows == 0


def test_a_convolution_in_two_steps_is_tried_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_for_hopper(monkeypatch)
    # As if the fewest taps were fastest: where they are, other tests ask the estimates.
    monkeypatch.setattr(tuning.Tuner, "seconds", lambda self, conv: float(prod(conv.arg(1).shape[2:])))
    monkeypatch.setattr("fusewright.schedule.taps_as_features._adding", lambda y, z, cost: 0.0)
    model = nn.Sequential(nn.Conv2d(40, 1, 3), nn.GELU(), nn.Softplus()).eval().requires_grad_(False)
    of = Trial(model, (torch.empty(2, 40, 11, 13),), {}, Options(verify=False, measure=False), print)
    built = trial._built(of)
    assert built.features == 1 and trial._is_rewritten(built)
    variants = trial._variants(of, built, 0)
    assert [v.features for v in variants[:2]] == [1, 0]
    assert trial._built(of, built).features == 1 and trial._built(of, variants[1]).features == 0


@pytest.mark.parametrize("values", [True, False])
def test_wrong_gradients_leave_calls_without_them(values: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are verified by themselves, once more; where those are refused as well, the plan tells of both."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(2), nn.Flatten(2)).eval()
    of = Trial(model, (torch.rand(2, 3, 16, 16),), {}, Options(rewrite="always", kernels="never", measure=False), print)
    asked: list[bool] = []

    def verified(of: Trial, built: pipeline.Built) -> Verdict:
        asked.append(of.gradients)
        return Verdict(
            (Check("values", values or of.gradients, "2e-1"), Check("gradients", not of.gradients, "3e-1")), "", 0.0
        )

    monkeypatch.setattr(trial, "_verified", verified)
    entry = trial.tried(of, Plan("Sequential", "rewritten", "", "cpu", ""))
    assert entry.plan is not None and asked[0] and not asked[-1]
    wrong = "verification failed (gradients: 3e-1)"
    if values:
        assert entry.runner is not None and entry.modes == {"forward"}
        assert [k.reason for k in entry.plan.kept if k.path == "original"] == 2 * [wrong]
    else:
        assert entry.runner is None and entry.plan.status == "unchanged"
        without = "without gradients, verification failed (values: 2e-1); the original is kept"
        assert entry.plan.reason == f"{wrong}; {without}"
