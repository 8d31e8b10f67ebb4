"""Small versions of well-known networks: captured whole, equal bit for bit, in training and eval mode."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.capture.harness import check, opaque

EXAMPLES = Path(__file__).parents[2] / "examples"


class Block(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.na, self.nb = nn.BatchNorm2d(c), nn.BatchNorm2d(c)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.nb(self.b(self.relu(self.na(self.a(x)))))
        y += x
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.Sequential(Block(8), Block(8))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(4 + 3 * i), nn.ReLU(inplace=True), nn.Conv2d(4 + 3 * i, 3, 3, padding=1))
            for i in range(3)
        )
        self.down = nn.Sequential(nn.Conv2d(13, 6, 1), nn.AvgPool2d(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.down(torch.cat(features, 1)).mean((2, 3))


class MobileHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depth = nn.Sequential(
            nn.Conv2d(8, 8, 3, groups=8, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(True)
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 2, 1), nn.ReLU(), nn.Conv2d(2, 8, 1), nn.Hardsigmoid()
        )
        self.head = nn.Sequential(nn.Conv2d(8, 12, 1), nn.Hardswish(inplace=True))
        self.classifier = nn.Sequential(nn.Dropout(0.2, inplace=True), nn.Linear(12, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.depth(x)
        x = self.head(x * self.squeeze(x))
        return self.classifier(x.mean([2, 3]))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.mid = nn.Conv2d(6, 6, 3, padding=1)
        self.up = nn.ConvTranspose2d(6, 3, 2, stride=2)
        self.out = nn.Conv2d(6, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = F.leaky_relu(self.mid(F.leaky_relu(self.down(x), 0.2, inplace=True)), 0.2)
        up = (
            F.pad(self.up(low), (0, x.shape[3] - 2 * low.shape[3], 0, 0))
            if x.shape[3] > 2 * low.shape[3]
            else self.up(low)
        )
        wide = F.interpolate(low, scale_factor=2, mode="nearest").mean(1, keepdim=True)
        return self.out(torch.cat([up, x], 1)) + wide


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.embed, self.layers = nn.Embedding(11, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens)).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(5, 6, num_layers=2, dropout=0.1, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        y, state = self.lstm(x)
        return self.fc(y[:, -1]), state


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.mu, self.logvar = nn.Conv2d(1, 4, 3, 2, 1), nn.Linear(64, 3), nn.Linear(64, 3)
        self.fc, self.dec = nn.Linear(3, 64), nn.ConvTranspose2d(4, 1, 4, 2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = F.relu(self.enc(x)).flatten(1)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)
        return {"x": torch.sigmoid(self.dec(F.relu(self.fc(z)).view(-1, 4, 4, 4))), "mu": mu, "logvar": logvar}


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(6, 8),
            nn.BatchNorm1d(8),
            nn.Dropout(0.3),
            nn.ReLU(),
            nn.Dropout1d(0.2),
            nn.Linear(8, 4),
            nn.AlphaDropout(0.1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


MODELS: list[tuple[type[nn.Module], tuple[Any, ...], list[str]]] = [
    (ResNet, (3, 17, 19), ["add_"] * 5),
    (DenseNet, (4, 8, 8), ["add_"] * 3),
    (MobileHead, (8, 7, 7), ["add_"]),
    (UNet, (3, 8, 8), []),
    (Recurrent, (7, 5), ["lstm"]),
    (VAE, (1, 8, 8), ["randn_like"]),
    (Noisy, (6,), ["add_", "feature_dropout", "alpha_dropout"]),
]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("model", "shape", "known"), MODELS, ids=[m[0].__name__ for m in MODELS])
@pytest.mark.sampled
def test_networks(model: type[nn.Module], shape: tuple[int, ...], known: list[str], training: bool) -> None:
    torch.manual_seed(0)
    captured = check(model().train(training), torch.randn(4, *shape, requires_grad=True), batch=3)
    idle = {"add_", "feature_dropout", "alpha_dropout"}  # counts and drops in training alone
    assert sorted(opaque(captured)) == sorted(n for n in known if training or n not in idle)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_transformer(training: bool) -> None:
    torch.manual_seed(0)
    captured = check(Encoder().train(training), torch.randint(0, 11, (4, 6)), batch=3)
    assert set(opaque(captured)) == {"scaled_dot_product_attention"}


@pytest.mark.parametrize(
    "name", ["conv_avgpool_sigmoid_sum", "conv3d_div_maxpool_gap_bias_sum", "convtranspose_gap_bias_logsumexp"]
)
def test_founding_models_have_no_opaque_operation(name: str) -> None:
    shapes = {"conv_a": (8, 24, 24), "conv3d": (8, 6, 10, 10), "convtr": (64, 7, 7)}
    shape = next(s for key, s in shapes.items() if name.startswith(key))
    scope = runpy.run_path(str(EXAMPLES / f"{name}.py"))
    torch.manual_seed(0)
    captured = check(scope["Model"](*scope["get_init_inputs"]()), torch.randn(4, *shape), batch=3)
    assert opaque(captured) == [] and captured.reasons == ()
