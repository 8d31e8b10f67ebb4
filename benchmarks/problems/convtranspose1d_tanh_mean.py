"""A strided 1-d transposed convolution, tanh, and a mean over time."""

import torch
from torch import nn


class Model(nn.Module):
    """ConvTranspose1d(32 -> 64, k4, s2, p1), tanh, mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(32, 64, 4, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.conv(x)).mean(dim=2)


batch_size = 64


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, 32, 16384)]


def get_init_inputs() -> list[object]:
    return []
