"""A 3-d convolution, group norm, and the mean of everything but the batch."""

import torch
from torch import nn


class Model(nn.Module):
    """Conv3d(3 -> 24, k3), GroupNorm(8), a mean over channels and positions."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x)).mean(dim=(1, 2, 3, 4))


batch_size = 128


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, 3, 24, 32, 32)]


def get_init_inputs() -> list[int]:
    return [3, 24, 3, 8]
