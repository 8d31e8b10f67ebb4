"""Random models up to generated kernels: the programs are right, and so are the kernels."""

from __future__ import annotations

import pytest
import torch

if __package__:
    from tests.fuzz.kernels import run
else:
    from kernels import run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FAMILIES = {"contraction", "range reduction", "sample program", "stream"}


@pytest.mark.parametrize("first", range(0, 80, 20))
@pytest.mark.sampled
def test_programs(first: int) -> None:
    """Without a kernel being run: building them, and the program around them."""
    _check(range(first, first + 20), most=0)


def test_kernels() -> None:
    """Each family takes part."""
    assert _check(range(8), most=1) >= FAMILIES - {"range reduction"}


def test_operands_that_are_computed() -> None:
    """A convolution divided by a function of a parameter: the kernel reads the function's value, as an operand."""
    assert "contraction" in _check(range(506, 507), most=2)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(400, 1000, 50))
def test_many_kernels(first: int) -> None:
    _check(range(first, first + 50), most=3)


def _check(seeds: range, most: int) -> set[str]:
    """No model fails; returns the families that had a part in them."""
    torch.set_num_threads(1)
    tally = run(seeds, most=most)
    failures = "\n".join(f"seed {seed}: {text}" for seed, text in tally.failures.items())
    assert not tally.failures, (
        f"{failures}\nreproduce: PYTHONPATH=tests python -m tests.fuzz.kernels --seed S --count 1"
    )
    assert tally.refused <= len(seeds) // 4 and tally.kernels >= len(seeds)
    assert not most or tally.emulated
    return set(tally.families)
