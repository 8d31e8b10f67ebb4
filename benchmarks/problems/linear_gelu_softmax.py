"""A linear layer, gelu and softmax over the features."""

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    """Linear(512 -> 1024), gelu, softmax."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.softmax(F.gelu(self.linear(x)), dim=1)


batch_size = 1024


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, 512)]


def get_init_inputs() -> list[int]:
    return [512, 1024]
