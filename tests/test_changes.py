"""Changes to a module after it was optimised are noticed, and hooks fire."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fusewright.runtime.nvrtc import KernelError
from fusewright.runtime.operators import operator
from tests.dropin import Gap, Hidden, Scaled, fast, images, kernels_of, program_calls, same


@pytest.fixture
def model() -> Gap:
    torch.manual_seed(0)
    return Gap()


class TestChanges:
    @pytest.mark.parametrize("through", ["model", "fast"])
    def test_attribute(self, model: Gap, through: str) -> None:
        f, x = fast(model), images()
        same(f, model, x, program=True)
        (model if through == "model" else f).divisor = 3.0
        same(f, model, x, program=False)
        same(f, model, x, program=True)
        assert f.divisor == model.divisor == 3.0
        model.divisor = 2.0
        same(f, model, x, program=True)

    def test_list_changed_in_place(self) -> None:
        model = Scaled()
        f, x = fast(model), images()
        same(f, model, x, program=True)
        model.factors[0] = 4.0
        same(f, model, x, program=False)
        model.settings.deep["a"][0].append(1)
        same(f, model, x, program=False)

    def test_plain_tensor_attribute(self) -> None:
        model = Scaled()
        f, x = fast(model), images()
        with torch.no_grad():
            same(f, model, x, program=True)
            model.shift.add_(1.0)
            same(f, model, x, program=True)
            other = copy.deepcopy(f)
            other.shift.add_(1.0)
            torch.testing.assert_close(other(x), Scaled.forward(other, x))
            same(f, model, x, program=True)
            model.shift = torch.full((8,), 9.0)
            same(f, model, x, program=False)

    def test_sharing(self) -> None:
        """Tied weights are one parameter to a program; untied, they must be two again."""
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.AvgPool1d(6))
        model[2].weight = model[0].weight
        f, x = fast(model, torch.randn(4, 6)), torch.randn(4, 6)
        same(f, model, x, program=True)
        model[2].weight = nn.Parameter(torch.randn(6, 6))
        same(f, model, x, program=False)
        model[2].weight = model[0].weight
        same(f, model, x, program=True)

    def test_module_that_is_no_submodule(self) -> None:
        model = Scaled()
        model.factors[1:] = [hidden := nn.Linear(8, 8)]  # type: ignore[assignment]
        hidden.parent = [model]  # a cycle
        f, x = fast(model), images()
        same(f, model, x, program=True)
        hidden.eval()
        same(f, model, x, program=False)
        hidden.train()
        same(f, model, x, program=True)

    @pytest.mark.parametrize("kind", ["slots", "array", "class", "method"])
    def test_hidden_state(self, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model = Hidden()
        f, x = fast(model), images()
        same(f, model, x, program=True)
        match kind:
            case "slots":
                model.slotted.factor = 5.0
            case "array":
                model.array[0] = 5.0
            case "class":
                monkeypatch.setattr(Hidden, "factor", 5.0)
            case "method":
                monkeypatch.setattr(Hidden, "forward", lambda self, x: self.conv(x).mean((2, 3)) * 5)
        same(f, model, x, program=False)

    def test_submodule_replaced(self, model: Gap) -> None:
        f, x = fast(model), images()
        model.conv = nn.Conv2d(3, 8, 3, padding=1)
        same(f, model, x, program=False)
        model.conv = nn.Conv2d(3, 8, 3)
        same(f, model, x, program=True)

    def test_hook_on_a_submodule(self, model: Gap) -> None:
        f, x, seen = fast(model), images(), []
        handle = model.conv.register_forward_hook(lambda *_: seen.append(1))
        same(f, model, x, program=False)
        same(f, model, x, program=False)
        assert len(seen) == 4
        handle.remove()
        same(f, model, x, program=True)

    def test_hook_for_all_modules(self, model: Gap) -> None:
        f, x, seen = fast(model), images(), []
        handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
        try:
            f(x)
        finally:
            handle.remove()
        assert seen == ["Conv2d", "Gap"]

    def test_forward_replaced_on_the_instance(self, model: Gap) -> None:
        f = fast(model)
        model.forward = lambda x: x
        assert f(x := images()) is x


class TestRootHooks:
    def test_all_kinds_fire_once(self, model: Gap) -> None:
        f, seen = fast(model), []
        f.register_forward_pre_hook(lambda *_: seen.append("pre"))
        model.register_forward_hook(lambda *_: seen.append("forward"))
        f.register_full_backward_hook(lambda *_: seen.append("backward"))
        f(images(requires_grad=True)).sum().backward()
        assert seen == ["pre", "forward", "backward"] and program_calls(f) == 1

    def test_not_fired_and_not_baked_in_by_optimize(self, model: Gap) -> None:
        calls: list[int] = []

        def doubled(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return output * 2

        model.register_forward_hook(doubled)
        f = fast(model, verify=True)
        assert not calls
        same(f, model, images(), program=True)
        assert len(calls) == 2


class Positive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 2048)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu().sum(1)


class TestShapesOfParameters:
    """A generated kernel has its weights' shapes in its text."""

    @pytest.mark.parametrize("taps", [5, 2])
    def test_of_a_convolution(self, taps: int) -> None:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        f, x = fast(model, images(), kernels="always"), images()
        same(f, model, x, program=True)
        model[0].weight.data = torch.randn(8, 3, taps, taps)
        same(f, model, x, program=False)
        same(f, model, x, program=True)

    def test_of_a_product(self) -> None:
        model = Positive()
        f, x = fast(model, torch.randn(64, 16), kernels="always"), torch.randn(64, 16)
        assert any("rows_0" in kernel.shapes[0] for kernel in kernels_of(f))
        same(f, model, x, program=True)
        model.linear.weight.data, model.linear.bias.data = torch.randn(4096, 16), torch.randn(4096)
        same(f, model, x, program=False)

    def test_a_kernel_refuses_others(self) -> None:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        (kernel,) = kernels_of(fast(model, images(), kernels="always"))
        with pytest.raises(KernelError, match=r"generated for .* of shape \(8, 3, 3, 3\)"):
            operator(kernel)(images(), torch.randn(8, 3, 2, 2), torch.randn(8))
