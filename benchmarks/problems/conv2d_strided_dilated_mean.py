"""A strided, padded, dilated convolution, then a global mean: cropped ranges per tap."""

import torch
from torch import nn


class Model(nn.Module):
    """Conv2d(k3, s2, p1, d2) and a mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 3, stride=2, padding=1, dilation=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean(dim=(2, 3))


batch_size = 32


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, 64, 256, 256)]


def get_init_inputs() -> list[object]:
    return []
