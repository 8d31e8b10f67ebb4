"""The usual beginning of an image classifier: a strided convolution, relu, max pooling with overlapping windows."""

import torch
from torch import nn


class Model(nn.Module):
    """Conv2d(3 -> 64, k7, s2, p3) -> relu -> MaxPool2d(3, s2, p1)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 7, stride=2, padding=3)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(torch.relu(self.conv(x)))


batch_size = 128


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, 3, 224, 224)]


def get_init_inputs() -> list[object]:
    return []
