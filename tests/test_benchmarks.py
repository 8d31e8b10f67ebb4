"""What the README claims is what the data say; every case and every random configuration is a model that runs."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fusewright.capture import capture
from fusewright.ir import pointwise
from fusewright.problem import load_problem
from fusewright.runtime import nvrtc

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))  # its scripts import each other by name, as scripts do

import configurations  # noqa: E402
import counters  # noqa: E402
import footprint  # noqa: E402
import functions  # noqa: E402
import fused  # noqa: E402
import random_configurations  # noqa: E402
import roofline  # noqa: E402
import run  # noqa: E402
import scaling  # noqa: E402
import stores  # noqa: E402
import table  # noqa: E402
from accuracy import Accuracy  # noqa: E402
from fused_models import ROWS, Row  # noqa: E402
from worker import Worker  # noqa: E402


def test_tables_of_documents_are_the_data() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "benchmarks" / "table.py"), "--check"], check=False)
    assert done.returncode == 0, "run: python benchmarks/table.py"


@pytest.mark.parametrize("path", run.CASES)
def test_a_case_runs_at_its_full_size(path: str) -> None:
    problem = load_problem(ROOT / path)
    model = problem.build(device="meta")
    dtype = next(model.parameters()).dtype
    inputs = [torch.empty(shape, dtype=dtype, device="meta") for shape in problem.shapes()]
    assert model(*inputs).numel() > 0


# Tables


def _case(name: str, **more: Any) -> dict[str, Any]:
    def row(peer: str, seconds: float) -> dict[str, Any]:
        forward = {"median": seconds}
        return {
            "name": peer,
            "forward": forward,
            "training": None,
            "ratio": 0.01 / seconds,
            "fraction": 0.001 / seconds,
        }

    rows = [row("eager", 0.01), row("fusewright", 0.002)]
    where = {"device": "D", "torch": "2", "threads": 1, "date": "2026-01-01T00:00"}
    return {"problem": name, "inputs": [[2, 3]], "status": "rewritten", "rows": rows, "environment": where, **more}


def test_a_table_has_columns_for_what_was_measured_only() -> None:
    plain = table._table({"cases": [_case("a")]}, "x.json")
    assert "| model | input | eager | Fusewright | times eager |\n" in plain and "otherwise" not in plain
    full = table._table({"cases": [_case("a"), _case("b", roofline={"seconds": 0.001}, flags=run.NO_TF32)]}, "x.json")
    assert "| a | 2x3 | 10 | 2 | 5.00 | - | - |" in full
    assert "| b (allow_tf32=False) | 2x3 | 10 | 2 | 5.00 | 1 | 50% |" in full and "otherwise" in full


def test_the_fastest_peer_is_the_measure_where_there_are_several() -> None:
    case = _case("a")
    case["rows"].append({**case["rows"][0], "name": "openvino", "forward": {"median": 0.003}})
    assert "| 10 | 3 | 2 | 5.00 | 1.50 |" in table._table({"cases": [case]}, "x.json")
    case["rows"][-1]["forward"] = None
    assert "| 10 | - | 2 | 5.00 | 5.00 |" in table._table({"cases": [case]}, "x.json")


def test_first_calls_memory_and_scaling_have_tables() -> None:
    where = _case("a")["environment"]
    extra, first = {"eager": 4e6, "fusewright": 1e6}, {"cold": 0.5, "warm": 0.04}
    case = {"problem": "a", "batch": 2, "environment": where, "first_call": first, "extra": extra}
    assert "| a | 2 | 0.50 | 0.04 | 4 | 1 | 25.0% |" in table._footprint({"cases": [case]}, "x.json")
    times = {"eager": {"median": 0.01}, "fusewright": {"median": 0.002}}
    row = {"varies": "side", "point": scaling.BASE, "times": times, "ratio": 5.0, "roofline": {"fraction": 0.5}}
    text = table._scaling({"problem": scaling.PROBLEM, "environment": where, "rows": [row]}, "x.json")
    assert "| side | 4 | 192 | 8 | 64 | 2 | 10 | 2 | 5.0 | 50% |" in text


def test_networks_have_a_table() -> None:
    times = {"eager": {"median": 0.01}, "compile": {"median": 0.005}, "fusewright": {"median": 0.002}}
    row = {"name": "a", "shape": [8, 3], "error": "", "optimized": 12.3, "times": times, "verified": None}
    record = {"environment": _case("a")["environment"], "dtype": "float32", "verified": False}
    text = table._networks({**record, "rows": [row, {"name": "b", "error": "died"}]}, "x.json")
    assert "| a | 8x3 | 10 | 5 | 2 | 5.00 | 2.50 | 12 |" in text and "not verified" in text and "| b |" not in text


def _run(monkeypatch: pytest.MonkeyPatch, **rows: tuple[float, float, float]) -> None:
    """Runs of one fused operator each, by their date; seconds of eager, `torch.compile` and Fusewright."""
    peers = ("eager", "compile", "fusewright")
    runs = {
        date: {
            "environment": {"date": date, "device": "NVIDIA D"},
            "rows": [
                {
                    "index": 7,
                    "name": "a",
                    "shape": [2],
                    "error": "",
                    "times": {p: {"median": t} for p, t in zip(peers, times, strict=True)},
                },
                {"index": 8, "name": "b", "shape": [2], "error": "died"},
            ],
        }
        for date, times in rows.items()
    }
    monkeypatch.setattr(table, "_fused_runs", lambda files="": dict(sorted(runs.items())))


def test_the_summary_has_the_latest_run_of_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    _run(monkeypatch, day2=(0.8, 0.2, 0.4), day1=(0.8, 0.4, 0.1))
    assert "| fused operators, the latest run of each | H100, H200 | 1 | 2.00 | 0.50 | 0.50 | 1 |" in table._summary()
    assert "| fused operators, bfloat16, the latest run of each | H200 | 1 | 2.00 | 0.50 |" in table._summary()
    monkeypatch.setattr(table, "LAYERS", 7)
    assert "| of these rows 1 to 7: one layer and what follows it | H100, H200 | 1 |" in table._summary()


def test_a_table_goes_where_its_name_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "text_of", lambda name: f"({name})\n")
    text = "a\n<!-- table: x.json -->\nold\n<!-- end of table -->\nb\n<!-- table: y -->\n<!-- end of table -->\n"
    once = table.written(text)
    assert once == text.replace("old\n", "\n(x.json)\n\n").replace("y -->\n", "y -->\n\n(y)\n\n") == table.written(once)


def test_a_sweep_varies_one_number_at_a_time() -> None:
    found = list(scaling.points(most_threads=2))
    assert len(found) == len({tuple(point.values()) for _, point in found}) + len(scaling.SWEEPS) - 1
    assert all(sum(point[k] != v for k, v in scaling.BASE.items()) <= 1 for _, point in found)


def test_a_point_is_optimised_and_timed() -> None:
    row = scaling.run_point({**scaling.BASE, "batch": 1, "side": 24, "threads": 1}, checked=False)
    assert row["kernels"] and row["ratio"] > 0 and row["roofline"]["fraction"] > 0


@pytest.mark.slow
def test_footprint_in_fresh_processes() -> None:
    found = footprint.run_case("examples/classifier_head.py", 2, threads=1)
    assert found["kernels"] and found["first_call"]["warm"] > 0 and found["extra"]["eager"] > 0


def test_a_case_measured_again_takes_the_place_of_the_old_one() -> None:
    first, flagged, again = _case("a"), _case("a", flags=run.NO_TF32), _case("a", status="unchanged")
    records = run.added(run.added([first], flagged), again)
    assert records == [again, flagged]


# Random configurations


def test_a_configuration_depends_on_seed_and_index_alone() -> None:
    drawn = [configurations.draw(7, i, 1e5, 1e6) for i in range(40)]
    assert drawn[23] == configurations.draw(7, 23, 1e5, 1e6)
    assert len(set(map(str, drawn))) == 40
    assert {c.rank for c in drawn} == {1, 2, 3} and {c.transposed for c in drawn} == {True, False}
    assert {c.pool.kind if c.pool else None for c in drawn} == {"max", "avg", None}
    assert {c.reduction.over if c.reduction else None for c in drawn} == {"positions", "channels", "both", None}
    assert any(c.groups > 1 for c in drawn) and any(c.pool and c.pool.stride != c.pool.window for c in drawn)


def test_sizes_keep_to_the_range() -> None:
    for index in range(20):
        sizes = configurations.Sizes.of(configurations.draw(3, index, 1e8, 1e9))
        assert 1e8 <= sizes.ends <= 1e9 and sizes.middle <= configurations.SWELLS * 1e9


def test_a_configuration_counts_its_bytes_and_flops() -> None:
    layer: Any = ((3, 3), (1, 1), (0, 0), (1, 1), 2, False, (0, 0))
    plain = configurations.Configuration((2, 4, 8, 8), 6, *layer, ("torch.tanh(x)",), None, (), None)
    sizes = configurations.Sizes.of(plain)
    assert sizes.ends == 4 * (2 * 4 * 64 + 2 * 6 * 36) and sizes.middle == 4 * 2 * 6 * 36
    assert sizes.flops == 2 * (2 * 6 * 36) * 2 * 9


def test_functions_are_those_of_the_table() -> None:
    assert set(configurations.FUNCTIONS) <= set(pointwise.functions())
    for name, parameters in configurations.FUNCTIONS.items():
        assert pointwise.traits(name, parameters).arity == 1


@pytest.fixture
def row() -> dict[str, Any]:
    drawn = configurations.draw(1, 3, 5e4, 2e5)
    return random_configurations.measured(drawn, 3, torch.device("cpu"), ("eager",))


def test_a_row_is_whole_and_can_be_saved(row: dict[str, Any]) -> None:
    assert row["error"] == "" and row["accuracy"]["right"] and row["path"] in ("generated", "ATen", "algebra")
    assert set(row["times"]) - {"always"} == {"fusewright", "eager"} and row["roofline"]["fraction"] > 0
    found = random_configurations.summary([json.loads(json.dumps(row)), {**row, "error": "lost"}])
    assert (found["rows"], found["failed"], found["wrong"], found["all right"]) == (2, [3], [], False)
    assert found["worst fraction"] == row["roofline"]["fraction"] and found["slower than compile"] == []
    slow = {"median": row["times"]["fusewright"]["median"] / 2}
    beaten = {**row, "times": {**row["times"], "compile": slow}, "accuracy": {**row["accuracy"], "right": False}}
    found = random_configurations.summary([beaten])
    assert found["slower than compile"] == found["wrong"] == [3] and not found["all right"]


def test_a_failure_becomes_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such kernel\nwith a long story")

    monkeypatch.setattr(random_configurations, "planned", fail)
    drawn = configurations.draw(1, 3, 5e4, 2e5)
    failed = random_configurations.measured(drawn, 3, torch.device("cpu"), ("eager",))
    assert failed["error"] == "RuntimeError: no such kernel"
    assert random_configurations._cells(failed, ("eager",))[-1] == failed["error"]


def test_a_path_says_what_computes_the_convolution() -> None:
    x = torch.randn(2, 2, 5, 5)
    conv = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.Tanh()).eval().requires_grad_(False)
    mean = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.AdaptiveAvgPool2d(1)).eval().requires_grad_(False)
    options = {"verify": False, "measure": False}
    how = ((conv, {"kernels": "always"}), (conv, {"kernels": "never"}), (mean, {"rewrite": "always"}))
    plans = [random_configurations.optimized(model, x, **options, **more)[1].plan for model, more in how]
    paths = [random_configurations._path(plan) for plan in plans if plan is not None]
    assert paths == ["generated", "ATen", "algebra"]


@pytest.mark.slow
def test_a_peer_that_loses_the_device_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Rows:
        def row(self, job: tuple[object, ...], lost: dict[str, object], limit: float) -> dict[str, object]:
            if "compile" in job[2]:  # type: ignore[operator]
                return {
                    "error": "RuntimeError: CUDA error in compile",
                    "lost": "compile",
                    "reasons": {"compile": "why"},
                }
            return {"error": "", "lost": "", "reasons": {}, "names": job[2]}

    row = random_configurations._row(Rows(), ("a", 3), ("eager", "compile"), {}, 1.0)  # type: ignore[arg-type]
    assert row == {"error": "", "lost": "", "reasons": {"compile": "why"}, "names": ("eager",)}

    def admits(entrants: object, *_: object) -> dict[str, str]:
        return {"compile": "AcceleratorError: CUDA error: an illegal memory access was encountered"}

    monkeypatch.setattr(random_configurations, "admit", admits)
    configuration = random_configurations.draw(1, 3, *random_configurations.BYTES["cpu"])
    found = random_configurations.measured(configuration, 3, torch.device("cpu"), ("eager", "compile"))
    assert found["lost"] == "compile" and found["error"] == "RuntimeError: CUDA error in compile"


def test_a_worker_that_takes_too_long_is_replaced() -> None:
    drawn = configurations.draw(1, 3, 5e4, 2e5)
    worker = Worker(random_configurations._work, "cpu", 1)
    try:
        assert worker.facts["rates"]["bandwidth"] > 0
        assert worker.row((drawn, 3, ("eager",)), {"index": 3}, 0.0)["error"] == "it took more than 0 s"
        assert worker.row((drawn, 3, ("eager",)), {"index": 3}, 100.0)["error"] == ""
        worker._process.kill()
        worker._process.join()
        assert worker.row((drawn, 3, ("eager",)), {"index": 3}, 100.0)["error"] == ""
    finally:
        worker.stop()


class Off(torch.nn.Module):
    """A model, wrong in one row of the batch."""

    def __init__(self, model: torch.nn.Module, row: int, by: float) -> None:
        super().__init__()
        self.model, self.row, self.by = model, row, by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.model(x).clone()
        y[self.row] += self.by
        return y


@pytest.mark.parametrize(("row", "by"), [(15, 1e-4), (7, 0.5), (7, float("nan"))])
def test_a_wrong_row_is_seen(row: int, by: float) -> None:
    """The last row is compared with float64, one in the middle with eager: `flops` leaves time for one row only."""
    torch.manual_seed(0)
    model, x = torch.nn.Linear(8, 4).requires_grad_(False), torch.randn(16, 8)
    right = Accuracy(model, model, x, 1e12, 1.0).checked()
    assert right.right and right.rows == 1 and right.error == right.eager > 0
    wrong = Accuracy(model, Off(model, row, by), x, 1e12, 1.0).checked()
    assert not wrong.right and wrong.reason


class Least(torch.nn.Module):
    """The value nearest to zero of many that are rounded sums, whose terms are added up in order or backwards."""

    def __init__(self, *, backwards: bool) -> None:
        super().__init__()
        self.backwards = backwards

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = reversed(range(x.shape[1])) if self.backwards else range(x.shape[1])
        return sum(x[:, i] for i in steps).abs().amin(dim=1, keepdim=True)  # type: ignore[union-attr]


@pytest.mark.parametrize("by", [0.0, 0.1])
def test_other_rows_may_be_as_inexact_as_those_whose_truth_is_known(by: float) -> None:
    """Rounding leaves nothing of such a value; a wrong row of it is still seen."""
    torch.manual_seed(0)
    eager, other, x = Least(backwards=False), Least(backwards=True), torch.randn(16, 16, 2000)
    x[:, 5] += 1e4  # what is added behind it is rounded as that is
    x[:, -1] -= 1e4
    assert (eager(x) - other(x)).abs().max() > 0.01 * eager(x).max()
    assert Accuracy(eager, Off(other, 7, by), x, 1e10, 1.0).checked().right == (by == 0.0)


def test_a_floor_is_bytes_or_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = torch.nn.Linear(64, 32).eval().requires_grad_(False), torch.randn(8, 64)
    size = 4 * (8 * 64 + 8 * 32 + 64 * 32 + 32)
    for reached, seconds, bound in (((1.0, 1e9), size, "memory"), ((1e9, 1.0), 2 * 8 * 64 * 32, "arithmetic")):
        monkeypatch.setattr(roofline, "rates", lambda *_, r=reached: roofline.Rates(*r))
        least = roofline.floor(capture(model, (x,), {}).graph, (x,), model(x))
        assert (least.seconds, least.bound) == (seconds, bound)


def test_a_floor_is_that_of_the_rewritten_model() -> None:
    """A convolution summed over positions: one product per tap is left of it, and less where the weight is summed."""
    layers = torch.nn.Conv2d(4, 8, 3, bias=False), torch.nn.AdaptiveAvgPool2d(1)
    model, x = torch.nn.Sequential(*layers).eval().requires_grad_(False), torch.randn(2, 4, 32, 32)
    least = roofline.floor(capture(model, (x,), {}).graph, (x,), model(x))
    assert 0 < least.flops <= 2 * 2 * 8 * 4 * 9


def test_a_floor_reads_what_is_derived_from_the_weights() -> None:
    class Summed(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sum(dim=1, keepdim=True)

    model, x = Summed(64, 512).eval().requires_grad_(False), torch.randn(2, 64)
    least = roofline.floor(capture(model, (x,), {}).graph, (x,), model(x))
    assert 4 * (2 * 64 + 2 + 64) <= least.bytes <= 8 * (2 * 64 + 2 + 64)


# Functions


class Squashed(torch.nn.Module):
    """A function after a convolution and before pooling, then a softmax."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.conv, self.function = torch.nn.Conv2d(2, 4, 3), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.max_pool2d(self.function(self.conv(x)), 2).flatten(1).softmax(1)


