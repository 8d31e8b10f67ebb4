"""Groups that end before a pool: where that is estimated or measured to be faster, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulation.emulate import emulate
from gpu_build import built_for_a_gpu
from torch import Tensor, nn

from fusewright import racing, tuning
from fusewright.capture import capture
from fusewright.codegen import cpu, cuda
from fusewright.ir import ops, spec
from fusewright.ir.fused import Fused
from fusewright.ir.node import Graph
from fusewright.kernel import Kernel
from fusewright.reduced import shape
from fusewright.runtime import cache
from fusewright.runtime.launch import Launcher
from fusewright.runtime.nvrtc import KernelError
from fusewright.schedule.group import Group
from fusewright.schedule.groups import cut
from fusewright.schedule.wishes import Wishes
from fusewright.tuning import EARLY, Decision, Tuner

CPU = torch.device("cpu")
WHOLE, PARTS, ALL_BEHIND = ["fused_conv_abs_avg_atan"], ["fused_conv_abs", "fused_avg_atan"], "fused_abs_avg_atan"
SHARES = ["fused_convtranspose_softmax_mul_sigmoid", "fused_convtranspose", "fused_softmax_mul_sigmoid"]
ADDED = ["fused_conv_tanh_add_relu", "fused_conv_tanh", "fused_add_relu", "fused_tanh_add_relu"]


class Overlapping(nn.Module):
    """Windows that overlap: each position is in four of them."""

    def __init__(self, channels: int = 3, features: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, features, (2, 6))
        self.pool = nn.AvgPool2d(8, (2, 7))

    def forward(self, x: Tensor) -> Tensor:
        return torch.atan(self.pool(self.conv(x).abs()))


class Apart(nn.Module):
    """Windows that do not overlap, of as many positions as a thread holds."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 64, 3)
        self.bias = nn.Parameter(torch.randn(1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.max_pool2d(torch.tanh(self.conv(x)) * 2.0 + self.bias, 4)


# -- what is offered


def offered(model: nn.Module, *args: Tensor) -> list[Group]:
    found: list[Group] = []
    cut(capture(model.eval(), args, {}).graph, found.append)
    return [group for group in found if group.family == "contraction"]


def test_a_group_with_a_pool_has_a_shorter_one() -> None:
    """With a tail as well, and what is left is a valid graph."""

    class Tail(Overlapping):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(super().forward(x).mean((2, 3)))

    first, second = offered(Tail(), torch.rand(2, 3, 30, 40))
    assert first.record.tail is not None and second.record.tail is None
    for group in (first, second):
        assert group.shorter is not None and group.shorter.name == PARTS[0] and group.shorter.shorter is None
        rest = spec.check(group.rest())
        assert rest.inputs[0].shape == group.shorter.root.shape and rest.outputs[0].shape == group.root.shape
        assert not any(isinstance(node.op, ops.Conv) for node in rest.nodes())
        assert group.behind(group.shorter.root) is group.root


def test_what_has_no_pool_has_no_shorter_group() -> None:
    for reduced in ((2, 3), (3,)):  # the second is cut into windows
        (group, *_) = offered(Summed(reduced), torch.rand(2, 3, 30, 40))
        assert group.shorter is None and (group.split is not None) == (reduced == (3,))


class Summed(nn.Module):
    """A reduction over all of the positions, or over some."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.conv, self.dims = nn.Conv2d(3, 4, 3), dims

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x)).sum(self.dims)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x).tanh() + x)


def test_a_group_with_a_residual_has_a_shorter_one() -> None:
    """Which is offered as well where the whole one is no kernel."""
    whole, *others = offered(Residual(), torch.rand(2, 3, 30, 40))
    assert whole.name == ADDED[0] and [group.name for group in others] == ADDED[1:2]
    assert whole.shorter is not None and whole.shorter.root is others[0].root
    assert whole.rest().outputs[0].shape == whole.root.shape and others[0].shorter is None


class Shares(nn.Module):
    """A softmax over the channels of a transposed convolution, whose rows have an even length or an odd one."""

    def __init__(self, features: int, more: int = 0) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(64, features, 4, stride=2, padding=1, output_padding=more)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(torch.softmax(self.conv(x), 1) * 2.0)


def test_a_group_with_a_softmax_has_a_shorter_one() -> None:
    whole, *_ = offered(Shares(16), torch.rand(2, 64, 8, 8))
    assert whole.name == SHARES[0] and whole.shorter is not None and whole.shorter.name == SHARES[1]
    assert whole.rest().outputs[0].shape == whole.root.shape


# -- by estimate


@pytest.mark.parametrize(("features", "more", "left"), [(64, 0, False), (128, 1, True)])
def test_softmaxes_that_tiles_suffer_from_are_left_to_memory(
    monkeypatch: pytest.MonkeyPatch, features: int, more: int, left: bool
) -> None:
    built = built_for_a_gpu(monkeypatch, Shares(features, more), torch.empty(64, 64, 64, 64))
    assert [choice.name for choice in built.choices] == (SHARES[1:] if left else SHARES[:1])
    assert [choice.family for choice in built.choices] == ["contraction", "normalization"][: 2 if left else 1]


def test_overlapping_windows_are_left_to_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By tiles that have windows as cells, and compute four times what they share."""
    built = built_for_a_gpu(monkeypatch, Overlapping(51, 103), torch.empty(64, 51, 138, 175), capability=80)
    assert [choice.name for choice in built.choices] == PARTS
    assert [choice.family for choice in built.choices] == ["contraction", "stream"]


def test_overlapping_windows_that_threads_pool_together_are_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    built = built_for_a_gpu(monkeypatch, Overlapping(51, 103), torch.empty(64, 51, 138, 175))
    assert [choice.name for choice in built.choices] == WHOLE


@pytest.mark.parametrize(("size", "left"), [(7, False), (9, True)])
def test_windows_larger_than_tiles_are_left_to_memory(monkeypatch: pytest.MonkeyPatch, size: int, left: bool) -> None:
    model = nn.Sequential(nn.ConvTranspose3d(74, 40, 7, padding=(1, 3, 1)), nn.MaxPool3d(size))
    built = built_for_a_gpu(monkeypatch, model, torch.empty(16, 74, 37, 40, 29))
    found = [choice.name for choice in built.choices]
    assert found == (["fused_convtranspose", "fused_max_add"] if left else ["fused_convtranspose_max_add"])


def test_overlapping_windows_are_left_to_memory_where_tiles_suffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two thirds of what a tile computes are in windows of others, too."""
    model = nn.Sequential(nn.Conv2d(37, 127, 7, (3, 2), (9, 7), 3), nn.Mish(), nn.MaxPool2d(8, 3))
    built = built_for_a_gpu(monkeypatch, model, torch.empty(32, 37, 432, 362))
    assert [choice.name for choice in built.choices] == ["fused_conv_mish", "fused_max"]


@pytest.mark.parametrize(
    ("capability", "dtype"), [(90, torch.float32), (80, torch.float32), (90, torch.float64)], ids=str
)
@pytest.mark.parametrize(("size", "taken_in"), [(3, True), (199, False)])
def test_windows_that_begin_between_strides(
    monkeypatch: pytest.MonkeyPatch, capability: int, dtype: torch.dtype, size: int, taken_in: bool
) -> None:
    """A block's threads pool them together, where it has room for what it computes; else a pool reads the output."""
    model = nn.Sequential(nn.ConvTranspose2d(9, 24, 3, 2), nn.ReLU(), nn.MaxPool2d(size)).to(dtype)
    built = built_for_a_gpu(monkeypatch, model, torch.empty(16, 9, 128, 128, dtype=dtype), capability=capability)
    names = [choice.name for choice in built.choices]
    apart = ["fused_convtranspose", "fused_max_add_relu"]
    assert names == (["fused_convtranspose_max_add_relu"] if taken_in else apart)


@pytest.mark.parametrize(("size", "name"), [(3, "fused_convtranspose_max_add_relu"), (199, "fused_convtranspose")])
def test_a_single_launch_ends_before_windows_that_no_kernel_pools(
    monkeypatch: pytest.MonkeyPatch, size: int, name: str
) -> None:
    model = nn.Sequential(nn.ConvTranspose2d(9, 24, 3, 2), nn.ReLU(), nn.MaxPool2d(size))
    built = built_for_a_gpu(monkeypatch, model, torch.empty(16, 9, 128, 128), wishes=Wishes(single=True))
    assert built.choices[0].name == name


def test_dilated_tiles_have_whole_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Along depth and height they are not of one residue of the dilation."""
    conv = nn.ConvTranspose3d(32, 134, 6, padding=(1, 3, 1), dilation=(2, 2, 1))
    model = nn.Sequential(conv, nn.SELU(), nn.AvgPool3d(2))
    built = built_for_a_gpu(monkeypatch, model, torch.empty(8, 32, 70, 55, 62))
    assert [choice.name for choice in built.choices] == ["fused_convtranspose_selu_avg"]


def test_small_windows_are_taken_in(monkeypatch: pytest.MonkeyPatch) -> None:
    built = built_for_a_gpu(monkeypatch, Apart(), torch.empty(128, 8, 256, 256))
    assert [choice.family for choice in built.choices] == ["contraction"]


def test_another_size_is_cut_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Estimates would have it otherwise; and the rest's decisions are the same, too."""
    model = Overlapping(51, 103)
    first = built_for_a_gpu(monkeypatch, model, torch.empty(64, 51, 138, 175), capability=80)
    assert Decision(dict(EARLY)) in first.decisions.values()
    monkeypatch.setattr(cuda, "early", lambda *_, **__: 2.0)
    second = built_for_a_gpu(monkeypatch, model, torch.empty(2, 51, 30, 40), capability=80, decisions=first.decisions)
    assert shape(second) == shape(first) and second.decisions == first.decisions
    other = built_for_a_gpu(monkeypatch, model, torch.empty(2, 51, 30, 40), capability=80)
    assert [choice.name for choice in other.choices] == WHOLE
    third = built_for_a_gpu(monkeypatch, model, torch.empty(64, 51, 138, 175), capability=80, decisions=other.decisions)
    assert shape(third) == shape(other)


# -- by measuring


class Times:
    """Stands in for the device: seconds by the name of a kernel, or of ATen's program for the group."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
        monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(directory))
        monkeypatch.setitem(tuning.TARGETS, "cpu", cuda)
        monkeypatch.setattr(cuda, "early", lambda *_, **__: self.estimated)
        monkeypatch.setattr(racing, "seconds", self.seconds)
        monkeypatch.setattr(racing, "can_build", lambda launcher, device: True)
        monkeypatch.setattr(racing, "can_load", lambda launcher, device: True)
        monkeypatch.setattr(tuning, "reference_of", self.reference)
        monkeypatch.setattr(Launcher, "__call__", lambda launcher, *operands: self.launch(launcher, operands[0]))
        self.generated: Mapping[str, float] = {}
        self.aten: Mapping[str, float] = {}
        self.estimated = 1.0
        self.calls: list[str] = []
        self.took = 0.0

    def reference(self, kernel: Kernel) -> Callable[..., Tensor]:
        def run(*operands: Tensor) -> Tensor:
            self.took = self.aten.get(kernel.name, 9.0)
            return operands[0]

        return run

    def launch(self, launcher: Launcher, x: Tensor) -> Tensor:
        self.calls.append(launcher.kernel.name)
        self.took = self.generated.get(launcher.kernel.name, 9.0)
        return x

    def seconds(self, call: Callable[[], Tensor], device: torch.device, most: float = float("inf")) -> float:
        call()
        return self.took


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Times:
    return Times(monkeypatch, tmp_path / "cache")


def tuned(mode: tuning.Mode = "auto", rows: int = 30, **options: Any) -> tuple[Tuner, list[str]]:
    graph = capture(Overlapping(), (torch.rand(2, 3, rows, 40),), {}).graph
    tuner = Tuner(CPU, dict.fromkeys(graph.symbols, 2), mode, (False, False), **options)
    return tuner, names(cut(graph, tuner))


def names(graph: Graph) -> list[str]:
    return [n.op.name for n in graph.nodes() if isinstance(n.op, Fused)]


MEASURED: dict[str, tuple[tuning.Mode, tuple[float, float, float], dict[str, float], list[str]]] = {
    "both parts together are faster": ("auto", (5.0, 1.0, 1.0), {}, PARTS),
    "and where they must be": ("always", (5.0, 1.0, 1.0), {}, PARTS),
    "not much": ("auto", (2.0, 1.0, 0.99), {}, WHOLE),
    "slower": ("always", (2.0, 1.0, 3.0), {}, WHOLE),
    "ATen's whole is faster than the kernel's": ("auto", (5.0, 1.0, 1.0), {WHOLE[0]: 4.0}, PARTS),
    "ATen's convolution is fastest": ("auto", (5.0, 1.0, 1.0), {PARTS[0]: 0.5}, [ALL_BEHIND]),
    "but must not run": ("always", (5.0, 1.0, 1.0), {PARTS[0]: 0.5}, PARTS),
    "ATen's pool is fastest": ("auto", (5.0, 1.0, 2.0), {PARTS[1]: 0.5}, PARTS[:1]),
}


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.sampled
def test_measured(times: Times, name: str) -> None:
    mode, generated, times.aten, expected = MEASURED[name]
    times.generated = dict(zip((*WHOLE, *PARTS, ALL_BEHIND), (*generated, 1.0), strict=True))
    tuner, found = tuned(mode)
    assert found == expected == list(tuner.kernels)


# Seconds of the kernels of the whole, of its parts, and of all behind the convolution; ATen's, and what is expected.
MEASURED_RESIDUALS: dict[str, tuple[tuple[float, ...], tuple[float, ...], list[str], bool]] = {
    "far ahead of ATen's operations": ((1.0, 0.1, 0.1, 0.1), (2.0, 0.1, 9.0), ADDED[:1], False),
    "ahead": ((1.5, 1.0, 1.0, 1.0), (2.0, 9.0, 9.0), ADDED[:1], True),
    "two kernels are faster": ((1.5, 0.5, 0.5, 1.0), (2.0, 9.0, 9.0), ADDED[1:3], True),
    "ATen's convolution is faster": ((1.5, 1.0, 0.4, 0.5), (2.0, 0.5, 9.0), ADDED[3:], True),
    "ATen's operations are faster": ((3.0, 1.0, 0.4, 0.5), (2.0, 9.0, 9.0), ADDED[1:3], True),
}


@pytest.mark.parametrize("name", MEASURED_RESIDUALS)
@pytest.mark.sampled
def test_measured_residuals(times: Times, name: str) -> None:
    """Where ATen's operations are nearly as fast, its convolution with one kernel behind it may be faster."""
    generated, aten, expected, parts = MEASURED_RESIDUALS[name]
    times.generated = dict(zip(ADDED, generated, strict=True))
    times.aten = dict(zip(ADDED, aten, strict=False))
    graph = capture(Residual(), (torch.rand(2, 3, 30, 40),), {}).graph
    tuner = Tuner(CPU, dict.fromkeys(graph.symbols, 2), "auto", (False, False))
    assert names(cut(graph, tuner)) == expected == list(tuner.kernels)
    assert (ADDED[1] in times.calls) == parts
    found = [choice.name for choice in tuner.choices]
    assert len(found) == len(set(found))


def test_what_was_measured_is_not_measured_again(times: Times) -> None:
    times.generated = dict(zip((*WHOLE, *PARTS), (5.0, 1.0, 1.0), strict=True))
    first, _ = tuned()
    assert EARLY in [decision.option for decision in first.decisions.values()]
    assert set(times.calls) == {*WHOLE, *PARTS} and times.calls.count(PARTS[1]) == 1
    assert [(choice.name, choice.generated) for choice in first.choices] == [(name, 1.0) for name in PARTS]
    calls = len(times.calls)
    second, found = tuned()
    assert found == PARTS and second.decisions == first.decisions and second.choices == first.choices
    third, found = tuned(rows=50, remembered=first.decisions)
    assert found == PARTS and third.decisions == first.decisions and len(times.calls) == calls


def test_what_no_estimate_speaks_for_is_not_measured(times: Times) -> None:
    times.generated, times.estimated = dict(zip((*WHOLE, *PARTS), (5.0, 1.0, 1.0), strict=True)), 1.6
    assert tuned()[1] == WHOLE and set(times.calls) == set(WHOLE)


@pytest.mark.parametrize("aten", [9.0, 0.5])
def test_what_no_estimate_speaks_against_is_measured_alone(times: Times, aten: float) -> None:
    """The whole group's kernels may take all of the time that there is."""
    times.generated, times.estimated = dict(zip((*WHOLE, *PARTS, ALL_BEHIND), (0.1, 1.0, 1.0, 1.0), strict=True)), 0.6
    times.aten = {PARTS[0]: aten}
    first, found = tuned()
    assert found == (PARTS if aten > 1.0 else [ALL_BEHIND]) and not set(WHOLE) & set(times.calls)
    second, again = tuned(rows=50, remembered=first.decisions)
    assert again == found and second.decisions == first.decisions


@pytest.mark.parametrize("mode", ["auto", "always"])
@pytest.mark.parametrize("failing", ["no kernel runs", "memory is short"])
def test_where_no_part_runs_the_whole_group_does(
    times: Times, monkeypatch: pytest.MonkeyPatch, mode: tuning.Mode, failing: str
) -> None:
    """Models may run at all because the tensor between the parts is never there."""
    times.generated, times.estimated = dict(zip((*WHOLE, *PARTS, ALL_BEHIND), (1.0, 1.0, 1.0, 1.0), strict=True)), 0.6
    launch = times.launch

    def fails(launcher: Launcher, x: Tensor) -> Tensor:
        if launcher.kernel.name != PARTS[0]:
            return launch(launcher, x)
        raise KernelError("no") if failing == "no kernel runs" else torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(times, "launch", fails)
    assert tuned(mode)[1] == WHOLE


def test_a_decision_to_end_early_is_for_groups_that_can(times: Times) -> None:
    times.generated, times.estimated = dict(zip((*WHOLE, *PARTS), (5.0, 1.0, 1.0), strict=True)), 0.6
    first, _ = tuned("always")
    graph = capture(Overlapping(), (torch.rand(2, 3, 30, 40),), {}).graph
    for how in ("remembered", "known"):
        options: dict[str, Any] = {how: first.decisions if how == "remembered" else first.known}
        tuner = Tuner(CPU, dict.fromkeys(graph.symbols, 2), "always", (False, False), **options)
        assert names(cut(graph, lambda group, tuner=tuner: tuner(replace(group, shorter=None)))) == WHOLE


def test_a_single_launch_is_the_whole_group(times: Times) -> None:
    times.generated = dict(zip((*WHOLE, *PARTS), (5.0, 1.0, 1.0), strict=True))
    assert tuned(wishes=Wishes(single=True))[1] == WHOLE and set(times.calls) == set(WHOLE)


def test_out_of_time_the_whole_group_is_enough(times: Times, monkeypatch: pytest.MonkeyPatch) -> None:
    times.generated = dict(zip((*WHOLE, *PARTS), (5.0, 1.0, 1.0), strict=True))
    monkeypatch.setattr(tuning, "SECONDS", -1.0)
    assert tuned()[1] == WHOLE


def test_on_a_cpu_no_group_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tuning.TARGETS, "cpu", cpu)
    assert tuned("always", measure=False)[1] == WHOLE


# -- what runs


def test_both_parts_compute_what_the_whole_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tuning.TARGETS, "cpu", cuda)
    monkeypatch.setattr(cuda, "early", lambda *_, **__: 0.1)
    model, x = Overlapping().eval(), torch.randn(2, 3, 30, 40)
    tuner, found = tuned("always", measure=False)
    assert found == PARTS and next(iter(tuner.decisions.values())) == Decision(EARLY)
    first, second = tuner.kernels.values()
    with torch.no_grad():
        got = emulate(second, emulate(first, x, model.conv.weight, model.conv.bias))
        torch.testing.assert_close(got, model(x), rtol=1e-4, atol=1e-5)
