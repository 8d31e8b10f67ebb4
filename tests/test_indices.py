"""Where the greatest and the least are, as models ask for it: programs with CUDA kernels, which are emulated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from dropin import fast, kernels_of
from gpu_build import as_on_a_gpu, built_for_a_gpu, emulated
from torch import Tensor, nn

from fusewright import pipeline

Function = Callable[[nn.Module, Tensor], Tensor]


class Model(nn.Module):
    """A function of x, and of a table of codes."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.codes = nn.Parameter(torch.randn(20, 24, generator=torch.Generator().manual_seed(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


# What models do, and the words of the kernel that finds the index.
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
    "as classes of a mean": (lambda m, x: x.neg().argmax(-1).float().mean(1), (3, 50, 24), "neg_argmax"),
    "of a softmax of channels": (lambda m, x: F.softmax(x, 1).argmax(1), (2, 24, 400), "softmax_argmax"),
    "of a softmax of rows": (lambda m, x: F.softmax(x, -1).argmax(-1), (6, 40, 100), "softmax_argmax"),
    "of a normalised row": (lambda m, x: F.layer_norm(x, x.shape[-1:]).argmax(-1), (6, 40, 100), "layernorm_argmax"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled
def test_kernels_find_what_eager_finds(name: str, dtype: torch.dtype) -> None:
    function, shape, words = MODELS[name]
    torch.manual_seed(3)
    model, x = Model(function).to(dtype).eval(), (4 * torch.randn(shape)).round().to(dtype)
    built = as_on_a_gpu(model, x)
    assert f"fused_{words}(" in built.program.source and "torch.arg" not in built.program.source
    got, eager = emulated(built, model, x), model(x)
    assert got.dtype == eager.dtype and got.stride() == eager.stride()
    if any(word in name for word in ("norm", "soft", "nearest")):  # of values that differ by roundings
        assert (got == eager).float().mean() > (0.9 if dtype == torch.bfloat16 else 0.999)
    else:
        torch.testing.assert_close(got, eager, rtol=1e-6, atol=0)


Results = tuple[Tensor, ...]
BOTH: dict[str, tuple[Callable[[Tensor], Results], tuple[int, ...]]] = {
    "one call": (lambda x: tuple(x.max(1)), (3, 90, 40)),
    "one call, kept, behind functions": (lambda x: tuple(torch.min(x.abs() * 2, -1, keepdim=True)), (3, 500, 90)),
    "one call, in parts": (lambda x: tuple(x.max(0)), (1500, 20)),
    "two calls": (lambda x: (x.amax(1), x.argmax(1)), (3, 900, 40)),
    "both ends": (lambda x: (x.argmax(0), x.argmin(0), x.mean(0)), (700, 12)),
    "the share of what is greatest": (lambda x: (x.max(1)[0] * 2 + 1, x.max(1)[1]), (3, 900, 40)),
}


class Several(nn.Module):
    def __init__(self, function: Callable[[Tensor], Results]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Results:
        return self.function(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.sampled
def test_values_and_indices_are_read_once(name: str, dtype: torch.dtype) -> None:
    function, shape = BOTH[name]
    torch.manual_seed(3)
    model, x = Several(function), (4 * torch.randn(shape)).round().to(dtype)
    built = as_on_a_gpu(model, x)
    (kernel,) = built.program.kernels
    assert len(kernel.results) == len(function(x)) and "arg" in kernel.name
    for one, other in zip(emulated(built, model, x), function(x), strict=True):
        tolerance = 0.0 if dtype == torch.bfloat16 or not other.is_floating_point() else 1e-5
        assert one.dtype == other.dtype and one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("name", ["along rows", "along columns, kept", "of all", "nearest codes", "behind functions"])
def test_unmeasured_kernels_find_them(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ATen does not at the pace of memory."""
    function, shape, words = MODELS[name]
    model, x = Model(function), torch.randn(shape)
    if device == "cuda":
        built = built_for_a_gpu(monkeypatch, model, x, kernels="auto")
    else:
        built = pipeline.build(model, (x,), {}, kernels="auto", measure=False)
        torch.testing.assert_close(built.program.functions()[1](model, x), model(x))
    assert f"fused_{words}(" in built.program.source and "torch.arg" not in built.program.source


def test_without_kernels_both_are_one_call() -> None:
    x = torch.randn(3, 4, 5).round()
    built = pipeline.build(Several(BOTH["one call"][0]), (x,), {}, kernels="never", measure=False)
    assert "torch.max(x, 1)" in built.program.source and "arg" not in built.program.source
    z = x.clone().requires_grad_()
    values, indices = built.program.functions()[1](None, z)
    values.sum().backward()
    assert torch.equal(indices, x.max(1)[1]) and torch.equal(z.grad, F.one_hot(indices, 4).mT.float())


PICKED: dict[str, Callable[[Tensor], Tensor]] = {
    "of the same": lambda x: x.gather(1, x.argmax(1, keepdim=True)),
    "of a least": lambda x: x.gather(-1, x.min(-1)[1].unsqueeze(-1)),
    "of a softmax": lambda x: F.softmax(x, 1).gather(1, x.argmax(1, keepdim=True)),
    "of its logarithm": lambda x: F.log_softmax(x, 1).gather(1, x.argmax(1).unsqueeze(1)),
}


@pytest.mark.parametrize("name", PICKED)
def test_what_is_picked_is_an_extreme(name: str) -> None:
    """With its gradient; in one kernel on a GPU."""
    torch.manual_seed(5)
    x = torch.randn(40, 100)
    model = Model(lambda m, x: PICKED[name](x))
    built = as_on_a_gpu(model, x)
    assert "gather" not in built.program.source and "arg" not in built.program.source
    torch.testing.assert_close(emulated(built, model, x), model(x))
    plain = pipeline.build(model, (x,), {}, kernels="never", measure=False)
    derive, forward = plain.program.functions()
    grads = []
    for call in (model, lambda z: forward(model, z, *derive(model))):
        z = x.clone().requires_grad_()
        (call(z) * torch.arange(40.0)[:, None]).sum().backward()
        grads.append(z.grad)
    torch.testing.assert_close(*grads)


def test_what_is_picked_elsewhere_is_not() -> None:
    x = torch.randn(40, 100)
    for function in (
        lambda x: x.gather(1, (2 * x).argmax(1, keepdim=True)),
        lambda x: x.gather(0, x.argmax(1, keepdim=True) % 40),
        lambda x: F.softmax(x, 0).gather(1, x.argmax(1, keepdim=True)),
        lambda x: torch.tanh(x).gather(1, x.argmax(1, keepdim=True)),
    ):
        model = Several(function)
        built = pipeline.build(model, (x,), {}, kernels="never", measure=False)
        assert "gather" in built.program.source
        torch.testing.assert_close(built.program.functions()[1](None, x), model(x))


@pytest.mark.parametrize("name", ["nearest codes", "behind functions", "as classes of a mean"])
def test_they_serve_once_they_are_verified(name: str) -> None:
    """On a CPU, with and without gradients, which an index has none of."""
    function, shape, words = MODELS[name]
    torch.manual_seed(7)
    model, x = Model(function), torch.randn(shape)
    ours = fast(model, x, rewrite="cost", kernels="always")
    assert f"fused_{words}" in [k.name for k in kernels_of(ours)]
    for given in (x, x.clone().requires_grad_()):
        got, want = ours(given), model(given)
        assert not got.requires_grad and got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