@pytest.mark.parametrize(
    ("function", "special"),
    [
        (torch.tanh, 2),
        (torch.sin, 1),
        (torch.relu, 0),
        (lambda x: x / 3.0, 0),
        (lambda x: 3.0 / (1.0 + x.exp()), None),
        (lambda x: x**-1.5, 1),
        (lambda x: x**3, 0),
        (lambda x: x**0.3, 2),
        (lambda x: F.gelu(x, approximate="tanh"), 2),
    ],
)
def test_functions_are_counted_where_they_are_evaluated(function: Any, special: int | None) -> None:
    """At the outputs of the convolution, 2 x 4 x 6 x 6; the softmax at those of the pooling."""
    graph = capture(Squashed(function).eval(), (torch.randn(2, 2, 8, 8),), {}).graph
    found = functions.evaluations(graph, dict.fromkeys(graph.symbols, 2))
    softmax, outputs = 2 * 36, 2 * 4 * 36
    if special is None:  # exp, add, reciprocal, mul
        assert (found.all, found.special) == (4 * outputs + softmax, 2 * outputs + softmax)
    else:
        assert (found.all, found.special) == (outputs + softmax, special * outputs + softmax)


def test_functions_of_parameters_are_not_counted() -> None:
    class Scaled(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight.tanh()

    graph = capture(Scaled(5, 1), (torch.randn(3, 5),), {}).graph
    assert functions.evaluations(graph, dict.fromkeys(graph.symbols, 3)) == functions.Evaluations(15.0, 0.0)


def test_every_function_that_needs_a_special_result_has_its_number() -> None:
    """Those whose text calls the library or divides."""
    special = re.compile(r"\b(exp|exp2|expm1|log|log2|log10|log1p|tanh|erf|sqrt|sin|cos|atan|pow)\(|\b1 / |/ \(")
    known = {*functions.SPECIAL, "div", "gelu", "pow"}
    named = {name for name in pointwise.functions() if name in pointwise._PLAIN}
    needing = {name for name in named if special.search(pointwise.traits(name).cpp or "")}
    assert needing and needing <= known <= set(pointwise.functions())


def test_functions_take_the_time_of_the_busier_units(monkeypatch: pytest.MonkeyPatch) -> None:
    chip = SimpleNamespace(multi_processor_count=100, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: chip)
    monkeypatch.setattr(functions, "_clock", lambda _: 1e9)
    gpu = torch.device("cuda", 0)
    assert functions.Evaluations(16e11, 16e11).seconds(gpu) == pytest.approx(1.0)
    assert functions.Evaluations(128e11, 1.0).seconds(gpu) == pytest.approx(1.0)


def test_functions_leave_the_fraction_alone(row: dict[str, Any]) -> None:
    least = roofline.Floor(8, 2.0, 0.5, "memory", roofline.Rates(16.0, 4.0))
    record = replace(least, functions=9.0).record(1.0)
    assert record["functions"] == 9.0 and record["fraction"] == least.record(1.0)["fraction"] == 0.5
    assert row["roofline"]["functions"] is None and random_configurations._cells(row, ("eager",))[-1] == "-"
    row["roofline"]["functions"] = 0.0015
    assert random_configurations._cells(row, ("eager",))[-1] == "1.500"


# Fused operators


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.index))
def test_a_fused_operator_runs_at_its_full_size(row: Row) -> None:
    scope: dict[str, Any] = {}
    exec(row.source(), scope)
    with torch.device("meta"):
        model, inputs = scope["Model"]().train(row.training), scope["get_inputs"]()
        assert inputs[0].shape == row.shape and model(*inputs).numel() > 0
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    batch = any(not isinstance(m, torch.nn.modules.instancenorm._InstanceNorm) for m in norms)
    assert row.training == batch or row.index > 128  # whose networks are in evaluation mode


