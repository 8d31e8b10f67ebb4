"""Cross products: elements of what lies further along, in kernels of what is around them; calls elsewhere."""

from __future__ import annotations

import pytest
import torch
from gpu_build import Function, Weighted, as_on_a_gpu, emulated
from torch import Tensor

from fusewright import pipeline
from fusewright.capture import capture
from fusewright.ir import ops


def _turned(x: Tensor, q: Tensor) -> Tensor:
    """Vectors, turned by quaternions."""
    u = q[..., :3]
    c = torch.cross(u, x, dim=-1) + q[..., 3:] * x
    return x + 2 * torch.cross(u, c, dim=-1)


# What a model computes, its weight's and its input's shape, and its kernels.
MODELS: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...], list[str]]] = {
    "turned": (_turned, (50, 4), (50, 3), ["fused_cross_mul_add_cross_mul_add"]),
    "turned alike": (_turned, (1, 4), (50, 3), ["fused_cross_mul_add_cross_mul_add"]),
    "normals": (
        lambda x, w: torch.linalg.cross(x[:, 1] - x[:, 0], x[:, 2] - x[:, 0]) * w,
        (3,),
        (40, 3, 3),
        ["fused_sub_cross_mul"],
    ),
    "of channels": (
        lambda x, w: torch.cross(x.tanh(), w.expand_as(x), dim=1),
        (3, 1, 1),
        (2, 3, 5, 8),
        ["fused_tanh_cross"],
    ),
    "lengths": (
        lambda x, w: torch.linalg.cross(x, w.expand_as(x)).norm(dim=-1),
        (3,),
        (40, 3),
        ["fused_cross", "fused_norm"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_kernels(name: str, dtype: torch.dtype) -> None:
    function, weight, shape, kernels = MODELS[name]
    model, x = Weighted(function, *weight).to(dtype).eval(), torch.randn(shape, dtype=dtype)
    built = as_on_a_gpu(model, x)
    assert sorted(k.name for k in built.program.kernels) == sorted(kernels)
    assert "linalg.cross" not in built.program.source
    with torch.no_grad():
        torch.testing.assert_close(emulated(built, model, x), model(x))


def test_every_number_is_read_once_for_an_element() -> None:
    """Two products in a row reach for the same elements, of the model's tensors as they lie."""
    built = as_on_a_gpu(Weighted(_turned, 48, 4).eval(), torch.randn(48, 3))
    (kernel,) = built.program.kernels
    assert "fused_cross_mul_add_cross_mul_add(x, self.weight)" in built.program.source
    vectors, quaternions = (sum(f"d.{name}[" in line for line in kernel.source.splitlines()) for name in ("x", "p1"))
    assert (vectors, quaternions) == (2, 4)  # beside the vector's own element, four at a time


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_eagers(name: str) -> None:
    function, weight, shape, _ = MODELS[name]
    model, x = Weighted(function, *weight).eval(), torch.randn(shape, requires_grad=True)
    derive, forward = as_on_a_gpu(model, x.detach()).program.functions()
    found = [
        torch.autograd.grad(y.square().sum(), (x, model.weight)) for y in (model(x), forward(model, x, *derive(model)))
    ]
    torch.testing.assert_close(*found)


def test_a_cpu_calls_it() -> None:
    model, x = Weighted(_turned, 50, 4).eval(), torch.randn(50, 3)
    built = pipeline.build(model, (x,), {}, kernels="always", measure=False)
    assert built.program.source.count("torch.linalg.cross(") == 2
    derive, forward = built.program.functions()
    torch.testing.assert_close(forward(model, x, *derive(model)), model(x))


def test_the_first_dimension_of_three_elements() -> None:
    def of(shape: tuple[int, ...]) -> list[ops.Op]:
        model = Weighted(lambda x, w: torch.cross(x, w), *shape)
        return [n.op for n in capture(model, (torch.randn(shape),), {}).graph.nodes() if isinstance(n.op, ops.Cross)]

    assert of((3, 4, 3)) == [ops.Cross(0)]
    assert of((4, 3, 3)) == [ops.Cross(1)]
