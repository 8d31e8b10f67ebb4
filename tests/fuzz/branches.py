"""Random models that branch: values used twice, gates, residuals, masks, in-place steps, several outputs.

Like `tests.fuzz.modules`, whose steps they share; a step here may read any earlier value, and an input may be a mask
or whole numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from random import Random

import torch
from torch import Tensor, nn

if __package__:
    from tests.fuzz import steps
    from tests.fuzz.modules import LARGEST, LOUDEST, _scramble
else:
    import steps
    from modules import LARGEST, LOUDEST, _scramble

Value = Tensor | tuple[Tensor, ...]


class Branched(nn.Module):
    """Step i applies `modules[which[i]]` to the values `reads[i]`; the values `returned` come out."""

    def __init__(self, reads: list[tuple[int, ...]], which: list[int], modules: list[nn.Module], returned: list[int]):
        super().__init__()
        self.kangaroo = nn.ModuleList(modules)  # a name that no generated text may hold
        self.reads, self.which, self.returned = reads, which, returned

    def forward(self, wallaby: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        values = [wallaby, *others]
        for reads, module in zip(self.reads, self.which, strict=True):
            values.append(self.kangaroo[module](*(values[i] for i in reads)))
        return tuple(values[i] for i in self.returned)


class Both(nn.Module):
    """A function of two values."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.function(a, b)


@dataclass(frozen=True)
class Call:
    """A model in float64, in evaluation mode, and the arguments of a call."""

    model: nn.Module
    args: tuple[Tensor, ...]


def draw(seed: int) -> Call:
    """The model of this seed."""
    for attempt in count():
        random = Random(f"branches {seed}.{attempt}")
        torch.manual_seed(random.randrange(2**31))
        args = _arguments(random)
        model = _model(random, args)
        if model is None:
            continue
        model.double().eval()
        _scramble(model)
        if right(copy.deepcopy(model), args):
            return Call(model, args)
    raise AssertionError


def _arguments(random: Random) -> tuple[Tensor, ...]:
    n = random.choice((0, 1, 2, 2, 2, 3))
    most = (0, 17, 9, 6)[n]
    lengths = [random.randint(1 if random.random() < 0.2 else 3, most) for _ in range(n)]
    shape = (random.choice((1, 2, 2, 3)), random.choice((1, 2, 3, 4, 6)), *lengths)
    args = [torch.randn(shape, dtype=torch.float64)]
    if random.random() < 0.3:
        args.append(random.choice((torch.rand(shape) > 0.5, torch.randint(-3, 4, shape), torch.randn(shape).double())))
    return tuple(args)


def _model(random: Random, args: tuple[Tensor, ...]) -> Branched | None:
    """Steps over the arguments; `None` where too few came about."""
    values, reads, which, modules = list(args), [], [], []
    for _ in range(random.randint(2, 7)):
        for _ in range(8):
            step = _step(random, values, modules)
            if step is None:
                continue
            read, module = step
            if module not in modules:
                modules.append(module)
            reads.append(read)
            which.append(modules.index(module))
            values.append(module(*(values[i] for i in read)).detach())
            break
    if len(reads) < 2:
        return None
    free = [i for i in range(len(args), len(values)) if not any(i in r for r in reads)]
    if random.random() < 0.2:
        free.append(random.randrange(len(args), len(values)))
    return Branched(reads, which, modules, free)


def _step(random: Random, values: list[Tensor], modules: list[nn.Module]) -> tuple[tuple[int, ...], nn.Module] | None:
    """A module and the values to apply it to: the newest ones rather than others."""
    places = range(len(values))
    i = random.choice([*places, *[len(values) - 1] * 2 * len(values)])
    try:
        if random.random() < 0.35:
            read: tuple[int, ...] = (i, random.choice(places))
            module: nn.Module = Both(random.choice(TWO))
        elif modules and random.random() < 0.06:
            read, module = (i,), random.choice(modules)  # its parameters are used twice
        else:
            kinds = random.choice((steps.CONTRACTIONS, steps.MIDDLE, steps.REDUCTIONS, steps.TAILS, OWN, OWN))
            read, module = (i,), random.choice(kinds)(random, values[i]).double().eval()
    except (RuntimeError, ValueError, IndexError, TypeError):
        return None
    return (read, module) if right(module, tuple(values[j] for j in read)) else None


