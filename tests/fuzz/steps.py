"""What a random chain is made of: functions that draw one step for the value it is to meet."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[Random, Tensor], nn.Module]


class Apply(nn.Module):
    """A function without parameters, and how it reads."""

    def __init__(self, text: str, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.text, self.function = text, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.text


class Combine(nn.Module):
    """x with a parameter: a scale, a bias, a matrix."""

    def __init__(self, sign: str, *shape: int) -> None:
        super().__init__()
        self.sign, self.other = sign, nn.Parameter(torch.randn(shape, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        match self.sign:
            case "+":
                return x + self.other
            case "-":
                return self.other - x
            case "*":
                return x * self.other
            case "/":
                return x / (self.other.abs() + 1)
            case _:
                return x @ self.other

    def extra_repr(self) -> str:
        return f"{self.sign}, {tuple(self.other.shape)}"


# Contractions


def _conv(random: Random, x: Tensor) -> nn.Module:
    n = x.ndim - 2
    groups = random.choice([g for g in (1, 1, 1, 2, 3) if x.shape[1] % g == 0])
    options: dict[str, Any] = {
        "kernel_size": _each(random, n, 1, 4),
        "stride": _each(random, n, 1, 3),
        "padding": _each(random, n, 0, 2),
        "dilation": _each(random, n, 1, 2),
        "bias": random.random() < 0.7,
    }
    if random.random() < 0.1:
        options |= {"padding": "same", "stride": 1}
    elif random.random() < 0.05:
        options["padding_mode"] = random.choice(("reflect", "replicate", "circular"))
    features = groups * random.randint(1, 4)
    plain = options["padding"] != "same" and "padding_mode" not in options
    sides = _sides(options) if plain else None
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[n - 1](x.shape[1], features, groups=groups, **options)
    return conv if sides is None else nn.Sequential(_PADS[n](sides), conv)


_PADS = (None, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)


def _sides(options: dict[str, Any]) -> tuple[int, ...] | None:
    """Now and then, the padding that `options` then no longer have, perhaps with one more at an end.

    Drawn from what has been drawn, so that chains without are the same as before.
    """
    aside = Random(str(options))
    if aside.random() < 0.75 or not any(options["padding"]):
        return None
    sides = [p + aside.choice((0, 0, 1)) * side for p in reversed(options["padding"]) for side in (0, 1)]
    options["padding"] = tuple(aside.choice((0, 0, 1)) for _ in options["padding"])
    return tuple(sides)


def _conv_transpose(random: Random, x: Tensor) -> nn.Module:
    n = x.ndim - 2
    groups = random.choice([g for g in (1, 1, 1, 2, 3) if x.shape[1] % g == 0])
    stride, dilation = _each(random, n, 1, 3), _each(random, n, 1, 2)
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[n - 1]
    return kind(
        x.shape[1],
        groups * random.randint(1, 4),
        _each(random, n, 1, 4),
        stride=stride,
        padding=_each(random, n, 0, 2),
        output_padding=tuple(random.choice((0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)),
        dilation=dilation,
        groups=groups,
        bias=random.random() < 0.7,
    )


def _full_conv(random: Random, x: Tensor) -> nn.Module:
    """A kernel as large as what it is laid over."""
    groups = random.choice([g for g in (1, 2, 3) if x.shape[1] % g == 0])
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[x.ndim - 3]
    return kind(x.shape[1], groups * random.randint(1, 3), tuple(x.shape[2:]), groups=groups)


def _single_tap(random: Random, x: Tensor) -> nn.Module:
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[x.ndim - 3]
    groups = random.choice([g for g in (1, 2, 3) if x.shape[1] % g == 0])
    return kind(x.shape[1], groups * random.randint(1, 3), 1, groups=groups)


def _with_gaps(random: Random, x: Tensor) -> nn.Module:
    """A transposed convolution whose taps are a multiple of its stride apart, and a max over all that lies between, or
    over channels."""
    kinds = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    stride = random.randint(2, 3)
    conv = kinds[x.ndim - 3](
        x.shape[1],
        random.randint(1, 3),
        random.randint(1, 3),
        stride=stride,
        padding=random.randint(0, 1),
        dilation=stride * random.randint(1, 2),
        bias=random.random() < 0.7,
    )
    pools = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
    length = min(conv.double()(x).shape[2:])
    kernel = random.randint(2, 4)
    if length < kernel:
        return conv
    if Random(str(conv)).random() < 0.3:  # drawn from what has been drawn, so that others are the same as before
        return nn.Sequential(conv, nn.SiLU(), Apply("amax(1)", lambda y: y.amax(1, keepdim=True)))
    return nn.Sequential(conv, pools[x.ndim - 3](kernel, stride * random.randint(1, 2), random.randint(0, kernel // 2)))


def _one_by_one(random: Random, x: Tensor) -> nn.Module:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[x.ndim - 3]
    return kind(x.shape[1], random.randint(1, 5), 1, bias=random.random() < 0.7)


def _linear(random: Random, x: Tensor) -> nn.Module:
    return nn.Linear(x.shape[-1], random.randint(1, 5), bias=random.random() < 0.7)


def _matmul(random: Random, x: Tensor) -> nn.Module:
    lead = x.shape[1:-2] if random.random() < 0.3 else ()
    return Combine("@", *lead, x.shape[-1], random.randint(1, 5))


# Steps in the middle


def _pointwise(random: Random, x: Tensor) -> nn.Module:
    return random.choice(POINTWISE)(random)


def _twice(random: Random, x: Tensor) -> nn.Module:
    """The same function again, or one that undoes it, and scales in a row."""
    a, b = _number(random), _number(random)
    pairs: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("relu(relu)", lambda x: torch.relu(torch.relu(x))),
        ("abs(abs)", lambda x: x.abs().abs()),
        ("-(-x)", lambda x: x.neg().neg()),
        ("clamp(clamp)", lambda x: x.clamp(-1.0, 0.9).clamp(-0.7, 1.1)),
        (f"x * {a} * {b}", lambda x: x * a * b),
        (f"x / {a} * {b}", lambda x: x / a * b),
        (f"x + {a} - {b}", lambda x: x + a - b),
        ("x + x", lambda x: x + x),
        ("x - x", lambda x: x - x),
        ("x * 0", lambda x: x * 0.0),
        ("x * 1 + 0", lambda x: x * 1.0 + 0.0),
        ("abs(-x)", lambda x: x.neg().abs()),
        ("1 - sigmoid(cos(-x))", lambda x: 1 - torch.sigmoid(torch.cos(-x))),
        ("view as it is", lambda x: x.expand(x.shape).permute(tuple(range(x.ndim))).reshape(x.shape)),
        ("relu6(relu)", lambda x: F.relu6(torch.relu(x))),
    ]
    return Apply(*random.choice(pairs))


def _masked(random: Random, x: Tensor) -> nn.Module:
    """A mask by way of whole numbers."""
    return Apply("x * whole(x > 0)", lambda x: x * (x > 0).int().to(x.dtype))


def _on_positive(random: Random, x: Tensor) -> nn.Module:
    """A function that is monotone on part of the line only, where it is."""
    inner = random.choice((torch.sigmoid, F.softplus, lambda x: torch.relu(x) + 0.5, torch.exp))
    outer = random.choice((torch.sqrt, torch.log, torch.square, torch.reciprocal, torch.rsqrt, torch.abs, torch.log1p))
    return Apply(f"{outer.__name__} of a positive value", lambda x: outer(inner(x)))


def _constant(random: Random, x: Tensor) -> nn.Module:
    value = _number(random)
    forms: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        (f"x * {value}", lambda x: x * value),
        (f"x / {value}", lambda x: x / value),
        (f"x + {value}", lambda x: x + value),
        (f"x - {value}", lambda x: x - value),
        (f"{value} - x", lambda x: value - x),
    ]
    return Apply(*random.choice(forms))


def _parameter(random: Random, x: Tensor) -> nn.Module:
    shapes = [(), (x.shape[-1],), (x.shape[1], *(1,) * (x.ndim - 2)), tuple(x.shape[1:])]
    return Combine(random.choice("+-*/"), *random.choice(shapes[: 1 + 3 * (x.ndim > 1)]))


def batch_norm(random: Random, x: Tensor) -> nn.Module:
    n, channels = x.ndim - 2, x.shape[1]
    affine, momentum = random.random() < 0.7, random.choice((0.1, 0.3))
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[n]
    return kind(channels, momentum=momentum, affine=affine, track_running_stats=random.random() < 0.8)


def _norm(random: Random, x: Tensor) -> nn.Module:
    n, channels = x.ndim - 2, x.shape[1]
    affine = random.random() < 0.7
    kinds: list[Callable[[], nn.Module]] = [
        lambda: batch_norm(random, x),
        lambda: (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[n - 1](
            channels, affine=affine, track_running_stats=random.random() < 0.2
        ),
        lambda: _group_norm(random, channels) if affine else nn.LocalResponseNorm(random.randint(1, 5), 0.5),
        lambda: nn.LayerNorm(_trailing(random, x)) if affine else _spelled_out(_trailing(random, x), center=True),
        lambda: nn.RMSNorm(_trailing(random, x)) if affine else _spelled_out(_trailing(random, x), center=False),
    ]
    return random.choice(kinds)()


def _group_norm(random: Random, channels: int) -> nn.Module:
    return nn.GroupNorm(random.choice([g for g in (1, 2, 3, channels) if channels % g == 0]), channels)


def _spelled_out(shape: tuple[int, ...], *, center: bool) -> nn.Module:
    """A norm over trailing dimensions as people write it."""
    dims = tuple(range(-len(shape), 0))

    def norm(x: Tensor) -> Tensor:
        x = x - x.mean(dims, keepdim=True) if center else x
        return x * torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + 1e-5)

    return Apply(f"{'layer' if center else 'RMS'} norm over {shape}, spelled out", norm)


def _trailing(random: Random, x: Tensor) -> tuple[int, ...]:
    """Trailing sizes to normalise over; of one element only rounding errors would be left, magnified."""
    shapes = [tuple(x.shape[i:]) for i in range(1, x.ndim)]
    return random.choice([s for s in shapes if math.prod(s) > 1] or shapes[:1])


def _dropout(random: Random, x: Tensor) -> nn.Module:
    return nn.Dropout(0.3)


def _pool(random: Random, x: Tensor) -> nn.Module:
    n = x.ndim - 2
    kernel, stride = _each(random, n, 1, 4), _each(random, n, 1, 3)
    padding = tuple(random.randint(0, k // 2) for k in kernel)
    ceil = random.random() < 0.4
    options: dict[str, Any] = {"kernel_size": kernel, "stride": stride, "padding": padding, "ceil_mode": ceil}
    if random.random() < 0.5:
        options["dilation"] = _each(random, n, 1, 2)
        sides = _sides(options)
        pool = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[n - 1](**options)
        return pool if sides is None else nn.Sequential(_least(sides, sum(kernel) % 2 == 0), pool)
    if n > 1:
        options["divisor_override"] = random.choice((None, None, 3))
    options["count_include_pad"] = random.random() < 0.5
    if random.random() < 0.3:
        options |= {"stride": kernel, "padding": (0,) * n}
    sides = _sides(options)
    average = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[n - 1](**options)
    return average if sides is None else nn.Sequential(_PADS[n](sides), average)


def _least(sides: tuple[int, ...], positive: bool) -> nn.Module:
    """Padding with what no value is below."""
    if positive:
        return Apply(f"pad(relu(x), {sides})", lambda x: F.pad(torch.relu(x), sides))
    return Apply(f"pad(x, {sides}, value=-inf)", lambda x: F.pad(x, sides, value=-math.inf))


def _whole_windows(random: Random, x: Tensor) -> nn.Module:
    """Average pooling without padding or cut windows."""
    n = x.ndim - 2
    kernel, stride = _each(random, n, 1, 4), _each(random, n, 1, 4)
    return (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[n - 1](kernel, random.choice((kernel, stride)))


def _channel_pool(random: Random, x: Tensor) -> nn.Module:
    """A pooling whose last dimensions take in the channels."""
    k = random.randint(1, min(3, x.shape[1]))
    if random.random() < 0.5:
        return Apply(f"max pool over {k} channels", lambda x: F.max_pool1d(x.flatten(2).mT, k).mT)
    if x.shape[1] % 2 == 0 and x.ndim in (3, 4):  # as in a local response norm
        kind, kernel = (F.avg_pool2d, F.avg_pool3d)[x.ndim - 3], (k, *(1,) * (x.ndim - 2))
        return Apply(f"avg pool {kernel} of one channel", lambda x: kind(x.unsqueeze(1), kernel).squeeze(1))
    return Apply(f"avg pool over {k} channels", lambda x: F.avg_pool2d(x.flatten(2), (k, 1)))


def _twice_pooled(random: Random, x: Tensor) -> nn.Module:
    """Pools that compose: the second one not padded."""
    n = x.ndim - 2
    k, m, t = random.randint(1, 3), random.randint(1, 3), random.randint(1, 2)
    if random.random() < 0.6:
        kind = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1]
        return Apply(f"max pool {k}/{t} of max pool {m}/{t}", lambda x: kind(kind(x, m, t), k, t))
    kind = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[n - 1]
    return Apply(f"avg pool {k}/{t} of avg pool {m}/{m}", lambda x: kind(kind(x, m, m), k, t))


def _adaptive(random: Random, x: Tensor) -> nn.Module:
    n = x.ndim - 2
    out = (1,) * n if random.random() < 0.4 else _each(random, n, 1, 5)
    if random.random() < 0.75:
        return (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[n - 1](out if n > 1 else out[0])
    return (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)[n - 1](out if n > 1 else out[0])


# Reductions and tails


def _reduce(random: Random, x: Tensor) -> nn.Module:
    kind = random.choice(("sum", "sum", "mean", "mean", "amax", "amin", "logsumexp", "prod", "var"))
    return _reduced(random, x, kind)


def _linear_reduce(random: Random, x: Tensor) -> nn.Module:
    return _reduced(random, x, random.choice(("sum", "mean")))


def _reduced(random: Random, x: Tensor, kind: str) -> nn.Module:
    if x.ndim == 0:
        raise ValueError("nothing is left to reduce")
    dims = tuple(sorted(random.sample(range(x.ndim), random.randint(1, x.ndim))))
    if random.random() < 0.3 and x.ndim > 2:
        dims = tuple(range(2, x.ndim))
    keep = random.random() < 0.5
    if kind == "prod":
        return Apply(f"prod {dims[:1]} {keep}", lambda x: torch.prod(x, dims[0], keepdim=keep))
    if kind == "var":
        loss = random.choice((0, 1)) if math.prod(x.shape[d] for d in dims) > 1 else 0
        return Apply(f"var {dims} {keep} {loss}", lambda x: torch.var(x, dims, correction=loss, keepdim=keep))
    function = getattr(torch, kind)
    return Apply(f"{kind} {dims} {keep}", lambda x: function(x, dims, keepdim=keep))


def _softmax(random: Random, x: Tensor) -> nn.Module:
    """Over one dimension, or over all positions of an image, whose shares are scaled as such."""
    kind, dim = random.choice((nn.Softmax, nn.LogSoftmax)), random.randrange(x.ndim)
    if dim < 3:
        return kind(dim=dim)
    shares = kind(dim=2)
    return Apply(f"{shares} of flatten(x, 2), as x is, times 3", lambda x: shares(x.flatten(2)).view_as(x) * 3.0)


def _head(random: Random, x: Tensor) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), random.randint(1, 4)))


def _loose_ones(random: Random, x: Tensor) -> nn.Module:
    """Over dimensions of one element: nothing to do."""
    dims = [d for d in range(x.ndim) if x.shape[d] == 1]
    d, keep = random.choice(dims), random.random() < 0.5
    kinds: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("amax", lambda x: torch.amax(x, d, keepdim=keep)),
        ("sum", lambda x: torch.sum(x, d, keepdim=keep)),
        ("mean", lambda x: torch.mean(x, d, keepdim=keep)),
        ("prod", lambda x: torch.prod(x, d, keepdim=keep)),
        ("logsumexp", lambda x: torch.logsumexp(x, d, keepdim=keep)),
        ("var", lambda x: torch.var(x, d, correction=0, keepdim=keep)),
        ("softmax", lambda x: torch.softmax(x, d)),
        ("log_softmax", lambda x: torch.log_softmax(x, d)),
    ]
    name, function = random.choice(kinds)
    return Apply(f"{name} over {d}, which has one element", function)


def _each(random: Random, n: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(random.randint(low, high) for _ in range(n))


def _number(random: Random) -> float:
    return random.choice((2.0, 0.5, -1.5, 3.0, -0.25, 1.7, 2, -3))


def _function(text: str) -> Callable[[Random], nn.Module]:
    function = eval(f"lambda x: {text}", {"torch": torch, "F": F})
    return lambda random: Apply(text, function)


POINTWISE: list[Callable[[Random], nn.Module]] = [
    lambda random: nn.LeakyReLU(random.choice((0.01, 0.3, -0.2))),
    lambda random: nn.ELU(random.choice((1.0, 0.5))),
    lambda random: nn.CELU(random.choice((1.0, 0.5))),
    lambda random: nn.Hardtanh(*random.choice(((-1.0, 1.0), (-0.3, 0.8), (0.0, 6.0)))),
    lambda random: nn.Threshold(*random.choice(((0.1, 0.0), (0.1, 20.0)))),
    lambda random: nn.Softplus(random.choice((1, 2)), 20),
    lambda random: nn.GELU(random.choice(("none", "tanh"))),
    lambda random: nn.Hardshrink(0.2),
    lambda random: nn.Softshrink(0.2),
    *[lambda random, kind=kind: kind() for kind in (nn.ReLU, nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.Tanh, nn.SiLU, nn.Mish)],
    *[lambda random, kind=kind: kind() for kind in (nn.Hardswish, nn.Hardsigmoid, nn.Softsign, nn.SELU, nn.LogSigmoid)],
    *map(_function, ("-x", "x.abs()", "x.square()", "x ** 3", "torch.exp(x)", "torch.sin(x)", "torch.atan(x)")),
    *map(
        _function,
        ("torch.erf(x)", "x.clamp(min=-0.5)", "x.clamp(max=0.5)", "torch.expm1(x)", "torch.where(x > 0, x, -x)"),
    ),
]
CONTRACTIONS: list[Step] = [
    *[_conv] * 6,
    *[_conv_transpose] * 2,
    _with_gaps,
    _full_conv,
    _single_tap,
    _one_by_one,
    *[_linear] * 2,
    _matmul,
]
LINEAR: list[Step] = [*[_linear_reduce] * 4, *[_pool] * 2, *[_whole_windows] * 3, *[_adaptive] * 2, _channel_pool]
MIDDLE: list[Step] = [
    *[_pointwise] * 5,
    *[_pool] * 4,
    *[_constant] * 3,
    *[_parameter] * 2,
    *[_norm] * 3,
    _dropout,
    _masked,
    *[_twice] * 3,
    *[_on_positive] * 2,
    *[_twice_pooled] * 2,
    _adaptive,
    _loose_ones,
]
REDUCTIONS: list[Step] = [*[_reduce] * 5, _loose_ones, _adaptive]
TAILS: list[Step] = [*[_softmax] * 2, *[_head] * 2, _pointwise]
