"""Eight channels become sixty-four, and a max pool keeps one position of sixteen."""

import torch
from torch import nn


class Model(nn.Module):
    """Conv2d(8 -> 64, k3), tanh, * 2, a bias per channel, MaxPool2d(4)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 64, 3)
        self.bias = nn.Parameter(torch.randn(64, 1, 1))
        self.pool = nn.MaxPool2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(torch.tanh(self.conv(x)) * 2.0 + self.bias)


batch_size = 128


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, 8, 256, 256)]


def get_init_inputs() -> list[object]:
    return []
