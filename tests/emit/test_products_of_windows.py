"""Solution files of models whose convolutions are products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from solutions import load, problem, write

INIT = "self.conv = nn.Conv2d(3, 70, 16, stride=16)\nself.e = nn.Parameter(torch.rand(24, 70))"
FORWARD = "def forward(self, x):\n    return F.gelu(self.conv(x)).flatten(2).transpose(1, 2) + self.e"


def test_of_patches(tmp_path: Path) -> None:
    """A file for GPUs writes the windows by a kernel, and gives the same where its reference stands in for it, at any
    batch size."""
    path = problem(tmp_path, INIT, FORWARD, "[torch.rand(4, 3, 64, 96)]")
    solution: Any = load(write(path, rewrite="always"))
    text = Path(solution.__file__).read_text()
    assert "fused_rearrange" in text and "F.conv2d" not in text.partition("class ModelNew")[2]
    model = solution.ModelNew().eval()
    for batch in (4, 7):
        x = torch.rand(batch, 3, 64, 96)
        torch.testing.assert_close(model(x), solution.Model.forward(model, x), rtol=1e-4, atol=1e-5)
