"""Kernels' functions say what they were made for, as PyTorch's own do, and refuse a call for anything else."""

from __future__ import annotations

import ast
import copy
import re
import timeit
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from solutions import draft, load, problem, ruff, text_of, write
from torch import Tensor

from fusewright.kernel import Kernel

Given = dict[str, Any]

# A model, the shape of a sample, what the call of its kernel says, and other arguments, which PyTorch would take.
CASES: dict[str, tuple[str, str, str, Given, list[Given]]] = {
    "a pool that slid in front": (
        "self.conv = nn.Conv2d(3, 8, 3)",
        "F.avg_pool2d(self.conv(x), 4).sigmoid().sum((1, 2, 3))",
        "3, 41, 50",
        {"kernel_size": (3, 3), "stride": (4, 4), "pool": (4, 4), "pool_stride": (1, 1)},
        [{"stride": (1, 1)}, {"pool": (2, 2)}, {"pool_stride": (4, 4)}, {"padding": (1, 1)}, {"pool_padding": (1, 1)}],
    ),
    "a pool behind": (
        "self.conv = nn.Conv3d(3, 8, 3, padding=(0, 1, 2))",
        "F.max_pool3d(self.conv(x).relu(), 3, 2, 1, ceil_mode=True)",
        "3, 10, 13, 16",
        {
            **{"kernel_size": (3, 3, 3), "padding": (0, 1, 2), "pool": (3, 3, 3), "pool_stride": (2, 2, 2)},
            **{"pool_padding": (1, 1, 1), "pool_ceil_mode": True},
        },
        [{"padding": (1, 1, 1)}, {"stride": (2, 1, 1)}, {"pool_stride": (3, 3, 3)}, {"pool_ceil_mode": False}],
    ),
    "an average, in groups": (
        "self.conv = nn.Conv2d(4, 8, 3, groups=2)",
        "F.avg_pool2d(self.conv(x).tanh(), 3, 2, 1, count_include_pad=False)",
        "4, 20, 23",
        {
            **{"kernel_size": (3, 3), "groups": 2, "pool": (3, 3), "pool_stride": (2, 2)},
            **{"pool_padding": (1, 1), "pool_count_include_pad": False},
        },
        [{"groups": 4}, {"pool_count_include_pad": True}, {"pool_padding": (0, 0)}],
    ),
    "transposed": (
        "self.conv = nn.ConvTranspose2d(4, 9, 3, stride=2, output_padding=1)",
        "F.max_pool2d(self.conv(x), 2).tanh()",
        "4, 9, 11",
        {"kernel_size": (3, 3), "stride": (2, 2), "output_padding": (1, 1), "transposed": True, "pool": (2, 2)},
        [{"transposed": False}, {"output_padding": (0, 0)}, {"stride": (1, 2)}, {"pool_stride": (1, 1)}],
    ),
    "padding of two lengths": (
        "self.conv = nn.Conv1d(5, 8, 4, padding='same')",
        "self.conv(x).tanh().amax(2)",
        "5, 60",
        {"kernel_size": (4,), "padding": ((1, 2),)},
        [{"padding": (1,)}, {"dilation": (2,)}, {"stride": (2,)}],
    ),
    "a stream": (
        "self.slope = 0.1",
        "F.max_pool2d(F.leaky_relu(x, self.slope), 3, 2, 1, 2) + 1",
        "6, 31, 64",
        {"pool": (3, 3), "pool_stride": (2, 2), "pool_padding": (1, 1), "pool_dilation": (2, 2)},
        [{"pool": (5, 5)}, {"pool_stride": (1, 1)}, {"pool_padding": (0, 0)}, {"pool_dilation": (1, 1)}],
    ),
    "window sums": (
        "self.conv = nn.Conv2d(6, 9, 3, stride=2, dilation=2, padding=1)",
        "self.conv(x).mean((2, 3))",
        "6, 40, 44",
        {"pool": (19, 21), "pool_stride": (2, 2), "pool_padding": (1, 1), "pool_dilation": (2, 2)},
        [{"pool_dilation": (1, 1)}, {"pool_stride": (1, 1)}],
    ),
    "index ranges": (
        "self.conv = nn.Conv2d(6, 9, 3, padding=1)",
        "self.conv(x).mean((2, 3))",
        "6, 40, 50",
        {"ranges": (((0, 39, 1), (0, 40, 1), (1, 40, 1)), ((0, 49, 1), (0, 50, 1), (1, 50, 1)))},
        [{"ranges": (((0, 40, 1),) * 3, ((0, 50, 1),) * 3)}],
    ),
}


