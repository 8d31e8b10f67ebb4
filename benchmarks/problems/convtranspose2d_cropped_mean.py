"""A transposed convolution that crops, then a global mean: each tap sums its own range of the input."""

import torch
from torch import nn


class Model(nn.Module):
    """ConvTranspose2d(k4, s2, p1) and a mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(64, 64, 4, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean(dim=(2, 3))


batch_size = 32


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, 64, 256, 256)]


def get_init_inputs() -> list[object]:
    return []
