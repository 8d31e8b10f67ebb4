"""Values of weights alone: computed ahead of calls, not in kernels, unless these would read more then."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_build import Function, Weighted, as_on_a_gpu, emulated

SHAPE = (24, 40)

# What a model computes, and the shapes of what is derived.
MODELS: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "of its shape": (lambda x, w: torch.relu(x) * w.sigmoid(), [SHAPE]),
    "a row's norm": (lambda x, w: torch.relu(x) * F.normalize(w), [SHAPE]),
    "a reduction": (lambda x, w: torch.relu(x) * w.norm(dim=1, keepdim=True), [(24, 1)]),
    "ahead of a reduction": (lambda x, w: (x * w.square()).sum(1), [SHAPE]),
    "ahead of a softmax": (lambda x, w: torch.softmax(x + w.tanh(), 1), [SHAPE]),
    # a kernel reads less than that
    "sums of a row and a column": (lambda x, w: torch.relu(x) * (w[:, :1] + w[0]), []),
    "doubles": (lambda x, w: torch.relu(x).double() * w.double(), []),
}


@pytest.mark.parametrize("name", MODELS)
def test_derived(name: str) -> None:
    function, shapes = MODELS[name]
    model, x = Weighted(function, *SHAPE).eval(), torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))
    built = as_on_a_gpu(model, x)
    derive, _ = built.program.functions()
    assert built.program.kernels and [tuple(t.shape) for t in derive(model)] == shapes
    with torch.no_grad():
        torch.testing.assert_close(emulated(built, model, x), model(x))
        model.weight.mul_(0.5)
        torch.testing.assert_close(emulated(built, model, x), model(x))
