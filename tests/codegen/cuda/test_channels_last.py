"""Contraction kernels of channels-last inputs: who asks for one, what it returns, what it compiles to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from contraction_cases import Case, Found, find, tolerance
from emulation.emulate import emulate
from gpu_build import as_on_a_gpu, emulated
from torch import Tensor, nn

from fusewright import tuning
from fusewright.capture import capture
from fusewright.codegen import cuda
from fusewright.codegen.cuda import contraction
from fusewright.kernel import Kernel
from fusewright.runtime import nvrtc
from fusewright.runtime.launch import layout_of
from fusewright.runtime.operators import operator
from fusewright.schedule.group import Group
from fusewright.schedule.groups import cut
from fusewright.schedule.tiling import Tiling
from fusewright.tuning import TARGETS, Tuner

GOLDEN = Path(__file__).parents[2] / "golden"
BF16, LAST = torch.bfloat16, torch.channels_last
MEAN = Case((14, 14), 320, 1280, (1, 1), dtype=BF16, before=("hardswish",), fold="mean", fold_dims="p", batch=8)


@pytest.fixture(autouse=True)
def cuda_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU makes the kernels that a GPU would be given."""
    monkeypatch.setitem(TARGETS, "cpu", cuda)


def tuned(model: nn.Module, x: Tensor, layout: str | None = None) -> Tuner:
    """The kernels of `model` for an input like `x`, nothing measured."""
    graph = capture(model, (x,), {}).graph
    layouts = {graph.inputs[0]: layout or layout_of(x)}
    hints = {symbol: x.shape[where.dim] for symbol, where in graph.symbols.items()}
    tuner = Tuner(torch.device("cpu"), hints, "always", (True, True), measure=False, layouts=layouts)
    cut(graph, tuner)
    return tuner


def two() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 5, 2), nn.Tanh()).eval()


def test_what_comes_channels_last_stays_so() -> None:
    """The second kernel reads what the first one wrote, as it lies."""
    model, x = two(), torch.randn(2, 8, 9, 11).to(memory_format=LAST)
    first, second = tuned(model, x).kernels.values()
    assert [k.layouts[0] for k in (first, second)] == ["channels_last"] * 2
    assert set(first.layouts[1:] + second.layouts[1:]) == {"contiguous"}
    parameters = {tuple(p.shape): p.detach() for p in model.parameters()}
    between = emulate(first, x, parameters[12, 8, 3, 3], parameters[(12,)])
    got = emulate(second, between, parameters[5, 12, 2, 2], parameters[(5,)])
    with torch.no_grad():
        want = model(x)
    assert got.stride() == want.stride() and got.is_contiguous(memory_format=LAST)
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


def test_what_comes_contiguous_stays_so() -> None:
    kernels = tuned(two(), torch.randn(2, 8, 9, 11)).kernels.values()
    assert {layout for k in kernels for layout in (*k.layouts, k.output.layout)} == {"contiguous"}


def test_decisions_are_remembered_by_layout() -> None:
    x = torch.randn(2, 8, 9, 11)
    ours, others = (tuned(two(), x, layout).decisions for layout in ("channels_last", "contiguous"))
    assert len(ours) == len(others) == 2 and not ours.keys() & others.keys()
    assert all(d.option is not None and d.option["channels_last"] for d in ours.values())


@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (lambda: torch.randn(2, 3, 4, 5), "contiguous"),
        (lambda: torch.randn(2, 3, 4, 5).to(memory_format=LAST), "channels_last"),
        (lambda: torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d), "channels_last"),
        (lambda: torch.randn(2, 1, 4, 5).to(memory_format=LAST), "channels_last"),
        (lambda: torch.randn(2, 3, 1, 1).to(memory_format=LAST), "contiguous"),
        (lambda: torch.randn(2, 3, 4, 5).to(memory_format=LAST)[:, :, 1:], "channels_last"),
        (lambda: torch.randn(2, 1, 4, 5), "contiguous"),
        (lambda: torch.randn(2, 4, 3).transpose(1, 2), "contiguous"),
    ],
)
def test_layout_of_an_example(make: object, layout: str) -> None:
    """That of a convolution's result in eager, which knows one channel by its stride, and does not mind gaps."""
    assert callable(make) and layout_of(make()) == layout


