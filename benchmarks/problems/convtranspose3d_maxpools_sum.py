"""A transposed 3-d convolution of large kernel, two max pools, and a sum over channels."""

import torch
from torch import nn


class Model(nn.Module):
    """ConvTranspose3d(32 -> 64, k5, s2, p2), MaxPool3d(2), MaxPool3d(3), a sum over channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose3d(32, 64, 5, stride=2, padding=2)
        self.pools = nn.Sequential(nn.MaxPool3d(2), nn.MaxPool3d(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pools(self.conv(x)).sum(dim=1, keepdim=True)


batch_size = 16


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, 32, 32, 32, 32)]


def get_init_inputs() -> list[object]:
    return []
