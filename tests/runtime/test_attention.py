"""Attention as one call: the values, the gradients and the NaN of what it stands for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import fusewright
from fusewright.dispatch import Options
from fusewright.pipeline import build
from fusewright.runtime import attention as module
from fusewright.runtime.attention import attention, in_rows
from fusewright.trial import Trial, _built

GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def operands(device: str = "cpu", dtype: torch.dtype = torch.float32, length: int = 5) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = (2, 3, length, 16), (2, 3, length + 2, 16), (2, 3, length + 2, 16), (length, length + 2)
    q, k, v, mask = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
    return q, k, v, mask


def spelled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float = 0.25) -> Tensor:
    scores = q @ k.mT * scale
    return torch.softmax(scores if mask is None else scores + mask, -1) @ v


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_values_and_gradients(masked: bool, turned: bool) -> None:
    q, k, v, mask = (t.double().requires_grad_() for t in operands())
    given = [q, k, v, mask] if masked else [q, k, v]

    def call(*leaves: Tensor) -> Tensor:
        return attention(*leaves[:3], mask=leaves[3] if masked else None, scale=0.25, turned=turned)

    want = spelled(q, k, v, mask if masked else None)
    assert_close(call(*given), want.transpose(1, 2) if turned else want)
    assert call(*given).is_contiguous()
    assert torch.autograd.gradcheck(call, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, given, fast_mode=True)


class MinGPT(nn.Module):
    """Causal attention as it is written in many places."""

    def __init__(self, width: int = 64, heads: int = 4, length: int = 16) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (t.view(n, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(width, 2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        scores = scores.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf"))
        y = F.dropout(F.softmax(scores, -1), 0.1, self.training) @ v
        return self.out(y.transpose(1, 2).contiguous().view(n, length, width))


class Widened(nn.Module):
    """As transformers has it: a mask that is added, a softmax in float32."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        weights = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.25 + mask, dim=-1, dtype=torch.float32)
        return torch.matmul(weights.to(q.dtype), v).transpose(1, 2).contiguous()


def test_what_libraries_write_is_one_call() -> None:
    device = torch.device("cuda:0")
    source = build(MinGPT().eval(), (torch.randn(2, 16, 64),), {}, target=device).program.source
    derive, _, forward = source.partition("def forward")
    assert "where" in derive and "softmax" not in source and forward.count("attention(") == 1
    assert "turned=True" in forward and "contiguous" not in forward
    given = tuple(t.bfloat16() for t in operands())
    source = build(Widened(), given, {}, target=device).program.source
    assert source.count("attention(") == 1 and "softmax" not in source


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_mask_is_out_of_the_kernels_reach(dtype: torch.dtype) -> None:
    """They multiply by log2 e, and what is hidden by the least number would be hidden by -inf then."""
    q, k, v, mask = operands(dtype=dtype)
    least = torch.finfo(dtype).min
    mask[0], mask[1], mask[2, :3], mask[3, 0] = least, float("-inf"), least, float("nan")
    built = build(Added(), (q, k, v, mask), {}, target=torch.device("cuda:0"))
    _, forward = built.program.functions()
    given: list[Tensor] = []

    def listening(*tensors: Tensor, mask: Tensor, **how: Any) -> Tensor:
        given.append(mask)
        return attention(*tensors, mask=mask, **how)

    forward.__globals__["attention"] = listening
    torch.testing.assert_close(forward(None, q, k, v, mask), Added()(q, k, v, mask), equal_nan=True)
    (seen,) = given
    assert torch.equal((seen * math.log2(math.e)).isinf(), mask.isinf()) and torch.equal(seen.isnan(), mask.isnan())
    assert torch.equal(seen[4], mask[4])


class Added(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT * 0.25 + mask, -1) @ v


def test_a_solution_file_has_what_it_calls() -> None:
    """Which our own functions are not."""
    options = Options(sides=True, measure=False, target=torch.device("cuda:0"))
    given = Trial(MinGPT().eval(), (torch.randn(2, 16, 64),), {}, options, lambda _: None)
    again = _built(given, like=_built(given))
    assert "attention(" not in again.program.source and "softmax" in again.program.source


