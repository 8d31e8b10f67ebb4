"""Launchers: what the C++ text would hand to each kernel is what the kernel's record says, at many sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from solutions import draft as drafted
from solutions import load, problem, text_of

from fusewright import tuning
from fusewright.emit.draft import Draft
from fusewright.kernel import Kernel, evaluate

CASES = {
    "contraction": ("self.conv = nn.Conv2d(3, 40, (3, 2), padding=1)", "self.conv(x).relu().amax((2, 3))", "3, 33, 27"),
    "contraction, not reduced": ("self.conv = nn.Conv1d(5, 8, 3)", "self.conv(x).tanh()", "5, 300"),
    "positions as one": ("self.conv = nn.Conv2d(12, 40, 1)", "self.conv(x).tanh()", "12, 33, 27"),
    "positions of two dimensions as one": (
        "self.conv = nn.Conv3d(12, 40, (3, 1, 1))",
        "self.conv(x).relu().mean((2, 3, 4))",
        "12, 9, 7, 11",
    ),
    "transposed": ("self.conv = nn.ConvTranspose2d(4, 9, 3, stride=2)", "F.max_pool2d(self.conv(x), 2)", "4, 9, 11"),
    "several": (
        "self.conv = nn.ConvTranspose2d(4, 8, 3)",
        "torch.logsumexp(self.conv(x).mean((2, 3)), 1)",
        "4, 31, 30",
    ),
    "stream": ("self.pool = nn.MaxPool2d(3, 2, 1)", "self.pool(x.exp()).sigmoid().sum((1, 2, 3))", "6, 31, 64"),
    "rows": ("self.norm = nn.LayerNorm(96)", "self.norm(x).relu() * 2", "40, 96"),
    "norm": ("self.norm = nn.LayerNorm(96)", "self.norm(x).relu() * 2", "60, 96"),
    "norm, pooled": ("self.norm = nn.GroupNorm(3, 12)", "F.max_pool2d(self.norm(x.tanh()), 2)", "12, 70, 66"),
    "ranges": ("self.conv = nn.Conv2d(6, 9, 4, stride=3, padding=2)", "self.conv(x).mean((2, 3))", "6, 200, 240"),
    "embedding": ("self.table = nn.Embedding(90, 24)", "self.table((x * 90).long()).relu().mean(1)", "60"),
    "products of rows": ("self.p = nn.Parameter(torch.rand(1))", "(x @ x.mT).tanh() * self.p", "600"),
    "products of samples": ("self.p = nn.Parameter(torch.rand(1))", "torch.cdist(x, x).square() * self.p", "700, 40"),
    "products, reduced": ("self.p = nn.Parameter(torch.rand(1))", "(x @ x.mT).tanh().mean() * self.p", "600, 40"),
}

FAMILIES = {
    "contraction": {"contraction"},
    "contraction, not reduced": {"contraction"},
    "positions as one": {"contraction"},
    "positions of two dimensions as one": {"contraction"},
    "transposed": {"contraction"},
    "several": {"range reduction", "sample program"},
    "stream": {"stream"},
    "rows": set[str](),
    "norm": {"normalization"},
    "norm, pooled": {"normalization"},
    "ranges": {"range reduction"},
    "embedding": {"stream"},
    "products of rows": {"matmul"},
    "products of samples": {"matmul"},
    "products, reduced": {"matmul"},
}


def made(tmp_path: Path, case: str) -> tuple[Draft, ModuleType]:
    init, expression, shape = CASES[case]
    path = problem(tmp_path, init, f"def forward(self, x):\n    return {expression}", f"[torch.rand(4, {shape})]")
    with patch.object(tuning, "capability_of", lambda device: 90 if case.startswith("products") else None):
        found = drafted(path, kernels="always", rewrite="always")
    solution = path.with_name("solution.py")
    solution.write_text(text_of(found))
    return found, load(solution)


def launched(solution: Any, kernel: Kernel, operands: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The output that a launch would fill, and every argument that the launcher got, by its name in the C++ text."""
    given: list[Any] = []
    library = SimpleNamespace(**{f"launch_{kernel.name}": lambda *values: given.extend(values)})
    libraries, streams = {5: library}, {5: 57}
    with (
        patch.object(torch.Tensor, "get_device", lambda _: 5),
        patch.object(solution, "library", libraries.__getitem__),
        patch.object(solution, "dense", lambda kernel, name, tensor, *_: tensor),
        patch.object(solution, "raw_stream", streams.__getitem__),
    ):
        output = getattr(solution, f"{kernel.name}_launch")(*operands)
    text = getattr(solution, f"{kernel.name.upper()}_LAUNCHER")
    (parameters,) = re.findall(rf"launch_{kernel.name}\(([^)]*)\)", text)
    names = [parameter.split()[-1].lstrip("*") for parameter in parameters.split(",")]
    arguments = dict(zip(names, given, strict=True))
    assert arguments["stream"] == 57
    return output, arguments


