"""Records of small hand-written kernels, and what a right or a wrong one shows."""

from __future__ import annotations

import torch
from torch import Tensor

from emulation import emulate
from emulation.emulate import ORDERS
from fusewright.kernel import Argument, Array, Kernel, Launch

DYNAMIC = "extern __shared__ __align__(16) unsigned char shared_memory[];\n"


def kernel(
    body: str,
    *arguments: str,
    operands: str = "x",
    shape: tuple[str, ...] = ("n",),
    dtype: torch.dtype = torch.float32,
    grid: str = "1",
    threads: int = 64,
    shared: int = 0,
    cluster: int = 1,
    before: str = "",
) -> Kernel:
    """A record of one launch of `extern "C" __global__ void f(PARAMETERS) { body }`; n is the first operand's size."""
    parameters = ", ".join(arguments)
    names = [a.split()[-1].lstrip("*") for a in arguments]
    kinds = ["pointer" if "*" in a else "long" if "long" in a else "int" for a in arguments]
    attributes = f"__cluster_dims__({cluster}) " if cluster > 1 else ""
    source = f'{before}\nextern "C" __global__ {attributes}void f({parameters}) {{\n{body}\n}}\n'
    launch = Launch(
        "f",
        tuple(Argument(k, n) for k, n in zip(kinds, names, strict=True)),
        (grid, "1", "1"),
        threads,
        shared,
        cluster,
    )
    passed = tuple(operands.split())
    return Kernel(
        name="f",
        source=source,
        operands=passed,
        layouts=("contiguous",) * len(passed),
        sizes=(("n", 0, 0),),
        output=Array("y", shape, dtype),
        scratch=(),
        launches=(launch,),
        reference="",
    )


def in_all_orders(record: Kernel, *tensors: Tensor) -> list[Tensor]:
    return [emulate(record, *tensors, order=order, seed=3) for order in ORDERS]


def assert_right(record: Kernel, want: Tensor, *tensors: Tensor, tolerance: float = 0.0) -> None:
    """In every order, and under the sanitizers."""
    for got in [*in_all_orders(record, *tensors), emulate(record, *tensors, sanitize=True)]:
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def assert_visible(record: Kernel, want: Tensor, *tensors: Tensor) -> None:
    """The fault shows in at least one order."""
    assert any(not torch.allclose(got, want, rtol=1e-5) for got in in_all_orders(record, *tensors))


def ramp(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(1, n + 1, dtype=dtype)


SAXPY = "    const int i = blockIdx.x * blockDim.x + threadIdx.x;\n    if (i < n) y[i] = 2 * x[i] + z[i];"


def saxpy(grid: str = "ceil_div(n, 64)", body: str = SAXPY) -> Kernel:
    parameters = ("const float* __restrict__ x", "const float* __restrict__ z", "float* __restrict__ y", "int n")
    return kernel(body, *parameters, operands="x z", grid=grid)