def test_weights_that_are_returned_are_computed_once() -> None:
    class Both(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            weights = torch.softmax(q @ k.mT, -1)
            return weights @ v, weights

    source = build(Both(), operands()[:3], {}, target=torch.device("cuda:0")).program.source
    assert "attention(" not in source


class Of(nn.Module):
    def __init__(self, f: Callable[..., Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, *given: Tensor) -> Tensor:
        return self.f(*given)


def hidden(value: float, dtype: torch.dtype) -> Callable[..., Tensor]:
    """A row is hidden as a whole, by a number that half precision does not have."""
    mask = torch.full((5, 7), value, dtype=dtype)
    return lambda q, k, v: torch.softmax(q @ k.mT + mask, -1).to(v.dtype) @ v


def residual(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = q @ k.mT
    for _ in range(50):
        s = s + torch.sin(s)
    return torch.softmax(s, -1) @ v


def samples(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w = torch.ones(1, 3, 7, 8)
    return torch.softmax(w @ w.mT, -1) @ v.permute(1, 2, 0, 3).reshape(1, 3, 7, -1)


def by_positions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.softmax(q @ k.mT, -1) @ v).transpose(1, 2)


def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Sums of masks that are true are no truth."""
    return torch.softmax(q @ k.mT + (k > 0)[..., 0].unsqueeze(-2) + (q > 0)[..., :1], -1) @ v


def windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Masks of windows, and one of all, which are three for each sample."""
    n = q.shape[0]
    q, k, v = (t.reshape(3 * n, 1, *t.shape[2:]) for t in (q, k, v))
    own = torch.arange(105.0).reshape(3, 1, 5, 7).sin()
    s = (q @ k.mT * 0.25 + own[:1, :, :1]).view(n, 3, 1, 5, 7) + own
    s = s.masked_fill(own > 0.9, -math.inf).view(3 * n, 1, 5, 7)
    return torch.softmax(s, -1) @ v


MODELS: dict[str, tuple[Callable[..., Tensor], torch.dtype]] = {
    "a number that is added": (lambda q, k, v: torch.softmax(q @ k.mT + 1.5, -1) @ v, torch.float32),
    "no features": (lambda q, k, v: torch.softmax(q[..., :0] @ k[..., :0].mT, -1) @ v, torch.float32),
    "no values": (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v[..., :0], torch.float32),
    "a scale of infinity": (lambda q, k, v: torch.softmax(q @ k.mT / 1e-310, -1) @ v, torch.float32),
    "features of all samples": (samples, torch.float32),
    "masks of bool": (both, torch.float32),
    "residuals": (residual, torch.float32),
    "windows": (windows, torch.float32),
    "a number that is a tensor": (lambda q, k, v: torch.softmax(q @ k.mT + q.new_tensor(0.5), -1) @ v, torch.float32),
    "a mask of columns": (lambda q, k, v: torch.softmax(q @ k.mT + k[0, 0, :, 0], -1) @ v, torch.float32),
    "a mask beyond float16": (hidden(-1e9, torch.float32), torch.float16),
    "a mask of bfloat16": (hidden(-1e9, torch.bfloat16), torch.float16),
    "a mask beyond bfloat16": (hidden(torch.finfo(torch.float32).min, torch.float32), torch.bfloat16),
    "heads apart": (lambda *qkv: by_positions(*qkv).unflatten(3, (2, 8)), torch.float32),
    "the same shape": (lambda *qkv: by_positions(*qkv).view(2, 5, 3, 16), torch.float32),
    "one sample": (lambda *qkv: by_positions(*(t[:1] for t in qkv)).squeeze(0), torch.float32),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_a_gpu_would_compute_is_what_eager_has(name: str) -> None:
    f, dtype = MODELS[name]
    given = tuple(t.to(dtype) for t in operands()[:3])
    program = build(Of(f), given, {}, mode="always", measure=False, target=torch.device("cuda:0")).program
    derive, forward = replace(program, source=program.source.replace("cuda:0", "cpu")).functions()
    found = forward(Of(f), *given, *derive(Of(f)))
    torch.testing.assert_close(found, f(*given), check_stride=True, equal_nan=True)


def test_masks_of_windows_are_masks_of_attention() -> None:
    source = build(Of(windows), operands()[:3], {}, mode="always", target=torch.device("cuda:0")).program.source
    assert source.count("attention(") == 1 and "softmax" not in source and "pad" in source


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 5, 7), (3, 5, 1), (5, 8), (1, 3, 1, 8), (2, 1, 1, 1)])
def test_rows_of_masks_are_aligned(shape: tuple[int, ...]) -> None:
    mask, whole = torch.randn(shape), (2, 3, 5, max(shape[-1], 7))
    for given in (mask, mask.mT.contiguous().mT):
        found = in_rows(given, whole)
        assert found is not None and torch.equal(found, given.expand(whole))
        assert found.stride(-1) == 1 and not any(n % 8 for n in found.stride()[:-1])
    assert in_rows(None, whole) is None


def test_aligned_rows_are_not_copied() -> None:
    mask = F.pad(torch.randn(2, 3, 5, 7), (0, 1))[..., :7]
    assert in_rows(mask, (2, 3, 5, 7)).data_ptr() == mask.data_ptr()  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("length", [5, 49, 62, 512])
class TestOnGpu:
    pytestmark = GPU

    def test_values(self, dtype: torch.dtype, masked: bool, length: int) -> None:
        q, k, v, mask = operands("cuda", dtype, length)
        mask = mask if masked else None
        want = spelled(q.double(), k.double(), v.double(), None if mask is None else mask.double())
        own = (spelled(q, k, v, mask).double() - want).abs().max()
        with torch.no_grad():
            for turned in (True, False):
                found = attention(q, k, v, mask=mask, scale=0.25, turned=turned)
                found = found.transpose(1, 2) if turned else found
                assert (found.double() - want).abs().max() <= 3 * own + 1e-6

    def test_without_the_kernel_of_short_rows(
        self, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, masked: bool, length: int
    ) -> None:
        q, k, v, mask = operands("cuda", dtype, length)
        called: list[int] = []
        kernel = module._KERNEL
        assert kernel is not None

        def counting(*given: Any, **how: Any) -> Any:
            called.append(1)
            return kernel(*given, **how)

        with torch.no_grad():
            monkeypatch.setattr(module, "_KERNEL", counting)
            found = attention(q, k, v, mask=mask if masked else None, scale=0.25)
            assert bool(called) == (length < 512)
            monkeypatch.setattr(module, "_KERNEL", None)
            again = attention(q, k, v, mask=mask if masked else None, scale=0.25)
            torch.testing.assert_close(found, again, rtol=0.02, atol=0.02)

    def test_nan(self, dtype: torch.dtype, masked: bool, length: int) -> None:
        for index in range(4 if masked else 3):
            given = list(operands("cuda", dtype, length))
            given[index].view(-1)[3] = float("nan")
            q, k, v, mask = given
            with torch.no_grad():
                found = attention(q, k, v, mask=mask if masked else None, scale=0.25)
                assert torch.equal(found.isnan(), spelled(q, k, v, mask if masked else None).isnan()), index

    def test_rows_that_are_hidden(self, dtype: torch.dtype, masked: bool, length: int) -> None:
        q, k, v, mask = operands("cuda", dtype, length)
        mask[1], mask[2, 0] = torch.finfo(dtype).min, torch.finfo(dtype).min
        f = fusewright.optimize(Added(), (q, k, v, mask), rewrite="always", verify=False, measure=False)
        assert "attention(" in fusewright.explain(f).program
        with torch.no_grad():
            want = spelled(q.double(), k.double(), v.double(), mask.double())
            own = (spelled(q, k, v, mask).double() - want).abs().max()
            assert (f(q, k, v, mask).double() - want).abs().max() <= 3 * own + 1e-6

    def test_models(self, dtype: torch.dtype, masked: bool, length: int) -> None:
        torch.manual_seed(0)
        model = MinGPT(64, 4, length).to("cuda", dtype).eval().requires_grad_(False)
        x = torch.randn(3, length, 64, dtype=dtype, device="cuda")
        f = fusewright.optimize(model, (x,), rewrite="always")
        plan = fusewright.explain(f)
        assert plan.status == "rewritten" and "attention(" in plan.program, plan
