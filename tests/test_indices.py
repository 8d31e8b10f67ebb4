"""Where the greatest and the least are, as models ask for it: programs with CUDA kernels, which are emulated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gpu_build import as_on_a_gpu, emulated
from torch import Tensor, nn

Function = Callable[[nn.Module, Tensor], Tensor]


class Model(nn.Module):
    """A function of x, and of a table of codes."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.codes = nn.Parameter(torch.randn(20, 24, generator=torch.Generator().manual_seed(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


# What models do, the words of the kernel that has the index, and whether that is their only one.
MODELS: dict[str, tuple[Function, tuple[int, ...], str]] = {
    "along rows": (lambda m, x: torch.argmax(x, -1), (4, 60, 90), "argmax"),
    "along columns, kept": (lambda m, x: x.argmin(1, keepdim=True), (4, 90, 60), "argmin"),
    "of all": (lambda m, x: torch.argmax(x), (4, 90, 61), "argmax"),
    "of all, kept": (lambda m, x: torch.argmin(x, keepdim=True), (4, 90, 61), "argmin"),
    "of a batch": (lambda m, x: x.argmax(0), (90, 64), "argmax"),
    "behind functions": (lambda m, x: torch.argmax(torch.relu(x) * 2, 1), (4, 90, 61), "relu_mul_argmax"),
    "what is left of a maximum": (lambda m, x: x.abs().max(1)[1], (4, 90, 61), "abs_argmax"),
    "what is left of a minimum": (lambda m, x: torch.min(-x, -1, keepdim=True).indices, (4, 90, 61), "neg_argmin"),
    "flattened": (lambda m, x: (x * 2).flatten(1).argmax(1), (4, 30, 61), "mul_argmax"),
    "of a permuted image": (lambda m, x: x.permute(0, 2, 3, 1).abs().argmax(-1), (2, 24, 7, 9), "abs_argmax"),
    "of a slice": (lambda m, x: x[:, 8:72].neg().argmax(-1), (4, 96, 40), "neg_argmax"),
    "of pooled channels": (lambda m, x: F.max_pool2d(x, 2).argmax(1), (2, 24, 16, 18), "max_argmax"),
    "nearest codes": (
        lambda m, x: (x.unsqueeze(2) - m.codes).square().sum(-1).argmin(-1), (3, 50, 24), "sub_square_sum_argmin",
    ),
    "as classes of a mean": (lambda m, x: x.neg().argmax(-1).float().mean(1), (3, 50, 24), "neg_argmax_mean"),
    "of a softmax": (lambda m, x: F.softmax(x, -1).argmax(-1), (6, 40, 100), "softmax_argmax"),
    "of a softmax of channels": (lambda m, x: F.softmax(x, 1).argmax(1), (2, 24, 400), "softmax_argmax"),
    "of a normalised row": (lambda m, x: F.layer_norm(x, x.shape[-1:]).argmax(-1), (6, 40, 100), "layernorm_argmax"),
    "of normalised channels": (lambda m, x: F.group_norm(x, 4).argmax(1), (3, 24, 10, 12), "groupnorm_argmax"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_kernels_find_what_eager_finds(name: str, dtype: torch.dtype) -> None:
    function, shape, words = MODELS[name]
    torch.manual_seed(3)
    model, x = Model(function).to(dtype).eval(), (4 * torch.randn(shape)).round().to(dtype)
    built = as_on_a_gpu(model, x)
    assert f"fused_{words}(" in built.program.source and "torch.arg" not in built.program.source
    got, eager = emulated(built, model, x), model(x)
    assert got.dtype == eager.dtype and got.stride() == eager.stride()
    if "norm" in words or "soft" in words or "nearest" in name:  # values that differ by roundings
        assert (got == eager).float().mean() > (0.9 if dtype == torch.bfloat16 else 0.999)
    else:
        torch.testing.assert_close(got, eager, rtol=1e-6, atol=0)
