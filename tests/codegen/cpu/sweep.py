"""Random models of every family, each called with tensors of many shapes that lie in memory in many ways.

What runs is the whole program with its kernels, built with ``kernels="always"``; what it is compared with, the model in
float64.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from codegen.cuda import contraction_cases
from codegen.cuda.contraction_cases import STEPS
from torch import Tensor, nn

from fusewright import pipeline
from fusewright.kernel import Kernel
from fusewright.pipeline import Built
from fusewright.runtime.operators import operator

DTYPES = (torch.float32,) * 5 + (torch.float64, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Model:
    """A module in its dtype, an input shape that it takes, and how its rules are to be applied."""

    module: nn.Module
    shape: tuple[int, ...]
    dtype: torch.dtype
    mode: str = "never"


# -- models ------------------------------------------------------------------------------------------------------------


def contraction(rng: random.Random) -> Model:
    """A convolution of any kind and what follows it."""
    boxed = rng.random() < 0.25
    case = (contraction_cases.draw_boxed if boxed else contraction_cases.draw)(rng)
    if rng.random() < 0.25:  # depthwise
        case = replace(case, channels=1, features=rng.choice((1, 1, 2, 3)), groups=rng.choice((2, 5, 17, 24, 40)))
    module = contraction_cases.Model(case)
    mode = "always" if boxed else "never"
    return Model(module, (case.batch, case.channels * case.groups, *case.sizes), case.dtype, mode)


class Chain(contraction_cases.Model):
    """What follows the convolution, of a value in memory."""

    def __init__(self, case: contraction_cases.Case) -> None:
        super().__init__(replace(case, features=case.channels, groups=1, transposed=False))
        self.conv = nn.Identity()


def stream(rng: random.Random) -> Model:
    """Pointwise functions, a pool, a reduction."""
    case = contraction_cases.draw(rng)
    sizes = tuple(rng.choice((1, 2, 5, 7, 8, 13, 16, 31)) for _ in case.sizes)
    chain = case.before or tuple(rng.choices(list(STEPS), k=2))
    case = replace(case, sizes=sizes, before=chain, channels=rng.choice((1, 2, 3, 7, 17)))
    return Model(Chain(case), (rng.choice((1, 2, 3, 5)), case.channels, *sizes), case.dtype)


class Summed(nn.Module):
    """A convolution that is averaged or summed over positions: range sums of its input, and a product."""

    def __init__(self, conv: nn.Module, dims: tuple[int, ...], kind: str) -> None:
        super().__init__()
        self.conv, self.dims, self.kind = conv, dims, kind

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = getattr(self.conv(x), self.kind)(self.dims)
        return y


def range_reduction(rng: random.Random) -> Model:
    n = rng.choice((1, 2, 2, 3))
    transposed = rng.random() < 0.4
    kernel = tuple(rng.choice((1, 2, 3, 5)) for _ in range(n))
    stride = tuple(rng.choice((1, 1, 2, 3)) for _ in range(n))
    padding = tuple(rng.randint(0, k // 2) for k in kernel)
    channels, dtype = rng.choice((1, 2, 3, 5, 8)), rng.choice(DTYPES)
    make = getattr(nn, f"Conv{'Transpose' if transposed else ''}{n}d")
    conv = make(channels, rng.choice((1, 4, 7)), kernel, stride, padding, bias=rng.random() < 0.7)
    sizes = tuple(k + rng.choice((0, 1, 4, 10, 24)) for k in kernel)
    dims = tuple(range(2, n + 2))
    module = Summed(conv, dims if n == 1 or rng.random() < 0.7 else dims[1:], rng.choice(("mean", "sum")))
    return Model(module.to(dtype), (rng.choice((1, 2, 3, 5)), channels, *sizes), dtype, "always")


class Rows(nn.Module):
    """Small operations on the rows of a sample."""

    def __init__(self, steps: list[nn.Module | str], last: int) -> None:
        super().__init__()
        self.steps = [s if isinstance(s, str) else i for i, s in enumerate(steps)]
        self.modules_ = nn.ModuleDict({str(i): s for i, s in enumerate(steps) if not isinstance(s, str)})
        self.bias = nn.Parameter(torch.randn(last))

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = getattr(self, step)(x) if isinstance(step, str) else self.modules_[str(step)](x)
        return x

    def soft(self, x: Tensor) -> Tensor:
        return (x * 1.5).softmax(-1)

    def log_soft(self, x: Tensor) -> Tensor:
        return x.log_softmax(1)

    def biased(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.bias)

    def scaled(self, x: Tensor) -> Tensor:
        return x * x.sigmoid()

    def turned(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2) * 2 if x.ndim == 3 else -x

    def centred(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    def logsumexp(self, x: Tensor) -> Tensor:
        return x.logsumexp(-1)

    def variance(self, x: Tensor) -> Tensor:
        return x.var(-1, correction=0)

    def largest(self, x: Tensor) -> Tensor:
        return x.amax(-1, keepdim=True)


def sample_program(rng: random.Random) -> Model:
    last, dtype = rng.choice((1, 2, 7, 12, 33)), rng.choice(DTYPES)
    shape = (rng.choice((1, 2, 3, 5)), *((rng.choice((1, 3, 4, 9)),) if rng.random() < 0.5 else ()), last)
    steps: list[nn.Module | str] = []
    for _ in range(rng.randint(1, 3)):
        wide = rng.choice((1, 3, 16, 40))
        kinds = [nn.Linear(last, wide), nn.LayerNorm(last), nn.RMSNorm(last), "scaled", "centred", "soft"]
        step = rng.choice(kinds)
        last = wide if isinstance(step, nn.Linear) else last
        steps.append(step)
    steps.append("biased" if rng.random() < 0.5 else "scaled")
    steps += rng.choice((["soft"], ["log_soft"], ["soft", "turned"], ["logsumexp"], ["variance"], ["largest"]))
    return Model(Rows(steps, last).to(dtype), shape, dtype)


FAMILIES: dict[str, Callable[[random.Random], Model]] = {
    "contraction": contraction,
    "range reduction": range_reduction,
    "sample program": sample_program,
    "stream": stream,
}

# -- calls -------------------------------------------------------------------------------------------------------------


def laid_out(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same values in every way that memory can hold them, and others that share elements."""
    yield "contiguous", x
    if x.ndim in (4, 5):
        last = torch.channels_last if x.ndim == 4 else torch.channels_last_3d
        yield "channels-last", x.contiguous(memory_format=last)
    order = (*range(1, x.ndim), 0)
    yield "permuted", x.permute(order).contiguous().permute([order.index(i) for i in range(x.ndim)])
    yield "strided", torch.stack([x, -x], -1)[..., 0]
    yield "unaligned", torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    yield "expanded", x[:1].expand(x.shape)
    yield "expanded along the last", x[..., :1].expand(x.shape)