def calls_of(solution: Any, kernel: Kernel) -> list[tuple[str, list[str], list[str]]]:
    """The launches in the C++ text: entry, how it is launched, the arguments."""
    text = " ".join(getattr(solution, f"{kernel.name.upper()}_LAUNCHER").split())
    found = re.findall(r"\blaunch\((\w+), ((?:dim3\([^)]*\)|[^,]*), \d+, \d+, stream), (.*?)\)\)\)?[; ]", text)
    return [(entry, _items(shape), _items(arguments)) for entry, shape, arguments in found]


def _items(text: str) -> list[str]:
    return re.findall(r"dim3\([^)]*\)|[^,\s][^,]*", text)


def operands_of(kernel: Kernel, sizes: dict[str, int], like: list[torch.Tensor]) -> list[torch.Tensor]:
    """Operands whose sizes are these."""
    shapes = [[evaluate(n, sizes) for n in shape] for shape in kernel.shapes]
    return [t.new_empty(shape) for t, shape in zip(like, shapes, strict=True)]


def recorded(solution: Any, kernels: tuple[Kernel, ...]) -> dict[str, list[torch.Tensor]]:
    """The operands that each kernel gets in a call of the model on a CPU, where references serve."""
    found: dict[str, list[torch.Tensor]] = {}

    def recorder(name: str) -> Callable[..., torch.Tensor]:
        def record(*operands: torch.Tensor, **_: Any) -> torch.Tensor:
            found[name] = list(operands)
            result: torch.Tensor = getattr(solution, f"{name}_reference")(*operands)
            return result

        return record

    for kernel in kernels:
        setattr(solution, kernel.name, recorder(kernel.name))
    model = solution.ModelNew(*solution.get_init_inputs())
    with (
        torch.no_grad(),
        patch.object(solution, "kernels_for", lambda _: "cuda"),
        patch("torch.cuda.device", nullcontext),
    ):
        model(*solution.get_inputs())
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sampled
def test_launches_are_those_of_the_record(case: str, tmp_path: Path) -> None:
    draft, solution = made(tmp_path, case)
    kernels = draft.program.kernels
    assert FAMILIES[case] <= {c.family for c in draft.plan.kernels if c.path == "generated"}
    operands = recorded(solution, kernels)
    random = Random(0)
    for kernel in kernels:
        _refuses_other_shapes(solution, kernel, operands[kernel.name])
        for _ in range(20):
            sizes = {name: random.randint(20, 90) for name, _, _ in kernel.sizes}
            tensors = operands_of(kernel, sizes, operands[kernel.name])
            output, given = launched(solution, kernel, tensors)
            assert output.shape == tuple(evaluate(n, sizes) for n in kernel.output.shape)
            assert output.dtype == kernel.output.dtype
            pointers = dict(zip(kernel.operands, (t.data_ptr() for t in tensors), strict=True))
            pointers[kernel.output.name] = output.data_ptr()
            assert {name: given[name] for name in pointers if name in given} == {
                name: value for name, value in pointers.items() if name in given
            }
            _same_launches(kernel, calls_of(solution, kernel), given, sizes)


def _refuses_other_shapes(solution: Any, kernel: Kernel, tensors: list[torch.Tensor]) -> None:
    """Every operand of another shape is refused in a sentence that names it; lengths that may differ are not."""
    sizes_of, free = getattr(solution, f"{kernel.name}_sizes"), {(operand, dim) for _, operand, dim in kernel.sizes}
    right = [t.shape for t in tensors]
    sizes_of(*right)
    for i, name in enumerate(kernel.operands):
        wrong = [torch.Size((*right[i], 1))]
        wrong += [
            torch.Size(n + (d == dim) for d, n in enumerate(right[i]))
            for dim in range(len(right[i]))
            if (i, dim) not in free
        ]
        for shape in wrong:
            sentence = rf"^{kernel.name} takes {name} of shape \(.*\), not {re.escape(str(tuple(shape)))}$"
            with pytest.raises(ValueError, match=sentence):
                sizes_of(*right[:i], shape, *right[i + 1 :])


def _same_launches(
    kernel: Kernel, calls: list[tuple[str, list[str], list[str]]], given: dict[str, Any], sizes: dict[str, int]
) -> None:
    assert len(calls) == len(kernel.launches) > 0
    for (entry, shape, arguments), launch in zip(calls, kernel.launches, strict=True):
        assert entry == launch.entry
        grid = shape[0].removeprefix("dim3(").removesuffix(")").split(",")
        numbers = [evaluate(n.strip(), given) for n in grid] + [1] * (3 - len(grid))
        assert numbers == [evaluate(n, sizes) for n in launch.grid]
        assert shape[1:] == [str(launch.threads), str(launch.shared), "stream"]
        for text, argument in zip(arguments, launch.arguments, strict=True):
            if argument.kind == "pointer":
                assert text == argument.text
            else:
                assert evaluate(text, given) == evaluate(argument.text, sizes)


@pytest.mark.parametrize("private", [True, False])
def test_streams_are_raw_where_pytorch_gives_those(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, private: bool
) -> None:
    """The function that gives them is a private one."""
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    if private:
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", {5: 57}.__getitem__, raising=False)
    _, solution = made(tmp_path, "stream")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream={5: 75}[device]))
    assert solution.raw_stream(5) == (57 if private else 75)
