"""The mean over tokens of what a feed-forward layer widens them to."""

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    """Linear(384 -> 1536), gelu, mean over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(384, 1536)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(x)).mean(dim=1)


batch_size = 256


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(batch_size, 196, 384)]


def get_init_inputs() -> list[object]:
    return []
