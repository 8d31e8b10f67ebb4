"""`emulate`: what a generated kernel computes, found on a CPU, with everything checked that a GPU would not tell.

Threads are fibers that run until they meet a barrier or a collective of their warp, in one of three orders.  Output,
shared memory, scratch, and what lies around every array, start as poison.  A missing barrier and a read of something
nobody wrote show as poison or as results that differ between orders; `EmulationError` names a deadlock, a divergent
barrier or shuffle, a read or a write outside of an array, an operand written to, a tensor core's operand that was not
rounded, a misaligned asynchronous copy.  `sanitize=True` runs under AddressSanitizer and UBSan instead.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emulation.build import EmulationError, build
from fusewright.kernel import Array, Kernel, Launch, evaluate
from fusewright.runtime.launch import Launcher

# Where this variable is set, kernels run on a GPU instead.
ON_DEVICE = "FUSEWRIGHT_TESTS_ON_GPU"

ORDERS = ("forward", "reverse", "shuffled")
# What unwritten memory holds, by turns: NaN; since fmaxf and fminf ignore that, 3.4e38 and -1.7e38 as well.
POISONS = (0xFF, 0x7F, 0xFE)
NAN = 0xFF  # what no thread writes of the output, under every order
GUARD = 4096  # bytes of poison on one side of an array; a page that may not be touched is on the other
LIMITS = (2**31 - 1, 65535, 65535)  # of a grid
MOST_SHARED = 232448  # bytes a block can ask for on sm_90
_KINDS = {"pointer": "p", "int": "i", "long": "l"}


def _fenced(size: int, ahead: bool) -> Tensor:
    """At least so many bytes, next to a page that may not be touched: ahead of the first one, or behind the last."""
    size = math.ceil(size / mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, size + mmap.PAGESIZE)
    fence = ctypes.addressof(ctypes.c_char.from_buffer(pages)) + (0 if ahead else size)
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(mmap.PAGESIZE), 0):
        raise EmulationError("a page could not be protected")
    return torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=mmap.PAGESIZE if ahead else 0)


class _Memory:
    """An array's bytes between poison and a page that may not be touched (a sanitizer has its own guards)."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        poison: int,
        layout: str = "contiguous",
        behind: int = 0,
        ahead: bool = False,
    ) -> None:
        """`behind`: bytes from a boundary of 16 to its begin; `ahead`: whether the page is ahead of it."""
        self.name, self.dtype, self.shape, self.poison, self.layout = name, dtype, shape, poison, layout
        self.bytes = math.prod(shape) * dtype.itemsize
        self.raw = _fenced(self.bytes + behind + GUARD, ahead).fill_(poison)
        self.begin = behind if ahead else (self.raw.numel() - self.bytes - behind) // 16 * 16 + behind

    @property
    def payload(self) -> Tensor:
        return self.raw[self.begin : self.begin + self.bytes]

    def fill(self, tensor: Tensor) -> None:
        if self.bytes:
            self.payload.copy_(tensor.reshape(-1).view(torch.uint8))

    def value(self) -> Tensor:
        flat = self.payload.clone().view(self.dtype)
        if self.layout == "contiguous":
            return flat.reshape(self.shape)
        batch, channels, *rest = self.shape
        return flat.reshape(batch, *rest, channels).movedim(-1, 1)

    def check_guards(self, kernel: Kernel) -> None:
        around = torch.cat([self.raw[: self.begin], self.raw[self.begin + self.bytes :]])
        if not bool((around == self.poison).all()):
            raise EmulationError(f"{kernel.name} wrote outside {self.name}")


def emulate(kernel: Kernel, *tensors: Tensor, order: str = "forward", seed: int = 0, sanitize: bool = False) -> Any:
    """The output of `kernel` for these operands, on a CPU, of several all; raises `EmulationError` where the kernel is
    wrong."""
    sizes = {name: tensors[operand].shape[dim] for name, operand, dim in kernel.sizes}
    dense = _checked(kernel, tensors, sizes)
    if os.environ.get(ON_DEVICE):
        return _on_device(kernel, tensors, sizes)
    turn = ORDERS.index(order)
    poison = POISONS[(turn + seed) % 3]
    memories = [
        _Memory(name, tuple(t.shape), t.dtype, poison, behind=t.data_ptr() % 16, ahead=turn == 1)
        for name, t in zip(kernel.operands, tensors, strict=True)
    ]
    for memory, tensor in zip(memories, dense, strict=True):
        memory.fill(tensor)
    memories += [_memory(array, sizes, poison, turn == 1) for array in kernel.scratch]
    memories += [_memory(result, sizes, NAN, turn == 1) for result in kernel.results]
    index = {memory.name: i for i, memory in enumerate(memories)}
    call = "".join(_line(launch, sizes, index) for launch in kernel.launches)
    if sanitize:
        _run_program(kernel, call, memories, turn, seed)
    else:
        _run_library(kernel, call, memories, turn, seed)
    for memory, tensor in zip(memories, dense, strict=False):
        if memory.bytes and not torch.equal(memory.payload, tensor.reshape(-1).view(torch.uint8)):
            raise EmulationError(f"{kernel.name} wrote to its operand {memory.name}")
    values = tuple(memory.value() for memory in memories[-len(kernel.results) :])
    return values if kernel.also else values[0]


