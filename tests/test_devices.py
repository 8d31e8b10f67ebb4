"""Single numbers that are kept on the CPU in a model that is not: PyTorch takes them as they are, kernels do not.

Here "cpu:0" is the model's device: another one than "cpu" to a graph, the same one to PyTorch.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.codegen.aten import lower
from fusewright.ir import ops
from fusewright.ir.build import pointwise
from fusewright.ir.node import Graph, Node, make
from fusewright.ir.placement import gathered
from fusewright.ir.spec import check
from fusewright.ir.types import main_device
from fusewright.pipeline import Built, build
from fusewright.runtime.derived import DerivedWeights
from fusewright.schedule.group import Group
from fusewright.schedule.groups import cut
from tests.gpu_build import built_for_a_gpu

HOST, DEVICE = torch.device("cpu"), torch.device("cpu", 0)


class Scaled(nn.Module):
    """A convolution, and numbers: a parameter's view and an attribute, which no `.cuda()` moves, and a literal."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(3, 16, 3, stride=2, padding=1)
        self.scale = nn.Parameter(torch.tensor([1.5])).squeeze()
        self.factor = torch.tensor(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return (F.avg_pool2d(self.conv(x) * self.scale, 2) + torch.tensor(0.5)) * self.factor


def _built(model: nn.Module, x: Tensor) -> Built:
    return build(model, (x,), {}, kernels="always", target=DEVICE)


def _call(model: nn.Module, built: Built, x: Tensor, weights: DerivedWeights) -> Tensor:
    _, forward = built.program.functions()
    result: Tensor = forward(model, x, *weights(model))
    return result


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_the_whole_chain_fuses_with_numbers_of_another_device(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    built = built_for_a_gpu(monkeypatch, Scaled(), x)
    assert [c.name for c in built.choices] == ["fused_conv_mul_add_mul"]
    assert {"scale", "factor"} <= set(built.program.sources), "brought ahead, not in every call"
    assert built.program.source.count('torch.ones((), dtype=torch.float32, device="cuda") * ') == 3


def test_numbers_are_kept_current(x: Tensor) -> None:
    model = Scaled().requires_grad_(False)
    built = _built(model, x)
    weights = DerivedWeights(built.program.functions()[0], built.program.sources, built.program.constants)
    with torch.no_grad():
        torch.testing.assert_close(_call(model, built, x, weights), model(x))
        assert weights(model) is weights(model)
        model.factor.fill_(3.0)
        torch.testing.assert_close(_call(model, built, x, weights), model(x))
        model.scale = torch.tensor(-1.0)
        torch.testing.assert_close(_call(model, built, x, weights), model(x))


def test_gradients_flow_to_numbers(x: Tensor) -> None:
    model = Scaled()
    built = _built(model, x)
    weights = DerivedWeights(built.program.functions()[0], built.program.sources, built.program.constants)
    (actual,) = torch.autograd.grad(_call(model, built, x, weights).square().sum(), model.scale, retain_graph=True)
    (expected,) = torch.autograd.grad(model(x).square().sum(), model.scale, retain_graph=True)
    torch.testing.assert_close(actual, expected)


def _source(kind: type[ops.Source], shape: tuple[int, ...], device: torch.device, *more: object) -> Node:
    return make(kind(shape, torch.float32, device, *more))  # type: ignore[call-arg]


def _graph(x: Node, number: Node, *others: Node) -> Graph:
    """A convolution times a number, with a relu."""
    weight = _source(ops.Param, (16, 3, 3, 3), DEVICE, "weight")
    conv = make(ops.Conv((1, 1), ((0, 0), (0, 0)), (1, 1)), x, weight, None)
    return Graph((x, *others), (pointwise("relu", pointwise("mul", conv, number)),))


def test_an_input_that_is_a_number_is_an_operand_on_the_kernels_device() -> None:
    x, number = _source(ops.Input, (2, 3, 8, 8), DEVICE, "x", 0), _source(ops.Input, (), HOST, "number", 1)
    graph = check(gathered(_graph(x, number, number)))
    assert graph.inputs == (x, number), "which is taken from where it is"
    found: list[Group] = []
    cut(graph, lambda group: found.append(group))  # type: ignore[func-returns-value]
    group = found[0]
    assert group.root is graph.outputs[0] and {n.device for n in group.operands} == {DEVICE}
    _, forward = lower(graph).functions()
    model, image, scale = nn.Module(), torch.randn(2, 3, 8, 8), torch.tensor(-2.0, requires_grad=True)
    model.weight = nn.Parameter(torch.randn(16, 3, 3, 3))
    (actual,), expected = forward(model, image, scale), F.relu(F.conv2d(image, model.weight) * scale)
    torch.testing.assert_close(actual, expected)
    gradients = [torch.autograd.grad(y.square().sum(), scale) for y in (actual, expected)]
    torch.testing.assert_close(*gradients)


def test_nothing_is_brought_where_all_is_on_one_device(x: Tensor) -> None:
    graph = capture(Scaled(), (x,)).graph
    assert gathered(graph).nodes() == graph.nodes()


def test_a_number_that_is_made_is_made_where_it_is_read() -> None:
    x, full = _source(ops.Input, (2, 3, 8, 8), DEVICE, "x", 0), make(ops.Full((), 0.5, torch.float32, HOST))
    (relu,) = gathered(_graph(x, full)).outputs
    assert isinstance(relu, Node) and relu.arg(0).arg(1) is make(ops.Full((), 0.5, torch.float32, DEVICE))


def test_two_numbers_are_computed_with_where_one_of_them_is_not_on_the_cpu() -> None:
    gpu = torch.device("cuda", 0)
    here, there = _source(ops.Buffer, (), HOST, "here"), _source(ops.Buffer, (), gpu, "there")
    assert pointwise("add", here, there).device == pointwise("add", there, here).device == gpu


def test_the_main_device() -> None:
    gpu = torch.device("cuda", 0)
    assert main_device([HOST, gpu]) == gpu and main_device([HOST]) == main_device([]) == HOST
