"""Which groups become kernels, and with which tiles: decided by times that the tests make up."""

from __future__ import annotations

import json
import math
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright import racing, tuning
from fusewright.capture import capture
from fusewright.codegen import cuda
from fusewright.errors import UnsupportedError
from fusewright.ir.fused import Fused
from fusewright.ir.node import Graph
from fusewright.ir.placement import placed
from fusewright.plan import Work
from fusewright.random_operands import random_operand, rows_of_indices
from fusewright.rules import RULES
from fusewright.rules.engine import rewrite
from fusewright.runtime import cache, operators
from fusewright.runtime.launch import Launcher
from fusewright.runtime.nvrtc import KernelError
from fusewright.schedule.group import Group
from fusewright.schedule.groups import cut
from fusewright.schedule.wishes import Wishes
from fusewright.side_by_side import side_by_side
from fusewright.tuning import Decision, Tuner

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Pair(nn.Module):
    """One kind of group twice: convolutions of so many features, on images of so many rows."""

    def __init__(self, *features: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, n, 3) for n in features)

    def forward(self, *images: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.relu(conv(x)).sum((2, 3)) for conv, x in zip(self.convs, images, strict=True))


def pair(features: tuple[int, ...] = (4,), rows: tuple[int, ...] = (20,), batch: int = 2) -> Graph:
    return capture(Pair(*features), tuple(torch.rand(batch, 3, n, 20) for n in rows), {}).graph


