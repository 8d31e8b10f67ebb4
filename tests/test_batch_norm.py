"""Batch norm outside of training: it vanishes into what comes before it, or into the kernels around it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from gpu_build import as_on_a_gpu, emulated, launched
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fusewright import pipeline
from fusewright.kernel import Kernel
from fusewright.runtime.operators import operator
from fusewright.schedule.wishes import Wishes
from tests.dropin import Normed, fast, images, kernels_of, program_calls, same


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


BLOCKS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...], tuple[str, ...]]] = {
    "max pooling": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        (2, 3, 12, 12),
        ("fused_conv_max_relu",),
    ),
    "mean": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.Hardswish(), Mean()),
        (2, 3, 10, 10),
        ("fused_conv_hardswish_mean",),
    ),
    "depthwise": (
        lambda: nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.BatchNorm2d(8), nn.ReLU6()),
        (2, 8, 9, 9),
        ("fused_conv_hardtanh",),
    ),
    "alone": (lambda: nn.Sequential(nn.BatchNorm2d(8)), (2, 8, 9, 9), ("fused_mul_add",)),
    "transition": (
        lambda: nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1, bias=False), nn.AvgPool2d(2)),
        (2, 8, 12, 12),
        ("fused_conv", "fused_mul_add_relu_avg"),
    ),
    "one dimension": (
        lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8, momentum=None), nn.ReLU()),
        (2, 4, 20),
        ("fused_conv_relu",),
    ),
    "three dimensions, transposed, not affine": (
        lambda: nn.Sequential(
            nn.ConvTranspose3d(4, 8, 3, stride=2, groups=2), nn.BatchNorm3d(8, affine=False), nn.ReLU()
        ),
        (2, 4, 4, 4, 4),
        ("fused_convtranspose_relu",),
    ),
    "linear": (lambda: nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()), (5, 8), ("fused_linear_relu",)),
}


def settled(model: nn.Module) -> nn.Module:
    """`model` in evaluation mode, its norms with weights and statistics as after some training."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
            if module.affine:
                nn.init.normal_(module.weight)
                nn.init.normal_(module.bias)
    return model.eval()


def planned(model: nn.Module, x: Tensor) -> nn.Module:
    return fast(model, x, rewrite="cost", kernels="always", verify=True)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.sampled
def test_block(name: str) -> None:
    make, shape, kernels = BLOCKS[name]
    model, x = settled(make()), torch.randn(shape)
    f = planned(model, x)
    assert tuple(kernel.name for kernel in kernels_of(f)) == kernels
    assert all("batch_norm" not in e.runner.program.source for e in f._fusewright.entries.values() if e.runner)
    with torch.no_grad():
        same(f, model, x, program=True)


def test_statistics_that_change_are_seen() -> None:
    make, shape, _ = BLOCKS["mean"]
    model, x = settled(make()), torch.randn(shape)
    f = planned(model, x)
    with torch.no_grad():
        same(f, model, x, program=True)
        model[1].running_var.mul_(4.0)
        same(f, model, x, program=True)
        f.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
        same(f, model, x, program=True)
        model[1].running_mean = torch.ones(16)
        same(f, model, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precisions_fold_in_float32(dtype: torch.dtype) -> None:
    make, shape, kernels = BLOCKS["mean"]
    model, x = settled(make()).to(dtype), torch.randn(shape, dtype=dtype)
    f = planned(model, x)
    assert tuple(kernel.name for kernel in kernels_of(f)) == kernels
    truth = copy.deepcopy(model).double()(x.double())
    with torch.no_grad():
        got, eager = f(x), model(x)
    assert program_calls(f) > 0
    assert (got - truth).abs().max() <= 2 * (eager - truth).abs().max()


class TestLeftAlone:
    @pytest.mark.parametrize("training", [True, False])
    def test_statistics_of_the_input(self, training: bool) -> None:
        """In training, and where none are kept."""
        model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8, track_running_stats=training), nn.ReLU())
        model.train(training)
        x = torch.randn(2, 4, 8, 8)
        f = planned(copy.deepcopy(model), x)
        (program,) = {e.runner.program.source for e in f._fusewright.entries.values() if e.runner}
        assert "batch_norm" in program
        for _ in range(2):
            torch.testing.assert_close(f(x), model(x))
        torch.testing.assert_close(f.state_dict(), model.state_dict())

    def test_without_kernels_a_norm_alone_stays(self) -> None:
        model = settled(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()))
        built = pipeline.build(model, (torch.randn(2, 8, 9, 9),), {})
        assert "batch_norm" in built.program.source


