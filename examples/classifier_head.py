"""The end of a MobileNet-like classifier: widen by a 1x1 convolution, hardswish, global mean, linear."""

import torch
from torch import nn


class Model(nn.Module):
    """Turns a feature map into class scores."""

    def __init__(self, in_channels: int, features: int, classes: int) -> None:
        super().__init__()
        self.widen = nn.Conv2d(in_channels, features, kernel_size=1)
        self.activation = nn.Hardswish()
        self.classifier = nn.Linear(features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.activation(self.widen(x))
        x = torch.flatten(x.mean(dim=(2, 3)), 1)
        return self.classifier(x)


batch_size = 64
in_channels, features, classes = 320, 1280, 1000
height = width = 7


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, in_channels, height, width)]


def get_init_inputs() -> list[int]:
    return [in_channels, features, classes]
