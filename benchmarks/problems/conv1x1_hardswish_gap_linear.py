"""The head of a small image classifier: nothing but the mean of each feature is needed of the convolution's output."""

import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    """Conv2d(320 -> 1280, k1) -> hardswish -> mean over positions -> Linear(1280 -> 1000)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(320, 1280, 1)
        self.classifier = nn.Linear(1280, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(F.hardswish(self.conv(x)).mean((2, 3)))


batch_size = 128


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, 320, 7, 7)]


def get_init_inputs() -> list[object]:
    return []
