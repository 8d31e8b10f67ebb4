"""One element of each row, as losses by hand pick it: kernels read it where it lies, beside all else."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan

import pytest
import torch
import torch.nn.functional as F
from dropin import fast, kernels_of
from emulation.emulate import EmulationError
from gpu_build import as_on_a_gpu, emulated
from torch import Tensor

import fusewright
from fusewright import pipeline
from fusewright.runtime.device import DeviceFacts
from tests.capture.harness import Fn

Function = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _everything_is_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches cost nothing: what is small is planned as what is large."""
    facts = DeviceFacts("any", conv=1.0, matmul=1.0, wide=1.0, memory=1.0, reduce=1.0, window=1.0, launch=0.0)
    monkeypatch.setattr(pipeline, "device_facts", lambda device: facts)


def margin(x: Tensor, t: Tensor) -> Tensor:
    return (torch.clamp(x - x.gather(1, t) + 1, min=0).sum(1) - 1).mean()


def focal(x: Tensor, t: Tensor) -> Tensor:
    own = F.log_softmax(x, 1).gather(1, t).squeeze(1)
    return -((1 - torch.exp(own)) ** 2 * own).mean()


def focal_of_each(x: Tensor, t: Tensor) -> Tensor:
    own = F.log_softmax(x, 1).gather(1, t)
    return -((1 - torch.exp(own)) ** 2 * own)


def smoothed(x: Tensor, t: Tensor) -> Tensor:
    shares = F.log_softmax(x, 1)
    return -(0.9 * shares.gather(1, t).squeeze(1) + 0.1 * shares.mean(1)).mean()


def above(x: Tensor, t: Tensor) -> Tensor:
    return (x - torch.gather(x, 1, t)).exp().sum(1).log()


def towards(x: Tensor, t: Tensor) -> Tensor:
    return (2 * x.gather(1, t) - 1).square().mean()


# What a model computes of logits of a shape, and its kernels.
ROWS, SHORT, IMAGE, FEW = (37, 70), (36, 5), (3, 21, 6, 10), (2, 8, 7, 9)
KEPT = "fused_neg_max_sub_exp_sum_log_sub_neg_exp_sub_pow_mul"
SHIFTED = "fused_add_logsumexp_eq_where_sub_add_neg_exp_sub_pow_mul_mea"
MODELS: dict[str, tuple[Function, tuple[int, ...], list[str]]] = {
    "margin": (margin, ROWS, ["fused_neg_sub_add_clamp_min_sum_sub_mean"]),
    "margin, short": (margin, SHORT, ["fused_neg_sub_add_clamp_min_sum_sub_mean"]),
    "margin, of an image": (margin, FEW, ["fused_neg_sub_add_clamp_min_sum_sub_mean"]),
    "focal": (focal, ROWS, [KEPT, "fused_mean_neg"]),
    "focal, short": (focal, SHORT, [SHIFTED, "fused_abs_lt_where"]),
    "focal, of an image": (focal, IMAGE, [KEPT, "fused_mean_neg"]),
    "focal, of few classes": (focal, FEW, [KEPT, "fused_mean_neg"]),
    "focal, each": (focal_of_each, FEW, [KEPT + "_neg"]),
    "smoothed": (smoothed, IMAGE, ["fused_neg_max_sub_exp_sum_log_sub_neg_mul_sub_mean_mul_add", "fused_mean_neg"]),
    "above": (above, ROWS, ["fused_neg_sub_exp_sum_log"]),
    "towards": (towards, ROWS, ["fused_neg_mul_sub_square_mean"]),
}


