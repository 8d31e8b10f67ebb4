"""A generated CPU kernel as a program of its own, for sanitizers: every array lies in an allocation of its own size."""

from __future__ import annotations

import subprocess
import tempfile
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from fusewright.kernel import Argument, Kernel, evaluate
from fusewright.runtime import compiler
from fusewright.runtime.launch import FORMATS

SANITIZERS = ("-g1", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")

MAIN = """
#include <cstdio>
#include <cstdlib>

struct Pointer {
    void* at;
    template <typename T> operator T*() const { return static_cast<T*>(at); }
};

static void* allocated(std::size_t bytes, std::FILE* from) {
    void* const at = std::malloc(bytes);
    if (from ? std::fread(at, 1, bytes, from) != bytes : !std::memset(at, 0xff, bytes)) std::abort();
    return at;
}

int main(int, char** paths) {
    std::FILE* const from = std::fopen(paths[1], "rb");
    std::FILE* const to = std::fopen(paths[2], "wb");
"""


def run(kernel: Kernel, *tensors: Tensor, threads: int = 2, flags: tuple[str, ...] = SANITIZERS) -> Tensor:
    """The kernel's output from a process of its own; `AssertionError` with the report where a sanitizer objects."""
    sizes = {name: tensors[i].shape[dim] for name, i, dim in kernel.sizes}
    dense = [
        t.detach().contiguous(memory_format=FORMATS[layout][t.ndim])
        for t, layout in zip(tensors, kernel.layouts, strict=True)
    ]
    shape = [evaluate(n, sizes) for n in kernel.output.shape]
    out = torch.empty(shape, dtype=kernel.output.dtype)
    out = out.contiguous(memory_format=FORMATS[kernel.output.layout][out.ndim])
    with tempfile.TemporaryDirectory() as folder:
        text, program, given, made = (Path(folder) / name for name in ("kernel.cpp", "program", "given", "made"))
        text.write_text(kernel.source + _main(kernel, dense, out.nbytes, sizes, threads))
        command = compiler.compiler().command
        build = [*command, "-std=c++17", "-fopenmp", "-march=native", *flags, str(text), "-o", str(program)]
        done = subprocess.run(build, capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr
        given.write_bytes(b"".join(map(_bytes, dense)))
        done = subprocess.run([str(program), str(given), str(made)], capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr[-4000:]
        flat = torch.frombuffer(bytearray(made.read_bytes()), dtype=out.dtype)
        return flat.as_strided(out.shape, out.stride())


def _bytes(tensor: Tensor) -> bytes:
    """What a dense tensor holds, in the order of memory."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return bytes(flat.view(torch.uint8).numpy())


def _main(kernel: Kernel, dense: list[Tensor], size: int, sizes: dict[str, int], threads: int) -> str:
    """A main function that reads the operands, makes the calls and writes the output."""
    lines = [
        f"    const Pointer {n}{{allocated({t.nbytes}, from)}};" for n, t in zip(kernel.operands, dense, strict=True)
    ]
    lines += [f"    const Pointer {kernel.output.name}{{allocated({size}, nullptr)}};"]
    for a in kernel.scratch:
        bytes_ = prod(evaluate(n, sizes) for n in a.shape) * a.dtype.itemsize
        lines += [f"    const Pointer {a.name}{{allocated({bytes_}, nullptr)}};"]

    def text(argument: Argument) -> str:
        if argument.kind == "threads":
            return str(threads)
        return argument.text if argument.kind == "pointer" else str(evaluate(argument.text, sizes))

    for launch in kernel.launches:
        lines += [f"    {kernel.name}::{launch.entry}({', '.join(map(text, launch.arguments))});"]
    lines += [f"    std::fwrite({kernel.output.name}.at, 1, {size}, to);", "    std::fclose(to);"]
    names = (*kernel.operands, kernel.output.name, *(a.name for a in kernel.scratch))
    lines += [f"    std::free({name}.at);" for name in names]
    return MAIN + "\n".join([*lines, "    std::fclose(from);", "}"]) + "\n"