def check(family: str, seed: int) -> int:
    """A random model of the family is right at several batch sizes and layouts; how many calls were compared.

    0 where PyTorch itself cannot run the model, or it has no group of the family.
    """
    rng = random.Random(f"{family} {seed}")
    torch.manual_seed(seed)
    model = FAMILIES[family](rng)
    module, generator = model.module.eval(), torch.Generator().manual_seed(seed)
    x = torch.randn(model.shape, generator=generator).to(model.dtype)
    example = rng.choice([t for name, t in laid_out(x) if name in ("contiguous", "channels-last")])
    try:
        module(x)
    except (RuntimeError, NotImplementedError):  # no window fits, or ATen has no such operation in half precision
        return 0
    built = build(model, example)
    if not any(c.family == family and c.path == "generated" for c in built.choices):
        return 0
    program, count = Program(built), 0
    for batch in {model.shape[0], *((1, 7) if built.captured.graph.symbols else ())}:
        whole = torch.randn(batch, *model.shape[1:], generator=generator).to(model.dtype)
        for layout, given in rng.sample([*laid_out(whole)], 3):
            program.check(module, given, f"{family} {seed}: {tuple(given.shape)} {given.dtype}, {layout}")
            count += 1
    return count


def build(model: Model, example: Tensor) -> Built:
    """All passes, with a kernel wherever there can be one."""
    mode: Any = model.mode
    return pipeline.build(model.module, (example,), {}, mode=mode, kernels="always", measure=False)


class Program:
    """A built program that counts how often its kernels run."""

    def __init__(self, built: Built) -> None:
        self.kernels, self.ran = built.program.kernels, 0
        self.derive, self.forward = built.program.functions()
        self.forward.__globals__.update({k.name: self._counting(k) for k in self.kernels})

    def _counting(self, kernel: Kernel) -> Callable[..., Tensor]:
        run = operator(kernel).launch

        def counted(*tensors: Tensor) -> Tensor:
            self.ran += 1
            return run(*tensors)

        return counted

    def check(self, module: nn.Module, x: Tensor, what: str) -> None:
        """Off by no more than eager is, or than a change of the input's last bits makes, a few times."""
        before = self.ran
        wide = copy.deepcopy(module).double()
        with torch.no_grad():
            eager, got = module(x), self.forward(module, x, *self.derive(module))
            want, moved = wide(x.double()), wide(_shaken(x))
        (got,) = got if isinstance(got, tuple) else (got,)
        assert self.ran > before, f"{what}: no kernel ran"
        assert got.shape == want.shape and got.dtype == eager.dtype, what
        eps, scale = torch.finfo(x.dtype).eps, _largest(want)
        allowed = 8 * max(_largest(eager.double() - want), _largest(moved - want)) + 16 * eps * max(scale, 1e-3)
        error = _largest(got.double() - want)
        assert error <= allowed, f"{what}: off by {error:.3e}, {allowed:.3e} allowed"


def _shaken(x: Tensor) -> Tensor:
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.double() * (1 + torch.finfo(x.dtype).eps * noise)


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0
