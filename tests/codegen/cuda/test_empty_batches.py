"""A batch of no samples: every family gives a result of none, and launches nothing for it."""

from __future__ import annotations

import pytest
import torch
from contraction_cases import Case
from direct_cases import found, tiles
from direct_cases import kernel as direct
from emulation.emulate import emulate
from test_range_kernels import CASES as SUMS
from test_range_kernels import parsed
from test_sample_kernels import CASES as PROGRAMS
from test_sample_kernels import program
from test_stream_kernels import CHAINS, stream_of
from torch import Tensor

from fusewright.codegen.cuda import ranges, sample, stream
from fusewright.ir.node import Node


def empty(node: Node, batched: bool = True) -> Tensor:
    shape = [d if isinstance(d, int) else 0 for d in node.shape]
    return torch.zeros((0, *shape[1:]) if batched else shape, dtype=node.dtype)


@pytest.mark.parametrize("name", ["channel bias", "pool, channels", "long rows", "mean, bias, logsumexp, times"])
def test_stream(name: str) -> None:
    """In one launch, or in two; of one reduction, or two."""
    root = CHAINS[name]()
    s = stream_of(root)
    tensors = [empty(t, i == 0) for i, t in enumerate(s.tensors)]
    assert emulate(stream.kernel(s, "fused_test"), *tensors).shape == (0, *root.shape[1:])


@pytest.mark.parametrize("name", ["borders", "shared planes"])
def test_range_reduction(name: str) -> None:
    r = parsed(SUMS[name]())
    assert emulate(ranges.kernel(r, "fused_test"), empty(r.x)).shape == (0, *r.root.shape[1:])


def test_sample_program() -> None:
    p = program(PROGRAMS["founding"]())
    assert emulate(sample.kernel(p, "fused_test"), *(empty(t, False) for t in p.leaves)).shape == (0, 1)


@pytest.mark.parametrize("dims", ["", "p", "c", "cp"])
@pytest.mark.sampled
def test_contraction(dims: str) -> None:
    f = found(Case((9, 9), fold="mean" if dims else "", fold_dims=dims))
    for kernel in (f.kernel(f.tilings()[0]), direct(f, tiles(f)[0])):
        got = emulate(kernel, *f.tensors(f.case.example(batch=0)))
        assert got.shape == (0, *f.group.root.shape[1:])