class Gated(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(nn.functional.softplus(x))


TRAINING: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...], tuple[str, ...]]] = {
    "pooled": (
        lambda: nn.Sequential(nn.BatchNorm2d(8), nn.Tanh(), nn.MaxPool2d(2)),
        (4, 8, 12, 20),
        ("fused_statistics", "fused_sub_mul_add_max_tanh"),
    ),
    "functions first": (
        lambda: nn.Sequential(Gated(), nn.BatchNorm1d(8, momentum=0.3)),
        (4, 8, 33),
        ("fused_softplus_tanh_mul_statistics", "fused_softplus_tanh_mul_sub_mul_add"),
    ),
    "features": (
        lambda: nn.Sequential(nn.BatchNorm1d(12, affine=False), nn.ReLU()),
        (40, 12),
        ("fused_statistics", "fused_sub_mul_relu"),
    ),
    "two": (
        lambda: nn.Sequential(nn.BatchNorm3d(4), nn.ReLU(), nn.BatchNorm3d(4), nn.AvgPool3d(2)),
        (4, 4, 4, 4, 6),
        ("fused_statistics", "fused_sub_mul_add_relu_statistics", "fused_sub_mul_add_relu_sub_mul_add_avg"),
    ),
}


LAST: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...], torch.memory_format, tuple[str, ...]]] = {
    "alone": (
        lambda: nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()),
        (4, 8, 6, 7),
        torch.channels_last,
        ("fused_statistics", "fused_sub_mul_add_relu"),
    ),
    "functions first": (
        lambda: nn.Sequential(Gated(), nn.BatchNorm3d(6, momentum=0.3)),
        (3, 6, 3, 4, 5),
        torch.channels_last_3d,
        ("fused_softplus_tanh_mul_statistics", "fused_softplus_tanh_mul_sub_mul_add"),
    ),
    "reduced": (
        lambda: nn.Sequential(nn.BatchNorm2d(16, affine=False), nn.Hardswish(), Mean()),
        (5, 16, 9, 5),
        torch.channels_last,
        ("fused_statistics", "fused_sub_mul_hardswish_mean"),
    ),
}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.celu(self.norm(x) + x) * 0.5


def calls_of(built: pipeline.Built, model: nn.Module, *args: Tensor) -> list[str]:
    """What a forward calls, kernels by their names: each keeps the host as long as a launch does, or nearly."""
    found: list[str] = []

    class Listing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(func.name())
            return func(*args, **(kwargs or {}))

    def listed(kernel: Kernel, *tensors: Tensor) -> Any:
        found.append(kernel.name)
        with _disable_current_modes():
            return launched(kernel, *tensors)

    derive, forward = built.program.functions()
    forward.__globals__.update({k.name: partial(listed, k) for k in built.program.kernels})
    derived = derive(model)
    with torch.no_grad(), Listing():
        forward(model, *args, *derived)
    return found


