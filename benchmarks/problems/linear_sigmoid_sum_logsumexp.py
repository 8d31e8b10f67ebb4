"""Two numbers of a row: the sum of its sigmoids after a linear layer, and the logsumexp of all rows' sums."""

import torch
from torch import nn


class Model(nn.Module):
    """Linear(2048 -> 4096), sigmoid, a sum over features, logsumexp over the batch."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.sigmoid(self.linear(x)).sum(dim=1)
        return torch.logsumexp(x, dim=0)


batch_size = 128


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, 2048)]


def get_init_inputs() -> list[int]:
    return [2048, 4096]
