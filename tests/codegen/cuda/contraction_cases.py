"""Random contraction groups: what one may be made of, its kernel for a tiling, its value in float64."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.codegen.cuda import contraction as cuda
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.kernel import Kernel
from fusewright.plan import Work
from fusewright.rules import RULES
from fusewright.rules.engine import rewrite
from fusewright.schedule import contraction, tiling
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.tiling import Tiling

# One step of a pointwise chain: of the value, a number per channel, shape (O, 1, ...), and one number, shape ().
Step = Callable[[Tensor, Tensor, Tensor], Tensor]
STEPS: dict[str, Step] = {
    "relu": lambda y, p, q: F.relu(y),
    "tanh": lambda y, p, q: y.tanh(),
    "sigmoid": lambda y, p, q: y.sigmoid(),
    "hardswish": lambda y, p, q: F.hardswish(y),
    "leaky": lambda y, p, q: F.leaky_relu(y, 0.2),
    "gelu": lambda y, p, q: F.gelu(y),
    "scale": lambda y, p, q: y * 0.5,
    "shift": lambda y, p, q: y + 1.25,
    "square": lambda y, p, q: y.square(),
    "large": lambda y, p, q: y * 40.0,
    "divide": lambda y, p, q: y / 3.0,
    "mish": lambda y, p, q: F.mish(y),
    "selu": lambda y, p, q: F.selu(y),
    "celu": lambda y, p, q: F.celu(y, 0.7),
    "softplus": lambda y, p, q: F.softplus(y),
    "log sigmoid": lambda y, p, q: F.logsigmoid(y),
    "sine": lambda y, p, q: y.sin(),
    "cosine": lambda y, p, q: y.cos(),
    "arc tangent": lambda y, p, q: y.atan(),
    "reverse": lambda y, p, q: 3 - y,
    "clamp": lambda y, p, q: y.clamp(-0.4, 0.6),
    "gate": lambda y, p, q: y * y.sigmoid(),
    "where": lambda y, p, q: torch.where(y > 0, y, 0.3 * y),
    "add channel": lambda y, p, q: y + p,
    "times channel": lambda y, p, q: y * p,
    "minus one": lambda y, p, q: y - q,
    "both": lambda y, p, q: (y + p) * p.sigmoid(),
}


# What is made of the channels of a position, of which no softmax is.
AMONG: dict[str, Callable[[Tensor], Tensor]] = {
    "less the greatest": lambda y: y - y.amax(1, keepdim=True),
    "of length one": lambda y: y / y.norm(dim=1, keepdim=True).clamp(min=1e-6),
    "gated by a mean": lambda y: y * F.hardsigmoid(y).mean(1, keepdim=True),
    "standardised": lambda y: (y - y.mean(1, keepdim=True)) / (y.std(1, keepdim=True) + 1e-3),
    "without freedom": lambda y: y - y.var(1, keepdim=True, correction=99),
    "by its variance": lambda y: y * torch.rsqrt(y.var(1, keepdim=True, unbiased=False) + 1e-3),
    "between its ends": lambda y: (y - y.amin(1, True)) / (y.amax(1, True) - y.amin(1, True) + 1e-3),
    "step by step": lambda y: (y - y.mean(1, True)) / ((y - y.mean(1, True)).square().mean(1, True) + 1e-3).sqrt(),
    "weighed by a softmax": lambda y: torch.softmax(y, 1) * y,
    "less a softmax": lambda y: torch.log_softmax(y, 1) - y.tanh(),
    "weighed by its shares": lambda y: y * (y - y.amax(1, True)).exp() / (y - y.amax(1, True)).exp().sum(1, True),
}


@dataclass(frozen=True)
class Case:
    """A group: convolution -> `before` -> softmax -> pool -> `after` -> reduction over `fold_dims` ("c", "p", "cp"),
    and `behind` one over channels."""

    sizes: tuple[int, ...]
    channels: int = 3  # of a group, as are the features
    features: int = 5
    kernel: tuple[int, ...] = (3, 3)
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] | str = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = (0, 0)
    bias: bool = True
    before: tuple[str, ...] = ()
    pool: str = ""
    window: tuple[int, ...] = ()
    step: tuple[int, ...] = ()
    pool_padding: tuple[int, ...] = ()
    ceil_mode: bool = False
    include_pad: bool = True
    divisor: int | None = None
    after: tuple[str, ...] = ()
    fold: str = ""
    fold_dims: str = ""
    keepdim: bool = False
    behind: tuple[str, ...] = ()  # behind a reduction over channels
    batch: int = 2
    dtype: torch.dtype = torch.float32
    tf32: bool = True
    channels_last: bool = False
    softmax: str = ""  # or "log_softmax", or what else is `AMONG` channels
    pool_first: bool = False  # ahead of that
    cropped: tuple[tuple[int, int], ...] = ()  # so many positions of a transposed convolution, on both sides
    inside: tuple[tuple[int, int], ...] = ()  # so many elements of x that no window of a convolution reads

    @property
    def n(self) -> int:
        return len(self.sizes)

    @property
    def dims(self) -> tuple[int, ...]:
        return (*((1,) if "c" in self.fold_dims else ()), *(range(2, self.n + 2) if "p" in self.fold_dims else ()))

    @property
    def last(self) -> torch.memory_format:
        return torch.channels_last if self.n == 2 else torch.channels_last_3d

    def example(self, seed: int = 0, batch: int | None = None) -> Tensor:
        """An input (N, C, *) whose numbers are tf32 numbers where those may be used."""
        torch.manual_seed(seed)
        shape = (self.batch if batch is None else batch, self.channels * self.groups, *self.sizes)
        x = self.short(torch.randn(shape)).to(self.dtype)
        return x.to(memory_format=self.last) if self.channels_last else x

    def short(self, x: Tensor) -> Tensor:
        if self.dtype != torch.float32 or not self.tf32:
            return x
        return (x.detach().contiguous().view(torch.int32) & -8192).view(torch.float32)


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.case = case
        name = f"Conv{'Transpose' if case.transposed else ''}{case.n}d"
        more: dict[str, Any] = {"output_padding": case.output_padding} if case.transposed else {}
        c, o = case.channels * case.groups, case.features * case.groups
        self.conv = getattr(nn, name)(
            c,
            o,
            case.kernel,
            case.stride,
            case.padding,
            dilation=case.dilation,
            groups=case.groups,
            bias=case.bias,
            **more,
        )
        self.conv.weight.data = case.short(self.conv.weight.data)
        self.p = nn.Parameter(torch.rand(o, *(1,) * case.n) + 0.5)
        self.q = nn.Parameter(torch.tensor(0.75))
        self.eval().to(case.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y, c = self.before_fold(x), self.case
        if c.fold:
            y = getattr(torch, {"max": "amax", "min": "amin"}.get(c.fold, c.fold))(y, c.dims, c.keepdim)
        for name in c.behind:
            y = STEPS[name](y, self.p, self.q)
        return y

    def before_fold(self, x: Tensor) -> Tensor:
        c = self.case
        y = _without(self.conv(_without(x, c.inside)), c.cropped)
        for name in c.before:
            y = STEPS[name](y, self.p, self.q)
        if c.pool and c.pool_first:
            y = self.pooled(y)
        if c.softmax:
            y = AMONG[c.softmax](y) if c.softmax in AMONG else getattr(torch, c.softmax)(y, 1)
        if c.pool and not c.pool_first:
            y = self.pooled(y)
        for name in c.after:
            y = STEPS[name](y, self.p, self.q)
        return y

    def pooled(self, y: Tensor) -> Tensor:
        c = self.case
        pad = c.pool_padding or (0,) * c.n
        if c.pool == "max":
            return getattr(F, f"max_pool{c.n}d")(y, c.window, c.step, pad, ceil_mode=c.ceil_mode)
        more: dict[str, Any] = {"divisor_override": c.divisor} if c.divisor else {}
        return getattr(F, f"avg_pool{c.n}d")(y, c.window, c.step, pad, c.ceil_mode, c.include_pad, **more)


def _without(x: Tensor, ends: tuple[tuple[int, int], ...]) -> Tensor:
    for d, (left, right) in enumerate(ends, start=2):
        x = x.narrow(d, left, x.shape[d] - left - right)
    return x


@dataclass(frozen=True)
class Found:
    """A case's group and what its kernel is called with."""

    case: Case
    model: Model
    group: Contraction

    @property
    def cells(self) -> tuple[int, int, int]:
        """Cells of the whole output along d, h, w."""
        pooled = self.group.window
        shape = (pooled.node if pooled is not None else self.group.conv).shape[2:]
        lengths = self.group.along_axes([int(n) for n in shape])
        d, h, w = (-(-n // (1 if pooled else a.stride)) for n, a in zip(lengths, self.group.axes, strict=True))
        return d, h, w

    def tilings(self) -> list[Tiling]:
        return tiling.candidates(self.group, self.cells, tf32=self.case.tf32)

    def kernel(self, t: Tiling, blocks: int | None = None) -> Kernel:
        """In two launches where positions are reduced, or in one by clusters of so many blocks."""
        reference = "def reference(*operands): ..."
        return cuda.generate(self.group, t, "fused_test", reference, tf32=self.case.tf32, blocks=blocks)

    def tensors(self, x: Tensor) -> list[Tensor]:
        """Operands of a call."""
        return [x if n is self.group.x else self._value(n) for n in self.group.tensors]

    def _value(self, node: Node) -> Tensor:
        """A parameter, or what a pointwise function makes of some."""
        if isinstance(node.op, ops.Param):
            return self.model.get_parameter(node.op.path).detach()
        assert isinstance(node.op, ops.Pointwise), node
        values = [f"args[{i}]" for i in range(len(node.inputs))]
        args = [self._value(a) for a in node.inputs]
        found: Tensor = eval(node.op.traits.torch.format(*values), {"torch": torch, "F": F, "args": args})
        return found

    def reference(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The value in float64, and how large what is added up in it is."""
        wide = Model(self.case).double()
        wide.load_state_dict(self.model.state_dict())
        with torch.no_grad():
            y, c = wide.before_fold(x.double()), self.case
            want = wide(x.double())
            # What cancels in one convolution's sum is as large as another's value: a sum of few is no measure.
            size_ = y.abs().amax()
            if c.fold == "sum":
                size_ = torch.maximum(y.abs().sum(c.dims, c.keepdim), size_)
            if c.fold == "logsumexp":  # of numbers near zero it is the logarithm of how many there are
                size_ = size_.maximum(want.abs().amax())
            return want, size_


_SLIDES_FIRST = "avg_pool(conv(x, w)) = conv_strided(box(x), w)"
_CROPS = "slice(conv(x, w)) = conv_padded_otherwise(x, w)"
_BEGINS_INSIDE = "conv(slice(x), w) = conv_cropped(x, w)"


def find(case: Case, boxed: bool = False) -> Found | str:
    """The group of a case, or why it is none; `boxed` moves an average pool before its convolution."""
    model = Model(case)
    graph = capture(model, (case.example(),), {}).graph
    wanted = {_SLIDES_FIRST: boxed, _CROPS: case.cropped, _BEGINS_INSIDE: case.inside}
    if any(wanted.values()):
        rules = [rule for rule in RULES if wanted.get(rule.name)]
        graph = rewrite(graph, rules, lambda node: Work(0, 0, 0, 0), mode="always").graph
    group = contraction.match(graph.outputs[0], graph.users())
    if isinstance(group, str):
        return group
    assert group.takes_channels_last or not case.channels_last
    return Found(case, model, group.in_format(last=case.channels_last))


def some(tilings: Sequence[Tiling], count: int, rng: random.Random) -> list[Tiling]:
    """The first of `tilings` and others that differ from it and from each other."""
    chosen = list(tilings[:1])
    for t in rng.sample(tilings[1:], min(len(tilings) - 1, 40)):
        if len(chosen) < count and all(
            sum(a != b for a, b in zip(_traits(t), _traits(c), strict=True)) > 1 for c in chosen
        ):
            chosen.append(t)
    return chosen


def _traits(t: Tiling) -> tuple[Any, ...]:
    warps = (t.warps_m > 1, t.warps_h > 1, t.warps_w > 1)
    return (t.m_tiles, warps, t.cells_d * t.cells_h, t.cells_w, t.rows_d, t.rows_h, t.chunk, t.together_d, t.together_h)


def draw(rng: random.Random) -> Case:
    """A random case whose group the family takes, at a size for the emulator."""
    n, transposed = rng.choice((1, 2, 2, 3)), rng.random() < 0.35

    def each(*values: int) -> tuple[int, ...]:
        return tuple(rng.choice(values) for _ in range(n))

    groups = rng.choice((1, 1, 1, 1, 2, 3))
    kernel, dilation = each(*(1, 2, 3, 4, 5) if n < 3 else (1, 2, 3)), each(1, 1, 1, 2)
    stride = each(1, 1, 2, 3) if n < 3 else each(1, 1, 2)
    padding: tuple[int, ...] | str = tuple(
        rng.randint(0, d * (k - 1) // 2 + 1) for k, d in zip(kernel, dilation, strict=True)
    )
    if not transposed and rng.random() < 0.1:
        stride, padding = (1,) * n, "same"
    extra = tuple(rng.randrange(max(s, d)) for s, d in zip(stride, dilation, strict=True)) if transposed else ()
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    largest = (40, 19, 8)[n - 1]
    sizes = tuple(rng.randint(min(r, largest), max(largest, r + 2)) for r in reach)
    if transposed:
        sizes = tuple(-(-s // t) + 1 for s, t in zip(sizes, stride, strict=True))
    case = Case(
        sizes,
        rng.randint(1, 20 if n < 3 else 8),
        rng.choice((1, 3, 5, 8, 16, 17, 24, 33, 40)),
        kernel,
        stride,
        padding,
        dilation,
        groups,
        transposed,
        extra,
        rng.random() < 0.7,
        tuple(rng.choices(list(STEPS), k=rng.choice((0, 0, 1, 2, 3)))),
    )
    case = _pooled(case, rng) if rng.random() < 0.6 else case
    dims = rng.choice(("", "", "c", "p", "cp"))
    kind = rng.choice(("sum", "mean", "max", "min", "logsumexp")) if dims else ""
    dtype = rng.choice((torch.float32,) * 5 + (torch.float64, torch.bfloat16, torch.float16))
    case = replace(
        case,
        fold=kind,
        fold_dims=dims,
        keepdim=rng.random() < 0.5,
        batch=rng.randint(1, 3),
        dtype=dtype,
        tf32=rng.random() < 0.5,
        channels_last=n > 1 and rng.random() < 0.4,
    )
    return _cropped(case, rng) if transposed and rng.random() < 0.3 else case


def _cropped(case: Case, rng: random.Random) -> Case:
    """Without some positions at both ends, where that leaves what windows there were."""
    assert not isinstance(case.padding, str)
    free = [d * (k - 1) - p for d, k, p in zip(case.dilation, case.kernel, case.padding, strict=True)]
    cropped = tuple((rng.randint(0, max(0, n)), rng.randint(0, max(0, n))) for n in free)
    lengths = [
        (length - 1) * s - 2 * p + d * (k - 1) + 1 - sum(crop)
        for length, s, p, d, k, crop in zip(
            case.sizes, case.stride, case.padding, case.dilation, case.kernel, cropped, strict=True
        )
    ]
    fits = all(length >= w for length, w in zip(lengths, case.window or (1,) * case.n, strict=True))
    return replace(case, cropped=cropped) if fits else case


def _pooled(case: Case, rng: random.Random) -> Case:
    kind = rng.choice(("max", "avg"))
    window = tuple(rng.choice((2, 2, 3, 4)) for _ in case.sizes)
    step = tuple(k if rng.random() < 0.6 else rng.choice((1, 2, 3)) for k in window)
    if case.transposed:
        step = tuple(-(-t // s) * s for t, s in zip(step, case.stride, strict=True))
    pads = tuple(rng.choice((0, 0, 1)) for _ in window)
    return replace(
        case,
        pool=kind,
        window=window,
        step=step,
        pool_padding=pads,
        ceil_mode=rng.random() < 0.25,
        include_pad=rng.random() < 0.5,
        divisor=rng.choice((None, None, 7)) if case.n > 1 else None,
        after=tuple(rng.choices(list(STEPS), k=rng.choice((0, 0, 1, 2)))),
    )


def draw_boxed(rng: random.Random) -> Case:
    """A random convolution and average pool that become a convolution of window sums."""
    n = rng.choice((1, 2, 2, 3))

    def each(*values: int) -> tuple[int, ...]:
        return tuple(rng.choice(values) for _ in range(n))

    case = draw(rng)
    kernel, window = each(1, 2, 3, 4) if n < 3 else each(1, 2, 3), each(2, 3, 4)
    step = tuple(k if rng.random() < 0.6 else rng.choice((2, 3, 4)) for k in window)
    sizes = tuple(rng.randint(12, 24) for _ in range(n)) if n < 3 else each(10, 11, 12)
    dilation, padded = each(1, 1, 2), rng.random() < 0.5
    most = [d * (k - 1) if padded else 0 for k, d in zip(kernel, dilation, strict=True)]
    return replace(
        case,
        sizes=sizes,
        channels=rng.randint(1, 9),
        kernel=kernel,
        stride=each(1, 1, 2),
        padding=tuple(rng.randint(0, p) for p in most),
        dilation=dilation,
        transposed=False,
        output_padding=(),
        cropped=(),
        channels_last=False,
        before=(),
        pool="avg",
        window=window,
        step=step,
        pool_padding=(0,) * n,
        ceil_mode=False,
        include_pad=True,
        divisor=None,
    )


def tolerance(case: Case, boxed: bool = False) -> float:
    """Of the error over the size of what is added up."""
    if case.dtype == torch.float32:
        return 2e-3 if boxed and case.tf32 else 2e-5 if case.tf32 else 3e-6
    # Window sums are rounded before the products, whose sum may be much smaller than they are.
    return {torch.float64: 1e-13, torch.bfloat16: 8e-3, torch.float16: 1e-3}[case.dtype] * (8 if boxed else 1)
