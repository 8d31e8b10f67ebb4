"""The kernel families on a GPU: the cases of the emulated tests and random ones, each twice into poisoned memory."""

from __future__ import annotations

import copy
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from contraction_cases import draw, draw_boxed, find, some, tolerance
from direct_cases import assert_right, random_found, tiles
from direct_cases import some as some_direct
from emulation.emulate import ON_DEVICE, emulate
from test_pools import tiles as by_pools
from test_warpgroup_kernels import tiles as by_features
from test_warpgroup_positions import tiles as by_positions
from test_warpgroup_windows import assert_right as assert_right_windows
from test_warpgroup_windows import drawn as drawn_windows
from test_warpgroup_windows import tiles as by_windows
from torch import nn
from warpgroup_cases import assert_right as assert_right_by_warpgroups
from warpgroup_cases import drawn

import fusewright
from fusewright.codegen.cuda import contraction as cuda
from fusewright.codegen.cuda import warpgroup
from fusewright.errors import CaptureError
from fusewright.runtime.device import capability_of

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent


@pytest.mark.timeout(1200)  # 1,200 tests, as many at a time as there are processors
def test_the_emulated_cases() -> None:
    """Streams, range reductions, sample programs and contractions: the tests beside this one, on the device."""
    files = [str(f) for f in HERE.glob("test_*.py") if f != Path(__file__)]
    chosen = "not nvrtc and not compiles and not golden and not sanit and not emulator_would_find"
    chosen += " and not index_of_no_row"  # a trap ends the process's use of the device
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(os.cpu_count()), "-k", chosen, *files]
    ran = subprocess.run(command, env={**os.environ, ON_DEVICE: "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed and int(passed[1]) >= 300, ran.stdout[-300:]


@pytest.mark.parametrize("seed", range(24))
def test_random_contractions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight groups, each with two tilings; reductions over positions in one launch as well as in two."""
    monkeypatch.setenv(ON_DEVICE, "1")
    rng, ran = random.Random(seed), 0
    while ran < 8:
        boxed = rng.random() < 0.2
        case = draw_boxed(rng) if boxed else draw(rng)
        try:
            found = find(case, boxed)
        except CaptureError:  # no such model
            continue
        if isinstance(found, str):
            continue
        x = case.example(seed)
        want, size = found.reference(x)
        for t in some(found.tilings(), 2, rng):
            joined = cuda.blocks_per_sample(found.group, t, case.batch, found.cells) is not None
            for blocks in (None, *((1, 3) if joined else ())):
                kernel = cuda.generate(
                    found.group, t, "fused_test", "def reference(*operands): ...", tf32=case.tf32, blocks=blocks
                )
                got = emulate(kernel, *found.tensors(x)).double()
                error = ((got - want).abs() / size.clamp(min=1e-30)).max().item()
                assert error <= tolerance(case, boxed), (case, t, blocks, error)
        ran += 1


@pytest.mark.skipif(torch.cuda.is_available() and capability_of(torch.device("cuda")) != 90, reason="no Hopper")
@pytest.mark.parametrize(
    ("tiles_of", "first"),
    [
        pytest.param(by_features, 0, id="features"),
        pytest.param(by_positions, 1000, id="positions"),
        pytest.param(by_pools, 2000, id="pools"),
    ],
)
@pytest.mark.parametrize("seed", range(16))
def test_random_contractions_of_warpgroups(
    seed: int, tiles_of: Any, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight groups, each with three tiles, and in one launch where that is possible."""
    monkeypatch.setenv(ON_DEVICE, "1")
    for i in range(8):
        f, rng, found = drawn(tiles_of, first + 1000 * (seed + 1) + i)
        for t in (found[0], *rng.sample(found, min(2, len(found)))):
            joined = warpgroup.blocks_per_sample(f.group, t, 128, f.cells) is not None
            for blocks in (None, *((1, 3) if joined else ())):
                assert_right_by_warpgroups(f, t, blocks=blocks)


@pytest.mark.skipif(torch.cuda.is_available() and capability_of(torch.device("cuda")) != 90, reason="no Hopper")
@pytest.mark.parametrize("seed", range(16))
def test_random_window_sums_of_warpgroups(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight groups, each with three tiles, and in one launch where that is possible."""
    monkeypatch.setenv(ON_DEVICE, "1")
    for i in range(8):
        f, rng = drawn_windows(5000 + 1000 * (seed + 1) + i)
        found = by_windows(f)
        for t in (found[0], *rng.sample(found, min(2, len(found)))):
            joined = warpgroup.blocks_per_sample(f.group, t, 128, f.cells) is not None
            for blocks in (None, *((1, 3) if joined else ())):
                assert_right_windows(f, t, blocks=blocks)


@pytest.mark.parametrize("seed", range(16))
def test_random_direct_contractions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight groups, each with three tiles."""
    monkeypatch.setenv(ON_DEVICE, "1")
    for i in range(8):
        f, rng = random_found(1000 * (seed + 1) + i)
        for t in some_direct(tiles(f), 3, rng):
            assert_right(f, t)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(4, 24, 3, padding=1), nn.Linear(24, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.linear(torch.relu(self.conv(x)).mean((2, 3))), 1)


def test_always_means_generated() -> None:
    torch.manual_seed(0)
    model, x = Head().cuda(), torch.randn(8, 4, 33, 37, device="cuda")
    fast = fusewright.optimize(model, x, kernels="always", measure=False)
    plan = fusewright.explain(fast)
    assert [choice.path for choice in plan.kernels] == ["generated"] and plan.verdict is not None and plan.verdict.ok
    torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-4)


def test_more_than_2_to_the_31_elements() -> None:
    """A batch whose tensor is longer than 32-bit indices reach, through a contraction and a stream."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 16, 3), nn.ReLU(), nn.MaxPool2d(2)).cuda()
    x = torch.randn(2050, 2, 724, 724, device="cuda")
    assert x.numel() > 2**31
    fast = fusewright.optimize(model, x[:4], kernels="always", measure=False, verify=False)
    assert any(c.path == "generated" for c in fusewright.explain(fast).kernels)
    with torch.no_grad():
        got = fast(x)
        for i in (0, 1024, 2049):
            torch.testing.assert_close(got[i : i + 1], model(x[i : i + 1]), rtol=2e-3, atol=2e-3)


SUMS = {
    "rows": ((4096, 8192), 1, torch.float32),
    "rows, no vector": ((512, 8191), 1, torch.float32),
    "rows of bfloat16": ((512, 8192), 1, torch.bfloat16),
    "very long rows": ((300, 200_000), 1, torch.float32),
    "columns": ((16, 1000, 64, 64), 1, torch.float32),
    "columns of float16": ((16, 100, 64, 64), 1, torch.float16),
    "the first dimension": ((3000, 4096), 0, torch.float64),
}


@pytest.mark.parametrize("name", SUMS)
def test_prefix_sums(name: str) -> None:
    """In one launch, every way to share rows out timed, and no less exact than eager."""
    shape, dim, dtype = SUMS[name]

    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(torch.cumsum(x, dim))

    x = torch.rand(shape, device="cuda", dtype=dtype) - 0.4
    fast = fusewright.optimize(Sums(), x, kernels="always")
    assert [c.path for c in fusewright.explain(fast).kernels] == ["generated"]
    with torch.no_grad():
        got, own, want = fast(x), Sums()(x), Sums()(x.double())
    error, eager = ((found.double() - want).abs().max() for found in (got, own))
    assert error <= max(eager, 2 * torch.finfo(dtype).eps * want.abs().max())


class Residual(nn.Module):
    """A sum that is normalised, and added to."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + torch.tanh(x.roll(1, 1))
        return h + self.norm(h).roll(2, 1)


class Reduced(nn.Module):
    """Reductions of the same memory."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.relu(x)
        return y.mean(self.dims) * 2, y.amax(self.dims), torch.logsumexp(x, self.dims)


class States(nn.Module):
    """Pointwise values of the same memory, one of them on the way to the other."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        i, f, g, o, c = x.unbind(0)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(c), c


SEVERAL = {
    "residual": (lambda: Residual(nn.LayerNorm(768)), (4096, 768)),
    "residual of long rows": (lambda: Residual(nn.RMSNorm(16384)), (600, 16384)),
    "residual of groups": (lambda: Residual(nn.GroupNorm(8, 64)), (64, 64, 28, 28)),
    "residual, no vector": (lambda: Residual(nn.LayerNorm(333)), (4097, 333)),
    "rows": (lambda: Reduced(2, 3), (64, 256, 56, 56)),
    "columns": (lambda: Reduced(1), (64, 256, 56, 56)),
    "columns, no vector": (lambda: Reduced(1), (64, 256, 333)),
    "all": (lambda: Reduced(0, 1), (4096, 8191)),
    "states": (States, (5, 4096, 1024)),
    "states, no vector": (States, (5, 4095, 333)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SEVERAL)
def test_several_results(name: str, dtype: torch.dtype) -> None:
    """Of one kernel, each no less exact than eager's."""
    make, shape = SEVERAL[name]
    torch.manual_seed(0)
    model, x = make().cuda().to(dtype).eval(), torch.randn(shape, device="cuda", dtype=dtype)
    fast = fusewright.optimize(model, x, kernels="always")
    kernels = [k for e in fast._fusewright.entries.values() if e.runner for k in e.runner.program.kernels]
    assert any(kernel.also for kernel in kernels)
    with torch.no_grad():
        got, own, want = fast(x), model(x), copy.deepcopy(model).double()(x.double())
    for one, other, truth in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, own, want)), strict=True):
        assert one.dtype == other.dtype and one.stride() == other.stride()
        error, eager = ((found.double() - truth).abs().max() for found in (one, other))
        assert error <= max(1.5 * eager, 8 * torch.finfo(dtype).eps * truth.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(8192, 16384), (1024, 50257), (16, 96, 256, 256)], ids=str)
def test_losses_of_classes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """One read of logits, no less exact than eager, and its gradients."""
    classes = torch.randint(shape[1], (shape[0], *shape[2:]), device="cuda")
    classes.view(-1)[::7] = -100

    class Loss(nn.Module):
        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(x, t)

    x = torch.randn(shape, device="cuda", dtype=dtype) * 3 + 20
    fast = fusewright.optimize(Loss(), (x, classes), kernels="always")
    assert any("logsumexp" in c.name and c.path == "generated" for c in fusewright.explain(fast).kernels)
    with torch.no_grad():
        got, own, want = fast(x, classes), Loss()(x, classes), Loss()(x.double(), classes)
    assert (got - want).abs() <= max((own - want).abs(), 8 * torch.finfo(dtype).eps * want)
    small = x[:64].clone().requires_grad_()
    ours, theirs = (torch.autograd.grad(f(small, classes[:64]), small)[0] for f in (fast, Loss()))
    torch.testing.assert_close(ours, theirs)
