"""Models built with other arguments and inputs of other sizes: fused where the file says so, right everywhere."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from emulation.emulate import emulate
from solutions import draft, founding, load, problem, text_of, write

POOLED = (
    "self.conv = nn.Conv2d(channels, features, size, stride=stride)\nself.pool = nn.AvgPool2d(pool)",
    "def forward(self, x):\n    return self.pool(self.conv(x)).sigmoid().sum((1, 2, 3))",
    "channels=3, features=12, size=3, stride=1, pool=2",
)
DEEPER = (
    "self.conv = nn.Conv3d(channels, features, size, padding=padding)\nself.slope = slope",
    "def forward(self, x):\n    return F.max_pool3d(F.leaky_relu(self.conv(x), self.slope), 2).mean((2, 3, 4))",
    "channels=3, features=8, size=3, padding=1, slope=0.1",
)
SHAPES = {"pooled": (4, 3, 41, 50), "deeper": (4, 3, 10, 13, 16)}


@pytest.fixture(scope="module", params=SHAPES)
def on_a_cpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    """The solution of a model, whose kernels run here."""
    init, forward, arguments = {"pooled": POOLED, "deeper": DEEPER}[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    path = problem(folder, init, forward, f"[torch.rand({SHAPES[request.param]})]", arguments=arguments)
    return request.param, load(write(path, targets=("cpu",), kernels="always", rewrite="always"))


@contextmanager
def launches(solution: Any) -> Iterator[list[int]]:
    """Counts the launches of kernels."""
    count: list[int] = []
    (name,) = [name for name in vars(solution) if name.endswith("_launch")]
    launch = getattr(solution, name)

    def counted(*operands: Any) -> Any:
        count.append(1)
        return launch(*operands)

    setattr(solution, name, counted)
    yield count
    setattr(solution, name, launch)


def agrees(solution: Any, model: Any, x: torch.Tensor, *, kernels: bool) -> None:
    """A call gives what the original forward gives in float64; `kernels`: they serve it."""
    with launches(solution) as count:
        found = model(x)
    assert bool(count) == kernels
    expected = solution.Model.forward(copy.deepcopy(model).double(), x.double())
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)


def test_kernels_serve_other_sizes(on_a_cpu: tuple[str, Any]) -> None:
    """Lengths between those of the header, with and without gradients as it says; beyond them, the original forward."""
    name, solution = on_a_cpu
    torch.manual_seed(0)
    model, shape = solution.ModelNew(), SHAPES[name]
    for more in ([0, 0, 0], [1, 2, 3], [7, 3, 1], [9, 12, 15]):
        other = (*shape[:2], *(n + m for n, m in zip(shape[2:], more[: len(shape) - 2], strict=True)))
        with torch.no_grad():
            agrees(solution, model, torch.randn(3, *other[1:]), kernels=True)
        derived_for_any = name == "deeper" or not any(more)
        agrees(solution, model, torch.randn(2, *other[1:]), kernels=derived_for_any)
    with torch.no_grad():
        agrees(solution, model, torch.randn(*shape[:-1], 2 * shape[-1] + 1), kernels=False)
        agrees(solution, model, torch.randn(1, *shape[1:]), kernels=False)


def test_gradients_at_another_size(on_a_cpu: tuple[str, Any]) -> None:
    name, solution = on_a_cpu
    model, shape = solution.ModelNew(), SHAPES[name]
    x = torch.randn(*shape[:-1], shape[-1] + 3, requires_grad=True)
    with launches(solution) as count:
        found = torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])
    assert bool(count) == (name == "deeper")
    expected = torch.autograd.grad(solution.Model.forward(model, x).square().sum(), [x, *model.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", SHAPES)
def test_kernels_for_gpus_at_other_sizes(name: str, tmp_path: Path) -> None:
    """The kernel itself, emulated, at the ends of the ranges that its file says it serves and in between."""
    init, forward, arguments = {"pooled": POOLED, "deeper": DEEPER}[name]
    path = problem(tmp_path, init, forward, f"[torch.rand({SHAPES[name]})]", arguments=arguments)
    made = draft(path, kernels="always", rewrite="always")
    (kernel,) = made.program.kernels
    ranges = made.entry.sides.ranges
    assert list(ranges) == list(range(2, len(SHAPES[name])))
    torch.manual_seed(0)
    for share in (0.0, 0.3, 0.9, 1.0):
        sides = [low + int(share * (high - low)) - dim % 2 * (0 < share < 1) for dim, (low, high) in ranges.items()]
        x = torch.randn(2, SHAPES[name][1], *sides)
        with torch.no_grad():
            expected = made.model.double()(x.double()).float()
            found = emulate(kernel, x, *(p.float() for p in made.model.parameters()))
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)  # operands are rounded to tf32


OTHERS: dict[str, list[dict[str, Any]]] = {
    "pooled": [{"channels": 5}, {"features": 16}, {"size": 5}, {"size": (3, 5)}, {"stride": 2}, {"pool": 4}],
    "deeper": [{"channels": 2}, {"features": 12}, {"size": 5}, {"padding": 0}, {"slope": 0.3}],
}


def test_other_arguments_run_the_original_forward(on_a_cpu: tuple[str, Any]) -> None:
    name, solution = on_a_cpu
    for given in OTHERS[name]:
        model = solution.ModelNew(**given)
        batch, channels, *sides = SHAPES[name]
        x = torch.randn(batch, given.get("channels", channels), *sides)
        assert solution.weights(model) is None
        agrees(solution, model, x, kernels=False)


# For each founding model other arguments, and an input that its kernels would take if they were the same.
FOUNDING_OTHERS: dict[str, tuple[tuple[int, ...], list[tuple[Any, ...]]]] = {
    "conv_avgpool_sigmoid_sum": ((2, 8, 192, 192), [(8, 32, 3, 4), (8, 64, 5, 4), (8, 64, 3, 2), (6, 64, 3, 4)]),
    "conv3d_div_maxpool_gap_bias_sum": (
        (2, 8, 16, 32, 32),
        [(8, 24, 3, 2.0, 2), (8, 16, 5, 2.0, 2), (8, 16, 3, 4.0, 2), (8, 16, 3, 2.0, 3), (4, 16, 3, 2.0, 2)],
    ),
    "convtranspose_gap_bias_logsumexp": ((2, 64, 512, 512), [(64, 96, 3, 10.0), (64, 128, 5, 10.0), (64, 128, 3, 1.0)]),
}


@pytest.mark.parametrize("name", FOUNDING_OTHERS)
def test_founding_models_with_other_arguments(name: str, tmp_path: Path) -> None:
    path = tmp_path / "solution.py"
    path.write_text(text_of(founding(name)))
    solution: Any = load(path)
    solution.kernels_for = lambda _: "cuda"
    shape, others = FOUNDING_OTHERS[name]
    with torch.no_grad():
        assert solution.covered(solution.ModelNew(*solution.get_init_inputs()), torch.empty(shape))
        for given in others:
            model = solution.ModelNew(*given)
            own = (shape[0], given[0], *shape[2:])
            assert not solution.covered(model, torch.empty(own))
            small = torch.rand(2, given[0], *(min(n, 24) for n in shape[2:]))
            assert torch.equal(model(small), solution.Model.forward(model, small))


def test_the_header_says_which_sizes(tmp_path: Path) -> None:
    path = problem(tmp_path, *POOLED[:2], "[torch.rand(4, 3, 41, 50)]", arguments=POOLED[2])
    text = " ".join(text_of(draft(path, target="cpu", kernels="always", rewrite="always")).split())
    assert "Serves float32 (2 or more, 3, 41, 50), without gradients also float32 (2 or more, 3, " in text
    assert "Other constructor arguments and other calls give the same results by the original forward." in text