def test_fused_operators_are_told_apart() -> None:
    assert [row.index for row in ROWS] == [*range(1, len(ROWS) + 1)]
    assert len({(str(row), row.shape) for row in ROWS}) == len(ROWS)


def test_rows_of_fused_operators_are_shared_out() -> None:
    parts = [fused.chosen_rows("", f"{i}/3", 1) for i in (1, 2, 3)]
    assert sorted((row for part in parts for row in part), key=lambda row: row.index) == [*ROWS]
    (only,) = fused.chosen_rows("5", "1/1", 8)
    assert only.shape == (4, *ROWS[4].shape[1:]) and only.divided(10**6).shape[0] == 2


def test_what_a_fused_operator_is_called_with_is_no_parameter() -> None:
    row = Row(7, "", "x * t.exp() + b", (64, 8), {"b": (8,)}, given={"t": (64, 8)})
    scope: dict[str, Any] = {}
    exec(row.divided(16).source(), scope)
    model, inputs = scope["Model"](), scope["get_inputs"]()
    assert [*dict(model.named_parameters())] == ["b"] and [t.shape for t in inputs] == [(4, 8), (4, 8)]
    torch.testing.assert_close(model(*inputs), inputs[0] * inputs[1].exp() + model.b)


SMALL = Row(7, "conv2d 2-3 k3", "norm(relu(y) + b)", (4, 2, 12, 12), {"norm": "nn.BatchNorm2d(3)"}, training=True)


