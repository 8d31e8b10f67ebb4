"""Kernels under AddressSanitizer and UBSan: their text with a main function, on arrays of their very size."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from codegen.cuda import test_range_kernels, test_sample_kernels, test_stream_kernels
from native_cases import run
from torch import Tensor

from fusewright.codegen.cpu import ranges, sample, stream
from fusewright.kernel import Kernel, Launch, evaluate
from fusewright.runtime import compiler
from fusewright.runtime.launch import sizes_of

FLAGS = ("-std=c++17", "-O1", "-g1", "-march=native", "-fopenmp", "-fsanitize=address,undefined")
MAIN = """
#include <cstdio>
#include <cstdlib>
static char* array(const char* path, long long bytes) {  // exactly as large, so that what is around it is poison
    char* memory = static_cast<char*>(std::malloc(bytes));
    std::FILE* file = *path ? std::fopen(path, "rb") : nullptr;
    if (file && std::fread(memory, 1, bytes, file) != size_t(bytes)) std::abort();
    if (file) std::fclose(file);
    return memory;
}
int main() {
%s
    std::fwrite(%s, 1, %d, stdout);
}
"""
KINDS = {"int": "int", "long": "long long", "threads": "int"}


def program(kernel: Kernel, tensors: tuple[Tensor, ...], folder: Path) -> str:
    """The kernel, and a main function that calls it on these operands and prints the bytes of the output."""
    sizes = sizes_of(kernel, tensors)
    lines, bytes_of = [], {}
    for name, tensor in zip(kernel.operands, tensors, strict=True):
        flat = tensor.contiguous().view(-1).view(torch.uint8)
        (folder / name).write_bytes(flat.numpy().tobytes())
        lines.append(f'    char* {name} = array("{folder / name}", {len(flat)});')
    for a in (kernel.output, *kernel.scratch):
        count = 1
        for expression in a.shape:
            count *= evaluate(expression, sizes)
        bytes_of[a.name] = count * a.dtype.itemsize
        lines.append(f'    char* {a.name} = array("", {bytes_of[a.name]});')
    lines += [call(kernel, launch, sizes) for launch in kernel.launches]
    return kernel.source + MAIN % ("\n".join(lines), kernel.output.name, bytes_of[kernel.output.name])


def call(kernel: Kernel, launch: Launch, sizes: dict[str, int]) -> str:
    types, values = [], []
    for a in launch.arguments:
        types.append("void*" if a.kind == "pointer" else KINDS[a.kind])
        number = 3 if a.kind == "threads" else a.text if a.kind == "pointer" else evaluate(a.text, sizes)
        values.append(str(number))
    entry = f"reinterpret_cast<void (*)({', '.join(types)})>({kernel.name}::{launch.entry})"
    return f"    {entry}({', '.join(values)});"


def ranges_of(name: str) -> tuple[Kernel, tuple[Tensor, ...]]:
    r = test_range_kernels.parsed(test_range_kernels.CASES[name]())
    return ranges.kernel(r, "fused_test"), (test_range_kernels.random(r.x, 1),)


def stream_of(name: str) -> tuple[Kernel, tuple[Tensor, ...]]:
    s = test_stream_kernels.stream_of(test_stream_kernels.CHAINS[name]())
    return stream.kernel(s, "fused_test"), tuple(test_stream_kernels.random(n, i) for i, n in enumerate(s.tensors))


def sample_of(name: str) -> tuple[Kernel, tuple[Tensor, ...]]:
    p = test_sample_kernels.program(test_sample_kernels.CASES[name]())
    return sample.kernel(p, "fused_test"), tuple(test_sample_kernels.random(n, i) for i, n in enumerate(p.leaves))


Make = Callable[[str], tuple[Kernel, tuple[Tensor, ...]]]
CASES: list[tuple[Make, str]] = [
    *((ranges_of, name) for name in ("borders, odd", "shared planes", "1-d step 4", "3-d step 2", "windows of both")),
    *((stream_of, name) for name in ("max 3 s2 p1", "avg ceil without padding", "residual", "long rows, then sum")),
    *((stream_of, name) for name in ("tall columns", "logsumexp of channels", "before and after", "two of many")),
    *((sample_of, name) for name in ("founding", "head", "bf16 layer norm", "slice of a permutation", "matmul")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "name"), CASES, ids=[name for _, name in CASES])
def test_nothing_is_read_or_written_outside(make: Make, name: str, tmp_path: Path) -> None:
    kernel, tensors = make(name)
    source, binary = tmp_path / "kernel.cpp", tmp_path / "kernel"
    source.write_text(program(kernel, tensors, tmp_path))
    command = compiler.compiler().command
    built = compiler.run((*command, *FLAGS, str(source), "-o", str(binary)))
    assert built.returncode == 0, built.stderr
    done = subprocess.run([binary], capture_output=True, env={"ASAN_OPTIONS": "detect_leaks=0"}, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr.decode()[:3000]
    want = run(kernel, *tensors)
    got = torch.frombuffer(bytearray(done.stdout), dtype=want.dtype).view(want.shape)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_write_outside_is_found(tmp_path: Path) -> None:
    kernel, tensors = stream_of("residual")
    text = program(kernel, tensors, tmp_path).replace("value[e] =", "value[e + 1] =")
    (tmp_path / "kernel.cpp").write_text(text)
    command = compiler.compiler().command
    compiler.run((*command, *FLAGS, str(tmp_path / "kernel.cpp"), "-o", str(tmp_path / "kernel")))
    done = subprocess.run([tmp_path / "kernel"], capture_output=True, timeout=120)
    assert b"heap-buffer-overflow" in done.stderr
