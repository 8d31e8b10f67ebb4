"""Random products: what one may be made of, its group, its value in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from codegen.cuda.contraction_cases import STEPS
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.schedule.product import Product, match

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@dataclass(frozen=True)
class Case:
    """x (`shape`) times a weight, pointwise functions, and a reduction over features ("f"), tokens ("t") or both."""

    shape: tuple[int, ...]
    features: int
    steps: tuple[str, ...]
    fold: str
    over: str
    dtype: torch.dtype = F32
    tf32: bool = False
    bias: bool = True
    transposed: bool = True
    keepdim: bool = False
    turned: bool = False  # x lies as (N, K, M)
    repeated: bool = False  # and the weight is one for every sample

    @property
    def dims(self) -> tuple[int, ...]:
        last = len(self.shape) - 1
        return (*(range(1, last) if "t" in self.over else ()), *((last,) if "f" in self.over else ()))

    def drawn(self, batch: int) -> Tensor:
        """A random x, as it lies."""
        x = torch.randn(batch, *self.shape[1:])
        return x.mT.contiguous() if self.turned else x

    def short(self, x: Tensor) -> Tensor:
        """Numbers of tf32 where those may be used."""
        return (x.contiguous().view(torch.int32) & -8192).view(F32) if self.tf32 and self.dtype == F32 else x


CASES = {
    "rows, logsumexp": Case((70, 130), 140, ("relu",), "logsumexp", "f", keepdim=True),
    "rows, mean": Case((33, 64), 300, ("times channel",), "mean", "f", tf32=True, bias=False),
    "tokens, over tokens": Case((3, 50, 131), 129, ("add channel", "sigmoid"), "mean", "t"),
    "tokens, over features": Case((2, 5, 7, 128), 144, ("gate",), "max", "f", tf32=True),
    "tokens, over both": Case((3, 40, 96), 200, ("square",), "sum", "ft", F64),
    "a weight (in, out)": Case((2, 17, 100), 170, ("reverse",), "min", "f", transposed=False, bias=False),
    "more features than a block has": Case((20, 32), 704, ("minus one",), "logsumexp", "f"),
    "bfloat16": Case((5, 30, 128), 136, ("relu",), "logsumexp", "t", BF16),
    "turned, over features": Case((3, 40, 128), 140, ("relu",), "logsumexp", "f", turned=True),
    "turned, over tokens": Case((3, 50, 131), 129, ("add channel",), "mean", "t", tf32=True, turned=True),
    "turned, over both": Case((2, 17, 100), 170, ("square",), "sum", "ft", F64, keepdim=True, turned=True),
    "turned, in a batch": Case((3, 70, 128), 144, ("gate",), "max", "t", turned=True, repeated=True),
    "float16": Case((50, 160), 128, ("tanh", "both"), "mean", "f", F16),
}


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        k, o = case.shape[-1], case.features
        weight = torch.randn((o, k) if case.transposed else (k, o)) / k**0.5
        self.case, self.w = case, nn.Parameter(case.short(weight))
        self.b = nn.Parameter(torch.randn(o)) if case.bias else None
        self.p, self.q = nn.Parameter(torch.rand(o) + 0.5), nn.Parameter(torch.tensor(0.75))
        self.eval().to(case.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y, c = self.before_fold(x), self.case
        return getattr(torch, {"max": "amax", "min": "amin"}.get(c.fold, c.fold))(y, c.dims, c.keepdim)

    def before_fold(self, x: Tensor) -> Tensor:
        x = x.mT if self.case.turned else x
        if self.case.repeated:
            y = x @ self.w.mT.expand(len(x), -1, -1)
            y = y if self.b is None else y + self.b
        elif self.case.transposed:
            y = nn.functional.linear(x, self.w, self.b)
        else:
            y = x @ self.w if self.b is None else x @ self.w + self.b
        for name in self.case.steps:
            y = STEPS[name](y, self.p, self.q)
        return y


@dataclass(frozen=True)
class Found:
    """A case's group, and its model."""

    case: Case
    model: Model
    group: Product

    @property
    def rows(self) -> int:
        """Positions of a sample."""
        shape = self.case.shape
        return torch.Size(shape[1:-1] if self.group.by_sample else shape[:-1]).numel()

    def assert_right(self, run: Callable[..., Tensor], batch: int | None = None) -> None:
        """`run`, called with the operands for `batch` samples, gives what the model does in float64."""
        case = self.case
        torch.manual_seed(1)
        x = case.short(case.drawn(batch or case.shape[0])).to(case.dtype)
        wide = Model(case).double()
        wide.load_state_dict(self.model.state_dict())
        with torch.no_grad():
            want, values = wide(x.double()), wide.before_fold(x.double()).abs()
            got = run(*(x if isinstance(n.op, ops.Input) else self.value(n) for n in self.group.tensors))
        assert got.shape == want.shape and got.dtype == case.dtype
        size = values.sum(case.dims, case.keepdim) if case.fold == "sum" else values.amax()
        if case.fold == "logsumexp":  # of numbers near zero it is the logarithm of how many there are
            size = size.maximum(want.abs().amax())
        relative = {F64: 1e-13, F32: 2e-5 if case.tf32 else 3e-6, F16: 2e-3, BF16: 1e-2}[case.dtype]
        assert ((got.double() - want).abs() <= relative * (size + 1e-3)).all(), case

    def value(self, node: Node) -> Tensor:
        """A parameter, or the function of one that "both" has."""
        path = node.op.path if isinstance(node.op, ops.Param) else node.arg(0).op.path
        value = self.model.get_parameter(path).detach()
        return value if isinstance(node.op, ops.Param) else value.sigmoid()


def found(case: Case) -> Found:
    model = Model(case)
    graph = capture(model, (case.drawn(case.shape[0]).to(case.dtype),), {}).graph
    group = match(graph.outputs[0], graph.users())
    assert isinstance(group, Product), group
    return Found(case, model, group)


def draw(rng: random.Random) -> Case:
    """A random product at a size for the emulator."""
    tokens = tuple(rng.randint(1, 9) for _ in range(rng.choice((0, 1, 1, 2))))
    return Case(
        (rng.randint(1, 40 if not tokens else 4), *tokens, rng.choice((1, 3, 16, 24, 37, 70))),
        rng.choice((1, 5, 16, 33, 96, 130)),
        tuple(rng.choices(list(STEPS), k=rng.choice((0, 1, 2)))),
        rng.choice(("sum", "mean", "max", "min", "logsumexp")),
        rng.choice(("f", "t", "ft") if tokens else ("f",)),
        rng.choice((F32, F32, F32, F64, BF16, F16)),
        tf32=rng.random() < 0.5,
        bias=rng.random() < 0.6,
        transposed=rng.random() < 0.7,
        keepdim=rng.random() < 0.5,
        turned=len(tokens) == 1 and rng.random() < 0.5,
    )
