"""Kernels of products: the generated CUDA C++ runs on the CPU, and is compared with the model in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from contraction_cases import some
from emulation.emulate import ORDERS, emulate
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.codegen.cuda import contraction
from fusewright.codegen.product import of_tensors
from fusewright.ir import ops
from fusewright.kernel import Kernel
from fusewright.schedule import tiling
from fusewright.schedule.product import Product, match
from fusewright.schedule.tiling import Tiling

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@dataclass(frozen=True)
class Case:
    """A linear layer of x (shape) to `features`, and what follows: of its output and a number per feature."""

    shape: tuple[int, ...]
    features: int
    behind: Callable[[Tensor, Tensor], Tensor]
    dtype: torch.dtype = F32
    tf32: bool = False
    bias: bool = True
    transposed: bool = True


CASES = {
    "rows, logsumexp": Case((70, 130), 140, lambda y, p: y.relu().logsumexp(1, keepdim=True)),
    "rows, mean": Case((33, 64), 300, lambda y, p: (y * p).mean(1), tf32=True, bias=False),
    "tokens, over tokens": Case((3, 50, 131), 129, lambda y, p: (y + p).sigmoid().mean(1)),
    "tokens, over features": Case((2, 5, 7, 128), 144, lambda y, p: (y * y.sigmoid()).amax(-1), tf32=True),
    "tokens, over both": Case((3, 40, 96), 200, lambda y, p: y.square().sum((1, 2)), F64),
    "a weight (in, out)": Case((2, 17, 100), 170, lambda y, p: (2 - y).amin(1), transposed=False, bias=False),
    "more features than a block has": Case((20, 32), 704, lambda y, p: (y - p).logsumexp(1)),
    "bfloat16": Case((5, 30, 128), 136, lambda y, p: y.relu().logsumexp(1), BF16),
    "float16": Case((50, 160), 128, lambda y, p: y.tanh().sum(1), F16),
}


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        k, o = case.shape[-1], case.features
        self.case, self.p = case, nn.Parameter(torch.rand(o))
        self.w = nn.Parameter(short(torch.randn((o, k) if case.transposed else (k, o)) / k**0.5, case))
        self.b = nn.Parameter(torch.randn(o)) if case.bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.w, self.b) if self.case.transposed else x @ self.w
        return self.case.behind(y, self.p)


def short(x: Tensor, case: Case) -> Tensor:
    """Numbers of tf32 where those may be used."""
    return (x.view(torch.int32) & -8192).view(F32) if case.tf32 else x


def found(case: Case) -> tuple[Model, Product, list[Tiling]]:
    model = Model(case).to(case.dtype).eval()
    graph = capture(model, (torch.randn(case.shape).to(case.dtype),), {}).graph
    group = match(graph.outputs[0], graph.users())
    assert isinstance(group, Product), group
    rows = torch.Size(case.shape[1:-1] if group.by_sample else case.shape[:-1]).numel()
    return model, group, tiling.candidates(group.contraction, (1, 1, rows), case.dtype.itemsize)


def kernel(case: Case, group: Product, t: Tiling, blocks: int | None = None) -> Kernel:
    reference = "def reference(*operands): ..."
    view = contraction.generate(group.contraction, t, "fused_test", reference, tf32=case.tf32, blocks=blocks)
    return of_tensors(view, group)


def assert_right(
    case: Case, model: Model, group: Product, t: Tiling, order: str = "forward", blocks: int | None = None,
    batch: int | None = None,
) -> None:  # fmt: skip
    torch.manual_seed(1)
    x = short(torch.randn(batch or case.shape[0], *case.shape[1:]), case).to(case.dtype)
    tensors = [x if isinstance(n.op, ops.Input) else model.get_parameter(n.op.path).detach() for n in group.tensors]
    got = emulate(kernel(case, group, t, blocks), *tensors, order=order)
    wide = Model(case).double()
    wide.load_state_dict(model.state_dict())
    with torch.no_grad():
        want = wide(x.double())
    assert got.shape == want.shape and got.dtype == case.dtype
    relative = {F64: 1e-13, F32: 1e-5 if case.tf32 else 2e-6, F16: 2e-3, BF16: 1e-2}[case.dtype]
    assert (got - want).abs().max() <= relative * want.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_as_the_model_in_float64(name: str) -> None:
    """The best tiling and one that differs from it, every order of threads."""
    case = CASES[name]
    model, group, tilings = found(case)
    for t, order in zip(some(tilings, 3, random.Random(1)), ORDERS, strict=False):
        assert_right(case, model, group, t, order)


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("name", ["rows, logsumexp", "tokens, over tokens", "more features than a block has"])
def test_another_batch(name: str, batch: int) -> None:
    """Rows, be they positions or samples, are counted at run time."""
    model, group, tilings = found(CASES[name])
    assert_right(CASES[name], model, group, tilings[0], batch=batch)


@pytest.mark.parametrize("blocks", [1, 2])
def test_one_launch_over_tokens(blocks: int) -> None:
    case = CASES["tokens, over tokens"]
    model, group, tilings = found(case)
    t = next(t for t in tilings if t.block_m >= case.features and t.warps in (4, 8, 16))
    assert len(kernel(case, group, t, blocks).launches) == 1
    for order in ORDERS:
        assert_right(case, model, group, t, order, blocks)


def test_more_rows_than_32_bits_count_are_refused() -> None:
    """All rows are one sample's, inside which a thread counts in 32 bits."""
    case = CASES["rows, mean"]
    _, group, tilings = found(case)
    assert kernel(case, group, tilings[0]).counts == ("rows_0 * 64",)
