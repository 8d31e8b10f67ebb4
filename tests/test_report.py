"""Reports: units read well, tables fit 80 and 120 columns, and everything a plan knows is on the page."""

from __future__ import annotations

import dataclasses

import pytest

from fusewright.measure import Sample
from fusewright.peers import Bench, Row
from fusewright.plan import Declined, Fired, Kept, KernelChoice, Plan, Work
from fusewright.report import render_bench, render_plan, render_verdict
from fusewright.report.text import duration, less, scaled, times
from fusewright.verification.verdict import Check, Verdict

BEFORE = Work(flops=2.31e9, bytes=377e6, launches=4, seconds=0.0412)
AFTER = Work(flops=1.44e8, bytes=37.7e6, launches=5, seconds=0.0031)
VERDICT = Verdict(
    rows=(
        Check("outputs, uniform inputs", True, "64 elements", error=1.2e-7, tolerance=1e-6),
        Check("gradients", False, "conv.weight[3, 1, 0, 2] is 0.25, float64 says 0.5", error=0.5, tolerance=2e-6),
        Check("non-default stream", None, "no GPU here"),
    ),
    checked="batch 8 of 8 against float64",
    seconds=3.21,
)
PLAN = Plan(
    model="Model",
    status="rewritten",
    reason="",
    device="cpu (2 threads)",
    signature="float32[8, 8, 384, 384]",
    before=BEFORE,
    after=AFTER,
    rules=(
        Fired("avg_pool(conv(x)) -> strided_conv(box(x))", "conv, pool", "reassociates", BEFORE, AFTER),
        Fired("relu(relu(x)) -> relu(x)", "act1", "exact", AFTER, AFTER),
        Fired("relu(relu(x)) -> relu(x)", "act2", "exact", AFTER, AFTER),
    ),
    declined=(Declined("sum(conv(x)) -> matmul", "conv", "would cost 1.2 ms more"),),
    opaque=("aten.cumsum", "aten.cumsum", "aten.sort"),
    kernels=(
        KernelChoice("fused_conv_avg", "contraction", "conv [not a tag]", "generated", 2.5e-4, 3.4e-3, 16),
        KernelChoice("fused_mul", "stream", "", "ATen", 8.7e-6, 6.4e-6, 1),
    ),
    kept=(
        Kept("forward", "rewritten", "3.5 times faster", 0.290, 0.0823),
        Kept("forward+backward", "original", "not faster with gradients", 0.9, 1.2),
    ),
    precision=("range sums are carried in float64",),
    advice=("for finite inputs this model always returns 0: is that intended?",),
    verdict=VERDICT,
)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "FLOP", "0 FLOP"),
        (12, "B", "12.0 B"),
        (999, "B", "999 B"),
        (999_700, "B", "1.00 MB"),
        (1_234, "FLOP", "1.23 kFLOP"),
        (37.7e6, "B", "37.7 MB"),
        (2.31e9, "FLOP", "2.31 GFLOP"),
        (4.4e16, "FLOP", "44.0 PFLOP"),
    ],
)
def test_scaled(value: float, unit: str, text: str) -> None:
    assert scaled(value, unit) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.2e-9, "3.2e-06 ms"), (12.3e-6, "0.01 ms"), (0.0123, "12.3 ms"), (1.5, "1,500 ms"), (75.0, "75.0 s")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_factors() -> None:
    assert times(3.56) == "3.56x"
    assert less(10, 5) == "2.00x less"
    assert less(5, 10) == "2.00x more"
    assert (less(5, 5), less(5, 0), less(0, 5)) == ("same", "all gone", "new")
    assert (less(1.001, 1), less(1, 1.001), less(1.006, 1)) == ("about the same", "about the same", "1.01x less")


@pytest.mark.parametrize("width", [80, 120])
def test_plan_fits_and_is_plain(width: int) -> None:
    text = render_plan(PLAN, width)
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_plan_tells_everything() -> None:
    text = " ".join(render_plan(PLAN, 120).split())
    for words in (
        "Model: rewritten",
        "float32[8, 8, 384, 384]",
        "2.31 GFLOP",
        "16.0x less",
        "37.7 MB",
        "41.2 ms",
        "reassociates",
        "act1 and 1 more",
        "forward rewritten 290 ms",
        "290 ms",
        "3.52x",
        "forward+backward original 900 ms",
        "batch 8 of 8 against float64",
        "conv.weight[3, 1, 0, 2]",
        "carried in float64",
        "is that intended?",
        "would cost 1.2 ms more",
        "aten.cumsum (2 times), aten.sort",
        "best of 16 tile shapes",
        "fused_mul",
    ):
        assert words in text, words


