"""Spectrograms: a convolution, relu, and the mean over time, frequencies kept."""

import torch
from torch import nn


class Model(nn.Module):
    """Conv2d(16 -> 64, 3), relu, mean over the last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 64, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x)).mean(dim=3)


batch_size = 64


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(batch_size, 16, 128, 512)]


def get_init_inputs() -> list[object]:
    return []
