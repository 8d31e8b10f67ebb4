"""A text classifier of the simplest kind: embeddings, their mean over the tokens, a linear layer, log-probabilities."""

import torch
from torch import nn


class Model(nn.Module):
    """Embedding(32000, 512), a mean over 256 tokens, Linear(512 -> 128), log_softmax."""

    def __init__(self, vocabulary: int, width: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens).mean(dim=1)
        return torch.log_softmax(self.classifier(x), dim=1)


batch_size = 256
vocabulary = 32000


def get_inputs() -> list[torch.Tensor]:
    return [torch.randint(vocabulary, (batch_size, 256))]


def get_init_inputs() -> list[int]:
    return [vocabulary, 512, 128]
