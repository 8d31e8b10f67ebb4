"""The transition between two blocks of a DenseNet: norm, relu, 1x1 convolution, average pooling."""

import torch
from torch import nn


class Model(nn.Module):
    """BatchNorm2d, ReLU, Conv2d(256 -> 128, k1), AvgPool2d(2)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(256)
        self.conv = nn.Conv2d(256, 128, 1, bias=False)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.conv(torch.relu(self.norm(x))))


batch_size = 64


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, 256, 56, 56)]


def get_init_inputs() -> list[object]:
    return []
