"""Random models up to generated kernels for CPUs, compiled and run as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if __package__:
    from tests.fuzz import kernels
else:
    import kernels

from fusewright.codegen import cpu
from fusewright.kernel import Kernel
from fusewright.runtime.native import launcher

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def _natively(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is done for GPUs is done for this CPU, and kernels run instead of being emulated."""
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path))

    def run(kernel: Kernel, *operands: Tensor, **_: Any) -> Tensor:
        assert kernel.target == "cpu"
        return launcher(kernel)(*operands)

    monkeypatch.setattr(kernels, "cuda", cpu)
    monkeypatch.setattr(kernels, "emulate", run)
    torch.set_num_threads(1)


def test_kernels() -> None:
    _check([*range(5), 2054], most=1)  # the last has an operand that is computed


@pytest.mark.slow
@pytest.mark.parametrize("first", range(2000, 2200, 20))
def test_many_kernels(first: int) -> None:
    _check(range(first, first + 20), most=3)


def _check(seeds: Sequence[int], most: int) -> None:
    tally = kernels.run(seeds, most=most)
    failures = "\n".join(f"seed {seed}: {text}" for seed, text in tally.failures.items())
    assert not tally.failures, failures
    assert tally.kernels >= len(seeds) and tally.emulated