def right(function: Callable[..., Value], args: tuple[Tensor, ...]) -> bool:
    """Whether PyTorch takes these arguments, and what comes out is of moderate size and magnitude."""
    try:
        with torch.no_grad():
            found = function(*(a.clone() for a in args))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    results = found if isinstance(found, tuple) else (found,)
    return all(
        0 < r.numel() <= LARGEST and bool(torch.isfinite(r).all()) and float(r.double().abs().max()) <= LOUDEST
        for r in results
    )


def _own(*texts: str) -> list[steps.Step]:
    """Steps from texts of functions of x."""
    drawn = [steps._function(text) for text in texts]
    return [lambda random, x, draw=draw: draw(random) for draw in drawn]


def _view(random: Random, x: Tensor) -> nn.Module:
    dims = list(range(1, x.ndim))
    random.shuffle(dims)
    d = random.randrange(1, x.ndim)
    begin = random.randrange(x.shape[d])
    forms: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("flatten", lambda x: x.flatten(1)),
        (f"permute 0, {dims}", lambda x: x.permute(0, *dims)),
        (f"permuted copy 0, {dims}", lambda x: x.permute(0, *dims).contiguous()),
        (f"from {begin} along {d}", lambda x: x.narrow(d, begin, x.shape[d] - begin)),
        (f"every second along {d}", lambda x: x[(slice(None),) * d + (slice(None, None, 2),)]),
        ("unsqueeze", lambda x: x.unsqueeze(d)),
        ("channels in two", lambda x: x.unflatten(1, (2, -1)).sum(1)),
        ("transpose 0 and 1", lambda x: x.transpose(0, 1)),
    ]
    return steps.Apply(*random.choice(forms))


TWO: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    lambda a, b: a / (b.abs() + 1),
    lambda a, b: torch.maximum(a, b.to(a.dtype)),
    lambda a, b: torch.where(b > 0, a, -a),
    lambda a, b: torch.cat([a, b.to(a.dtype)], 1),
    lambda a, b: a * torch.sigmoid(b),
    lambda a, b: a.masked_fill(b.bool(), 0.25),
    lambda a, b: a.flatten(1) @ b.to(a.dtype).flatten(1).mT,
    lambda a, b: torch.addcmul(a, a, b.to(a.dtype)),
    lambda a, b: a.clone().add_(b),
]
OWN: list[steps.Step] = [
    *[_view] * 6,
    *_own(
        "x * torch.sigmoid(x)",
        "x + torch.tanh(x)",
        "F.softmax(x, -1) * x",
        "x - x.mean(-1, keepdim=True)",
        "x / (x.square().sum(1, keepdim=True) + 1)",
        "x.clone().relu_().add_(1)",
        "x.clone().mul_(0.5).clamp_(max=1.0)",
        "torch.cumsum(x, -1)",
        "(x > 0.1) & (x < 0.9)",
        "(x > 0).to(x.dtype)",
        "x.argmax(1)",
        "x.to(torch.int32)",
        "x.double()",
        "x.to(torch.float32) * 2",
        "x.sum(-1).max(-1)[0]",
        "x.amax(1, keepdim=True) - x.amin(1, keepdim=True)",
        "torch.sort(x, -1)[0]",
        "x.logsumexp(1)",
        "x.mean((-2, -1))",
        "x.std(1)",
        "x * x.new_ones(()) + x.shape[0]",
        "x.expand(2, *x.shape).sum(0)",
    ),
]
