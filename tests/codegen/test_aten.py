"""Programs: golden texts, names that cannot collide, what is derived, what is freed."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright.codegen.aten import lower
from fusewright.ir import ops
from fusewright.ir.fused import Fused
from fusewright.ir.node import Graph, make
from fusewright.kernel import Array, Kernel
from fusewright.pipeline import Built, build
from fusewright.problem import load_problem

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"


class Cropped(nn.Module):
    """A transposed convolution whose ends are cropped, averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3))


class Depth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x).mean(2))


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12))

    def forward(self, x: Tensor) -> dict[str, Tensor | list[Tensor]]:
        y = self.layers(x)
        return {"sum": y.sum(1, keepdim=True), "inputs": [x, x[:, 1:3]]}


class Bypass(nn.Module):
    """Nothing to rewrite: dropout, a residual, an operation that is not understood."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = F.dropout(torch.relu(self.first(x)), 0.25) + x
        z = torch.tril(self.second(self.norm(y)))
        return (z if mask is None else z.masked_fill(mask, float("-inf"))), y


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.shift = torch.arange(8.0)

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) * torch.tensor([1.0, -2.0] * 4) + self.shift).sum(1) + (self.shift * 2).sum()


def _example(name: str, batch: int):
    problem = load_problem(ROOT / "examples" / f"{name}.py").with_batch(batch)
    return problem.build(), tuple(problem.inputs())


MODELS = {
    "conv_avgpool_sigmoid_sum": lambda: _example("conv_avgpool_sigmoid_sum", 2),
    "conv3d_div_maxpool_gap_bias_sum": lambda: _example("conv3d_div_maxpool_gap_bias_sum", 2),
    "convtranspose_gap_bias_logsumexp": lambda: _example("convtranspose_gap_bias_logsumexp", 2),
    "cropped": lambda: (Cropped(), (torch.randn(2, 3, 9, 8),)),
    "depth": lambda: (Depth(), (torch.randn(2, 2, 9, 8, 8),)),
    "features": lambda: (Features(), (torch.randn(3, 6),)),
    "bypass": lambda: (Bypass(), (torch.randn(3, 6), torch.ones(3, 6, dtype=torch.bool))),
    "constants": lambda: (Constants(), (torch.randn(3, 6),)),
}


def built(model: nn.Module, *args: object, **kwargs: object) -> Built:
    return build(model, args, kwargs, mode="always")


@pytest.mark.parametrize("name", MODELS)
def test_golden(name: str) -> None:
    """To accept new texts: delete the file, run twice, and read the difference."""
    model, args = MODELS[name]()
    path = GOLDEN / f"{name}.txt"
    text = built(model, *args).program.source
    if not path.exists():
        path.write_text(text)
        pytest.fail(f"wrote {path.name}; read it and run again")
    assert text == path.read_text()


def run(model: nn.Module, *args: object, **kwargs: object) -> object:
    found = built(model, *args, **kwargs)
    derive, forward = found.program.functions()
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    return forward(model, *tensors, *derive(model))


def test_dropout_and_opaque_operations_draw_alike() -> None:
    model, args = MODELS["bypass"]()
    torch.manual_seed(3)
    found = run(model, *args)
    torch.manual_seed(3)
    torch.testing.assert_close(found, model(*args))


class TestNames:
    @pytest.mark.parametrize(
        "name",
        [
            "conv",
            "torch",
            "F",
            "constants",
            "B",
            "x_core",
            "range_sum_core_1",
            "float",
            "getattr",
            "conv_weight",
            "cast",
        ],
    )
    def test_of_inputs_cannot_collide(self, name: str) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1))

            def forward(self, **inputs: Tensor) -> Tensor:
                y = self.conv(inputs[name])
                return y.mean((2, 3)) * inputs["other"] + float("inf") * 0 + inputs[name].amax((1, 2, 3))[:, None]

        model = Model()
        inputs = {name: torch.randn(3, 3, 8, 8), "other": torch.randn(3, 4)}
        torch.testing.assert_close(run(model, **inputs), model(**inputs), equal_nan=True)

    @pytest.mark.parametrize("name", ["x_core", "lambda", "shaped", "torch", "self"])
    def test_of_parameters_cannot_collide(self, name: str) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_parameter(name, nn.Parameter(torch.randn(4, 3, 3, 3)))

            def forward(self, x: Tensor) -> Tensor:
                return F.conv2d(x, getattr(self, name), padding=1).mean((2, 3))

        model = Model()
        torch.testing.assert_close(run(model, x := torch.randn(3, 3, 8, 8)), model(x), rtol=1e-5, atol=1e-6)


class TestDerived:
    def test_reads_parameters_and_attributes(self) -> None:
        class Model(Constants):
            def forward(self, x: Tensor) -> Tensor:
                return self.linear(x).sum(1) + (self.shift * 2).sum() * torch.tensor([2.0]).exp()

        model = Model()
        program = built(model, torch.randn(3, 6)).program
        literal = next(iter(program.constants))
        assert set(program.sources) == {"linear.weight", "linear.bias", "shift", literal}
        assert set(program.constants) == {literal} and "self.shift" in program.source

    def test_what_the_caller_may_write_to_is_not_kept(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(4))

            def forward(self, x: Tensor):
                w = self.weight.exp()
                return x + w, (w * 2)[None].expand(x.shape[0], -1), w.reshape(2, 2), self.weight.tanh()

        program = built(Model(), torch.randn(3, 4)).program
        derive, forward = program.functions()
        model, x = Model(), torch.randn(3, 4)
        derived = derive(model)
        kept = {t.untyped_storage().data_ptr() for t in derived}
        assert not kept & {t.untyped_storage().data_ptr() for t in forward(model, x, *derived)}

    def test_calls_that_only_compute_on_weights_are_derived(self) -> None:
        """As a table of biases that is read at fixed places (a Swin's)."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Parameter(torch.randn(5, 4))
                self.register_buffer("places", torch.tensor([3, 0, 0]))

            def forward(self, x: Tensor) -> Tensor:
                return torch.roll(x + self.table.T[:, self.places].T.exp(), 1, 1)

        model, x = Model(), torch.randn(2, 3, 4)
        program = built(model, x).program
        assert program.sources == ("places", "table") and program.repeatable and not program.looks_up
        derive, forward = program.functions()
        assert "aten.index.Tensor" in program.source.partition("def forward")[0]
        torch.testing.assert_close(forward(model, x, *derive(model)), model(x))
        f = fusewright.optimize(model, (x,), rewrite="always", verify=False, measure=False)
        for change in (lambda: model.table.mul_(2), lambda: model.places.copy_(torch.tensor([1, 2, 4]))):
            with torch.no_grad():
                torch.testing.assert_close(f(x), model(x))
                change()
                torch.testing.assert_close(f(x), model(x))

    @pytest.mark.parametrize(
        "call",
        [
            lambda w, x: torch.dropout(w, 0.5, True).sum() + x,  # draws
            lambda w, x: torch.diagonal(w) + x,  # shares memory
            lambda w, x: w.roll(x.shape[0], 1).sum() + x,  # another one at another batch size
        ],
    )
    def test_other_calls_on_weights_are_not(self, call: Callable[[Tensor, Tensor], Tensor]) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(4, 4))

            def forward(self, x: Tensor) -> Tensor:
                return call(self.weight, x)

        program = built(Model(), torch.randn(3, 4)).program
        assert "torch.ops" not in program.source.partition("def forward")[0]

    def test_what_depends_on_the_batch_is_computed_anew(self) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.randn(1, 4))

            def forward(self, x: Tensor) -> Tensor:
                return x + self.weight.exp().expand(x.shape[0], 4) * x.shape[0]

        model = Model()
        derive, forward = built(model, torch.randn(3, 4)).program.functions()
        for batch in (3, 5):
            x = torch.randn(batch, 4)
            torch.testing.assert_close(forward(model, x, *derive(model)), model(x))


