"""Models of Euclidean distances, from a module to a program: products with what follows, kernels and gradients."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from gpu_build import as_on_a_gpu, emulated
from torch import Tensor, nn

import fusewright
from fusewright import pipeline, tuning
from fusewright.kernel import evaluate
from fusewright.runtime.operators import operator

Distances = Callable[..., Tensor]


class Model(nn.Module):
    """A function of the inputs and of a parameter."""

    def __init__(self, function: Distances, weight: Tensor) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(weight)

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args, self.weight)


def r(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


W = r(512, 64)
MODELS: dict[str, tuple[Distances, tuple[Tensor, ...], tuple[str, ...]]] = {
    "of rows": (lambda x, y, w: torch.cdist(x, y), (r(70, 64), r(70, 64) + 1), ("matmul", "stream", "stream")),
    "to a parameter": (lambda x, w: torch.cdist(x, w), (r(70, 64),), ("sample program",)),
    "of themselves, squared": (lambda x, w: torch.exp(-torch.cdist(x, x).square()), (r(70, 64),), ("matmul", "stream")),
    "of samples": (
        lambda x, y, w: torch.exp(-torch.cdist(x, y)),
        (r(3, 400, 48), r(3, 300, 48)),
        ("matmul", "sample program", "stream"),
    ),
    "of samples to a parameter": (lambda x, w: torch.cdist(w, x), (r(3, 300, 64),), ("matmul", "stream")),
    "kernel means": (
        lambda x, y, w: torch.exp(-torch.cdist(x, x).square()).mean()
        - 2 * torch.exp(-torch.cdist(x, y).square()).mean(),
        (r(70, 64) / 8, r(70, 64) / 8 + 0.05),
        ("matmul", "matmul", "stream", "stream"),
    ),
    "nearest": (lambda x, w: torch.cdist(x, w).square().amin(1), (r(70, 64),), ("product", "sample program")),
}  # fmt: skip


def built(name: str) -> tuple[pipeline.Built, nn.Module]:
    function, args, _ = MODELS[name]
    model = Model(function, W).eval()
    with patch.object(tuning, "capability_of", lambda device: 90):
        return as_on_a_gpu(model, *args), model


@pytest.mark.parametrize("name", MODELS)
def test_kernels(name: str) -> None:
    """As near to float64 as eager is, nearly, where nothing is near zero: a root makes more of what is rounded."""
    (found, model), (function, args, families) = built(name), MODELS[name]
    assert tuple(sorted(c.family for c in found.choices if c.path == "generated")) == families
    assert "cdist" not in found.program.source and "matmul" not in found.program.source.partition("def forward")[2]
    got = emulated(found, model, *args)
    with torch.no_grad():
        want = function(*(x.double() for x in args), W.double())
        eager = function(*args, W)
    off = want > 0.1 if name in ("of rows", "to a parameter") else torch.ones_like(want, dtype=torch.bool)
    assert got.shape == want.shape
    error, of_eager = ((x - want)[off].abs().max() for x in (got, eager))
    assert error <= 2 * of_eager + 1e-6 * want.abs().max(), (error, of_eager)


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str) -> None:
    """Those of eager, of coinciding points as well: 0 where a distance is 0."""
    (found, model), args = built(name), MODELS[name][1]
    args = tuple(x.detach().round() for x in args)  # small whole numbers, of which distances are exact
    args[0][..., 5, :] = args[0][..., 4, :]
    for x in args[1:]:
        x[..., 7, :] = args[0][..., 4, :][..., : x.shape[-1]]
    derive, forward = found.program.functions()
    with torch.no_grad():
        model.weight.copy_(model.weight.round())
        model.weight[:2] = 0.0

    def gradients(run: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in args]
        result = run(*leaves)
        weights = torch.linspace(0.5, 1.5, result.numel()).reshape(result.shape)
        wanted = [*leaves, *([model.weight] if name in ("to a parameter", "nearest") else [])]
        return list(torch.autograd.grad(result, wanted, weights))

    for got, want in zip(gradients(lambda *xs: forward(model, *xs, *derive(model))), gradients(model), strict=True):
        assert want.isfinite().all()
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


@pytest.mark.parametrize("name", ["of rows", "kernel means", "of samples to a parameter"])
def test_opcheck(name: str) -> None:
    """Lengths of either operand are a call's, and of one that is both, the same."""
    kernels = [k for k in built(name)[0].program.kernels if k.arch]
    assert kernels
    for kernel in kernels:
        lengths = {length: 40 + i for i, (length, _, _) in enumerate(kernel.sizes)}
        given = [torch.rand([evaluate(n, lengths) for n in shape], requires_grad=True) for shape in kernel.shapes]
        found = torch.library.opcheck(operator(kernel).overload, tuple(given))
        assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize(("rows", "status"), [(40, "verified"), (20, "unchanged")])
def test_few_rows_are_subtracted(rows: int, status: str) -> None:
    """Whichever number of rows a plan was made for, distances of near points are as eager has them, at any other."""
    model = Model(lambda x, w: torch.cdist(x, x), torch.zeros(1)).eval()
    optimized = fusewright.optimize(model, (r(rows, 8),), rewrite="always", measure=False)
    assert status in str(fusewright.explain(optimized))
    for count in (rows, 60 - rows):
        x = torch.stack([r(8) + 100 + 1e-3 * i for i in range(count)])
        want, error = model(x.double()), 2 * (model(x) - model(x.double())).abs().max()
        assert (optimized(x) - want).abs().max() <= error + 1e-6
