"""Kernels of products for CPUs: compiled, run, and compared with the model in float64."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from codegen.cuda.product_cases import CASES, Found, draw, found

from fusewright.codegen.cpu import contraction
from fusewright.codegen.product import of_tensors
from fusewright.runtime.native import launcher
from fusewright.schedule import product


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Kernels are built into a directory of the test's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


def assert_right(f: Found, option: int, batch: int | None = None) -> None:
    c = f.group.contraction
    hints = {d: f.case.shape[0] for n in f.group.tensors for d in n.shape if not isinstance(d, int)}
    options = contraction.options(c, hints, {c.x: c.layout})
    kernel = contraction.generate(c, options[option % len(options)], "fused_test", "def reference(*operands): ...")
    f.assert_right(launcher(of_tensors(kernel, f.group)), batch)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled
def test_as_the_model_in_float64(name: str) -> None:
    f = found(CASES[name])
    for batch in (None, 5):
        assert_right(f, 0, batch)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(i, marks=pytest.mark.slow) for i in range(4, 44))])
@pytest.mark.sampled
def test_random_products(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "SMALL", 0)
    torch.manual_seed(seed)
    assert_right(found(draw(random.Random(seed))), seed)