def test_a_fused_operator_becomes_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "PEERS", ("eager",))
    row = json.loads(json.dumps(fused.measured(SMALL, fused.Setting(torch.device("cpu")), verify=False)))
    assert row["error"] == "" and row["difference"] < 1e-5 and row["times"].keys() == {"eager", "fusewright"}
    assert row["name"] == "conv2d 2-3 k3, norm(relu(y) + b)" and row["kernels"] and fused._cells(row)[-1] == "-"
    monkeypatch.setattr(fused, "model_from", lambda *_: None)
    failed = fused.measured(SMALL, fused.Setting(torch.device("cpu")), verify=False)
    assert failed["error"].startswith("AttributeError") and fused._cells(failed)[-1] == failed["error"]


def _fused_row(index: int, eager: float, compiled: float, ours: float, **more: Any) -> dict[str, Any]:
    times = {"eager": {"median": eager}, "compile": {"median": compiled}, "fusewright": {"median": ours}}
    return {
        **{"index": index, "error": "", "difference": 1e-4, "status": "rewritten", "reason": ""},
        **{"times": times, **more},
    }


def test_a_summary_of_fused_operators() -> None:
    rows = [
        _fused_row(1, 8.0, 4.0, 2.0),
        _fused_row(2, 2.0, 1.0, 1.02),
        _fused_row(3, 4.0, 1.0, 4.0, status="unchanged", reason="verification failed (…)"),
        _fused_row(4, 4.0, 1.0, 1.0, difference=float("inf")),
        {"index": 5, "error": "lost"},
    ]
    found = fused.summary(rows)
    named = {key: found[key] for key in ("failed", "wrong", "verification failed", "kept as they are")}
    assert [*named.values()] == [[5], [4], [3], [3]]
    assert found["slower than compile"] == [3] and found["slower than eager"] == []
    assert found["compile over eager"] == pytest.approx((2 * 2 * 4 * 4) ** 0.25)
    assert fused.summary([])["fusewright over eager"] is None


