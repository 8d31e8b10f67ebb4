"""Every family at more than 500 combinations of shape, strides and dtype, against float64."""

from __future__ import annotations

from itertools import count

import pytest
import sweep
import torch

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
BLOCKS, CASES = 8, 72  # 576 cases of each family


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    """Kernels are built into a directory of the test's."""
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path))


def assert_right(family: str, first: int, cases: int) -> None:
    torch.set_num_threads(2)
    done = 0
    for tried in count():
        if done >= cases:
            return
        assert tried < 20 + cases, f"{done} cases of {family} after {tried} models"
        done += sweep.check(family, first + tried)


@pytest.mark.parametrize("family", sweep.FAMILIES)
def test_some(family: str) -> None:
    assert_right(family, 0, 20)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("family", sweep.FAMILIES)
def test_many(family: str, block: int) -> None:
    assert_right(family, 1000 * (block + 1), CASES)
