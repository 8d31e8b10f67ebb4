"""Windows of signals and images, and images put together from them: programs with CUDA kernels, which are emulated."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
import torch.nn.functional as F
from gpu_build import Function, Weighted, as_on_a_gpu, emulated
from torch import Tensor

from fusewright import pipeline


def _overlapping(x: Tensor, w: Tensor) -> Tensor:
    """Windows in steps, added up, and how many of them there are of each element."""
    columns = F.unfold(x, (4, 3), padding=(1, 0), stride=2)
    return F.fold(columns * w, x.shape[2:], (4, 3), padding=(1, 0), stride=2).relu()


# What a model computes, its weight's shape, its input's without the batch, and its kernels.
MODELS: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...], list[str]]] = {
    "frames": (lambda x, w: (x.unfold(-1, 12, 5) * w).tanh(), (12,), (61,), ["fused_mul_tanh"]),
    "frames of a function": (lambda x, w: x.exp().unfold(-1, 12, 5) * w, (12,), (61,), ["fused_exp_mul"]),
    "frames, normalised": (lambda x, w: F.layer_norm(x.unfold(-1, 32, 8), (32,), w), (32,), (96,), ["fused_layernorm"]),
    "patches": (
        lambda x, w: (x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(-1, 6, 48) * w).sin(),
        (48,),
        (3, 8, 13),
        ["fused_mul_sin"],
    ),
    "patches of all": (
        lambda x, w: (x.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(-1, 6, 48) * w).sin(),
        (48,),
        (3, 8, 12),
        ["fused_mul_sin"],
    ),
    "unfolded": (lambda x, w: F.unfold(x, 3, padding=1) + w, (27, 1), (3, 5, 8), ["fused_unfold_add"]),
    "unfolded, spelled out": (
        lambda x, w: F.pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1).permute(0, 1, 4, 5, 2, 3).flatten(1, 3)
        * w[:, None],
        (27, 1),
        (3, 5, 8),
        ["fused_pad_mul"],
    ),
    "folded": (
        lambda x, w: F.fold(x * w, (5, 7), 3, dilation=2, padding=2),
        (27, 1),
        (27, 35),
        ["fused_mul_fold"],
    ),
    "unfolded and folded": (
        lambda x, w: F.fold(F.unfold(x, 3, padding=1) * w, x.shape[2:], 3, padding=1),
        (27, 1),
        (3, 6, 8),
        ["fused_unfold_mul_fold"],
    ),
    "unfolded and folded, in steps": (_overlapping, (36, 1), (3, 8, 9), ["fused_unfold_mul_fold_relu"]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled
def test_one_kernel(name: str, dtype: torch.dtype) -> None:
    """At any batch, and of images whose channels lie last."""
    function, weight, shape, kernels = MODELS[name]
    model = Weighted(function, *weight).to(dtype).eval()
    built = as_on_a_gpu(model, torch.randn(4, *shape).to(dtype))
    assert [k.name for k in built.program.kernels] == kernels
    rtol, atol = (0.02, 0.05) if dtype.itemsize == 2 else (1e-5, 1e-5)
    for n in (1, 3):
        x = torch.randn(n, *shape).to(dtype)
        with torch.no_grad():
            want = model(x)
        torch.testing.assert_close(emulated(built, model, x), want, rtol=rtol, atol=atol)
        if x.ndim == 4:
            last = x.to(memory_format=torch.channels_last)
            torch.testing.assert_close(emulated(built, model, last), want, rtol=rtol, atol=atol)


@pytest.mark.parametrize("value", [nan, inf, -inf], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_special_values(name: str, value: float) -> None:
    """They reach what they reach in eager."""
    function, weight, shape, _ = MODELS[name]
    model = Weighted(function, *weight).eval()
    x = torch.randn(2, *shape)
    x.view(-1)[7] = x.view(-1)[-1] = value
    model.weight.data.view(-1)[3] = value
    with torch.no_grad():
        want = model(x)
    torch.testing.assert_close(emulated(as_on_a_gpu(model, x), model, x), want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str) -> None:
    """Through the operators' references, as eager's."""
    function, weight, shape, _ = MODELS[name]
    model = Weighted(function, *weight)
    x = torch.randn(3, *shape, requires_grad=True)
    derive, forward = as_on_a_gpu(model, x.detach()).program.functions()
    y, want = forward(model, x, *derive(model)), model(x)
    given = torch.randn_like(want)
    found, expected = (torch.autograd.grad(v, (x, model.weight), given) for v in (y, want))
    torch.testing.assert_close(found, expected)


ONE_CALL: dict[str, tuple[Function, tuple[int, ...], str]] = {
    "unfolded": (
        lambda x, w: F.unfold(x, (2, 3), (1, 2), (0, 1), 2),
        (3, 8, 9),
        "F.unfold(x, (2, 3), dilation=(1, 2), padding=(0, 1), stride=2)",
    ),
    "folded": (lambda x, w: F.fold(x, (8, 9), 2, padding=1), (12, 90), "F.fold(x, (8, 9), 2, padding=1)"),
    "windows": (lambda x, w: x.unfold(1, 4, 3), (20,), "x.unfold(1, 4, 3)"),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_CALL)
def test_one_call_stays_one_without_a_kernel(name: str) -> None:
    function, shape, text = ONE_CALL[name]
    model, x = Weighted(function, 1), torch.randn(2, *shape)
    program = pipeline.build(model, (x,), {}, kernels="never", measure=False).program
    assert text in program.source and program.source.count("  # (") == 1
    derive, forward = program.functions()
    assert torch.equal(forward(model, x, *derive(model)), model(x))


def test_as_many_taps_as_an_element_would_read_are_left_to_aten() -> None:
    model = Weighted(lambda x, w: F.fold(x.sin() * w, (16, 16), 9, padding=4), 1)
    built = as_on_a_gpu(model, torch.randn(2, 81, 256))
    assert "F.fold(" in built.program.source and [k.name for k in built.program.kernels] == ["fused_sin_mul"]
