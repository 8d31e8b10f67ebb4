"""A 3-d convolution averaged over depth: a partial reduction, after which a 2-d convolution remains."""

import torch
from torch import nn


class Model(nn.Module):
    """Conv3d(k3) and a mean over depth."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(8, 32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean(dim=2)


batch_size = 64


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, 8, 16, 64, 64)]


def get_init_inputs() -> list[object]:
    return []