def test_a_difference_is_a_share_of_what_eager_gives() -> None:
    nan, inf = float("nan"), float("inf")
    assert fused.difference(torch.tensor([4.0, nan, inf]), torch.tensor([4.0, nan, inf])) == 0.0
    assert fused.difference(torch.tensor([4.0, 1.0]), torch.tensor([4.0, 2.0])) == 0.25
    assert fused.difference(torch.tensor([1.0]), torch.tensor([nan])) == inf
    assert fused.difference(torch.zeros(2), torch.zeros(1)) == inf
    assert fused.difference(torch.zeros(1), torch.full((1,), 1e-6)) < fused.WRONG


def test_workers_share_rows_and_a_file_is_continued(tmp_path: Path) -> None:
    class Quick:
        def row(self, row: Row, lost: dict[str, Any], limit: float) -> dict[str, Any]:
            return {**lost, "took": limit, "error": "not measured"}

    options = SimpleNamespace(dtype="float32", limit=1.0, out=tmp_path / "rows.json")
    record: dict[str, Any] = {"rows": [{"index": 2, "error": "had"}]}
    fused.run([ROWS[2], ROWS[0]], [Quick(), Quick()], record, float("inf"), options)  # type: ignore[list-item]
    saved = json.loads(options.out.read_text())
    assert [row["index"] for row in saved["rows"]] == saved["summary"]["failed"] == [1, 2, 3]
    fused.run([ROWS[4]], [Quick()], record, 0.0, options)  # type: ignore[list-item]
    assert len(record["rows"]) == 3, "the time had come"


