"""Transposed convolution, mean over positions, bias, logsumexp over channels, scale: one number per image."""

import torch
from torch import nn


class Model(nn.Module):
    """Upsamples, only to average over every position again: the algebra sees that it need not upsample."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, scale: float) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose2d(in_channels, out_channels, kernel_size)
        self.bias = nn.Parameter(torch.randn(out_channels, 1, 1))
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.conv_transpose(x).mean(dim=(2, 3), keepdim=True)
        score = torch.logsumexp(mean + self.bias, dim=1, keepdim=True)
        return score.sum(dim=(2, 3)) * self.scale


batch_size = 16
in_channels, out_channels = 64, 128
height = width = 512


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, in_channels, height, width)]


def get_init_inputs() -> list[float]:
    return [in_channels, out_channels, 3, 10.0]
