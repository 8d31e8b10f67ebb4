"""The head of a small image classifier: bf16, channels last."""

import torch
from torch import nn


class Model(nn.Module):
    """Conv2d(160 -> 960, k1), hardswish and a global mean, in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(160, 960, 1, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        self.act = nn.Hardswish()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.conv(x)).mean(dim=(2, 3))


batch_size = 128


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, 160, 56, 56).to(torch.bfloat16, memory_format=torch.channels_last)]


def get_init_inputs() -> list[object]:
    return []
