"""What the header of a solution file says of kernels, and of what is left to PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from solutions import draft, problem, text_of

from fusewright.emit.header import operations
from fusewright.schedule.wishes import Wishes

CONV = "self.conv = nn.Conv2d(3, 8, 3)"
INPUT = "[torch.rand(4, 3, 20, 24)]"


def header_of(tmp_path: Path, init: str, returned: str, inputs: str = INPUT, **options: Any) -> str:
    """The header of a model's solution for a CPU, on one line."""
    path = problem(tmp_path, init, f"def forward(self, x):\n    return {returned}", inputs)
    return " ".join(text_of(draft(path, target="cpu", kernels="always", **options)).split('"""')[1].split())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fused_conv_leaky_relu_2", ["conv", "leaky_relu"]),
        ("fused_clamp_min_log1p", ["clamp_min", "log1p"]),
        ("fused_max", ["max"]),
    ],
)
def test_operations_by_the_names_of_kernels(name: str, words: list[str]) -> None:
    assert operations(name) == words


def test_kernels_in_the_order_in_which_they_run(tmp_path: Path) -> None:
    """Groups are found in another order: convolutions first."""
    said = header_of(tmp_path, CONV, "self.conv(x + x.flip(0) * 2).tanh().renorm(2, 0, 1e9).sigmoid().mean((2, 3))")
    first, second, third = (said.index(f"fused_{name} computes") for name in ("mul_add", "conv_tanh", "sigmoid_mean"))
    assert first < second < third


def test_what_pytorch_computes(tmp_path: Path) -> None:
    dropped = header_of(tmp_path, CONV, "F.dropout(self.conv(x).relu().mean((2, 3)), 0.5, True).exp() * 2")
    assert "PyTorch computes dropout, which no kernel here covers." in dropped
    mixed = header_of(
        tmp_path, "self.mix = nn.ChannelShuffle(2)", "self.mix(x).mean(1).exp()", "[torch.rand(4, 8, 128)]"
    )
    assert "No rule or kernel knows aten.channel_shuffle.default in mix, which PyTorch computes." in mixed
    alone = header_of(tmp_path, CONV, "self.conv(x).relu().mean((2, 3))")
    assert "PyTorch computes" not in alone
    assert "No rule or kernel" not in alone


def test_a_kernel_that_somebody_named(tmp_path: Path) -> None:
    said = header_of(tmp_path, CONV, "self.conv(x).relu().mean((2, 3))", wishes=Wishes(name="head"))
    assert "head computes conv2d, relu and mean in " in said
