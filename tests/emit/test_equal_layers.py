"""Solution files of models whose equal layers share a kernel."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from solutions import load, problem, write

INIT = "self.convs = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1) for _ in range(3)])\nself.last = nn.Conv2d(4, 6, 3)"
FORWARD = """def forward(self, x):
    for conv in self.convs:
        x = torch.tanh(conv(x)) * 2
    return F.relu(self.last(x))"""


def test_the_kernel_is_there_once_and_called_for_each(tmp_path: Path) -> None:
    path = problem(tmp_path, INIT, FORWARD, "[torch.rand(4, 4, 13, 20)]")
    text = write(path, targets=("cuda",), rewrite="always").read_text()
    assert text.count("def fused_conv_tanh_mul(") == 1 and text.count("= fused_conv_tanh_mul(") == 3
    solution: Any = load(write(path, targets=("cpu",), rewrite="always"))
    model, count = solution.ModelNew().eval(), []
    launch = solution.fused_conv_tanh_mul_launch
    solution.fused_conv_tanh_mul_launch = lambda *operands: (count.append(1), launch(*operands))[1]
    original, x = copy.deepcopy(model).double(), torch.rand(4, 4, 13, 20, requires_grad=True)
    y, want = model(x), solution.Model.forward(original, x.double())
    torch.testing.assert_close(y, want.float(), rtol=1e-4, atol=1e-5)
    (got,), (expected,) = (torch.autograd.grad(out.square().sum(), x) for out in (y, want))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert len(count) == 3
