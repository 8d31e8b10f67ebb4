"""What it takes to write images from where the tensor cores leave their values, row length by row length.

    python benchmarks/stores.py --out benchmarks/results/h200_stores.json

A kernel does nothing but write (128, 64, R, R) numbers, a tile of 64 features, 2 rows and 128 positions of a row at a
time, as its lanes have them: `neighbours`, two positions of eight features in one store (or two, where rows have odd
lengths), as products of features by positions lie; `eights`, eight positions of four features in one, as those of
positions by features; `rows`, the former by way of shared memory, as kernels with `by_rows` do; `fill` is PyTorch's.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

from fusewright.codegen.cuda.contraction_elements import PLAIN_ROWS
from fusewright.codegen.cuda.contraction_finish_text import WRITE_ROWS
from fusewright.codegen.cuda.primitives import with_primitives
from fusewright.codegen.text import fill
from fusewright.kernel import Argument, Array, Kernel, Launch
from fusewright.measure import compare, environment, save_results
from fusewright.runtime.launch import Launcher

SAMPLES, LENGTHS = 128, (95, 96, 112, 120, 124, 126, 127, 128)

_KERNEL = """
using Element = float;
using Compute = float;
$rows
extern "C" __global__ void __launch_bounds__(256) stores(const float* __restrict__ x, float* __restrict__ out, int R) {
    __shared__ float shared[8 * 8 * ROW_PITCH];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = lane / 4, quad = lane % 4;
    const long long plane = (long long)R * R;
    float* const image = out + blockIdx.x * 64 * plane;
    float* const team_rows = shared + warp * 8 * ROW_PITCH;
    const float v = x[blockIdx.x];
    for (int q = 2 * blockIdx.y + warp / 4; q < R; q += 2 * gridDim.y) {
        float* const to = image + q * R;
        $write
    }
}
"""

_NEIGHBOURS = """
#pragma unroll
for (int j = 0; j < 16; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = 8 * j + 2 * quad;
        float* const at = to + (16 * (warp % 4) + 8 * half + row) * plane + r;
        if (R % 2 == 0 && r < R) *reinterpret_cast<Neighbours*>(at) = Neighbours{v + r, v + r + 1};
        if (R % 2 != 0 && r < R) at[0] = v + r;
        if (R % 2 != 0 && r + 1 < R) at[1] = v + r + 1;
    }
"""

_EIGHTS = """
#pragma unroll
for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int feature = 0; feature < 16; ++feature) {
        const int r = 32 * (warp % 4) + 8 * j + row;
        if (r < R) to[(8 * (feature / 2) + 2 * quad + feature % 2) * plane + r] = v + r;
    }
"""

_ROWS = """
#pragma unroll
for (int half = 0; half < 2; ++half) {
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 16; ++j) {
        const int r = 8 * j + 2 * quad;
        *reinterpret_cast<Neighbours*>(&team_rows[row * ROW_PITCH + r]) = Neighbours{v + r, v + r + 1};
    }
    __syncwarp();
    write_rows(team_rows, to + (16 * (warp % 4) + 8 * half) * plane, plane, 8, min(R, POSITIONS), 0, lane);
}
"""

WAYS = {"neighbours": _NEIGHBOURS, "eights": _EIGHTS, "rows": _ROWS}


def writer(write: str, length: int) -> Launcher:
    """A kernel that writes one number per sample, and the position in its row, in this way."""
    rows = fill(WRITE_ROWS, type="float", positions=128, pitch=136, warps=1, at_once=2, together="RUN", **PLAIN_ROWS)
    pointers = Argument("pointer", "x"), Argument("pointer", "out"), Argument("int", str(length))
    return Launcher(
        Kernel(
            name="stores",
            source=with_primitives([fill(_KERNEL, rows=rows, write=fill(write))]),
            operands=("x",),
            layouts=("contiguous",),
            sizes=(("N", 0, 0),),
            output=Array("out", ("N", "64", str(length), str(length)), torch.float32),
            scratch=(),
            launches=(Launch("stores", pointers, ("N", "2", "1"), 256),),
            reference="",
        )
    )


def main() -> None:
    """Prints and saves a row for each length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", required=True)
    chosen = parser.parse_args()
    x = torch.arange(float(SAMPLES), device="cuda")
    results: list[dict[str, Any]] = []
    for length in LENGTHS:
        out = torch.empty(SAMPLES, 64, length, length, device="cuda")
        want = (x.view(-1, 1, 1, 1) + torch.arange(float(length), device="cuda")).expand_as(out)
        calls: dict[str, Any] = {way: partial(writer(text, length), x) for way, text in WAYS.items()}
        for way, call in calls.items():
            assert torch.equal(call(), want), (way, length)
        times = compare({**calls, "fill": partial(out.fill_, 1.0)}, device=out.device, min_time=0.02, max_time=1.0)
        row = {"length": length, "bytes": out.numel() * 4}
        results.append(row | {f"{way}, ms": round(1e3 * times[way].median, 4) for way in times})
        print(results[-1], flush=True)
    save_results(chosen.out, {"environment": environment(x.device), "rows": results})


if __name__ == "__main__":
    main()
