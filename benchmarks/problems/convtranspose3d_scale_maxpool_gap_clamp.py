"""A transposed 3-d convolution that is scaled, pooled, averaged over all positions and clamped."""

import torch
from torch import nn


class Model(nn.Module):
    """ConvTranspose3d(3 -> 16, k3, s2, p1), * 0.5, MaxPool3d(2), a global mean, a clamp to [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose3d(3, 16, 3, stride=2, padding=1)
        self.pool = nn.MaxPool3d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.pool(self.conv(x) * 0.5)
        return pooled.mean(dim=(2, 3, 4), keepdim=True).clamp(0.0, 1.0)


batch_size = 128


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, 3, 16, 32, 32)]


def get_init_inputs() -> list[object]:
    return []
