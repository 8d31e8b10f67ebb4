"""Parts of a turned view that kernels read: copied by kernels, and not by launchers."""

from __future__ import annotations

import pytest
import torch
from gpu_build import Function, Weighted, as_on_a_gpu, emulated
from torch import Tensor
from torch.nn import functional as F

from fusewright.ir import ops
from fusewright.ir.build import permute, reshape
from fusewright.ir.node import Node, make
from fusewright.schedule.turned_parts import in_rows


def _heads(x: Tensor, w: Tensor) -> Tensor:
    q, k, v = x.unflatten(-1, (3, 2, 20)).permute(2, 0, 3, 4, 1)
    return torch.softmax(F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * w, -1) @ v


# What a model computes, its weight's and its input's shape, and how many copies its kernels make.
MODELS: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...], int]] = {
    "heads": (_heads, (2, 1, 1), (3, 67, 120), 2),
    "one part": (
        lambda x, w: F.normalize(x.unflatten(-1, (2, 3, 8)).permute(2, 0, 3, 4, 1)[1], dim=-1) * w, (67,), (5, 67, 48),
        1,
    ),
    "two cuts": (
        lambda x, w: F.normalize(x.unflatten(-1, (3, 32)).permute(0, 2, 3, 1)[:, 1:, 2:26], dim=-1) * w, (131,),
        (5, 131, 96), 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_kernels(name: str, dtype: torch.dtype) -> None:
    function, weight, shape, copies = MODELS[name]
    model, x = Weighted(function, *weight).to(dtype).eval(), torch.randn(shape, dtype=dtype)
    built = as_on_a_gpu(model, x)
    names = [k.name for k in built.program.kernels if k.name.startswith("fused_rearrange")]
    assert len(names) == copies and ".contiguous()" not in built.program.source
    found = emulated(built, model, x)
    with torch.no_grad():
        want = model.double()(x.double())
    close = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found.double(), want, rtol=close, atol=close)


X = make(ops.Input((4, 6, 5, 8), torch.float32, torch.device("cpu"), "x", 0))
TURNED = permute(X, (1, 0, 3, 2))


def cut(x: Node, dim: int, start: int, stop: int, step: int = 1) -> Node:
    return make(ops.Slice(dim, start, stop, step), x)


def test_what_is_cut_first_and_turned_then() -> None:
    part = reshape(cut(TURNED, 0, 2, 3), (4, 8, 5))
    found = in_rows(part)
    want = permute(cut(X, 1, 2, 3), (1, 0, 3, 2), copy=True)
    assert found is reshape(want, (4, 8, 5))
    both = in_rows(cut(cut(TURNED, 0, 2, 4), 2, 1, 7))
    assert both is permute(cut(cut(X, 1, 2, 4), 3, 1, 7), (1, 0, 3, 2), copy=True)
    assert in_rows(TURNED) is permute(X, (1, 0, 3, 2), copy=True)


@pytest.mark.parametrize(
    "node",
    [
        X,
        cut(X, 1, 2, 3),
        cut(TURNED, 0, 0, 6, 2),
        permute(X, (1, 0, 2, 3)),
        permute(X, (1, 0, 3, 2), copy=True),
        reshape(TURNED, (6, 4, 40)),
    ],
    ids=["rows", "cut rows", "in steps", "whole rows", "a copy", "copied by its shape"],
)
def test_what_stays(node: Node) -> None:
    assert in_rows(node) is node


def test_gradients_are_eagers() -> None:
    function, weight, shape, _ = MODELS["heads"]
    model, x = Weighted(function, *weight).eval(), torch.randn(shape, requires_grad=True)
    derive, forward = as_on_a_gpu(model, x.detach()).program.functions()
    results = model(x), forward(model, x, *derive(model))
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), (x, model.weight)) for y in results))