def of(case: str, folder: Path) -> Path:
    """The problem file of a case."""
    init, expression, sample, _, _ = CASES[case]
    return problem(folder, init, f"def forward(self, x):\n    return {expression}", f"[torch.rand(2, {sample})]")


def called(text: str, name: str) -> Given:
    """The keyword arguments of the call of a kernel in the rewritten forward."""
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    (call,) = (call for call in calls if isinstance(call.func, ast.Name) and call.func.id == name)
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}


@pytest.mark.parametrize("target", ["cuda", "cpu"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled
def test_calls_say_what_a_kernel_was_made_for(case: str, target: str, tmp_path: Path) -> None:
    """The call names what is no default of PyTorch's; others are refused in a sentence, and nothing is launched."""
    made = draft(of(case, tmp_path), target=target, kernels="always", rewrite="always")
    path = tmp_path / "solution.py"
    path.write_text(text_of(made))
    ruff(path)
    solution: Any = load(path)
    kernel = next(kernel for kernel in made.kernels if kernel.fixed)
    _, _, _, said, others = CASES[case]
    assert called(path.read_text(), kernel.name) == said
    (support,) = re.findall(r"^def expect_arguments\(.*?\n\n", path.read_text(), re.DOTALL | re.MULTILINE)
    assert not re.search(r"\bpass\b|\btry\b|\bexcept\b", support)
    assert len(kernel.fixed) >= len(said)
    function, operands = getattr(solution, kernel.name), [torch.empty(0)] * len(kernel.operands)
    with patch.object(solution, "differentiable", lambda *_: "launched"):
        assert function(*operands, **said) == "launched"
        assert function(*operands, **{f.name: f.value for f in kernel.fixed}) == "launched"
        for other in others:
            (name,) = other
            held = next(f.value for f in kernel.fixed if f.name == name)
            sentence = (
                f"{kernel.name} was made for {name}={held}, not {other[name]}; "
                "`fusewright optimize` writes a file for another model"
            )
            with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
                function(*operands, **said | other)


def test_what_is_left_out_is_as_in_pytorch(tmp_path: Path) -> None:
    """A stride that is not named is 1, and a pool's is the pool: no kernel takes that for what it was made for."""
    solution: Any = load(write(of("a pool that slid in front", tmp_path), targets=("cpu",), rewrite="always"))
    _, _, _, said, _ = CASES["a pool that slid in front"]
    for name, default in (("stride", (1, 1)), ("pool_stride", (4, 4))):
        with pytest.raises(ValueError, match=re.escape(f"{name}={said[name]}, not {default}; ")):
            solution.fused_conv_avg_sigmoid_sum(*[None] * 3, **{n: v for n, v in said.items() if n != name})
    with pytest.raises(TypeError, match="kernel_size"):
        solution.fused_conv_avg_sigmoid_sum(None, None, None, pool=(4, 4))


def test_a_kernel_without_windows_takes_operands_alone(tmp_path: Path) -> None:
    path = problem(
        tmp_path,
        "self.linear = nn.Linear(6, 9)",
        "def forward(self, x):\n    return self.linear(x).relu().sum(2)",
        "[torch.rand(2, 7, 6)]",
    )
    text = write(path, targets=("cpu",)).read_text()
    assert "fused_linear_relu_sum(" in text
    assert "expect_arguments" not in text
    assert "import inspect" not in text


@pytest.mark.parametrize("case", ["a pool that slid in front", "a stream"])
def test_on_a_cpu(case: str, tmp_path: Path) -> None:
    """Results, gradients and second derivatives of the kernels' function, called with its arguments."""
    solution: Any = load(write(of(case, tmp_path), targets=("cpu",), kernels="always", rewrite="always"))
    torch.manual_seed(0)
    model = solution.ModelNew()
    x = torch.randn(2, *map(int, CASES[case][2].split(", ")), requires_grad=True)

    def derived(forward: Callable[..., Tensor], model: Any, x: Tensor) -> list[Tensor]:
        value = forward(model, x)
        first = torch.autograd.grad(value.square().sum(), x, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), [x, *model.parameters()], allow_unused=True)
        return [value, *first, *(each for each in second if each is not None)]

    wide = copy.deepcopy(model).double()
    expected = derived(solution.Model.forward, wide, x.detach().double().requires_grad_())
    found = derived(lambda model, x: model.fused(x, *solution.weights(model)), model, x)
    assert len(found) == len(expected)
    for ours, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, truth.float(), rtol=1e-3, atol=1e-4)


