"""A linear layer, max pooling over neighbouring features, their sum, a scale."""

import torch
from torch import nn


class Model(nn.Module):
    """Linear(8192 -> 8192), MaxPool1d(2), a sum over features, times 0.5."""

    def __init__(self, features: int, window: int, scale: float) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.pool = nn.MaxPool1d(window)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.linear(x).unsqueeze(1)).squeeze(1)
        return x.sum(dim=1) * self.scale


batch_size = 128
features = 8192


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, features)]


def get_init_inputs() -> list[float]:
    return [features, 2, 0.5]
