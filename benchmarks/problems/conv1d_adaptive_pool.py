"""A 1-d convolution and adaptive average pooling to five slots."""

import torch
from torch import nn


class Model(nn.Module):
    """Conv1d(k7) and AdaptiveAvgPool1d(5)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(32, 64, 7, padding=3)
        self.pool = nn.AdaptiveAvgPool1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.conv(x))


batch_size = 64


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, 32, 16384)]


def get_init_inputs() -> list[object]:
    return []