@pytest.mark.parametrize("script", sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py")))
def test_every_script_finds_what_it_imports(script: str) -> None:
    importlib.import_module(script)


@pytest.mark.parametrize("way", stores.WAYS)
def test_ways_to_write_compile(way: str) -> None:
    """They are made of the texts that kernels are."""
    assert nvrtc.compile(stores.writer(stores.WAYS[way], 95).kernel.source, "sm_90")


def test_counters_of_kernels() -> None:
    """A page as Nsight Compute writes it: messages, names, units, and a line for each kernel."""
    names = ["ID", "Kernel Name", *counters.metrics()]
    units = ["", "", "us", "warp", *["%"] * len(counters.BUSY), *["inst"] * len(counters.REASONS)]
    values = [
        "0",
        "fused_conv(const float *)",
        "1,250.5",
        "12.0",
        *["40"] * len(counters.BUSY),
        *["2"] * len(counters.REASONS),
    ]
    page = "\n".join(["==PROF== Connected", *(",".join(f'"{cell}"' for cell in row) for row in (names, units, values))])
    (kernel,) = counters.read(page)
    assert kernel["kernel"] == "fused_conv" and kernel["seconds"] == pytest.approx(1.2505e-3) and kernel["warps"] == 12
    assert set(kernel["busy"].values()) == {40.0} and sum(kernel["waits"].values()) == pytest.approx(1)
    assert counters.read("==WARNING== No kernels were profiled.") == []
