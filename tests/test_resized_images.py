"""Images that are resized, and pooled beside that: elements between others, in the kernels around them."""

from __future__ import annotations

import pytest
import torch
from gpu_build import Function, Weighted, as_on_a_gpu, emulated
from torch import Tensor
from torch.nn import functional as F

from fusewright import pipeline

SHAPE = (2, 3, 9, 12)


def cubic(x: Tensor, **how: object) -> Tensor:
    return F.interpolate(x, mode="bicubic", **how)  # type: ignore[arg-type]


# What a model computes, and its kernel.
MODELS: dict[str, tuple[Function, str]] = {
    "by cubes, clamped": (lambda x, w: cubic(x, scale_factor=2).clamp(0, 1), "fused_interpolate_clamp"),
    "by cubes to less": (lambda x, w: cubic(x, scale_factor=(1 / 3, 0.5)) * w, "fused_interpolate_mul"),
    "by cubes to a size": (
        lambda x, w: cubic(torch.relu(x), size=(13, 7), align_corners=True) + w, "fused_relu_interpolate_add",
    ),
    "halves, pooled beside": (
        lambda x, w: F.interpolate(x[:, :, :8], scale_factor=0.5, mode="bilinear") - F.max_pool2d(x[:, :, :8], 2) * w,
        "fused_interpolate_max_mul_sub",
    ),
    "two pools": (lambda x, w: F.max_pool2d(x, (3, 2)) + F.avg_pool2d(x, (3, 2)) * w, "fused_max_avg_mul_add"),
    "joined pools": (
        lambda x, w: torch.cat((F.max_pool2d(x, 2), F.avg_pool2d(x, 2) * w), 1), "fused_max_avg_mul_cat",
    ),
    "thirds, pooled beside": (
        lambda x, w: F.max_pool2d(x, 3) * F.interpolate(x, size=(3, 4), mode="bilinear"), "fused_max_interpolate_mul",
    ),
    "pooled of a function": (
        lambda x, w: F.max_pool2d(y := torch.tanh(x * w), 2) - F.avg_pool2d(y, 2), "fused_mul_tanh_max_avg_sub",
    ),
    "not all of it": (lambda x, w: F.max_pool2d(x, 2, 3) + F.avg_pool2d(x, 2, 3), "fused_max_avg_add"),
    "by cubes along one": (lambda x, w: cubic(x, size=(9, 24)) * w, "fused_interpolate_mul"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_kernels(name: str, dtype: torch.dtype) -> None:
    function, kernel = MODELS[name]
    model, x = Weighted(function, 3, 1, 1).to(dtype).eval(), torch.randn(SHAPE, dtype=dtype)
    built = as_on_a_gpu(model, x)
    assert [k.name for k in built.program.kernels] == [kernel]
    found = emulated(built, model, x)
    with torch.no_grad():
        want = model.double()(x.double())
    close = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.double(), want, rtol=close, atol=close)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", MODELS)
def test_numbers_that_are_none(name: str, value: float) -> None:
    """A neighbour that weighs nothing is weighed all the same: 0 times such a number is NaN."""
    model, x = Weighted(MODELS[name][0], 3, 1, 1).eval(), torch.randn(SHAPE)
    x[0, 1, 4, 5] = x[1, 0, 0, 0] = x[1, 2, 8, 11] = value
    with torch.no_grad():
        want = model(x)
    torch.testing.assert_close(emulated(as_on_a_gpu(model, x), model, x), want, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_a_cpu_are_eagers(name: str) -> None:
    model, x = Weighted(MODELS[name][0], 3, 1, 1).eval(), torch.randn(SHAPE, requires_grad=True)
    for built in (as_on_a_gpu(model, x.detach()), pipeline.build(model, (x.detach(),), {}, measure=False)):
        derive, forward = built.program.functions()
        results = model(x), forward(model, x, *derive(model))
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x) for y in results))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_compiles(arch: str) -> None:
    core = pytest.importorskip("cuda.core", reason="no NVRTC")
    for function, _ in MODELS.values():
        (kernel,) = as_on_a_gpu(Weighted(function, 3, 1, 1).eval(), torch.randn(SHAPE)).program.kernels
        core.Program(kernel.source, "c++", core.ProgramOptions(arch=arch, std="c++17")).compile("cubin")


def test_a_pool_by_itself_reads_rows() -> None:
    """What no one else reads is a stream's, as is what overlaps."""
    for function in (
        lambda x, w: torch.cat((F.max_pool2d(x, 2), w.expand(2, 3, 4, 6)), 1),
        lambda x, w: F.max_pool2d(x, 3, 1) + F.avg_pool2d(x, 3, 1),
        lambda x, w: F.max_pool2d(x, 2, padding=1) + F.avg_pool2d(x, 2, padding=1),
    ):
        kernels = as_on_a_gpu(Weighted(function, 3, 1, 1).eval(), torch.randn(SHAPE)).program.kernels
        assert len(kernels) == 2, [k.name for k in kernels]


def test_neighbours_two_apart_are_loaded_with_those_between() -> None:
    model = Weighted(lambda x, w: F.interpolate(x, scale_factor=0.5, mode="bilinear") - F.max_pool2d(x, 2), 1)
    (kernel,) = as_on_a_gpu(model.eval(), torch.randn(2, 3, 8, 16)).program.kernels
    assert kernel.source.count("load<2 * VALUES>(d.x") == 2 and "d.x[" not in kernel.source
    (kernel,) = as_on_a_gpu(model.eval(), torch.randn(2, 3, 8, 12)).program.kernels
    assert "load<2 * VALUES>" not in kernel.source  # rows begin elsewhere than at a multiple
