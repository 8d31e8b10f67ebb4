"""Random models of the family conv -> pointwise -> pool -> pointwise -> reduction, written as problem files.

Configuration `index` of `seed` depends on those two numbers (and on the range of sizes) alone, so that one row of a
table can be drawn again by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

import torch
from torch import nn

from fusewright.ir import pointwise

# Table functions with parameters.  Left out: what is not defined on all reals, grows without bound in a chain of
# itself, or jumps, for rounding across a jump is not an error of anybody's.
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("relu", "relu6", "abs", "neg", "hardsigmoid", "sigmoid", "log_sigmoid", "tanh", "tanhshrink"), ()),
    **dict.fromkeys(("softsign", "selu", "silu", "mish", "hardswish", "square", "erf", "atan", "sin", "cos"), ()),
    "hardtanh": (-1.0, 1.0),
    "clamp": (-0.5, 0.75),
    "clamp_min": (-0.25,),
    "clamp_max": (0.5,),
    "leaky_relu": (0.1,),
    "softshrink": (0.125,),
    "softplus": (1.0, 20.0),
    "celu": (1.0,),
    "gelu": ("tanh",),
}
# With a number or with a parameter per channel.
ARITHMETIC = ("x * 2.0", "x + 0.5", "x / 3.0", "x + self.bias", "x * self.scale")

REDUCTIONS = {
    "sum": "x.sum(dim={dims}, keepdim={keep})",
    "mean": "x.mean(dim={dims}, keepdim={keep})",
    "max": "x.amax(dim={dims}, keepdim={keep})",
    "min": "x.amin(dim={dims}, keepdim={keep})",
    "logsumexp": "torch.logsumexp(x, dim={dims}, keepdim={keep})",
}

# A convolution's output is at most so many times as large as the range of sizes allows for input and output, and its
# arithmetic at most so many FLOPs per such byte: eager has to run it in bounded memory and time.
SWELLS = 8
FLOPS_PER_BYTE = 5000


@dataclass(frozen=True)
class Pooling:
    """A window pool; `kind` is ``"max"`` or ``"avg"``."""

    kind: str
    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]


@dataclass(frozen=True)
class Reduction:
    """A reduction of the kinds in `REDUCTIONS` over ``"positions"``, ``"channels"`` or ``"both"``."""

    kind: str
    over: str
    keepdim: bool


@dataclass(frozen=True)
class Configuration:
    """One model and its input shape (batch, channels, *lengths); `before` and `after` the pool stand expressions."""

    shape: tuple[int, ...]
    out_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    output_padding: tuple[int, ...]
    before: tuple[str, ...]
    pool: Pooling | None
    after: tuple[str, ...]
    reduction: Reduction | None

    @property
    def rank(self) -> int:
        return len(self.kernel)

    def at(self, shape: tuple[int, ...]) -> Configuration:
        """The same model for another input."""
        return Configuration(**{**vars(self), "shape": shape})

    def convolution(self) -> tuple[str, dict[str, Any]]:
        """The name of the `nn` class and its keyword arguments."""
        arguments: dict[str, Any] = {
            "in_channels": self.shape[1],
            "out_channels": self.out_channels,
            "kernel_size": self.kernel,
            "stride": self.stride,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
        }
        if self.transposed:
            arguments["output_padding"] = self.output_padding
        return f"Conv{'Transpose' if self.transposed else ''}{self.rank}d", arguments

    def steps(self) -> list[str]:
        """What follows the convolution, as expressions of x."""
        steps = list(self.before)
        if self.pool is not None:
            p = self.pool
            steps.append(f"F.{p.kind}_pool{self.rank}d(x, {p.window}, {p.stride}, {p.padding})")
        steps += self.after
        if self.reduction is not None:
            first, last = (2 if self.reduction.over == "positions" else 1), (self.rank + 2)
            dims = (1,) if self.reduction.over == "channels" else tuple(range(first, last))
            steps.append(REDUCTIONS[self.reduction.kind].format(dims=dims, keep=self.reduction.keepdim))
        return steps

    def source(self) -> str:
        """The model as a problem file."""
        name, arguments = self.convolution()
        given = ", ".join(f"{key}={value}" for key, value in arguments.items())
        lines = ["import torch", "import torch.nn.functional as F", "from torch import nn", "", ""]
        lines += ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        self.conv = nn.{name}({given})"]
        for parameter in ("bias", "scale"):
            if any(f"self.{parameter}" in step for step in self.steps()):
                sizes = (self.out_channels, *(1,) * self.rank)
                lines.append(f"        self.{parameter} = nn.Parameter(torch.randn{sizes})")
        lines += ["", "    def forward(self, x):", "        x = self.conv(x)"]
        lines += [f"        x = {step}" for step in self.steps()]
        lines += ["        return x", "", "", "def get_inputs():", f"    return [torch.randn{self.shape}]", "", ""]
        lines += ["def get_init_inputs():", "    return []"]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        """One line for a table."""
        kind = f"conv{'T' if self.transposed else ''}{self.rank}d {self.shape[1]}->{self.out_channels}"
        parts = [f"k{_short(self.kernel)}", f"s{_short(self.stride)}", f"p{_short(self.padding)}"]
        parts += [f"d{_short(self.dilation)}"] if max(self.dilation) > 1 else []
        parts += [f"g{self.groups}"] if self.groups > 1 else []
        chain = [f"{kind} {' '.join(parts)}", *map(_word, self.before)]
        if self.pool is not None:
            chain.append(f"{self.pool.kind}pool {_short(self.pool.window)}/{_short(self.pool.stride)}")
        chain += map(_word, self.after)
        if self.reduction is not None:
            chain.append(f"{self.reduction.kind} over {self.reduction.over}")
        return f"{', '.join(chain)}; {'x'.join(map(str, self.shape))}"


def _short(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(set(values)) == 1 else ",".join(map(str, values))


def _word(step: str) -> str:
    return step.partition("(")[0].removeprefix("torch.").removeprefix("F.")


@dataclass(frozen=True)
class Sizes:
    """Bytes of a configuration in float32, found on the meta device: of inputs and outputs, and of the convolution."""

    ends: int
    middle: int
    flops: float

    @classmethod
    def of(cls, configuration: Configuration) -> Sizes:
        """Raises what PyTorch raises where the configuration is no valid model."""
        model = meta_model(configuration)
        x = torch.empty(configuration.shape, device="meta")
        y: torch.Tensor = model.conv(x)  # type: ignore[operator]
        weight = math.prod(configuration.kernel) * (
            configuration.out_channels if configuration.transposed else configuration.shape[1]
        )
        flops = 2.0 * (x if configuration.transposed else y).numel() * weight / configuration.groups
        return cls(4 * (x.numel() + model(x).numel()), 4 * y.numel(), flops)


def meta_model(configuration: Configuration) -> nn.Module:
    """The model without memory."""
    space: dict[str, Any] = {}
    exec(configuration.source(), space)
    with torch.device("meta"):
        model: nn.Module = space["Model"]()
    return model


def draw(seed: int, index: int, low: float, high: float) -> Configuration:
    """Configuration `index` of `seed`, with `low` to `high` bytes of input and output together."""
    for attempt in count():
        random = Random(f"{seed}.{index}.{attempt}")
        found = _sized(random, _model(random), low, high)
        if found is not None:
            return found
    raise AssertionError


def _sized(random: Random, model: Configuration, low: float, high: float) -> Configuration | None:
    """`model` at the largest lengths within a drawn size; `None` where it fits none."""
    target = math.exp(random.uniform(math.log(low), math.log(high)))
    batch, channels = model.shape[:2]
    side = (target / 4 / batch / channels) ** (1 / model.rank)
    ratios = [random.uniform(0.8, 1.25) for _ in range(model.rank)]
    while side >= 1:
        lengths = tuple(max(1, round(side * r)) for r in ratios)
        side *= 0.9
        candidate = model.at((batch, channels, *lengths))
        try:
            sizes = Sizes.of(candidate)
        except (RuntimeError, ValueError):
            return None
        if sizes.ends <= target and sizes.middle <= SWELLS * high and sizes.flops <= FLOPS_PER_BYTE * high:
            return candidate if sizes.ends >= low else None
    return None


def _model(random: Random) -> Configuration:
    """A model, its lengths still open."""
    rank = random.choices((1, 2, 3), (2, 5, 3))[0]
    channels, out, groups = _channels(random)
    transposed = random.random() < 0.4
    kernel = _each(random, rank, lambda: random.randint(1, 7))
    stride = _each(random, rank, lambda: random.choice((1, 1, 1, 2, 2, 3)))
    dilation = _each(random, rank, lambda: random.choice((1, 1, 1, 2, 3)))
    padding = tuple(random.randint(0, d * (k - 1) // 2) for k, d in zip(kernel, dilation, strict=True))
    extra = tuple(random.randint(0, s - 1) if random.random() < 0.3 else 0 for s in stride)
    chain = [_pointwise(random) for _ in range(random.randint(0, 4))]
    pool = _pooling(random, rank) if random.random() < 0.6 else None
    cut = random.randint(0, len(chain)) if pool is not None else len(chain)
    over = random.choice(("positions", "channels", "both", ""))
    reduction = Reduction(random.choice(list(REDUCTIONS)), over, random.random() < 0.5) if over else None
    shape = (random.choice((8, 16, 32, 64, 128)), channels)
    before, after = tuple(chain[:cut]), tuple(chain[cut:])
    layer = (kernel, stride, padding, dilation, groups, transposed, extra if transposed else (0,) * rank)
    return Configuration(shape, out, *layer, before, pool, after, reduction)


def _channels(random: Random) -> tuple[int, int, int]:
    """Input channels, output channels and groups."""
    channels, out = random.randint(1, 96), random.randint(1, 160)
    if random.random() < 0.7:
        return channels, out, 1
    groups = random.choice((2, 3, 4, 8, channels))
    channels = max(1, channels // groups) * groups
    return channels, max(1, out // groups) * groups, groups


def _each(random: Random, rank: int, one: Any) -> tuple[int, ...]:
    """One number for all dimensions, at times one for each."""
    if random.random() < 0.7:
        return (one(),) * rank
    return tuple(one() for _ in range(rank))


def _pointwise(random: Random) -> str:
    if random.random() < 0.3:
        return random.choice(ARITHMETIC)
    name = random.choice(list(FUNCTIONS))
    return pointwise.traits(name, FUNCTIONS[name]).torch.format("x")


def _pooling(random: Random, rank: int) -> Pooling:
    """A pool whose windows touch, or at times overlap, and at times reach into padding."""
    window = _each(random, rank, lambda: random.randint(2, 8))
    stride = window if random.random() < 0.6 else tuple(random.randint(1, w) for w in window)
    padding = tuple(random.randint(0, w // 2) for w in window) if random.random() < 0.25 else (0,) * rank
    return Pooling(random.choice(("max", "avg")), window, stride, padding)