class Behind(nn.Module):
    """A convolution and a function of what it gives."""

    def __init__(self, conv: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.function = conv, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.conv(x))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("function", "last"),
    [
        (lambda y: torch.sigmoid(2 * y.softmax(1)), False),
        (lambda y: y.log_softmax(1), False),
        (lambda y: y.softmax(1) * y, False),
        (lambda y: y * y.softmax(1), True),  # the first operand decides
        (lambda y: y - y.amax(1, keepdim=True), True),
    ],
)
@pytest.mark.sampled
def test_what_is_written_lies_as_in_eager(
    monkeypatch: pytest.MonkeyPatch, function: Callable[[Tensor], Tensor], last: bool, transposed: bool
) -> None:
    """Softmaxes give rows, whatever they are of."""
    monkeypatch.setattr(tuning, "capability_of", lambda device: 90)
    monkeypatch.setattr(cuda, "early", lambda *_, **__: math.inf)
    torch.manual_seed(0)
    conv = nn.ConvTranspose2d(8, 12, 4, stride=2, padding=1) if transposed else nn.Conv2d(8, 12, 3)
    model, x = Behind(conv, function).eval(), torch.randn(2, 8, 9, 11).to(memory_format=LAST)
    built = as_on_a_gpu(model, x, tf32=(True, True))
    (kernel,) = built.program.kernels
    assert (kernel.layouts[0], kernel.output.layout) == ("channels_last", "channels_last" if last else "contiguous")
    got, want = emulated(built, model, x), model(x).detach()
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("way", ["tiling", "warpgroup", "positions", "pools", "instead"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.sampled
def test_every_way_to_multiply_writes_rows(monkeypatch: pytest.MonkeyPatch, way: str, transposed: bool) -> None:
    monkeypatch.setattr(cuda, "WORTH_WATCHING", 0.0)
    torch.manual_seed(0)
    conv = nn.ConvTranspose2d(16, 24, 4, stride=2, padding=1) if transposed else nn.Conv2d(16, 24, 3)
    model = Behind(conv, lambda y: F.max_pool2d(y.tanh(), 2) if way == "pools" else y.tanh()).eval()
    x = torch.randn(2, 16, 9, 21).to(memory_format=LAST)
    graph, groups = capture(model, (x,), {}).graph, list[Group]()
    cut(graph, lambda group: groups.append(group))  # type: ignore[func-returns-value]
    group = replace(next(g for g in groups if g.family == "contraction"), order="rows")
    hints = {symbol: x.shape[where.dim] for symbol, where in graph.symbols.items()}
    ways = cuda.options(group, hints, {graph.inputs[0]: "channels_last"}, tf32=True, capability=90)
    some = [option for option in ways if way in option]
    parameters = {tuple(p.shape): p.detach() for p in model.parameters()}
    for option in some[:2]:
        kernel = cuda.generate(group, "fused_test", option, tf32=True)
        assert (kernel.layouts[0], kernel.output.layout) == ("channels_last", "contiguous")
        got = emulate(kernel, x, *(parameters[tuple(n.shape)] for n in group.operands[1:]))  # type: ignore[arg-type]
        assert got.is_contiguous()
        torch.testing.assert_close(got, model(x).detach(), rtol=5e-3, atol=5e-3)
    assert some or (way, transposed) == ("positions", True)


def test_averages_in_three_dimensions_lie_in_rows() -> None:
    torch.manual_seed(0)
    model = Behind(nn.Conv3d(8, 6, 3), lambda y: F.avg_pool3d(y.tanh(), 2).relu()).eval()
    x = torch.randn(2, 8, 8, 6, 9).to(memory_format=torch.channels_last_3d)
    built = as_on_a_gpu(model, x)
    (kernel,) = built.program.kernels
    assert (kernel.layouts[0], kernel.output.layout) == ("channels_last", "contiguous")
    torch.testing.assert_close(emulated(built, model, x), model(x).detach(), check_stride=True)


@pytest.mark.parametrize("given", [LAST, torch.contiguous_format])
def test_operators_return_what_the_kernel_writes(given: torch.memory_format) -> None:
    """Whatever the call's own layout is; the shape functions agree."""
    x = torch.randn(2, 8, 9, 11)
    model = two()[:2]
    (kernel,) = tuned(model, x, "channels_last").kernels.values()
    operands = [x.to(memory_format=given), *(p.detach() for p in model.parameters())]
    got = operator(kernel)(*operands)
    assert got.is_contiguous(memory_format=LAST) and not got.is_contiguous()
    torch.testing.assert_close(got, model(x).detach())
    tests = torch.library.opcheck(operator(kernel).overload, operands)
    assert set(tests.values()) == {"SUCCESS"}


def test_window_sums_want_planes() -> None:
    case = Case((22, 20), 3, 24, pool="avg", window=(4, 4), step=(4, 4))
    boxed = find(case, boxed=True)
    assert isinstance(boxed, Found) and boxed.group.box is not None and not boxed.group.takes_channels_last


@pytest.mark.parametrize(
    ("channels", "dtype", "wanted"),
    [(24, BF16, "mma_bf16"), (6, torch.float16, "mma_fp16"), (7, BF16, "mma_tf32"), (24, torch.float32, "mma_tf32")],
)
def test_halves_are_multiplied_in_pairs_of_channels(channels: int, dtype: torch.dtype, wanted: str) -> None:
    """Where there are pairs; the case's value is checked with the others of its kind."""
    case = Case((5, 9), channels, 17, dtype=dtype, padding=(1, 1), channels_last=True)
    found = find(case)
    assert isinstance(found, Found)
    kernel = found.kernel(next(t for t in found.tilings() if t.chunk == channels))
    assert f"{wanted}(d, a, b);" in kernel.source
    x = case.example()
    want, _ = found.reference(x)
    got = emulate(kernel, *found.tensors(x)).double()
    assert ((got - want).abs() <= tolerance(case) * want.abs().amax()).all()


def kernels() -> dict[str, Kernel]:
    """Larger ones: of what is written, of a mean, of pooled values."""
    cases = {
        "plain": Case((62, 62), 64, 64, before=("relu", "add channel")),
        "mean": MEAN,
        "pool": Case((62, 62), 8, 64, pool="max", window=(4, 4), step=(4, 4), fold="sum", fold_dims="cp"),
    }
    made = {}
    for name, case in cases.items():
        found = find(replace(case, channels_last=True))
        assert isinstance(found, Found)
        made[name] = found.kernel(found.tilings()[0])
    return made


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_compiles_without_spills(arch: str) -> None:
    for name, kernel in kernels().items():
        taken = nvrtc.resources(nvrtc.compile(kernel.source, arch))
        assert taken.keys() == {launch.entry for launch in kernel.launches}
        assert all(entry.stack == 0 for entry in taken.values()), (name, taken)


def test_reads_as_it_did() -> None:
    """A golden text, as those of `test_contraction_kernels`."""
    found = find(replace(MEAN, channels_last=True))
    assert isinstance(found, Found)
    tiling = Tiling(2, 2, 1, 4, 1, 2, 2, 1, 1, 64, False, False)
    source = contraction.generate(found.group, tiling, "fused_test", "", tf32=True).source
    path = GOLDEN / "contraction_channels_last.cu"
    assert source == path.read_text(), f"write the text to {path} if it is meant to change"