def test_what_serves_calls_fits_a_narrow_terminal() -> None:
    text = render_plan(dataclasses.replace(PLAN, kept=(*PLAN.kept, Kept("with input gradients", "rewritten", ""))), 60)
    words = " ".join(text.split())
    assert "calls run by original rewritten speedup" in words
    assert "with input rewritten - - - gradients" in words
    assert "not faster with gradients" in words


def test_replays_have_a_column_of_their_own() -> None:
    kept = (Kept("forward", "recorded", "a CUDA graph was faster", 4e-3, 3e-3, 1e-3), *PLAN.kept[1:])
    words = " ".join(render_plan(dataclasses.replace(PLAN, kept=kept), 100).split())
    assert "calls run by original rewritten recorded speedup" in words
    assert "forward recorded 4.00 ms 3.00 ms 1.00 ms 4.00x" in words
    assert "forward+backward original 900 ms 1,200 ms - 0.75x" in words


def test_nothing_measured_shows_no_figures() -> None:
    text = render_plan(dataclasses.replace(PLAN, kept=(Kept("with input gradients", "rewritten", "not measured"),)), 60)
    words = " ".join(text.split())
    assert "with input gradients rewritten not measured" in words
    assert "speedup" not in words


def test_untouched_plan_gives_the_reason() -> None:
    plan = Plan("Model", "untouched", "the forward depends on the values of its input", "cpu", "float32[2, 3]")
    text = render_plan(plan, 80)
    assert "untouched, it runs as it did" in text
    assert "depends on the values" in text
    assert "Work" not in text


def test_a_call_without_tensors_leaves_no_stray_comma() -> None:
    text = render_plan(dataclasses.replace(PLAN, signature=", training mode"), 80)
    assert "for training mode" in text


def test_many_rules_stay_short() -> None:
    rules = tuple(Fired(f"rule {i}", "node", "exact", AFTER, AFTER) for i in range(100))
    text = render_plan(dataclasses.replace(PLAN, rules=rules), 80)
    assert "and 70 more rows" in text


@pytest.mark.parametrize("width", [80, 120])
def test_verdict(width: int) -> None:
    text = render_verdict(VERDICT, width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert "FAILED: 1 passed, 1 failed, 1 not checked, in 3.2 s" in words
    assert "1.2e-07 1.0e-06" in words
    assert "no GPU here" in words


def test_verdict_that_passes_and_one_that_checked_nothing() -> None:
    assert render_verdict(dataclasses.replace(VERDICT, rows=VERDICT.rows[:1])).startswith("verified: 1 passed")
    assert render_verdict(dataclasses.replace(VERDICT, rows=())).startswith("nothing could be checked")


def sample(seconds: float) -> Sample:
    return Sample(seconds, seconds, seconds, 15)


ENVIRONMENT = {"device": "a processor", "threads": 2, "torch": "2.13.0", "date": "2026-01-02T03:04:05+00:00"}


@pytest.mark.parametrize("width", [80, 120])
def test_bench(width: int) -> None:
    rows = (
        Row("eager", sample(0.290), 1.0, sample(0.9), 1.0),
        Row("fusewright", sample(0.0823), 3.52, sample(0.3), 3.0),
        Row("openvino", reason="openvino is not installed"),
    )
    text = render_bench("conv_avgpool_sigmoid_sum", Bench("Model", rows, ENVIRONMENT), width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert "a processor, 2 threads, torch 2.13.0" in words
    assert "eager 290 ms 1.00x 900 ms 1.00x" in words
    assert "fusewright 82.3 ms 3.52x 300 ms 3.00x" in words
    assert "openvino - - - -" in words


def test_bench_without_training() -> None:
    rows = (Row("eager", sample(0.29), 1.0), Row("fusewright", sample(0.1), 2.9))
    assert "backward" not in render_bench("x", Bench("Model", rows, ENVIRONMENT), 80)
