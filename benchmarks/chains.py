"""Convolutions with several strides of output and what often follows them, timed forward: eager and Fusewright.

    python benchmarks/chains.py --out benchmarks/results/h200_chains.json
    python benchmarks/chains.py --only softmax --out chains.json

Kernels are chosen by measuring; eager and the module that `fusewright.optimize` returns are timed in turns.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright.measure import compare, environment, forward_call, save_results

Chain = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A layer, and a function of what it gives and of a number per channel."""

    def __init__(self, layer: nn.Module, chain: Chain) -> None:
        super().__init__()
        self.layer, self.chain = layer, chain
        spatial = layer.weight.ndim - 2  # type: ignore[operator, union-attr]
        self.number = nn.Parameter(torch.randn(layer.out_channels, *(1,) * spatial))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """As the chain has it."""
        return self.chain(self.layer(x), self.number)


TWICE_3D = {"stride": 2, "padding": 1, "output_padding": 1}
MODELS: dict[str, tuple[Callable[[], nn.Module], Chain, tuple[int, ...]]] = {
    "convT3d 32-64 k3 s2, softmax, sigmoid": (
        lambda: nn.ConvTranspose3d(32, 64, 3, **TWICE_3D),
        lambda y, _: torch.sigmoid(torch.softmax(y, 1)),
        (16, 32, 16, 32, 32),
    ),
    "convT2d 64-64 k4 s2, softmax, + b, * 2, sigmoid": (
        lambda: nn.ConvTranspose2d(64, 64, 4, stride=2, padding=1),
        lambda y, b: torch.sigmoid((torch.softmax(y, 1) + b) * 2),
        (64, 64, 64, 64),
    ),
    "convT3d 32-64 k3 s2, ((y + b) + y) * y + y": (
        lambda: nn.ConvTranspose3d(32, 64, 3, **TWICE_3D),
        lambda y, b: ((y + b) + y) * y + y,
        (16, 32, 16, 32, 32),
    ),
    "convT3d 16-32 k3 s2, leaky_relu, * m, leaky_relu, maxpool 2": (
        lambda: nn.ConvTranspose3d(16, 32, 3, **TWICE_3D),
        lambda y, m: F.max_pool3d(F.leaky_relu(F.leaky_relu(y, 0.2) * m, 0.2), 2),
        (16, 16, 16, 32, 32),
    ),
    "convT2d 64-64 k3 s2, mish, + 0.5, hardtanh, * 2": (
        lambda: nn.ConvTranspose2d(64, 64, 3, stride=2, padding=1, output_padding=1),
        lambda y, _: F.hardtanh(F.mish(y) + 0.5) * 2,
        (64, 64, 128, 128),
    ),
    "convT2d 64-128 k5 s2, min over channels, sum over rows, gelu": (
        lambda: nn.ConvTranspose2d(64, 128, 5, stride=2, padding=2, output_padding=1),
        lambda y, _: F.gelu(torch.min(y, 1, keepdim=True)[0].sum(2, keepdim=True)) + 0.1,
        (16, 64, 64, 64),
    ),
    "convT2d 32-16 k4 s2, rows of odd length, - b, tanh": (
        lambda: nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1, output_padding=1),
        lambda y, b: torch.tanh(y - b),
        (128, 32, 64, 64),
    ),
    "convT3d 64-128 k3 s2, rows of odd length, clamp, / 2": (
        lambda: nn.ConvTranspose3d(64, 128, 3, stride=2, padding=1),
        lambda y, _: torch.clamp(y, min=-1.0) / 2,
        (4, 64, 24, 48, 48),
    ),
}


def main() -> None:
    """Prints and saves a row for each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="models whose name contains one of these words (a,b,c)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, help="in place of the models' own")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    rows: dict[str, Any] = {}
    for name, model, x in _models(chosen):
        fast = fusewright.optimize(model, (x,))
        calls = {"eager": forward_call(model, (x,)), "fusewright": forward_call(fast, (x,))}
        times = compare(calls, device=chosen.device, min_time=0.02, rounds=7, max_time=2.0)
        rows[name] = {"x": list(x.shape), **{who: sample.median * 1e3 for who, sample in times.items()}}
        print(name, rows[name], flush=True)
        save_results(chosen.out, {"environment": environment(chosen.device), "milliseconds": rows})


def _models(chosen: argparse.Namespace) -> Iterator[tuple[str, nn.Module, Tensor]]:
    for name, (layer, chain, shape) in MODELS.items():
        if any(word in name for word in chosen.only.split(",")):
            torch.manual_seed(0)
            model = Model(layer(), chain).to(chosen.device).eval().requires_grad_(False)
            yield name, model, torch.randn(chosen.batch or shape[0], *shape[1:], device=chosen.device)


if __name__ == "__main__":
    main()