class Chain(nn.Module):
    """Deep and plain, so that eager holds two activations at a time."""

    def forward(self, x: Tensor) -> Tensor:
        for i in range(12):
            y = x.sin()
            x = torch.cat((y[:, 1:], y[:, :1]), 1) if i % 3 == 0 else y + 1
        return x.sum(1)


def peak(call) -> int:
    """The most bytes alive at once among the tensors a call makes, by PyTorch's own profiler."""
    gc.collect()
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        call()
    held = highest = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    return highest


def test_memory_is_freed_as_early_as_in_eager() -> None:
    model, x = Chain(), torch.randn(64, 4096)
    derive, forward = build(model, (x,), {}, mode="never").program.functions()
    ours, eager = peak(lambda: forward(model, x, *derive(model))), peak(lambda: model(x))
    assert 0 < ours <= eager


def test_variables_leave_the_names_of_kernels_alone() -> None:
    """A variable of the name would hide the operator that the same line calls."""
    x = make(ops.Input((2, 3), torch.float32, torch.device("cpu"), "fused_cast", 0))
    placeholder = make(ops.Input(x.shape, x.dtype, x.device, "operand_0", 0))
    calls = []
    for name in ("fused", "fused_2", "fused_cast"):
        calls.append(make(Fused(name, make(ops.Pointwise("relu"), placeholder)), calls[-1] if calls else x))
    kernels = [_kernel(name) for name in ("fused", "fused_2", "fused_cast")]
    program = lower(Graph((x,), tuple(calls)), kernels=kernels)
    value = torch.randn(2, 3)
    derive, forward = program.functions()
    assert all(torch.equal(y, value.relu()) for y in forward(None, value, *derive(None)))


