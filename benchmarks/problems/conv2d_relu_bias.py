"""A convolution whose output is the model's: nothing shrinks it, so it is written once, finished."""

import torch
from torch import nn


class Model(nn.Module):
    """Conv2d(64 -> 128, k3), relu, and a bias per channel after it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 128, 3)
        self.bias = nn.Parameter(torch.randn(128, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x)) + self.bias


batch_size = 128


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, 64, 128, 128)]


def get_init_inputs() -> list[object]:
    return []
