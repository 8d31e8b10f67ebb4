"""Each ATen spelling becomes the operation it means, and gives the same bits when it runs again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fusewright.capture import capture
from fusewright.ir.ops import (
    NEVER,
    Cast,
    Cat,
    Conv,
    Detach,
    Dropout,
    Embedding,
    Expand,
    Flip,
    Fold,
    Full,
    Interpolate,
    Matmul,
    Nll,
    Norm,
    Opaque,
    Pad,
    Permute,
    Pointwise,
    Pool,
    RangeSum,
    Reduce,
    Reshape,
    Roll,
    Scan,
    Slice,
    Softmax,
    Unfold,
    Upsample,
    Windows,
)
from tests.capture.harness import Fn, check, kinds, opaque, program_of, run

IMAGE = (4, 6, 9, 11)


def r(*shape: int, grad: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).requires_grad_(grad)


def conv(n: int, **options: Any) -> nn.Module:
    return getattr(nn, f"Conv{n}d")(6, 4, 3, **options)


def transposed(n: int, **options: Any) -> nn.Module:
    return getattr(nn, f"ConvTranspose{n}d")(6, 4, 3, **options)


CONTRACTIONS: list[tuple[nn.Module, tuple[int, ...], list[type]]] = [
    (conv(1), (4, 6, 11), [Conv]),
    (conv(2, stride=2, padding=(1, 0), dilation=2, bias=False), IMAGE, [Conv]),
    (conv(2, groups=2), IMAGE, [Conv]),
    (conv(3, padding=1), (4, 6, 5, 6, 7), [Conv]),
    (conv(2, padding="same"), IMAGE, [Conv]),
    (conv(2, padding="valid"), IMAGE, [Conv]),
    (nn.Conv2d(6, 4, 4, padding="same"), IMAGE, [Conv]),
    (nn.Conv1d(6, 4, 2, padding="same", dilation=3), (4, 6, 11), [Conv]),
    (conv(2, padding=1, padding_mode="circular"), IMAGE, [Pad, Conv]),
    (conv(2), (6, 9, 11), [Reshape, Conv, Reshape]),
    (transposed(1), (4, 6, 11), [Conv]),
    (transposed(2, stride=2, padding=1, output_padding=1), IMAGE, [Conv]),
    (transposed(2, stride=3, groups=2, dilation=2), IMAGE, [Conv]),
    (transposed(3, stride=2), (4, 6, 3, 4, 5), [Conv]),
    (transposed(2), (6, 9, 11), [Reshape, Conv, Reshape]),
    (nn.Linear(6, 5), (4, 6), [Matmul]),
    (nn.Linear(6, 5, bias=False), (4, 3, 6), [Matmul]),
    (nn.Linear(6, 5), (6,), [Reshape, Permute, Matmul, Reshape]),
]


@pytest.mark.parametrize(("model", "shape", "expected"), CONTRACTIONS, ids=lambda v: str(v)[:60])
def test_contractions(model: nn.Module, shape: tuple[int, ...], expected: list[type]) -> None:
    unbatched = expected[0] is Reshape
    assert kinds(check(model, r(*shape), batch=None if unbatched else 3)) == expected


POOLS: list[tuple[nn.Module, tuple[int, ...], list[type]]] = [
    (nn.MaxPool1d(3), (4, 6, 11), [Pool]),
    (nn.MaxPool2d(3, 2, 1), IMAGE, [Pool]),
    (nn.MaxPool2d(3, 2, 1, dilation=2, ceil_mode=True), IMAGE, [Pool]),
    (nn.MaxPool3d(2), (4, 6, 5, 6, 7), [Pool]),
    (nn.MaxPool2d(2), (6, 9, 11), [Pool]),
    (nn.AvgPool1d(3, 2), (4, 6, 11), [Pool]),
    (nn.AvgPool2d(3, padding=1, ceil_mode=True), IMAGE, [Pool]),
    (nn.AvgPool2d(3, padding=1, count_include_pad=False), IMAGE, [Pool]),
    (nn.AvgPool2d(3, divisor_override=5), IMAGE, [Pool]),
    (nn.AvgPool3d(2), (4, 6, 5, 6, 7), [Pool]),
    (nn.AdaptiveAvgPool1d(1), (4, 6, 11), [Reduce]),
    (nn.AdaptiveAvgPool1d(5), (4, 6, 11), [RangeSum]),
    (nn.AdaptiveAvgPool1d(4), (4, 6, 12), [Pool]),
    (nn.AdaptiveAvgPool2d(1), IMAGE, [Reduce]),
    (nn.AdaptiveAvgPool2d((3, None)), IMAGE, [Pool]),
    (nn.AdaptiveAvgPool2d(3), (4, 6, 9, 9), [RangeSum]),
    (nn.AdaptiveAvgPool2d((4, 5)), IMAGE, [RangeSum]),
    (nn.AdaptiveAvgPool2d((4, 5)), (6, 9, 11), [Reshape, RangeSum, Reshape]),
    (nn.AdaptiveAvgPool3d(1), (4, 6, 5, 6, 7), [Reduce]),
    (nn.AdaptiveAvgPool3d(2), (4, 6, 4, 4, 4), [Pool]),
    (nn.AdaptiveMaxPool2d(3), (4, 6, 9, 9), [Pool]),
    (nn.AdaptiveMaxPool2d(4), (4, 6, 9, 9), [Opaque]),
]


@pytest.mark.parametrize(("model", "shape", "expected"), POOLS, ids=lambda v: str(v)[:60])
def test_pools(model: nn.Module, shape: tuple[int, ...], expected: list[type]) -> None:
    captured = check(model, r(*shape), batch=3 if shape[0] == 4 else None)
    assert [k for k in kinds(captured) if k.__name__ != "Item"] == expected


def test_used_indices_keep_a_pool_opaque() -> None:
    captured = check(Fn(lambda x: F.max_pool2d(x, 2, return_indices=True)), r(*IMAGE))
    assert opaque(captured) == ["max_pool2d_with_indices"]


FUNCTIONS: list[tuple[str, Callable[..., Any], list[type]]] = [
    ("mean", lambda x: x.mean(), [Reduce]),
    ("mean dims", lambda x: x.mean((-1, 2), keepdim=True), [Reduce]),
    ("sum", lambda x: x.sum(), [Reduce]),
    ("sum dims", lambda x: x.sum((3, 1)), [Reduce]),
    ("sum dtype", lambda x: x.sum(1, dtype=torch.float64), [Reduce]),
    ("amax", lambda x: x.amax((1, 2)), [Reduce]),
    ("amin", lambda x: x.amin(), [Reduce]),
    ("max over a dimension", lambda x: x.max(1)[0], [Reduce]),
    ("min over a dimension", lambda x: torch.min(x, dim=-1, keepdim=True).values, [Reduce]),
    ("max over a dimension, and where", lambda x: x.max(1)[0] + x.max(1)[1], [Reduce, Reduce, Pointwise]),
    ("max over a dimension, and where, by one call", lambda x: sum(x.max(1)), [Reduce, Pointwise, Reduce, Pointwise]),
    ("where the max is", lambda x: x.max(1)[1], [Reduce]),
    ("where the first true one is", lambda x: (x > 0).max(1)[1], [Pointwise, Opaque]),
    ("where the min is, kept", lambda x: torch.min(x, -1, keepdim=True).indices, [Reduce]),
    ("argmax", lambda x: x.argmax(-2), [Reduce]),
    ("argmax of all", lambda x: torch.argmax(x), [Reduce]),
    ("argmin of all, kept", lambda x: torch.argmin(x, keepdim=True), [Reduce]),
    ("argmin of numbers made whole", lambda x: x.long().argmin(0, keepdim=True), [Cast, Reduce]),
    (
        "one hot, of the greatest",
        lambda x: F.one_hot(x.argmax(1), 6) * x.permute(0, 2, 3, 1),
        [Reduce, Reshape, Full, Scan, Pointwise, Pointwise, Cast, Permute, Pointwise],
    ),
    ("one hot, of any", lambda x: F.one_hot((x > 0).long(), 2), [Pointwise, Cast, Opaque]),
    ("max over all", lambda x: x.max(), [Reduce]),
    ("logsumexp", lambda x: x.logsumexp(1, keepdim=True), [Reduce]),
    ("prod", lambda x: x.prod(1), [Reduce]),
    ("prod over all", lambda x: x.prod(), [Opaque]),
    ("var", lambda x: x.var((2, 3)), [Reduce]),
    ("var biased", lambda x: x.var(1, unbiased=False, keepdim=True), [Reduce]),
    ("var correction", lambda x: torch.var(x, (1, 2), correction=2), [Reduce]),
    ("cumsum", lambda x: x.cumsum(-1), [Scan]),
    ("cumsum dtype", lambda x: torch.cumsum(x, 1, dtype=torch.float64), [Scan]),
    ("cumsum of truths", lambda x: (x > 0).cumsum(1) * x, [Pointwise, Scan, Pointwise]),
    ("cumprod", lambda x: torch.cumprod(x, 1), [Scan]),
    ("cumprod of whole numbers", lambda x: torch.cumprod((x > 0).long(), 1) * x, [Pointwise, Cast, Scan, Pointwise]),
    ("cummax", lambda x: torch.cummax(x, -1)[0], [Scan]),
    ("cummax, and where", lambda x: torch.cummax(x, 1)[0] + torch.cummax(x, 1)[1], [Scan, Opaque, Pointwise]),
    ("cummin", lambda x: torch.cummin(x, 2).values, [Scan]),
    ("logcumsumexp", lambda x: torch.logcumsumexp(x, 1), [Scan]),
    ("pad and crop", lambda x: F.pad(x, (1, -1)), [Slice, Pad]),
    ("crop on both sides, and pad", lambda x: F.pad(x, (-1, -2, 0, 3), value=1.5), [Slice, Pad]),
    ("crop", lambda x: F.pad(x, (0, -1)), [Opaque]),
    ("softmax", lambda x: x.softmax(-1), [Softmax]),
    ("log_softmax", lambda x: F.log_softmax(x, 1), [Softmax]),
    ("softmax dtype", lambda x: x.softmax(1, dtype=torch.float64), [Cast, Softmax]),
    ("view", lambda x: x.view(x.shape[0], -1), [Reshape]),
    ("reshape merging the batch", lambda x: x.reshape(-1, 9, 11), [Reshape]),
    ("flatten", lambda x: x.flatten(1), [Reshape]),
    ("unflatten", lambda x: x.unflatten(1, (2, 3)), [Reshape]),
    ("squeeze", lambda x: x.unsqueeze(2).squeeze(2), [Reshape]),
    ("squeezed, and back", lambda x: x[:, :1].squeeze(1).unsqueeze(1) * 2, [Slice, Pointwise]),
    (
        "merged, and back, in another order",
        lambda x: x.transpose(1, 2).reshape(x.shape[0], -1).reshape(x.shape[0], 9, 6, 11),
        [Permute, Reshape, Reshape],
    ),
    ("permute", lambda x: x.permute(0, -1, 1, 2), [Permute]),
    ("transpose", lambda x: x.transpose(1, -1), [Permute]),
    ("mT", lambda x: x.mT, [Permute]),
    ("movedim", lambda x: x.movedim((1, 2), (-1, 1)), [Permute]),
    ("expand", lambda x: x[:, :1].expand(-1, 5, -1, -1), [Slice, Expand]),
    ("expand_as", lambda x: x.mean(1, keepdim=True).expand_as(x), [Reduce, Expand]),
    ("slice", lambda x: x[:, 1:-1, ::2], [Slice, Slice]),
    ("slice of the batch", lambda x: x[1:] - x[:-1], [Slice, Slice, Pointwise]),
    ("select", lambda x: x[:, -1], [Slice, Reshape]),
    ("narrow", lambda x: x.narrow(2, 3, 4), [Slice]),
    ("split", lambda x: [p * 2 for p in x.split(4, 1)], [Slice, Pointwise, Slice, Pointwise]),
    ("split sizes", lambda x: x.split([1, 5], 1)[1], [Slice]),
    ("chunk", lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1], [Slice, Slice, Pointwise]),
    ("unbind", lambda x: x.unbind(1)[2], [Slice, Reshape]),
    ("cat with nothing", lambda x: torch.cat([torch.tensor([]), x, x * 2], -2), [Pointwise, Cat]),
    ("cat of one", lambda x: torch.cat([torch.tensor([]), x], -2) * 2, [Pointwise]),
    (
        "cat of another dtype",
        lambda x: torch.cat([torch.tensor([], dtype=torch.float64), x], -2) * 2,
        [Opaque, Pointwise],
    ),
    ("cat", lambda x: torch.cat([x, x * 2], -3), [Pointwise, Cat]),
    ("stack", lambda x: torch.stack([x, x * 2], 1), [Reshape, Pointwise, Reshape, Cat]),
    ("roll", lambda x: x.roll((2, -1), (1, -1)), [Roll]),
    ("roll, twice along one dimension", lambda x: x.roll((2, 3), (1, 1)), [Roll]),
    ("roll of all elements", lambda x: x.roll(2), [Opaque]),
    ("roll along the batch", lambda x: x.roll(1, 0), [Opaque]),
    ("flip", lambda x: x.flip(-1, 1), [Flip]),
    ("flip along nothing", lambda x: x.flip(()), [Opaque]),
    ("flip along the batch", lambda x: x.flip(0), [Opaque]),
    ("upsampled", lambda x: F.interpolate(x, scale_factor=2), [Upsample]),
    ("upsampled to a size", lambda x: F.interpolate(x, size=(3 * x.shape[2], x.shape[3])), [Upsample]),
    ("upsampled rows", lambda x: F.interpolate(x.flatten(2), scale_factor=3), [Reshape, Upsample]),
    ("upsampled by what float32 does not find", lambda x: F.interpolate(x, scale_factor=41), [Opaque]),
    ("upsampled by other factors", lambda x: F.interpolate(x, scale_factor=(2.0, 1.5)), [Opaque]),
    ("resampled", lambda x: F.interpolate(x, (7, 20)), [Upsample]),
    ("resampled rows", lambda x: F.interpolate(x.flatten(2), 50), [Reshape, Upsample]),
    ("downsampled", lambda x: F.interpolate(x, scale_factor=0.5), [Opaque]),
    ("interpolated", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), [Interpolate]),
    ("interpolated to a size", lambda x: F.interpolate(x, (5, 9), mode="bilinear", align_corners=True), [Interpolate]),
    ("interpolated rows", lambda x: F.interpolate(x.flatten(2), 7, mode="linear"), [Reshape, Interpolate]),
    ("interpolated volumes", lambda x: F.interpolate(x[:, None], (3, 5, 7), mode="trilinear"), [Reshape, Interpolate]),
    ("interpolated by other factors", lambda x: F.interpolate(x, scale_factor=1.3, mode="bilinear"), [Opaque]),
    ("interpolated by cubes", lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"), [Interpolate]),
    (
        "interpolated by smooth cubes",
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic", antialias=True),
        [Opaque],
    ),
    ("windows along a dimension", lambda x: x.unfold(2, 4, 3), [Windows]),
    ("windows along the last dimension", lambda x: x.unfold(-1, 5, 2) * 2, [Windows, Pointwise]),
    ("windows with gaps", lambda x: x.unfold(1, 2, 3), [Windows]),
    ("windows side by side", lambda x: x.unfold(1, 3, 3), [Windows]),
    ("windows side by side, and a rest", lambda x: x.unfold(3, 4, 4), [Windows]),
    ("windows along the batch", lambda x: x.unfold(0, 2, 1), [Opaque]),
    ("windows of nothing", lambda x: x.unfold(1, 0, 1), [Opaque]),
    ("unfolded", lambda x: F.unfold(x, 3, padding=1), [Unfold]),
    ("unfolded, in steps", lambda x: F.unfold(x, (2, 3), (2, 1), (1, 2), (3, 2)), [Unfold]),
    ("unfolded, one image", lambda x: F.unfold(x[0], 2), [Slice, Reshape, Reshape, Unfold, Reshape]),
    ("folded", lambda x: F.fold(x.flatten(2), (10, 13), (2, 3)), [Reshape, Fold]),
    ("folded, in steps", lambda x: F.fold(x.flatten(2), (18, 33), (2, 3), (2, 1), (1, 0), (2, 3)), [Reshape, Fold]),
    ("folded, one image", lambda x: F.fold(x[1].flatten(1), (10, 13), (2, 3)), [Slice] + [Reshape] * 4 + [Fold]),
    (
        "unfolded and folded",
        lambda x: F.fold(F.unfold(x, 3, 1, 1) * 2, x.shape[2:], 3, 1, 1),
        [Unfold, Pointwise, Fold],
    ),
    ("pad", lambda x: F.pad(x, (1, 2, 0, 3), value=1.5), [Pad]),
    ("pad reflect", lambda x: F.pad(x, (1, 0, 2, 3), mode="reflect"), [Pad]),
    ("pad replicate", lambda x: F.pad(x, (1, 0, 2, 3), mode="replicate"), [Pad]),
    ("pad by nothing", lambda x: F.pad(x, (0, 0, 0, 0)) + 1, [Pointwise]),
    ("pad by nothing returned", lambda x: F.pad(x, (0, 0, 0, 0)), [Pad]),
    ("negative pad", lambda x: F.pad(x, (-1, 2)), [Slice, Pad]),
    ("cast", lambda x: x.double(), [Cast]),
    ("cast to the same", lambda x: x.float() * 2, [Pointwise]),
    ("type_as", lambda x: x.to(torch.float64).type_as(x), [Cast, Cast]),
    ("contiguous", lambda x: x.mT.contiguous(), [Permute]),
    ("contiguous, and the view of it", lambda x: x.mT.contiguous() * x.mT, [Permute, Permute, Pointwise]),
    ("contiguous slice", lambda x: x[:, :, ::2].contiguous().view(x.shape[0], -1), [Slice, Permute, Reshape]),
    ("contiguous vector", lambda x: x[0, 0, 0, ::2].contiguous(), [Slice, Reshape] * 3 + [Slice, Permute]),
    ("contiguous already", lambda x: (x * 2).contiguous(), [Pointwise]),
    ("channels last", lambda x: x.contiguous(memory_format=torch.channels_last), [Opaque]),
    ("clone", lambda x: x.clone() * 2, [Pointwise]),
    ("clone in rows", lambda x: x.mT.clone(memory_format=torch.contiguous_format) * 2, [Permute, Pointwise]),
    ("clone in rows, returned", lambda x: x.mT.clone(memory_format=torch.contiguous_format), [Permute, Opaque]),
    ("clone, returned", lambda x: x.clone(), [Opaque]),
    ("clone, a view of it returned", lambda x: x.clone().view(-1), [Opaque, Reshape]),
    ("detach", lambda x: x.detach() + x, [Detach, Pointwise]),
    ("scalars", lambda x: (3 - x * 2 + 1.5) / 4, [Pointwise] * 4),
    ("alpha", lambda x: torch.add(x, x, alpha=2), [Opaque]),
    ("rounding", lambda x: torch.div(x, 2, rounding_mode="floor"), [Pointwise]),
    ("reciprocal", lambda x: 2 / x, [Pointwise, Pointwise]),
    ("batch size as a number", lambda x: x.sum(0) / x.shape[0], [Reduce, Pointwise]),
    ("matmul", lambda x: x @ x.mT, [Permute, Matmul]),
    ("bmm", lambda x: torch.bmm(x[:, 0], x[:, 1].mT), [Slice, Reshape, Slice, Reshape, Permute, Matmul]),
    ("mm", lambda x: x[:, 0, 0] @ torch.ones(11, 3), [Slice, Reshape, Slice, Reshape, Matmul]),
    ("zeros", lambda x: x + torch.zeros(x.shape[0], 1, 1, 1), [Pointwise]),
    ("masked_fill", lambda x: x.masked_fill(x > 0, -1.0), [Pointwise, Pointwise]),
    ("where", lambda x: torch.where(x > 0, x, 0.5), [Pointwise, Pointwise]),
    ("layer_norm", lambda x: F.layer_norm(x, (9, 11)), [Norm]),
    ("rms_norm", lambda x: F.rms_norm(x, (11,)), [Norm]),
    ("group_norm", lambda x: F.group_norm(x, 3), [Norm]),
    ("instance_norm", lambda x: F.instance_norm(x), [Norm]),
    ("batch_norm without statistics", lambda x: F.batch_norm(x, None, None, training=True), [Norm]),
    ("dropout off", lambda x: F.dropout(x, 0.5, False) * 2, [Pointwise]),
    ("dropout of nothing", lambda x: F.dropout(x, 0.0, True) * 2, [Pointwise]),
    ("dropout", lambda x: F.dropout(x, 0.5, True), [Dropout]),
    ("feature dropout", lambda x: F.dropout2d(x, 0.5, True), [Opaque]),
]


@pytest.mark.parametrize(("name", "fn", "expected"), FUNCTIONS, ids=[f[0] for f in FUNCTIONS])
def test_functions(name: str, fn: Callable[..., Any], expected: list[type]) -> None:
    found = [k for k in kinds(check(Fn(fn), r(*IMAGE), batch=7)) if k.__name__ != "Item"]
    assert sorted(k.__name__ for k in found) == sorted(k.__name__ for k in expected if k is not Full)


POINTWISE = {
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "clamp": lambda x: x.clamp(-0.5, 1),
    "clamp_min": lambda x: x.clamp(min=0.25),
    "clamp_max": lambda x: x.clamp(max=0.25),
    "hardtanh": lambda x: F.hardtanh(x, -0.5, 2.0),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: F.elu(x, 0.7),
    "celu": lambda x: F.celu(x, 0.7),
    "softplus": lambda x: F.softplus(x, 2, 10),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "threshold": lambda x: F.threshold(x, 0.1, -3.0),
    "pow": lambda x: x**3,
    "square": torch.square,
    "abs": torch.abs,
    "neg": lambda x: -x,
    "exp": torch.exp,
    "maximum": lambda x: torch.maximum(x, x.mean(1, keepdim=True)),
    "minimum": lambda x: torch.min(x, x * 2),
}


@pytest.mark.parametrize("fn", POINTWISE)
def test_pointwise(fn: str) -> None:
    captured = check(Fn(POINTWISE[fn]), r(*IMAGE), batch=2)
    assert any(isinstance(n.op, Pointwise) and n.op.fn == fn for n in captured.graph.nodes())


def test_batch_norm_in_eval_mode_is_pure() -> None:
    captured = check(nn.BatchNorm2d(6).eval(), r(*IMAGE), batch=2)
    assert kinds(captured) == [Norm] and not captured.graph.effects


def test_batch_norm_in_training_mode_updates_its_statistics_once() -> None:
    captured = check(nn.BatchNorm2d(6), r(*IMAGE), batch=2)
    assert opaque(captured) == ["add_"] and kinds(captured) == [Opaque, Norm]


def test_instance_norm_with_statistics_is_an_effect() -> None:
    captured = check(nn.InstanceNorm2d(6, affine=True, track_running_stats=True), r(*IMAGE), batch=2)
    assert [type(e.op) for e in captured.graph.effects] == [Norm]


def test_a_number_comes_second() -> None:
    captured = check(Fn(lambda x: 2 * x + 1), r(3, 5))
    assert all(n.args[1].op.__class__.__name__ == "Number" for n in captured.graph.nodes() if n.args)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Embedding()),
        ({"padding_idx": 2}, Embedding(padding_idx=2)),
        ({"padding_idx": -1}, Embedding(padding_idx=8)),
        ({"scale_grad_by_freq": True, "padding_idx": 0}, Embedding(0, True)),
    ],
)
def test_embedding(options: dict[str, Any], expected: Embedding, kind: torch.dtype) -> None:
    """What matters to gradients alone is kept, and matters there: `check` compares them as well."""
    tokens = torch.tensor([[0, 2, 2, 8], [8, 3, 2, 0], [1, 1, 1, 1], [2, 2, 5, 7]]).to(kind)
    captured = check(nn.Embedding(9, 5, **options), tokens, batch=3)
    assert [n.op for n in captured.graph.nodes() if n.inputs] == [expected]


PICKS: list[tuple[str, Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = [
    ("of rows", lambda x, i: x.gather(1, i), (4, 6), (4, 1)),
    ("of rows, counted from the end", lambda x, i: torch.gather(x, -1, i).squeeze(-1), (4, 6), (4, 1)),
    ("of channels", lambda x, i: x.gather(1, i) - x, (4, 6, 3, 5), (4, 1, 3, 5)),
    ("of channels of volumes", lambda x, i: x.gather(1, i), (4, 6, 3, 2, 5), (4, 1, 3, 2, 5)),
    ("of tokens", lambda x, i: x.gather(-1, i).squeeze(-1), (4, 3, 6), (4, 3, 1)),
    ("of half precision", lambda x, i: x.bfloat16().gather(1, i), (4, 6), (4, 1)),
]


@pytest.mark.parametrize(("fn", "shape", "index"), [p[1:] for p in PICKS], ids=[p[0] for p in PICKS])
def test_picks(fn: Callable[..., Any], shape: tuple[int, ...], index: tuple[int, ...]) -> None:
    """One element of each row is what a loss of classes picks, none of which it ignores."""
    captured = check(Fn(fn), r(*shape), torch.randint(6, index), batch=3)
    (nll,) = (n.op for n in captured.graph.nodes() if isinstance(n.op, Nll))
    assert nll == Nll(NEVER) and not opaque(captured)
    with pytest.raises(RuntimeError, match="out of bounds"):
        program_of(captured)(nn.Module(), (r(*shape), torch.full(index, -1)), {})


NO_PICKS: list[tuple[str, Callable[..., Any], tuple[int, ...]]] = [
    ("several of each", lambda x, i: x.gather(1, i), (4, 2)),
    ("of some rows", lambda x, i: x.gather(1, i), (3, 1)),
    ("of columns", lambda x, i: x.gather(0, i), (1, 6)),
    ("of whole numbers", lambda x, i: x.long().gather(1, i), (4, 1)),
    ("of what would be copied", lambda x, i: x.view(4, 2, 3, 1).permute(0, 2, 3, 1).gather(-1, i % 2), (4, 3, 1, 1)),
    ("of a slice of tokens", lambda x, i: x.view(4, 3, 2)[:, 1:].gather(-1, i % 2), (4, 2, 1)),
    ("in between", lambda x, i: x.view(4, 1, 2, 3).gather(2, i % 2), (4, 1, 1, 3)),
    ("with a sparse gradient", lambda x, i: torch.gather(x, 1, i, sparse_grad=True) * 2, (4, 1)),
]


@pytest.mark.parametrize(("fn", "index"), [p[1:] for p in NO_PICKS], ids=[p[0] for p in NO_PICKS])
def test_what_is_no_pick_stays_a_call(fn: Callable[..., Any], index: tuple[int, ...]) -> None:
    captured = capture(Fn(fn), (r(4, 6, grad=False), torch.randint(4, index)))
    assert opaque(captured)[-1] == "gather"


class Table(nn.Module):
    """A function of a parameter and of what it is called with."""

    def __init__(self, fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.fn, self.table = fn, nn.Parameter(r(*shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fn(self.table, x)


TABLES = {1: (9,), 2: (9, 5), 3: (9, 5, 2)}


@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("ndim", TABLES)
def test_entries_of_a_table(ndim: int, kind: torch.dtype) -> None:
    """Counted from the end as well; gradients of entries that are taken twice are compared."""
    places = torch.tensor([[0, -1, 2, 2], [8, 3, -9, 0]]).to(kind)
    captured = check(Table(lambda t, i: t[i], TABLES[ndim]), places, batch=3)
    assert [n.op for n in captured.graph.nodes() if isinstance(n.op, Embedding)] == [Embedding(wraps=True)]
    captured = check(Table(lambda t, i: t.index_select(0, i), TABLES[ndim]), places[0].abs(), batch=3)
    assert [n.op for n in captured.graph.nodes() if isinstance(n.op, Embedding)] == [Embedding()]


@pytest.mark.parametrize(
    "fn, given",
    [
        (lambda t, i: t[:, i], torch.tensor([0, 4, -1])),
        (lambda t, i: t[i, i], torch.tensor([0, 4, -1])),
        (lambda t, i: t.index_select(1, i), torch.tensor([0, 4, 1])),
        (lambda t, i: t.long()[i].float() * t.sum(), torch.tensor([0, 4, 1])),
    ],
    ids=["of columns", "two", "selected columns", "integers"],
)
def test_other_indices_stay_calls(fn: Any, given: torch.Tensor) -> None:
    assert Embedding not in kinds(capture(Table(fn, TABLES[2]), (given,), {}))


def test_entries_of_a_batch_stay_a_call() -> None:
    """Samples would mix."""
    assert Embedding not in kinds(capture(Fn(lambda x: x[torch.tensor([0, 1, 0])]), (r(4, 5),), {}))


def test_a_renormalised_embedding_stays_a_call() -> None:
    model = nn.Embedding(9, 5, max_norm=0.5)
    captured = check(copy.deepcopy(model), torch.tensor([[0, 2, 2, 8]]))
    assert {"embedding", "embedding_renorm_"} <= set(opaque(captured))
    assert Embedding not in kinds(captured)


def test_sparse_gradients_stay_sparse() -> None:
    model, tokens = nn.Embedding(9, 5, sparse=True), torch.tensor([[0, 2, 2, 8]])
    captured = capture(model, (tokens,), {})
    assert [n.op for n in captured.graph.nodes() if n.inputs] == [Embedding(sparse=True)]
    gradients = [run(call, model, (tokens,), {})[1][0] for call in (lambda m, a, k: m(*a), program_of(captured))]
    assert all(g is not None and g.layout is torch.sparse_coo for g in gradients)
    assert torch.equal(*(g.to_dense() for g in gradients if g is not None))
