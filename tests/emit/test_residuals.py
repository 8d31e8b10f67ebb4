"""Solution files of models that add what has the shape of a convolution's output."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from solutions import load, problem, write

INIT = "self.conv = nn.Conv2d(8, 8, 3, padding=1)\nself.beside = nn.Conv2d(8, 8, 1, padding=padding)"
FORWARDS = {
    "the input": "def forward(self, x):\n    return F.relu(self.conv(x) + x)",
    "another convolution": "def forward(self, x):\n    return F.relu(self.conv(x) + self.beside(x))",
}


@pytest.mark.parametrize("name", FORWARDS)
def test_additions(name: str, tmp_path: Path) -> None:
    """One kernel convolves and adds, at every size of the input; a file for GPUs has such a kernel as well."""
    path = problem(tmp_path, INIT, FORWARDS[name], "[torch.rand(4, 8, 13, 20)]", arguments="padding=0")
    assert "fused_conv_add_relu computes convolution, " in write(path, rewrite="always").read_text()
    solution: Any = load(write(path, targets=("cpu",), rewrite="always"))
    model, count = solution.ModelNew().eval(), []
    launch = solution.fused_conv_add_relu_launch
    solution.fused_conv_add_relu_launch = lambda *operands: (count.append(1), launch(*operands))[1]
    original = copy.deepcopy(model).double()
    for size in ((4, 8, 13, 20), (3, 8, 13, 20), (4, 8, 7, 33)):
        x = torch.rand(size, requires_grad=True)
        y = model(x)
        want = solution.Model.forward(original, x.double())
        torch.testing.assert_close(y, want.float(), rtol=1e-4, atol=1e-5)
        (got,), (expected,) = (torch.autograd.grad(out.square().sum(), x) for out in (y, want))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert len(count) == 3


def test_an_input_that_is_added_has_the_shape_of_the_output(tmp_path: Path) -> None:
    """As it has at one size, at which PyTorch would add it, and not at the next."""
    init = "self.conv = nn.Conv2d(8, 8, 3, stride=2, padding=2)"
    path = problem(tmp_path, init, FORWARDS["the input"], "[torch.rand(4, 8, 3, 3)]")
    solution: Any = load(write(path, targets=("cpu",), rewrite="always"))
    model = solution.ModelNew().eval()
    model(torch.rand(4, 8, 3, 3))
    with pytest.raises(RuntimeError):
        model(torch.rand(4, 8, 6, 6))
    with pytest.raises(ValueError, match=r"x"):
        solution.fused_conv_add_relu_launch(torch.rand(4, 8, 6, 6), model.conv.weight, model.conv.bias)
