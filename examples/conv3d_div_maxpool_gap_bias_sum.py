"""3-d convolution, division, max pooling, global average, bias, sum over channels: one number per volume."""

import torch
from torch import nn


class Model(nn.Module):
    """Scores a volume by the mean of its strongest local responses."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, divisor: float, pool_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel_size)
        self.divisor = divisor
        self.max_pool = nn.MaxPool3d(pool_size)
        self.mean = nn.AdaptiveAvgPool3d(1)
        self.bias = nn.Parameter(torch.randn(out_channels, 1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x) / self.divisor
        x = self.mean(self.max_pool(x)) + self.bias
        return x.sum(dim=1)


batch_size = 128
in_channels, out_channels = 8, 16
depth, height, width = 16, 64, 64


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, in_channels, depth, height, width)]


def get_init_inputs() -> list[float]:
    return [in_channels, out_channels, 3, 2.0, 2]