# Models that are a convolution and a pool alone, so that the arguments say all there is to say.
PLAIN = {
    "in front": ("nn.Conv2d(3, 8, 3)", "F.avg_pool2d(self.conv(x), 4)", "3, 41, 50"),
    "in front, strided": ("nn.Conv2d(3, 8, (3, 2), 2)", "F.avg_pool2d(self.conv(x), (2, 3))", "3, 23, 30"),
    "in front, volumes": ("nn.Conv3d(3, 8, 2)", "F.avg_pool3d(self.conv(x), 2)", "3, 9, 10, 11"),
    "behind": ("nn.Conv2d(4, 8, 3, 2, 1, 2, 2)", "F.max_pool2d(self.conv(x), 3, 2, 1)", "4, 30, 33"),
    "ends that differ": ("nn.Conv1d(4, 8, 4, padding='same')", "F.max_pool1d(self.conv(x), 2)", "4, 33"),
    "transposed": (
        "nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2)",
        "F.max_pool2d(self.conv(x), 2, ceil_mode=True)",
        "4, 9, 12",
    ),
}


def meant(kernel: Kernel, x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    """A convolution and a pool by PyTorch, from nothing but the kernel's arguments."""
    given: Given = {f.name: f.value for f in kernel.fixed}
    n = x.ndim - 2
    conv, transposed, pool = (getattr(F, f"{name}{n}d") for name in ("conv", "conv_transpose", "max_pool"))
    convolution = {name: given[name] for name in ("stride", "dilation", "groups")}
    windows = {name: given.get(f"pool_{name}", 1) for name in ("stride", "padding", "dilation")}
    assert tuple(w.shape[2:]) == given["kernel_size"]
    if "_avg" in kernel.name:  # PyTorch's average pools have no dilation
        means = torch.full((x.shape[1], 1, *given["pool"]), 1 / prod(given["pool"]), dtype=x.dtype)
        x = conv(x, means, groups=x.shape[1], **windows)
    if given.get("transposed"):
        y = transposed(x, w, bias, padding=given["padding"], output_padding=given["output_padding"], **convolution)
    else:
        ends = [(p, p) if isinstance(p, int) else p for p in given["padding"]]
        y = conv(F.pad(x, [p for end in reversed(ends) for p in end]), w, bias, **convolution)
    if "_max" in kernel.name:
        y = pool(y, given["pool"], ceil_mode=given.get("pool_ceil_mode", False), **windows)
    found: Tensor = y
    return found


@pytest.mark.parametrize("case", PLAIN)
@pytest.mark.sampled
def test_arguments_are_what_the_kernel_computes(case: str, tmp_path: Path) -> None:
    conv, expression, sample = PLAIN[case]
    forward = f"def forward(self, x):\n    return {expression}"
    path = problem(tmp_path, f"self.conv = {conv}", forward, f"[torch.rand(2, {sample})]")
    for target in ("cuda", "cpu"):
        made = draft(path, target=target, kernels="always", rewrite="always")
        (kernel,) = made.kernels
        x = torch.randn(2, *map(int, sample.split(", ")), dtype=torch.float64)
        model = made.model.double()
        with torch.no_grad():
            torch.testing.assert_close(meant(kernel, x, *model.parameters()), model(x))


def test_the_comparison_takes_well_under_a_microsecond(tmp_path: Path) -> None:
    solution: Any = load(write(of("a pool that slid in front", tmp_path), targets=("cpu",), rewrite="always"))
    _, _, _, said, _ = CASES["a pool that slid in front"]
    solution.differentiable = lambda *_: None
    calls = timeit.repeat(lambda: solution.fused_conv_avg_sigmoid_sum(None, None, None, **said), number=1000, repeat=20)
    assert min(calls) / 1000 < 2e-6  # 0.3 where nothing else runs
