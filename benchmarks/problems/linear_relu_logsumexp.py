"""The logsumexp over a linear layer's features, as a partition function has it."""

import torch
from torch import nn


class Model(nn.Module):
    """Linear(512 -> 1024), relu, logsumexp over features."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(torch.relu(self.linear(x)), dim=1)


batch_size = 65536


def get_inputs() -> list[torch.Tensor]:
    return [torch.randn(batch_size, 512)]


def get_init_inputs() -> list[object]:
    return []
