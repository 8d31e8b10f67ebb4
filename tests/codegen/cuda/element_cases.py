"""Groups that read what has the shape of a convolution's output, or a number per channel of each sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
import torch.nn.functional as F
from codegen.cuda.contraction_cases import _SLIDES_FIRST, Case, Model, tolerance
from emulation.emulate import emulate
from torch import Tensor

from fusewright.capture import capture
from fusewright.ir import ops
from fusewright.ir.node import Node
from fusewright.kernel import Kernel
from fusewright.plan import Work
from fusewright.rules import RULES
from fusewright.rules.engine import rewrite
from fusewright.schedule import contraction
from fusewright.schedule.contraction import Contraction

# Of the convolution's output y, a number per channel p, a tensor like the output r, and (N, C, 1, ...) s.
Read = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
READS: dict[str, Read] = {
    "residual": lambda y, p, r, s: F.relu(y + r),
    "behind a channel": lambda y, p, r, s: F.relu(y * p + r),
    "ahead of a channel": lambda y, p, r, s: F.gelu(y + r) * p + 0.5,
    "twice": lambda y, p, r, s: (y + r) * r.sigmoid(),
    "scale": lambda y, p, r, s: y * s,
    "scale and residual": lambda y, p, r, s: F.relu(y * s + r * p),
    "gate": lambda y, p, r, s: torch.where(y > 0.1, y, r),
    "the input": lambda y, p, r, s: F.relu(y + r),
    "sine": lambda y, p, r, s: (y + r).sin(),
    "a function": lambda y, p, r, s: y * torch.sigmoid(r) + p,
    "a function of all": lambda y, p, r, s: y + F.relu(r * s + p),
    "a comparison": lambda y, p, r, s: torch.where(r > 0.2, y, 0.5 * y),
}


class Reading(Model):
    def __init__(self, case: Case, read: str) -> None:
        super().__init__(case)
        self.read = read

    def forward(self, x: Tensor, r: Tensor, s: Tensor) -> Tensor:
        return self.fold(self.values(x, r, s))

    def values(self, x: Tensor, r: Tensor, s: Tensor) -> Tensor:
        y = self.pooled(self.conv(x)) if self.case.pool else self.conv(x)
        return READS[self.read](y, self.p, x if self.read == "the input" else r, s)

    def fold(self, y: Tensor) -> Tensor:
        c = self.case
        return getattr(torch, {"max": "amax", "min": "amin"}.get(c.fold, c.fold))(y, c.dims, c.keepdim) if c.fold else y


@dataclass(frozen=True)
class Found:
    """A case's group and what its kernel is called with; `like` is the type of what is as large as the output."""

    case: Case
    model: Reading
    group: Contraction
    like: torch.dtype

    @property
    def cells(self) -> tuple[int, int, int]:
        """Cells of the whole output along d, h, w."""
        lengths = self.group.along_axes([int(n) for n in self.group.conv.shape[2:]])
        d, h, w = (-(-n // a.stride) for n, a in zip(lengths, self.group.axes, strict=True))
        return d, h, w

    def example(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        return _example(self.case, self.model, self.like, seed)

    def tensors(self, example: tuple[Tensor, ...]) -> list[Tensor]:
        """Operands of a call."""
        return [self._value(node, example) for node in self.group.tensors]

    def _value(self, node: Node, example: tuple[Tensor, ...]) -> Tensor:
        """An input, a parameter, or what a pointwise function makes of some."""
        if isinstance(node.op, ops.Input):
            return example[node.op.index]
        if isinstance(node.op, ops.Param):
            return self.model.get_parameter(node.op.path).detach()
        assert isinstance(node.op, ops.Pointwise), node
        values = [f"args[{i}]" for i in range(len(node.inputs))]
        args = [self._value(a, example) for a in node.inputs]
        found: Tensor = eval(node.op.traits.torch.format(*values), {"torch": torch, "F": F, "args": args})
        return found

    def reference(self, example: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """The value in float64, and how large what is added up in it is."""
        wide = Reading(self.case, self.model.read).double()
        wide.load_state_dict(self.model.state_dict())
        with torch.no_grad():
            y = wide.values(*(t.double() for t in example))
            want = wide.fold(y)
            size = y.nan_to_num(0, 0, 0).abs().amax()
            if self.case.fold == "sum":
                size = torch.maximum(y.abs().sum(self.case.dims, self.case.keepdim), size)
            if self.case.fold == "logsumexp":  # of numbers near zero it is the logarithm of how many there are
                size = size.maximum(want.abs().amax())
            return want, size


def _example(case: Case, model: Reading, like: torch.dtype, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    x = case.example(seed)
    with torch.no_grad():
        y = model.pooled(model.conv(x)) if case.pool else model.conv(x)
    r = torch.randn(y.shape).to(like)
    r = r.to(memory_format=case.last) if case.channels_last else r
    return x, r, (torch.rand(y.shape[:2]) + 0.5).to(case.dtype).reshape(*y.shape[:2], *(1,) * case.n)


def find(case: Case, read: str, like: torch.dtype | None = None) -> Found:
    """The group of a case, whose average pool moves before its convolution."""
    model, like = Reading(case, read), like or case.dtype
    graph = capture(model, _example(case, model, like, 0), {}).graph
    if case.pool:
        rules = [rule for rule in RULES if rule.name == _SLIDES_FIRST]
        graph = rewrite(graph, rules, lambda node: Work(0, 0, 0, 0), mode="always").graph
    group = contraction.match(graph.outputs[0], graph.users())
    assert isinstance(group, Contraction), group
    return Found(case, model, group.in_format(last=case.channels_last), like)


def assert_right(f: Found, kernel: Kernel, order: str = "forward", seed: int = 0, sanitize: bool = False) -> None:
    """The kernel's value, emulated, is the model's."""
    example = f.example(seed)
    assert_close(f, emulate(kernel, *f.tensors(example), order=order, sanitize=sanitize), example)


def assert_close(f: Found, got: Tensor, example: tuple[Tensor, ...]) -> None:
    want, size = f.reference(example)
    assert got.shape == want.shape and got.dtype == f.group.root.dtype
    assert not f.case.channels_last or f.case.fold or got.is_contiguous(memory_format=f.case.last)
    error = ((got.double() - want).abs() / (size + 1e-3)).nan_to_num(inf)
    assert error.max() <= tolerance(f.case, bool(f.case.pool)), error.max()


def assert_finite_as_eager(f: Found, run: Callable[..., Tensor]) -> None:
    """NaN and infinities of what is as large as the output surface where eager has them, and nowhere else."""
    x, r, s = f.example()
    middle = tuple(n // 2 for n in r.shape[2:])
    for channel, value in enumerate((torch.nan, inf, -inf)):
        r[(0, channel, *middle)] = value
    want, _ = f.reference((x, r, s))
    got = run(*f.tensors((x, r, s))).double()
    torch.testing.assert_close(got.isnan(), want.isnan())
    torch.testing.assert_close(got[want.isinf()], want[want.isinf()])
    assert want.isnan().any() and want.isinf().any() and got[1:].isfinite().all()
