"""What the tests of CPU kernels share: running them under conditions that must not matter, and what is quick."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from fusewright.kernel import Kernel
from fusewright.runtime.native import launcher


def run(kernel: Kernel, *tensors: Tensor) -> Tensor:
    """The kernel's output, which must be the same bits with one thread and with three, and twice in a row."""
    assert kernel.target == "cpu"
    call, before = launcher(kernel), torch.get_num_threads()
    kept = [t.clone() for t in tensors]
    results = []
    try:
        for threads in (1, 3, 3):
            torch.set_num_threads(threads)
            results.append(call(*tensors))
    finally:
        torch.set_num_threads(before)
    assert all(same_bits(a, b) for a, b in zip(tensors, kept, strict=True)), "an operand was written to"
    assert all(same_bits(results[0], r) for r in results[1:]), "other bits with other threads"
    return results[0]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def quick(names: Iterable[str], *always: str, share: int = 3) -> list[object]:
    """Parameters: one case in `share`, and those named, in every run; the others are slow, for each has to be built."""
    return [
        name if name in always or zlib.crc32(name.encode()) % share == 0 else pytest.param(name, marks=pytest.mark.slow)
        for name in names
    ]