class Clock:
    """Stands in for the device: what each call takes by the source of its kernel, `aten` for anything else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(directory))
        monkeypatch.setitem(tuning.TARGETS, "cpu", cuda)
        monkeypatch.setattr(racing, "seconds", self.seconds)
        monkeypatch.setattr(racing, "can_build", lambda launcher, device: self.builds(launcher.kernel.source))
        monkeypatch.setattr(racing, "can_load", lambda launcher, device: self.loads(launcher.kernel.source))
        monkeypatch.setattr(Launcher, "__call__", lambda launcher, *operands: self.launch(launcher, *operands))
        self.aten = 1.0
        self.takes: Callable[[str], float] = lambda source: 0.5
        self.builds: Callable[[str], bool] = lambda source: True
        self.loads: Callable[[str], bool] = lambda source: True
        self.calls = 0
        self.launched: str | None = None

    def launch(self, launcher: Launcher, *operands: Tensor) -> Tensor:
        self.launched = launcher.kernel.source
        return operands[0]

    def seconds(self, call: Callable[[], Tensor], device: torch.device, most: float = float("inf")) -> float:
        self.calls += 1
        self.launched = None
        call()
        return self.aten if self.launched is None else self.takes(self.launched)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clock:
    return Clock(monkeypatch, tmp_path / "cache")


def tuned(graph: Graph, mode: tuning.Mode = "auto", **options: Any) -> tuple[Tuner, Graph]:
    hints = dict.fromkeys(graph.symbols, 2)
    tuner = Tuner(CPU, hints, mode, (False, False), **options)
    return tuner, cut(graph, tuner)


def contraction(tuner: Tuner) -> Decision:
    return next(d for key, d in tuner.decisions.items() if key.startswith("contraction"))


def fused(graph: Graph) -> list[str]:
    return [n.op.name for n in graph.nodes() if isinstance(n.op, Fused)]


# -- which kernel


@pytest.mark.parametrize("place", [0, 3, -1])
def test_the_fastest_tiles_win(clock: Clock, place: int) -> None:
    sources = made_for(pair())
    clock.takes = lambda source: 0.1 if source == sources[place] else 0.2
    tuner, graph = tuned(pair())
    assert tuner.kernels["fused_conv_relu_sum"].source == sources[place]
    (choice,) = tuner.choices
    assert (choice.path, choice.generated, choice.aten, choice.tried) == ("generated", 0.1, 1.0, len(sources))
    assert fused(graph) == ["fused_conv_relu_sum"]


def made_for(graph: Graph) -> list[str]:
    """The source of each option of the only contraction."""
    found: list[str] = []

    def decide(group: Any) -> None:
        if group.family == "contraction":
            hints = dict.fromkeys(graph.symbols, 2)
            options = tuning.cuda.options(group, hints, {})
            found.extend(tuning.cuda.generate(group, group.name, o, tf32=False).source for o in options)

    cut(graph, decide)
    assert len(set(found)) == len(found) > 4
    return found


@pytest.mark.parametrize(("capability", "tf32", "there"), [(90, True, True), (90, False, False), (80, True, False),
                                                            (100, True, False), (None, True, False)])  # fmt: skip
@pytest.mark.sampled
def test_what_only_hopper_runs_is_an_option_there_alone(capability: int | None, tf32: bool, there: bool) -> None:
    """Kernels for warpgroups multiply tf32 numbers, and their instructions are in no other architecture."""
    graph, found = pair(), []

    def decide(group: Any) -> None:
        if group.family == "contraction":
            hints = dict.fromkeys(graph.symbols, 64)
            options = tuning.cuda.options(group, hints, {}, tf32=tf32, capability=capability)
            found.extend(tuning.cuda.generate(group, group.name, o, tf32=tf32) for o in options)

    cut(graph, decide)
    assert any(kernel.arch == "sm_90a" for kernel in found) == there
    assert any(not kernel.arch for kernel in found)


@pytest.mark.parametrize(("stride", "whole"), [(1, False), (2, True)])
def test_windows_that_begin_in_the_midst_of_cells_have_direct_kernels_alone(stride: int, whole: bool) -> None:
    """Windows of a transposed convolution: whole cells where they are as far apart as its strides, or multiples."""
    model = nn.Sequential(nn.ConvTranspose1d(2, 3, 1, stride=2), nn.MaxPool1d(3, stride))
    graph, found = capture(model, (torch.randn(3, 2, 16),), {}).graph, []

    def decide(group: Any) -> None:
        if group.family == "contraction" and group.record.window is not None:
            found.extend(tuning.cuda.options(group, dict.fromkeys(graph.symbols, 3), {}))

    cut(graph, decide)
    assert found and any("tiling" in option for option in found) == whole
    assert whole or all("direct" in option for option in found)


@pytest.mark.parametrize(("features", "ways"), [(22, {"warpgroup", "positions"}), (64, {"warpgroup"})])
def test_of_few_features_both_ways_of_warpgroups_are_measured(features: int, ways: set[str]) -> None:
    """At least a few tiles of either, and no more in all than there would be of one, but for those with producers."""
    graph, found = pair((features,), (60,), 64), []

    def decide(group: Any) -> None:
        if group.family == "contraction":
            hints = dict.fromkeys(graph.symbols, 64)
            found.extend(tuning.cuda.options(group, hints, {}, tf32=True, capability=90))

    cut(graph, decide)
    alone = [option for option in found if option.get("blocks") is None]
    counts = {way: sum(way in option for option in alone) for way in ("warpgroup", "positions")}
    assert {way for way, count in counts.items() if count} == ways
    produced = [option for option in alone for way in ways if option.get(way, {}).get("producers")]
    assert all(counts[way] >= 4 for way in ways)
    assert sum(counts.values()) - len(produced) <= tuning.cuda.OF_WARPGROUPS
    assert 0 < len(produced) <= 2 * len(ways) * tuning.cuda.OF_PRODUCERS  # whose warpgroups take turns, or do not


class Pooled(nn.Module):
    """A convolution behind whose average pool another function follows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(x), 4).sigmoid().sum((1, 2, 3))


@pytest.mark.parametrize(("capability", "tf32", "there"), [(90, True, True), (90, False, False), (80, True, False)])
def test_of_window_sums_both_ways_to_multiply_are_measured(capability: int, tf32: bool, there: bool) -> None:
    """From registers by warpgroups where there are such, and by warps."""
    graph = capture(Pooled(), (torch.rand(64, 8, 66, 66),), {}).graph
    slides = [rule for rule in RULES if rule.name == "avg_pool(conv(x, w)) = conv_strided(box(x), w)"]
    graph, found = rewrite(graph, slides, lambda node: Work(0, 0, 0, 0), mode="always").graph, []

    def decide(group: Any) -> None:
        if group.family == "contraction":
            assert group.record.box is not None
            hints = dict.fromkeys(graph.symbols, 64)
            found.extend(tuning.cuda.options(group, hints, {}, tf32=tf32, capability=capability))

    cut(graph, decide)
    counts = {way: sum(way in option for option in found) for way in ("windows", "tiling")}
    assert (counts["windows"] > 0) == there and counts["tiling"] > 0
    assert sum("windows" in o for o in found if o.get("blocks") is None) <= tuning.cuda.OF_WARPGROUPS