def given(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(len(shape))
    return 3 * torch.randn(shape).to(dtype), torch.randint(shape[1], (shape[0], 1, *shape[2:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled
def test_elements_are_read_where_they_lie(name: str, dtype: torch.dtype) -> None:
    function, shape, kernels = MODELS[name]
    x, t = given(shape, dtype)
    model = Fn(function)
    built = as_on_a_gpu(model, x, t)
    if dtype != torch.bfloat16:  # what eager rounds may be a kernel of its own
        assert [k.name for k in built.program.kernels] == kernels
        ahead = kernels[-1] == "fused_abs_lt_where"  # rows that are not kept are shifted by what is picked
        assert ("gather" in built.program.source) == ahead
    got, want = emulated(built, model, x, t), function(x.double(), t)
    assert got.dtype == dtype and got.shape == want.shape
    tolerance = 4 * torch.finfo(dtype).eps if dtype != torch.bfloat16 else 0.05
    assert (got.double() - want).abs().max() <= tolerance * want.abs().max().clamp(min=1)


def of_tokens(x: Tensor, t: Tensor) -> Tensor:
    return torch.gather(F.log_softmax(x.float() * 0.5, -1), 2, t.unsqueeze(2)).squeeze(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_are_rows(dtype: torch.dtype) -> None:
    """Logits are read once, by one kernel, as they were given."""
    x, t = torch.randn(3, 5, 96).to(dtype), torch.randint(96, (3, 5))
    model = Fn(of_tokens)
    built = as_on_a_gpu(model, x, t)
    (kernel,) = built.program.kernels
    assert "log" in kernel.name and kernel.dtypes == (dtype, torch.int64)
    torch.testing.assert_close(emulated(built, model, x, t), of_tokens(x, t))


def test_tokens_that_others_see_stay_as_they_are() -> None:
    def with_entropy(x: Tensor, t: Tensor) -> Tensor:
        shares = F.log_softmax(x, -1)
        return shares.gather(-1, t.unsqueeze(-1)).squeeze(-1) - (shares.exp() * shares).sum(-1)

    x, t = torch.randn(3, 5, 96), torch.randint(96, (3, 5))
    model = Fn(with_entropy)
    torch.testing.assert_close(emulated(as_on_a_gpu(model, x, t), model, x, t), with_entropy(x, t))


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("name", ["margin", "focal, of few classes", "focal, each", "above"])
def test_special_values(name: str, value: float) -> None:
    """In the place of the class, in another, and in all."""
    function, shape, _ = MODELS[name]
    (x, t), model = given(shape), Fn(function)
    x[0].scatter_(0, t[0], value)
    x[1].scatter_(0, (t[1] + 1) % shape[1], value)
    x[2 % shape[0]] = value if len(shape) == 2 else x[2 % shape[0]]
    torch.testing.assert_close(emulated(as_on_a_gpu(model, x, t), model, x, t), function(x, t), equal_nan=True)


@pytest.mark.parametrize("wrong", [-1, 100, -100, -(2**63)])
@pytest.mark.parametrize("name", ["margin", "focal", "focal, of few classes"])
def test_what_is_no_index_is_a_trap(name: str, wrong: int) -> None:
    """None is ignored, as a loss of classes ignores -100."""
    function, shape, _ = MODELS[name]
    (x, t), model = given(shape), Fn(function)
    built = as_on_a_gpu(model, x, t)
    assert built.program.looks_up
    t[-1, 0] = wrong
    with pytest.raises(RuntimeError, match="out of bounds"):
        function(x, t)
    with pytest.raises(EmulationError, match="__trap"):
        emulated(built, model, x, t)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_eagers(name: str) -> None:
    function, shape, _ = MODELS[name]
    x, t = given(shape, torch.float64)
    model = Fn(function)
    derive, forward = as_on_a_gpu(model, x, t).program.functions()
    x.requires_grad_()
    results = (function(x, t), forward(model, x, t, *derive(model)))
    seed = torch.linspace(0.5, 1.5, results[0].numel()).double().reshape(results[0].shape)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, seed)[0] for y in results))


@pytest.mark.parametrize("name", ["margin", "towards"])
def test_they_serve_once_they_are_verified(name: str) -> None:
    """On a CPU, with and without gradients."""
    function, shape, _ = MODELS[name]
    (x, t), model = given(shape), Fn(function)
    ours = fast(model, x, t, rewrite="cost", kernels="always")
    assert kernels_of(ours)
    for logits in (x, x.clone().requires_grad_()):
        for index in (t, t[:3] if name == "towards" else t):  # of fewer rows, which is another's call
            torch.testing.assert_close(ours(logits, index), function(logits, index))


def test_kernels_of_a_cpu_raise_what_eager_does() -> None:
    model, x, t = Fn(lambda x, t: F.log_softmax(x, -1).gather(-1, t) * 2), torch.randn(6, 70), torch.randint(70, (6, 1))
    fast = fusewright.optimize(model, (x, t), rewrite="always", kernels="always", measure=False)
    assert fusewright.explain(fast).kernels
    t[3] = 70
    for each in (model, fast):
        with pytest.raises(RuntimeError, match="out of bounds"):
            each(x, t)
