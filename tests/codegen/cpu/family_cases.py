"""One kernel of any family by name, with operands and what it should give: for tests that run it in unusual ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import test_cpu_contraction
import torch
from codegen.cuda import test_range_kernels, test_sample_kernels, test_stream_kernels
from codegen.cuda.contraction_cases import tolerance
from torch import Tensor

from fusewright.codegen.cpu import ranges, sample, stream
from fusewright.kernel import Kernel

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Case:
    """A kernel, its operands, its value in float64, and how far off a result may be."""

    kernel: Kernel
    tensors: tuple[Tensor, ...]
    want: Tensor
    allowed: Tensor

    def assert_right(self, got: Tensor) -> None:
        assert got.shape == self.want.shape and got.dtype == self.kernel.output.dtype
        error = (got.double() - self.want).abs()
        assert (error <= self.allowed).all(), f"off by {float((error / self.allowed).max()):.3g} times what is allowed"


def _scaled(want: Tensor, dtype: torch.dtype, units: float = 8) -> Tensor:
    """So many units in the last place of the largest value."""
    return torch.full_like(want, units * torch.finfo(dtype).eps * max(float(want.abs().max()), 1e-3))


def contraction_of(name: str) -> Case:
    boxed = name in test_cpu_contraction.BOXED
    case = (test_cpu_contraction.BOXED if boxed else test_cpu_contraction.CASES)[name]
    f = test_cpu_contraction.found(case, boxed)
    strips = test_cpu_contraction.ways(f)
    cut = replace(strips[-1], strip=(1, 2, 3) if name != "flat" else (1, 1, 20))  # sizes are no multiples of it
    x = case.example()
    want, size = f.reference(x)
    allowed = torch.maximum(size, want.abs().amax()).clamp_min(1e-30).expand_as(want) * tolerance(case, boxed)
    return Case(test_cpu_contraction.kernel(f, cut), tuple(f.tensors(x)), want, allowed)


def ranges_of(name: str) -> Case:
    root = test_range_kernels.CASES[name]()
    r = test_range_kernels.parsed(root)
    x = test_range_kernels.random(r.x, 1)
    want = test_range_kernels.expected(root.op, test_range_kernels._value(r.value, r.x, x.double()))
    narrow = max(torch.finfo(root.dtype).eps, torch.finfo(torch.float32).eps if r.value is not r.x else 0)
    return Case(ranges.kernel(r, "fused_test"), (x,), want, want.abs() * narrow + 1e-12 + 8 * narrow * want.abs().max())


def stream_of(name: str) -> Case:
    root = test_stream_kernels.CHAINS[name]()
    s = test_stream_kernels.stream_of(root)
    given = {n: test_stream_kernels.random(n, i) for i, n in enumerate(s.tensors)}
    want = test_stream_kernels.reference(root, given)
    return Case(stream.kernel(s, "fused_test"), tuple(given.values()), want, _scaled(want, root.dtype))


def sample_of(name: str) -> Case:
    root = test_sample_kernels.CASES[name]()
    p = test_sample_kernels.program(root)
    given = {n: test_sample_kernels.random(n, i) for i, n in enumerate(p.leaves)}
    want = test_sample_kernels.reference(root, given)
    return Case(sample.kernel(p, "fused_test"), tuple(given.values()), want, _scaled(want, root.dtype))


FAMILIES: dict[str, Callable[[str], Case]] = {
    "contraction": contraction_of,
    "range reduction": ranges_of,
    "sample program": sample_of,
    "stream": stream_of,
}