@pytest.mark.parametrize(("mode", "taken"), [("auto", False), ("always", True)])
def test_a_slower_kernel_is_taken_only_where_it_must_be(clock: Clock, mode: tuning.Mode, taken: bool) -> None:
    clock.aten = 0.5 * 0.96
    tuner, graph = tuned(pair(), mode)
    choice = tuner.choices[0]
    assert choice.path == ("generated" if taken else "ATen")
    assert (choice.generated, choice.aten) == (0.5, clock.aten)
    assert ("fused_conv_relu_sum" in fused(graph)) == taken == bool(tuner.kernels)


def test_only_the_chosen_kernel_becomes_an_operator(clock: Clock) -> None:
    known = set(operators._operators)
    tuner, _ = tuned(pair((5,)))
    assert tuner.choices[0].path == "generated" and tuner.choices[0].tried > 4
    assert set(operators._operators) == known, "the program that calls the chosen one registers it"


def test_a_little_faster_is_not_enough(clock: Clock) -> None:
    clock.aten = 0.5 / 0.98
    assert tuned(pair())[0].choices[0].path == "ATen"
    clock.aten = 0.5 / 0.96
    assert tuned(pair(batch=3, rows=(21,)))[0].choices[0].path == "generated"


def test_without_measuring_the_best_guess(clock: Clock) -> None:
    tuner, _ = tuned(pair(), measure=False)
    assert tuner.kernels["fused_conv_relu_sum"].source == made_for(pair())[0]
    assert clock.calls == 0 and tuner.choices[0].generated is None


def test_another_device_is_left_alone(clock: Clock) -> None:
    graph = pair()
    tuner = Tuner(torch.device("meta"), {}, "always", (False, False))
    assert cut(graph, tuner).outputs == graph.outputs and not tuner.choices


def test_layers_whose_operands_have_other_bounds_share_no_kernel(clock: Clock) -> None:
    """What is at most 1 needs no maximum subtracted before its exponential."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(8, 16, 3, padding=1) for _ in range(3))
            self.scale = nn.Parameter(torch.ones(1, 16, 1, 1))

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            scales = torch.sigmoid(self.scale), self.scale * 1.5, self.scale * 1.5
            values = (conv(x).sigmoid() * scale for conv, scale in zip(self.convs, scales, strict=True))
            return tuple(torch.logsumexp(value, 1) for value in values)

    tuner, graph = tuned(capture(Sums(), (torch.rand(2, 8, 9, 9),), {}).graph, mode="always", measure=False)
    first, second, third = fused(graph)
    assert first != second == third
    first, second = (tuner.kernels[name].unnumbered.source for name in (first, second))
    assert first.replace("exp", "") != second.replace("exp", "")


# -- what is prepared


@pytest.fixture
def far(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A GPU of compute capability 9.0 that is not here; nothing is remembered of it."""
    monkeypatch.setattr(tuning, "capability_of", lambda device: 90)
    monkeypatch.setattr(Tuner, "_remembered_at", lambda tuner, group: None)
    return clock


def prepared(layers: int, **options: Any) -> Tuner:
    """A tuner that was shown a network of convolutions, each of other sizes, and a pool behind the last."""
    convs = [nn.Sequential(nn.Conv2d(8 * i, 8 * i + 8, 3), nn.ReLU()) for i in range(1, layers + 1)]
    model = nn.Sequential(*convs, nn.MaxPool2d(2))
    graph = placed(capture(model, (torch.rand(2, 8, 40, 40),), {}).graph, GPU)
    tuner = Tuner(GPU, dict.fromkeys(graph.symbols, 2), "always", (True, True), **options)
    tuner.prepare(graph, lambda node: False, {})
    tuner.builders.shutdown()
    return tuner


