"""A linear layer summed over its features: the sum moves into the weight."""

import torch
from torch import nn


class Model(nn.Module):
    """Linear(4096 -> 4096) and a sum over features."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4096, 4096)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum(dim=1, keepdim=True)


batch_size = 1024


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, 4096)]


def get_init_inputs() -> list[object]:
    return []