def _on_device(kernel: Kernel, tensors: tuple[Tensor, ...], sizes: Mapping[str, int]) -> Any:
    """The same on a GPU, output and scratch in memory that held NaN, twice: the bits must agree."""
    launch, operands = Launcher(kernel), [_as_far(t) for t in tensors]
    results = []
    for _ in range(2):
        for array in reversed(kernel.arrays):
            count = math.prod(evaluate(e, sizes) for e in array.shape) * array.dtype.itemsize
            torch.full((max(1, -(-count // 8)),), -1, dtype=torch.int64, device="cuda")  # what is given out next
        given = launch(*operands)
        results.append(tuple(r.cpu() for r in (given if kernel.also else (given,))))
    for one, other in zip(*results, strict=True):
        if not torch.equal(*(r.reshape(-1).view(torch.uint8) for r in (one, other))):
            raise EmulationError(f"{kernel.name} gives other bits when it runs again")
    return results[0] if kernel.also else results[0][0]


def _as_far(tensor: Tensor) -> Tensor:
    """A tensor on the GPU, as far behind a boundary of 16 bytes as it lies on the CPU."""
    ahead = tensor.data_ptr() % 16 // tensor.itemsize
    there = torch.empty(ahead + tensor.numel(), dtype=tensor.dtype, device="cuda")
    return there.as_strided(tensor.shape, tensor.stride(), ahead).copy_(tensor)


def _checked(kernel: Kernel, tensors: tuple[Tensor, ...], sizes: Mapping[str, int]) -> list[Tensor]:
    """The operands as they lie in memory, each flat and contiguous."""
    assert len(tensors) == len(kernel.operands), f"{kernel.name} takes {kernel.operands}"
    assert not kernel.dtypes or kernel.dtypes == tuple(t.dtype for t in tensors), f"{kernel.dtypes} were promised"
    for shape, tensor in zip(kernel.shapes, tensors, strict=False):
        assert [evaluate(e, sizes) for e in shape] == list(tensor.shape), f"{shape} was promised"
    dense = []
    for name, layout, tensor in zip(kernel.operands, kernel.layouts, tensors, strict=True):
        assert tensor.device.type == "cpu", f"{name} is not on the CPU"
        ordered = tensor.movedim(1, -1) if layout == "channels_last" else tensor
        assert ordered.is_contiguous(), f"{name} is not {layout}"
        dense.append(ordered.detach())
    return dense


def _memory(array: Array, sizes: Mapping[str, int], poison: int, ahead: bool) -> _Memory:
    shape = tuple(evaluate(e, sizes) for e in array.shape)
    return _Memory(array.name, shape, array.dtype, poison, array.layout, ahead=ahead)


def _line(launch: Launch, sizes: Mapping[str, int], index: Mapping[str, int]) -> str:
    """One launch as `launch.cpp` reads it; nothing where there are no blocks, as in `fusewright.runtime.launch`."""
    grid = [evaluate(e, sizes) for e in launch.grid]
    if 0 in grid:
        return ""
    legal = all(1 <= g <= most for g, most in zip(grid, LIMITS, strict=True)) and grid[0] % launch.cluster == 0
    if not legal or not 1 <= launch.threads <= 1024 or launch.shared > MOST_SHARED or launch.cluster > 8:
        raise EmulationError(f"no GPU launches {launch.entry}: grid {grid}, {launch}")
    words = [launch.entry, *grid, launch.threads, launch.shared, launch.cluster, len(launch.arguments)]
    for argument in launch.arguments:
        value = index[argument.text] if argument.kind == "pointer" else evaluate(argument.text, sizes)
        if argument.kind == "int" and not -(2**31) <= value < 2**31:
            raise EmulationError(f"{launch.entry}: {argument.text} = {value} is no int")
        words += [_KINDS[argument.kind], value]
    return " ".join(map(str, words)) + "\n"


@functools.lru_cache(maxsize=64)
def _library(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)


def _run_library(kernel: Kernel, call: str, memories: list[_Memory], order: int, seed: int) -> None:
    library = _library(build(kernel, sanitize=False))
    buffers = (ctypes.c_void_p * len(memories))(*(m.raw.data_ptr() + m.begin for m in memories))
    message = ctypes.create_string_buffer(4000)
    arguments = (ctypes.c_char_p(call.encode()), buffers, order, ctypes.c_ulonglong(seed), message)
    if library.emulation_run(*arguments, ctypes.c_size_t(len(message))):
        raise EmulationError(message.value.decode())
    for memory in memories:
        memory.check_guards(kernel)


def _run_program(kernel: Kernel, call: str, memories: list[_Memory], order: int, seed: int) -> None:
    program = build(kernel, sanitize=True)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "call", *(Path(folder) / f"{i}" for i in range(len(memories)))]
        files[0].write_text(call)
        for file, memory in zip(files[1:], memories, strict=True):
            file.write_bytes(memory.payload.numpy().tobytes())
        command = [program, files[0], order, seed, *files[1:]]
        environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
        words = [str(word) for word in command]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, timeout=280)
        if done.returncode:
            raise EmulationError(_complaint(done.stderr) or f"{kernel.name}: exit status {done.returncode}")
        for file, memory in zip(files[1:], memories, strict=True):
            memory.payload.copy_(
                torch.frombuffer(bytearray(file.read_bytes()) or bytearray(1), dtype=torch.uint8)[: memory.bytes]
            )


def _complaint(stderr: str) -> str:
    """What the sanitizer found, and the kernel's lines that it blames."""
    lines = [line for line in stderr.splitlines() if re.search(r"ERROR|runtime error|\.cu:|READ of|WRITE of", line)]
    return "\n".join(lines[:20] or stderr.splitlines()[:20])