class TestTraining:
    """On a GPU, statistics of batches are values that update running ones and that kernels take in."""

    @pytest.mark.parametrize("mean", [0.0, 1000.0])
    @pytest.mark.parametrize("name", TRAINING)
    @pytest.mark.sampled
    def test_forward(self, name: str, mean: float) -> None:
        make, shape, kernels = TRAINING[name]
        torch.manual_seed(0)
        model = make().train()
        built = as_on_a_gpu(model, torch.randn(shape))
        assert {kernel.name for kernel in built.program.kernels} == set(kernels)
        assert "batch_norm" not in built.program.source
        truth = copy.deepcopy(model).double()
        for shift in (mean, mean + 1.0):
            x = torch.randn(shape) + shift
            got, want = emulated(built, model, x), truth(x.double())
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5 + 1e-6 * mean)
        for key, value in truth.state_dict().items():
            found = model.state_dict()[key]
            torch.testing.assert_close(found.to(value.dtype), value, rtol=1e-6, atol=1e-6 + 1e-8 * mean)
            assert not found.requires_grad

    @pytest.mark.parametrize("name", TRAINING)
    def test_backward(self, name: str) -> None:
        """The kernels' operators on a CPU: their references are what is differentiated."""
        make, shape, _ = TRAINING[name]
        torch.manual_seed(0)
        model = make().train()
        eager = copy.deepcopy(model)
        derive, forward = as_on_a_gpu(model, torch.randn(shape)).program.functions()
        x = torch.randn(shape, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        got, want = forward(model, x, *derive(model)), eager(y)
        weight = torch.randn_like(want)
        (got * weight).sum().backward()
        (want * weight).sum().backward()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model.state_dict(), eager.state_dict())

    def test_half_precision_statistics_of_a_norm_that_nobody_reads(self) -> None:
        """Both are updated from the same statistics, whose name is free behind that."""

        class Dropped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.BatchNorm2d(8)

            def forward(self, x: Tensor) -> Tensor:
                self.norm(x)
                return torch.relu(x) * 2

        torch.manual_seed(0)
        model, x = Dropped().bfloat16().train(), (3 * torch.randn(4, 8, 32, 32)).bfloat16()
        eager = copy.deepcopy(model)
        built = as_on_a_gpu(model, x)
        assert "batch_norm" not in built.program.source
        emulated(built, model, x), eager(x)
        torch.testing.assert_close(model.norm.running_var, eager.norm.running_var, rtol=1e-2, atol=0.0)
        torch.testing.assert_close(model.norm.running_mean, eager.norm.running_mean, rtol=1e-2, atol=1e-3)

    def test_half_precision_statistics_are_rounded_once(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()).bfloat16().train()
        eager, x = copy.deepcopy(model), torch.randn(4, 8, 6, 6).bfloat16()
        derive, forward = as_on_a_gpu(model, x).program.functions()
        with torch.no_grad():
            torch.testing.assert_close(forward(model, x, *derive(model)), eager(x), rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(model.state_dict(), eager.state_dict())

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("name", LAST)
    @pytest.mark.sampled
    def test_channels_last(self, name: str, dtype: torch.dtype) -> None:
        """Statistics are those of columns, and images stay as they lie."""
        make, shape, memory_format, kernels = LAST[name]
        torch.manual_seed(0)
        model, x = make().to(dtype).train(), torch.randn(shape, dtype=dtype).to(memory_format=memory_format)
        given: dict[str, Any] = {"kernels": "always", "measure": False, "target": torch.device("cuda")}
        planned = pipeline.build(model, (x,), {}, **given).program
        assert tuple(k.name for k in planned.kernels) == kernels
        assert all(k.layouts[0] == "channels_last" for k in planned.kernels)
        built = as_on_a_gpu(model, x)  # results of other kernels lie in rows on a CPU
        assert built.program.kernels[0].layouts[0] == "channels_last" and "batch_norm" not in built.program.source
        truth, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
        got, near, want = emulated(built, model, x), eager(x), truth(x.double())
        assert got.stride() == near.stride()
        close = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(got.double(), want, **close)
        for key, value in truth.state_dict().items():
            torch.testing.assert_close(model.state_dict()[key].to(value.dtype), value, **close)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
    def test_calls_of_the_host(self, dtype: torch.dtype, memory_format: torch.memory_format) -> None:
        """Two kernels, what counts batches, and an addition for each of both running statistics: nothing is looked at
        in another way first."""
        torch.manual_seed(0)
        model = Residual().to(dtype).train()
        x = torch.randn(4, 8, 6, 7, dtype=dtype).to(memory_format=memory_format)
        given: dict[str, Any] = {"kernels": "always", "measure": False, "target": torch.device("cuda")}
        built, truth = pipeline.build(model, (x,), {}, **given), copy.deepcopy(model).double()
        assert calls_of(built, model, x) == [
            "aten::add_.Tensor",
            "fused_statistics",
            *["aten::detach", "aten::add.out"] * 2,
            "fused_sub_mul_add_celu_mul",
        ]
        truth(x.double())
        for key, value in truth.state_dict().items():
            torch.testing.assert_close(model.state_dict()[key], value.to(model.state_dict()[key].dtype))

    @pytest.mark.parametrize("affine", [True, False])
    @pytest.mark.parametrize("momentum", [0.0, 0.1, 1.0])
    def test_half_precision_running_statistics_are_rounded_once(self, momentum: float, affine: bool) -> None:
        """Bit for bit, as a GPU's eager has them; that of a CPU rounds on the way."""
        model = nn.Sequential(nn.BatchNorm1d(8, momentum=momentum, affine=affine), nn.ReLU()).bfloat16().train()
        settled(model).train()
        x = torch.randint(-4, 5, (17, 8, 32), generator=torch.Generator().manual_seed(0)).bfloat16()
        rows = x.double().transpose(0, 1).flatten(1)
        taken, running = (rows.mean(1), rows.var(1)), (model[0].running_mean, model[0].running_var)
        built = as_on_a_gpu(model, x)
        assert "fused_statistics" in built.program.source
        for _ in range(3):
            want = [
                (r.double() * (1 - momentum) + t * momentum).bfloat16() for r, t in zip(running, taken, strict=True)
            ]
            emulated(built, model, x)
            assert all(map(torch.equal, running, want))

    def test_kernels_are_called_directly(self) -> None:
        """Updates bring no tensors that are not ordinary: without gradients, no kernel need look at its operands."""
        model, x = Residual().train(), torch.randn(4, 8, 6, 7)
        built = as_on_a_gpu(model, x)
        assert built.program.kernels and not built.program.foreign
        assert "add_" in built.program.source
        f, eager = fast(Normed().train(), images(), kernels="always"), Normed().train()
        eager.load_state_dict(f.state_dict())
        (runner,) = {e.runner for e in f._fusewright.entries.values() if e.runner}
        assert runner.program.kernels and runner._direct is not None
        for _ in range(2):
            x = images()
            with torch.no_grad():
                found = []
                for model in (f, eager):
                    torch.manual_seed(0)
                    found.append(model(x))
            torch.testing.assert_close(*found)
        torch.testing.assert_close(f.state_dict(), eager.state_dict())
        assert program_calls(f) > 0

    @pytest.mark.parametrize("shape", [(6, 1), (6, 1, 9), (6, 1, 5, 4)], ids=len)
    def test_of_one_channel(self, shape: tuple[int, ...]) -> None:
        """A row of its statistics may have the shape in which it is read."""
        torch.manual_seed(0)
        norm = nn.BatchNorm2d(1) if len(shape) == 4 else nn.BatchNorm1d(1)
        model, x = nn.Sequential(norm, nn.SiLU()).train(), torch.randn(shape)
        truth, built = copy.deepcopy(model).double(), as_on_a_gpu(model, x)
        assert "fused_statistics" in built.program.source
        torch.testing.assert_close(emulated(built, model, x).double(), truth(x.double()), rtol=1e-5, atol=1e-5)
        for key, value in truth.state_dict().items():
            torch.testing.assert_close(model.state_dict()[key].to(value.dtype), value, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_operators_of_statistics_hold(self, dtype: torch.dtype) -> None:
        """Where no kernel runs, rows of one tensor are results with memory of their own, as those of a kernel are."""
        x = torch.randn(4, 8, 6, 7, dtype=dtype)
        kernels = as_on_a_gpu(Residual().to(dtype).train(), x).program.kernels
        (statistics,) = (kernel for kernel in kernels if "statistics" in kernel.name)
        torch.library.opcheck(operator(statistics).overload, (x.requires_grad_(),))

    def test_what_is_foreign(self) -> None:
        class Found(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return torch.logcumsumexp(torch.linalg.inv(x), 0).tanh()

        assert pipeline.build(Found(), (torch.eye(4),), {}).program.foreign

    def test_one_norm_called_twice(self) -> None:
        """The second call takes in what the first one has written, of other values and of the same."""

        class Twice(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.BatchNorm2d(8)

            def forward(self, x: Tensor) -> Tensor:
                return torch.relu(self.norm(torch.relu(self.norm(x)) + x)) + torch.tanh(self.norm(x))

        torch.manual_seed(0)
        model, x = Twice().train(), 2 + 3 * torch.randn(4, 8, 6, 6)
        truth, built = copy.deepcopy(model).double(), as_on_a_gpu(model, x)
        assert "batch_norm" not in built.program.source
        torch.testing.assert_close(emulated(built, model, x).double(), truth(x.double()), rtol=1e-5, atol=1e-5)
        for key, value in truth.state_dict().items():
            torch.testing.assert_close(model.state_dict()[key].to(value.dtype), value, rtol=1e-6, atol=1e-6)

    def test_running_statistics_have_no_gradient(self) -> None:
        torch.manual_seed(0)
        model = Residual().train()
        x = torch.randn(4, 8, 6, 7, requires_grad=True)
        derive, forward = as_on_a_gpu(model, x).program.functions()
        for _ in range(2):
            forward(model, x, *derive(model)).square().sum().backward()
        assert not any(b.requires_grad for b in model.buffers())

    def test_wishes_hold(self) -> None:
        model, x = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()).train(), torch.randn(4, 8, 6, 6)
        wishes, device = Wishes(keep=("batchnorm",)), torch.device("cuda")
        built = pipeline.build(model, (x,), {}, kernels="always", measure=False, target=device, wishes=wishes)
        assert "batch_norm" in built.program.source

    def test_little_is_left_alone(self) -> None:
        """Where nothing is measured, a small batch is not worth the operations of the update."""
        model = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()).train()
        x = torch.randn(4, 8, 6, 6)
        built = pipeline.build(model, (x,), {}, kernels="auto", measure=False, target=torch.device("cuda"))
        assert "batch_norm" in built.program.source
        large = torch.empty(64, 8, 64, 64)
        built = pipeline.build(model, (large,), {}, kernels="auto", measure=False, target=torch.device("cuda"))
        assert "batch_norm" not in built.program.source


@pytest.mark.parametrize("name", ["mean", "alone"])
def test_on_a_gpu(name: str) -> None:
    """The kernels of a CUDA build, emulated."""
    make, shape, kernels = BLOCKS[name]
    model, x = settled(make()), torch.randn(shape)
    built = as_on_a_gpu(model, x)
    (kernel,) = built.program.kernels
    assert (kernel.name,) == kernels and kernel.target == "cuda"
    with torch.no_grad():
        torch.testing.assert_close(emulated(built, model, x), model(x))
