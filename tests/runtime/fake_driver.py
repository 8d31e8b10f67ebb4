"""Hand-written kernels for tests of the runtime, and a driver that runs their like on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from fusewright.kernel import Argument, Array, Kernel, Launch
from fusewright.runtime.driver import Configuration, Start

BLEND = """
// z = tanh(x) * w * w, x is (N, C) and w is (C).
extern "C" __global__ void blend(const float* x, const float* w, float* z, long long count, int C) {
    const long long i = blockIdx.x * 128LL + threadIdx.x;
    if (i < count) z[i] = tanhf(x[i]) * w[i % C] * w[i % C];
}
"""
# Two launches with an array between them, which needs more shared memory than a launch gets unasked.
ROWS = """
extern __shared__ double held[];
extern "C" __global__ void square(const double* x, double* squares, long long count) {
    const long long i = blockIdx.x * 128LL + threadIdx.x;
    held[threadIdx.x + 7000] = i < count ? x[i] * x[i] : 0.0;
    __syncthreads();
    if (i < count) squares[i] = held[threadIdx.x + 7000];
}
extern "C" __global__ void sum_rows(const double* squares, double* sums, int C) {
    double sum = 0.0;
    for (int c = 0; c < C; ++c) sum += squares[(long long)blockIdx.x * C + c];
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
"""
HEADER = "import torch\nimport torch.nn.functional as F\n\n\n"


def pointers(*names: str) -> tuple[Argument, ...]:
    return tuple(Argument("pointer", name) for name in names)


def blend(**changes: Any) -> Kernel:
    blocks = ("ceil_div(N * C, 128)", "1", "1")
    arguments = (*pointers("x", "w", "z"), Argument("long", "N * C"), Argument("int", "C"))
    record: dict[str, Any] = {
        "name": "fused_blend",
        "source": BLEND,
        "operands": ("x", "w"),
        "layouts": ("contiguous", "contiguous"),
        "sizes": (("N", 0, 0), ("C", 0, 1)),
        "output": Array("z", ("N", "C"), torch.float32),
        "scratch": (),
        "launches": (Launch("blend", arguments, blocks, 128),),
        "reference": HEADER + "def reference(x, w):\n    return torch.tanh(x) * w * w\n",
        "dtypes": (torch.float32, torch.float32),
        "shapes": (("N", "C"), ("C",)),
    }
    return Kernel(**record | changes)


def rows(**changes: Any) -> Kernel:
    first = Launch(
        "square",
        (*pointers("x", "squares"), Argument("long", "N * C")),
        ("ceil_div(N * C, 128)", "1", "1"),
        threads=128,
        shared=8 * (7000 + 128),
    )
    second = Launch("sum_rows", (*pointers("squares", "sums"), Argument("int", "C")), ("N", "1", "1"), 32)
    record: dict[str, Any] = {
        "name": "fused_square_sum",
        "source": ROWS,
        "operands": ("x",),
        "layouts": ("contiguous",),
        "sizes": (("N", 0, 0), ("C", 0, 1)),
        "output": Array("sums", ("N",), torch.float64),
        "scratch": (Array("squares", ("N", "C"), torch.float64),),
        "launches": (first, second),
        "reference": HEADER + "def reference(x):\n    return (x * x).sum(1)\n",
        "dtypes": (torch.float64,),
    }
    return Kernel(**record | changes)


def at(address: int, ctype: Any, count: int = 1) -> Any:
    """The array of C values at an address."""
    return (ctype * count).from_address(address)


def run_blend(cells: list[int], grid: tuple[int, int, int]) -> None:
    x, w, z = (at(cell, ctypes.c_uint64)[0] for cell in cells[:3])
    (count,), (channels,) = at(cells[3], ctypes.c_int64), at(cells[4], ctypes.c_int32)
    assert grid == (-(-count // 128), 1, 1)
    scale = torch.tensor(at(w, ctypes.c_float, channels))
    values = torch.tensor(at(x, ctypes.c_float, count)).view(-1, channels)
    at(z, ctypes.c_float, count)[:] = (torch.tanh(values) * scale * scale).flatten().tolist()


def run_square(cells: list[int], grid: tuple[int, int, int]) -> None:
    x, squares = (at(cell, ctypes.c_uint64)[0] for cell in cells[:2])
    (count,) = at(cells[2], ctypes.c_int64)
    at(squares, ctypes.c_double, count)[:] = [value * value for value in at(x, ctypes.c_double, count)]


def run_sum_rows(cells: list[int], grid: tuple[int, int, int]) -> None:
    squares, sums = (at(cell, ctypes.c_uint64)[0] for cell in cells[:2])
    (channels,) = at(cells[2], ctypes.c_int32)
    values = at(squares, ctypes.c_double, channels * grid[0])
    for row in range(grid[0]):
        at(sums, ctypes.c_double, grid[0])[row] = sum(values[row * channels : (row + 1) * channels])


Run = Callable[[list[int], tuple[int, int, int]], None]
# Parameters of each entry, and what stands for it.
ENTRIES: dict[str, tuple[int, Run]] = {
    "blend": (5, run_blend),
    "square": (3, run_square),
    "sum_rows": (3, run_sum_rows),
}


@dataclass
class FakeDriver:
    """Runs the kernels above on CPU tensors and keeps a record of what it was asked."""

    kind: str = "cpu"
    capabilities: int = 90
    device: int = 0
    status: int = 0
    before_launch: Callable[[], None] = lambda: None
    loads: list[bytes] = field(default_factory=list)
    functions: list[tuple[str, int, int]] = field(default_factory=list)
    launches: list[tuple[str, int, tuple[int, int, int], int, int]] = field(default_factory=list)
    early: list[bool] = field(default_factory=list)
    guards: list[int] = field(default_factory=list)
    attached: int = 0

    def capability(self, index: int) -> int:
        return self.capabilities

    def current(self) -> int:
        return self.device

    @contextmanager
    def guard(self, index: int) -> Any:
        self.guards.append(index)
        before, self.device = self.device, index
        try:
            yield
        finally:
            self.device = before

    def stream(self, index: int) -> int:
        return (7 << 32) + index

    def attach(self, index: int) -> None:
        self.attached += 1

    def load(self, cubin: bytes) -> int:
        self.loads.append(cubin)
        return len(self.loads)

    def function(self, module: int, entry: str, shared: int, cluster: int) -> int:
        self.functions.append((entry, shared, cluster))
        return list(ENTRIES).index(entry)

    def start(
        self, function: int, grid: tuple[int, int, int], threads: int, shared: int, parameters: Any, early: bool
    ) -> tuple[Configuration, Start]:
        entry = list(ENTRIES)[function]
        count, run = ENTRIES[entry]
        assert len(parameters) == count
        configuration = SimpleNamespace(stream=0)

        def launch() -> int:
            self.before_launch()
            assert at(parameters[0], ctypes.c_uint64)[0] % 16 == 0, "the first operand is not aligned"
            run(list(parameters), grid)
            self.early.append(early)
            self.launches.append((entry, configuration.stream, grid, threads, shared))
            return self.status

        return configuration, launch

    def error(self, status: int) -> str:
        return f"out of resources ({status})"
