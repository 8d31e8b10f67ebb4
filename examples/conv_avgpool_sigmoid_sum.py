"""Convolution, average pooling, sigmoid, sum of everything: one number per image."""

import torch
from torch import nn


class Model(nn.Module):
    """Pools a convolution's response, squashes it and adds it up."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, pool_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size)
        self.pool = nn.AvgPool2d(pool_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.pool(self.conv(x))
        return torch.sigmoid(pooled).sum(dim=(1, 2, 3))


batch_size = 128
in_channels, out_channels = 8, 64
height = width = 384


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, in_channels, height, width)]


def get_init_inputs() -> list[int]:
    return [in_channels, out_channels, 3, 4]
