"""A generated CPU kernel as a program of its own: for sanitizers, and for processors that are not this one.

Every array lies in an allocation of its own size.
"""

from __future__ import annotations

import platform
import subprocess
import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from shutil import which

import pytest
import torch
from torch import Tensor

from fusewright.kernel import Argument, Kernel, evaluate
from fusewright.runtime import compiler
from fusewright.runtime.launch import FORMATS


@dataclass(frozen=True)
class Machine:
    """How to build a program, and how to run it: `command` is empty for the compiler of kernels."""

    flags: tuple[str, ...]
    command: tuple[str, ...] = ()
    runner: tuple[str, ...] = ()
    processor: str = ""

    def skip_where_missing(self) -> None:
        """Skips a test that needs what is not installed."""
        for program in (*self.command[:1], *self.runner[:1]):
            if which(program) is None:
                pytest.skip(f"{program} is not installed")
        if self.processor and platform.machine() != self.processor:
            pytest.skip(f"flags of {self.processor}")
        names = set(self.flags) & REQUIRED.keys()
        if names:
            there = Path("/proc/cpuinfo").read_text().split()
            missing = [word for name in names for word in REQUIRED[name] if word not in there]
            if missing:
                pytest.skip(f"this processor has no {missing[0]}")


# What a processor must have for code of these flags.
REQUIRED = {"-march=haswell": ("avx2", "fma")}
PLAIN = (*compiler.FLAGS, "-fopenmp")
SANITIZED = Machine(
    (
        "-std=c++17",
        "-march=native",
        "-fopenmp",
        "-g1",
        "-O1",
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
    )
)
MACHINES = {
    "x86-64": Machine((*PLAIN, "-march=x86-64"), processor="x86_64"),
    "avx2": Machine((*PLAIN, "-march=haswell"), processor="x86_64"),
    "clang": Machine((*PLAIN, "-march=native", "-mprefer-vector-width=512"), ("clang++",), (), "x86_64"),
    "clang, avx2": Machine((*PLAIN, "-march=haswell"), ("clang++",), (), "x86_64"),
    "aarch64": Machine((*PLAIN, "-static"), ("aarch64-linux-gnu-g++",), ("qemu-aarch64",)),
    "clang, aarch64": Machine(
        (*(flag for flag in PLAIN if flag != "-fopenmp"), "-fopenmp-simd", "--target=aarch64-linux-gnu", "-static"),
        ("clang++",), ("qemu-aarch64",),
    ),
}  # fmt: skip

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


def run(kernel: Kernel, *tensors: Tensor, threads: int = 2, machine: Machine = SANITIZED) -> Tensor:
    """The kernel's output from a process of its own; `AssertionError` with what the compiler or the process says."""
    machine.skip_where_missing()
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
        command = machine.command or compiler.compiler().command
        _done(*command, *machine.flags, str(text), "-o", str(program))
        given.write_bytes(b"".join(map(_bytes, dense)))
        _done(*machine.runner, str(program), str(given), str(made))
        flat = torch.frombuffer(bytearray(made.read_bytes()), dtype=out.dtype)
        return flat.as_strided(out.shape, out.stride())


def _done(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=250, check=False)
    assert not done.returncode, f"{command[0]} ended with {done.returncode}: {done.stderr[-4000:]}"


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
        if all(evaluate(n, sizes) for n in launch.grid):
            lines += [f"    {kernel.name}::{launch.entry}({', '.join(map(text, launch.arguments))});"]
    lines += [f"    std::fwrite({kernel.output.name}.at, 1, {size}, to);", "    std::fclose(to);"]
    names = (*kernel.operands, kernel.output.name, *(a.name for a in kernel.scratch))
    lines += [f"    std::free({name}.at);" for name in names]
    return MAIN + "\n".join([*lines, "    std::fclose(from);", "}"]) + "\n"