def test_derived_weights_lie_as_kernels_read_them() -> None:
    """A transposed view would be copied by the kernel's launcher, in every call."""
    weight = make(ops.Param((2, 3), torch.float32, torch.device("cpu"), "weight"))
    turned = make(ops.Permute((1, 0)), make(ops.Pointwise("exp"), weight))
    placeholder = make(ops.Input(turned.shape, torch.float32, weight.device, "operand_0", 0))
    fused = make(Fused("fused", make(ops.Pointwise("relu"), placeholder)), turned)
    program = lower(Graph((), (fused,)), kernels=(_kernel("fused"),))
    assert program.functions()[0](SimpleNamespace(weight=torch.randn(2, 3)))[0].is_contiguous()


class Held(nn.Module):
    """A function of an image, a weight and buffers."""

    def __init__(self, function: Callable[[Held, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 4))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("state", torch.rand(4))
        self.register_buffer("indices", torch.tensor([3, 0, 2, 1]))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def set_and_read(m: Held, x: Tensor) -> Tensor:
    m.state[:2] = x[0, :2]
    return x + m.state[m.indices]


def write_a_view(m: Held, x: Tensor) -> Tensor:
    m.state.view(2, 2).mul_(0.5)
    return x + m.state * 2


def normalise_and_read(m: Held, x: Tensor) -> Tensor:
    return m.norm(x) + m.norm.running_mean.flip(0)


@pytest.mark.parametrize("function", [set_and_read, write_a_view, normalise_and_read])
def test_what_a_call_writes_is_not_read_ahead(function: Callable[[Held, Tensor], Tensor]) -> None:
    model, x = Held(function), torch.randn(2, 4)
    eager = copy.deepcopy(model)
    derive, forward = build(model, (x,), {}, measure=False).program.functions()
    torch.testing.assert_close(forward(model, x, *derive(model)), eager(x))


@pytest.mark.parametrize(
    "view", [torch.atleast_2d, lambda w: torch.einsum("ij->ji", w), lambda w: torch.unsafe_split(w, 2)[0]]
)
@pytest.mark.parametrize("weight", [lambda m: m.weight[m.indices], lambda m: m.weight * 2])
def test_results_may_be_written_to(view: Callable[[Tensor], Tensor], weight: Callable[[Held], Tensor]) -> None:
    """What a call returns may share memory with its operands, though its schema does not tell."""
    model, x = Held(lambda m, x: (view(weight(m)), x + 1)), torch.randn(2, 4)
    derive, forward = build(model, (x,), {}, measure=False).program.functions()
    derived = derive(model)
    with torch.no_grad():
        forward(model, x, *derived)[0].zero_()
    torch.testing.assert_close(forward(model, x, *derived), model(x))


def _kernel(name: str) -> Kernel:
    return Kernel(
        name=name,
        source="",
        operands=("x",),
        layouts=("contiguous",),
        sizes=(("n", 0, 0),),
        output=Array("out", ("n", "3"), torch.float32),
        scratch=(),
        launches=(),
        reference="def reference(x):\n    return torch.relu(x)\n",
    )


@pytest.mark.parametrize(
    ("kernel", "options", "merged"),
    [
        ((5, 1, 1), {"padding": (2, 0, 0)}, "flatten(-2, -1)"),
        ((1, 1, 4), {"stride": (1, 1, 2), "padding": (0, 0, 1), "count_include_pad": False}, "flatten(-3, -2)"),
        ((3, 1, 1), {"stride": (2, 1, 1), "ceil_mode": True, "divisor_override": 2}, "flatten(-2, -1)"),
        ((3, 1, 3), {"stride": (1, 1, 1)}, None),
        ((3, 1, 1), {"stride": (1, 2, 1)}, None),
    ],
    ids=str,
)
def test_averages_along_one_axis_are_averages_of_images(
    kernel: tuple[int, ...], options: dict[str, Any], merged: str | None
) -> None:
    """PyTorch sums gradients of volumes in any order."""

    class Average(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.avg_pool3d(x, kernel, **{"stride": 1, **options})

    x = torch.randn(2, 3, 7, 6, 5, dtype=torch.float64, requires_grad=True)
    built = build(Average(), (x,), {})
    assert ("avg_pool3d" in built.program.source) == (merged is None)
    assert merged is None or merged in built.program.source
    _, forward = built.program.functions()
    ours, theirs = forward(Average(), x), Average()(x)
    torch.testing.assert_close(ours, theirs)
    cotangent = torch.randn_like(theirs)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, cotangent) for y in (ours, theirs)))
    last = x.detach().contiguous(memory_format=torch.channels_last_3d)
    assert forward(Average(), last).stride() == Average()(last).stride()