@pytest.mark.skipif(side_by_side(len, [[1], []], 60.0) is None, reason="no processes can be forked here")
@pytest.mark.slow  # searches all tiles twice
def test_ways_of_all_groups_are_those_that_each_would_find(far: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner = prepared(3)
    assert len(tuner.ways) == 4  # of the last group there is a shorter one
    monkeypatch.setattr(tuning, "side_by_side", lambda work, places, seconds: [work(place) for place in places])
    assert prepared(3).ways == tuner.ways
    assert all(ways.options for ways in tuner.ways.values())
    assert sum(ways.early < math.inf for ways in tuner.ways.values()) == 1


def test_kernels_of_all_groups_are_begun_ahead(far: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of every group, then some others of each, as many as are built in time."""
    monkeypatch.setattr(tuning, "side_by_side", lambda work, places, seconds: [work(place) for place in places])
    monkeypatch.setattr(racing, "cores", lambda: 1)
    begun: list[str] = []
    build = Tuner._build

    def watched(tuner: Tuner, group: Group, name: str, option: Any) -> racing.Build:
        begun.append(tuner._sized(group))
        return build(tuner, group, name, option)

    monkeypatch.setattr(Tuner, "_build", watched)
    builds = prepared(3).builds
    most = int(tuning.SECONDS / tuning.BUILD / len(builds))
    assert begun[: len(builds)] == list(builds) and [len(some) for some in builds.values()] == [most] * len(builds)
    assert begun[len(builds) :] == [sized for sized in builds for _ in range(most - 1)]


def test_what_was_begun_is_what_is_measured(clock: Clock) -> None:
    graph = pair()
    groups: list[Group] = []
    cut(graph, lambda group: groups.append(group))
    group = next(group for group in groups if group.family == "contraction")
    tuner = Tuner(CPU, dict.fromkeys(graph.symbols, 2), "always", (False, False))
    option = cuda.options(group, tuner.hints, {})[-1]
    tuner.builds[tuner._sized(group)] = [tuner._build(group, group.name, option)]
    cut(graph, tuner)
    assert contraction(tuner).option == option and contraction(tuner).tried == 1 and not tuner.builds


@pytest.mark.parametrize(
    "how", [{"measure": False}, {"wishes": Wishes(single=True)}, {"remembered": {"": Decision(None)}}]
)
def test_nothing_is_prepared_where_nothing_is_chosen_among(far: Clock, how: dict[str, Any]) -> None:
    assert not prepared(2, **how).ways


def test_a_single_group_is_not_prepared(far: Clock) -> None:
    x = torch.rand(2, 8, 40, 40)
    graph = placed(capture(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()), (x,), {}).graph, GPU)
    tuner = Tuner(GPU, dict.fromkeys(graph.symbols, 2), "always", (True, True))
    tuner.prepare(graph, lambda node: False, {})
    assert not tuner.ways and not tuner.builds


# -- kernels that do not work


@pytest.mark.parametrize("step", ["builds", "loads"])
def test_what_does_not_build_is_passed_over(clock: Clock, step: str) -> None:
    sources = made_for(pair())
    clock.takes = lambda source: 0.1 if source == sources[0] else 0.2 if source == sources[1] else 0.3
    setattr(clock, step, lambda source: source != sources[0])
    tuner, _ = tuned(pair())
    assert tuner.kernels["fused_conv_relu_sum"].source == sources[1]
    assert tuner.choices[0].tried == len(sources) - 1


def test_what_does_not_run_is_passed_over(clock: Clock) -> None:
    sources = made_for(pair())

    def takes(source: str) -> float:
        if source == sources[0]:
            raise KernelError("cannot be launched")
        return 0.2

    clock.takes = takes
    tuner, _ = tuned(pair())
    assert tuner.kernels["fused_conv_relu_sum"].source != sources[0] and tuner.choices[0].tried == len(sources) - 1


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_where_nothing_builds_aten_runs(clock: Clock, mode: tuning.Mode, tmp_path: Path) -> None:
    clock.loads = lambda source: False
    tuner, graph = tuned(pair(), mode)
    assert not fused(graph) and not tuner.kernels and {c.path for c in tuner.choices} == {"ATen"}
    assert not list((tmp_path / "cache").glob("tuned-*")), "a build may work another day"


def test_short_of_memory_the_best_guess_runs(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(call: Callable[[], Tensor], device: torch.device, most: float = 0.0) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(racing, "seconds", fails)
    tuner, _ = tuned(pair())
    assert tuner.kernels["fused_conv_relu_sum"].source == made_for(pair())[0]


def test_other_errors_are_not_hidden(clock: Clock) -> None:
    clock.takes = lambda source: 1 // 0
    with pytest.raises(ZeroDivisionError):
        tuned(pair())


def test_out_of_time_one_option_is_enough(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SECONDS", -1.0)
    assert tuned(pair())[0].choices[0].tried == 1


def test_long_out_of_time_convolutions_are_left_to_aten(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "LONGEST", -1.0)
    tuner, _ = tuned(pair())
    assert {c.path for c in tuner.choices if c.family == "contraction"} == {"ATen"} and clock.calls <= 2
    assert not any(name.startswith("fused_conv") for name in tuner.kernels)
    assert fused(tuned(pair(), mode="always")[1])


# -- what is remembered


def test_decisions_carry_over_to_other_sizes(clock: Clock) -> None:
    sources = made_for(pair())
    clock.takes = lambda source: 0.1 if source == sources[3] else 0.2
    first, _ = tuned(pair())
    calls = clock.calls
    second, _ = tuned(pair(rows=(14,), batch=5), remembered=first.decisions, measure=False)
    assert clock.calls == calls and contraction(second) == contraction(first)
    assert contraction(second).option != contraction(tuned(pair(), measure=False)[0]).option


def test_declined_stays_declined_at_other_sizes(clock: Clock) -> None:
    clock.aten = 0.01
    first, _ = tuned(pair())
    second, graph = tuned(pair(rows=(14,)), remembered=first.decisions)
    assert {c.path for c in second.choices} == {"ATen"} and not fused(graph)


def test_groups_of_one_kind_but_other_weights_are_decided_apart(clock: Clock) -> None:
    """Tiles, and whether a cluster finishes a sample, that fit 4 features are wrong for 100."""
    tuner, _ = tuned(pair((4, 100), (20, 20)), measure=False)
    small, large = tuner.kernels.values()
    assert small.launches[0].cluster > 1 and large.launches[0].cluster == 1


def test_groups_of_one_kind_are_decided_by_their_sizes(clock: Clock) -> None:
    clock.takes = lambda source: 0.5
    tuner, _ = tuned(pair((4, 4), (20, 30)))
    assert len([k for k in tuner.decisions if k.startswith("contraction")]) == 2
    assert len({k.rpartition(" #")[0] for k in tuner.decisions}) == 1
    assert clock.calls == sum(1 + choice.tried for choice in tuner.choices) and len(tuner.choices) == 2
    again, _ = tuned(pair((4, 4), (12, 16)), remembered=tuner.decisions)
    assert list(again.decisions.items()) == list(tuner.decisions.items())


def test_what_occurs_twice_is_measured_once(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tuner, "_remembered_at", lambda tuner, group: None)
    tuner, graph = tuned(pair((4, 4), (20, 20)))
    assert clock.calls == 1 + tuner.choices[0].tried and len(tuner.choices) == 2
    assert fused(graph) == ["fused_conv_relu_sum", "fused_conv_relu_sum_2"]  # which have batches of their own
    assert list(tuner.kernels) == fused(graph)


def test_equal_layers_share_a_kernel(clock: Clock) -> None:
    layers = [nn.Sequential(nn.Conv2d(4, n, 3, padding=1), nn.ReLU()) for n in (4, 4, 8)]
    graph = capture(nn.Sequential(*layers), (torch.rand(2, 4, 9, 9),), {}).graph
    tuner, graph = tuned(graph, mode="always")
    assert fused(graph) == ["fused_conv_relu", "fused_conv_relu", "fused_conv_relu_2"]
    assert [choice.name for choice in tuner.choices] == fused(graph)
    assert list(tuner.kernels) == ["fused_conv_relu", "fused_conv_relu_2"]


# -- on disk


def kept(directory: Path) -> Path:
    (path,) = (directory / "cache").glob("tuned-*.json")
    return path


def test_times_are_kept_for_the_next_run(clock: Clock, tmp_path: Path) -> None:
    first, _ = tuned(pair())
    calls = clock.calls
    second, _ = tuned(pair())
    assert clock.calls == calls and second.decisions == first.decisions and second.choices == first.choices
    assert not kept(tmp_path).stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    third, _ = tuned(pair(batch=2, rows=(24,)))
    assert clock.calls == calls + 1 + third.choices[0].tried, "other sizes, other times"


def test_the_best_of_single_launches_is_kept_apart(clock: Clock) -> None:
    clock.takes = lambda source: 0.4 if "__cluster_dims__" in source else 0.2
    first, _ = tuned(pair())
    alone, _ = tuned(pair(), wishes=Wishes(single=True))
    calls = clock.calls
    again, _ = tuned(pair())
    assert clock.calls == calls
    assert len(contraction(first).option or {}) and contraction(again).option == contraction(first).option
    assert contraction(alone).option != contraction(first).option


def test_kept_times_serve_both_modes(clock: Clock) -> None:
    """What is kept are times; what they mean is for the mode to say."""
    clock.aten = 0.01
    assert {c.path for c in tuned(pair())[0].choices} == {"ATen"}
    calls = clock.calls
    assert tuned(pair(), "always")[0].choices[0].path == "generated"
    assert clock.calls >= calls


CORRUPT = {
    "empty": "",
    "cut off": '{"option": {"tiling": {"m_t',
    "another shape": "[1, 2]",
    "unknown fields": '{"option": null, "generated": 0.1, "aten": 1.0, "tried": 3, "more": 1}',
    "no numbers": '{"option": {}, "generated": "fast", "aten": null, "tried": 3}',
    "no option of today's": '{"option": {"tiling": {"warps": 3}}, "generated": 0.1, "aten": 1.0, "tried": 3}',
    "no text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("name", CORRUPT)
@pytest.mark.sampled
def test_a_corrupt_file_is_ignored(clock: Clock, tmp_path: Path, name: str) -> None:
    first, _ = tuned(pair())
    path, calls = kept(tmp_path), clock.calls
    content = CORRUPT[name]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    second, _ = tuned(pair())
    assert second.decisions == first.decisions and clock.calls == 2 * calls
    assert json.loads(path.read_text())["tried"] == first.choices[0].tried, "and replaced"


def test_a_full_disk_is_no_problem(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuning, "write_atomic", full)
    assert tuned(pair())[0].choices[0].path == "generated"


def test_without_a_safe_directory_nothing_is_kept(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> Path:
        raise UnsupportedError("not safely ours")

    monkeypatch.setattr(tuning, "cache_directory", refused)
    tuned(pair())
    calls = clock.calls
    tuned(pair())
    assert clock.calls == 2 * calls


def test_tf32_is_for_the_operation_it_was_allowed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution's kernel asks the flag of convolutions."""
    monkeypatch.setitem(tuning.TARGETS, "cpu", cuda)
    texts = []
    for tf32 in ((True, False), (False, True)):
        graph = pair()
        tuner = Tuner(CPU, dict.fromkeys(graph.symbols, 2), "always", tf32, measure=False)
        cut(graph, tuner)
        texts.append(tuner.kernels["fused_conv_relu_sum"].source)
    assert texts[0] != texts[1] == made_for(pair())[0]


def test_random_operands_have_the_kinds_of_the_group() -> None:
    class Kinds(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.relu(x) * y

    graph = capture(Kinds(), (torch.rand(3, 4, dtype=torch.bfloat16), torch.rand(4, dtype=torch.float64)), {}).graph
    for node in graph.inputs:
        value = random_operand(node, dict.fromkeys(graph.symbols, 3), CPU)
        assert value.dtype == node.dtype and value.shape[-1] == 4


def test_random_indices_are_those_of_rows() -> None:
    """Of the smallest weight that they are used in; as ones they would find everything in the cache, or no row."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Embedding(50, 4), nn.Embedding(9, 4)

        def forward(self, tokens: Tensor) -> Tensor:
            return (self.large(tokens) + self.small(tokens)).mean(1)

    graph = capture(Tables(), (torch.randint(9, (3, 400)),), {}).graph
    groups: list[Group] = []
    cut(graph, lambda group: groups.append(group) or group.fused(group.name))  # type: ignore[func-returns-value]
    (group,), hints = groups, dict.fromkeys(graph.symbols, 3)
    rows = rows_of_indices(group, hints)
    assert rows == {graph.inputs[0]: 9}
    drawn = random_operand(graph.inputs[0], hints, CPU, rows)
    assert drawn.dtype == torch.int64 and drawn.unique().tolist() == list(range(9))


def test_every_part_of_the_options_has_its_turn() -> None:
    """The list has one way after the other, the best of each first: none waits until time is up."""
    options: list[tuning.Option] = [{"n": n} for n in range(10)]
    assert [option["n"] for option in racing.in_turn(options)] == [0, 3, 6, 9, 1, 4, 7, 2, 5, 8]
    assert racing.in_turn(options[:1]) == options[:1]


def test_finalists_are_timed_in_turns() -> None:
    def takes(seconds: float) -> Callable[[], Tensor]:
        def call() -> Tensor:
            time.sleep(seconds)
            return torch.empty(0)

        return call

    best, seconds, aten = racing.fastest({3: takes(0.02), 5: takes(0.002)}, takes(0.01), torch.device("cpu"), 1.0)
    assert best == 5
    assert 0.002 <= seconds < 0.01 <= aten < 0.02
