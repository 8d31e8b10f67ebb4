"""Whole networks in eager, by torch.compile and as `fusewright.optimize` serves them, in turns.

    python benchmarks/networks.py --out benchmarks/results/h100_networks.json
    python benchmarks/networks.py --rows resnet50,bert_base --dtype bfloat16 --out rows.json

Networks come from timm and transformers (which are not among this project's dependencies), untrained, in evaluation
mode; images of 224 x 224, sequences of 128 and 512 tokens; and one layer of attention.  Calls are forward, without
gradients, by default flags.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from fused import LIMIT, PEERS, SLOWER, serve, times, wrong
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from worker import Worker, answer, attempted

import fusewright
from fusewright.measure import environment, save_results

# Kernels of a network that its record names.
SLOWEST = 12
VOCABULARY = 30000


class Output(nn.Module):
    """One tensor of what a network of transformers answers with."""

    def __init__(self, network: nn.Module, index: int = 0) -> None:
        super().__init__()
        self.network, self.index = network, index

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.network(x, return_dict=False)[self.index]
        return answer


class SpelledOut(nn.Module):
    """Causal attention of heads of 96 numbers as many write it: two products, a mask, a softmax."""

    def __init__(self, width: int = 768, heads: int = 8, length: int = 512) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("seen", torch.ones(length, length).tril().view(1, 1, length, length))

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (t.view(n, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(width, 2))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        scores = scores.masked_fill(self.seen[:, :, :length, :length] == 0, float("-inf"))
        y = torch.softmax(scores, -1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(n, length, width))


@dataclass(frozen=True)
class Network:
    """A network by name: how to build it, and how large its input is (images, or tokens)."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def example(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Random images, or tokens."""
        if len(self.shape) == 2:
            return torch.randint(VOCABULARY, self.shape, device=device)
        return torch.randn(self.shape, device=device, dtype=dtype)


def _timm(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        network: nn.Module = timm.create_model(name)
        return network

    return build


def _transformers(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **sizes)
        return Output(getattr(transformers, f"{name}Model")(config))

    return build


IMAGES = ("resnet18", "resnet50", "densenet121", "mobilenetv3_large_100", "efficientnet_b0", "regnety_016")
IMAGES += ("convnext_tiny", "vit_small_patch16_224", "swin_tiny_patch4_window7_224", "mixer_s32_224", "vgg11")
NETWORKS = (
    *(Network(name, _timm(name), (64, 3, 224, 224)) for name in IMAGES),
    Network("bert_base", _transformers("Bert"), (32, 128)),
    Network("gpt2", _transformers("GPT2"), (8, 512)),
    Network("llama", _transformers("Llama", hidden_size=1024, intermediate_size=2816, num_hidden_layers=12,
                                   num_attention_heads=16), (8, 512)),
    Network("attention_spelled_out", SpelledOut, (64, 512, 768)),
)  # fmt: skip


def _network(name: str) -> Network:
    """The network of that name; one that the list above lacks is timm's, for images of 224 x 224."""
    listed = (network for network in NETWORKS if network.name == name)
    return next(listed, Network(name, _timm(name), (64, 3, 224, 224)))


# -- one row, in the worker -------------------------------------------------------------------------------------------


def _sized(network: Network, batch: int) -> Network:
    return replace(network, shape=(batch, *network.shape[1:])) if batch else network


def measured(network: Network, device: torch.device, dtype: torch.dtype, verify: bool) -> dict[str, Any]:
    """The record of one network, seconds throughout; what fails is told in it."""

    def fill(record: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = network.build().to(device, dtype).eval().requires_grad_(False)
        serve(record, model, (network.example(device, dtype),), verify)
        kernels = record["kernels"]
        record["rules"] = Counter(record["rules"])
        record["kernels"] = Counter(f"{kernel['family']}: {kernel['path']}" for kernel in kernels)
        record["slowest kernels"] = sorted(kernels, key=lambda k: -(k["generated"] or 0))[:SLOWEST]

    return attempted({"name": network.name, "shape": list(network.shape)}, fill, device)


def _work(pipe: Connection, device: str, dtype: str, verify: bool, batch: int) -> None:
    """Answers names with records; first of all with facts."""
    where, of = torch.device(device), getattr(torch, dtype)
    pipe.send({"environment": environment(where)})
    answer(pipe, lambda name: measured(_sized(_network(name), batch), where, of, verify))


# -- all rows ---------------------------------------------------------------------------------------------------------


def summary(records: Sequence[dict[str, Any]], dtype: str) -> dict[str, Any]:
    """What is asked of all networks together."""
    whole = [record for record in records if not record["error"]]
    compared = [record for record in whole if "compile" in record["times"]]
    return {
        "failed": [record["name"] for record in records if record["error"]],
        "wrong": [record["name"] for record in whole if not record["difference"] <= wrong(dtype)],
        "kept as they are": [record["name"] for record in whole if record["status"] != "rewritten"],
        "slower than eager": [r["name"] for r in whole if times(r, "fusewright", "eager") > SLOWER],
        "slower than compile": [r["name"] for r in compared if times(r, "fusewright", "compile") > SLOWER],
    }


def show(record: dict[str, Any]) -> None:
    """All rows, milliseconds; then the summary."""
    table = Table("network", "input", "status", "kernels", "difference", "seconds", title="medians in ms")
    for name in (*PEERS, "fusewright"):
        table.add_column(name, justify="right")
    for row in record["rows"]:
        table.add_row(*_cells(row))
    console = Console(width=230)
    console.print(table)
    for key, value in record["summary"].items():
        console.print(f"{key}: {value}", highlight=False)


def _cells(row: dict[str, Any]) -> list[str]:
    head = [row["name"], "x".join(map(str, row["shape"]))]
    if row["error"]:
        return [*head, row["error"]]
    kernels = ", ".join(f"{count} {name}" for name, count in row["kernels"].items())
    taken = [f"{row['times'][n]['median'] * 1e3:.3f}" if n in row["times"] else "-" for n in (*PEERS, "fusewright")]
    said = " ".join(filter(None, (row["status"], row["reason"])))
    return [*head, said, kernels, f"{row['difference']:.1e}", f"{row['optimized']:.0f}", *taken]


def main() -> None:
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="", help="these networks alone (a,b,c), any of timm's among them")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=0, help="so many images or sequences instead of the usual")
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which a row is given up")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no row is begun")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    wanted = [name for name in chosen.rows.split(",") if name] or [network.name for network in NETWORKS]
    worker = Worker(_work, chosen.device, chosen.dtype, not chosen.no_verify, chosen.batch)
    record: dict[str, Any] = {"fusewright": fusewright.__version__, **worker.facts, "dtype": chosen.dtype}
    record |= {"verified": not chosen.no_verify, "summary": {}, "rows": []}
    try:
        for name in wanted:
            if time.monotonic() - begun > chosen.seconds:
                break
            found = worker.row(
                name, {"name": name, "shape": list(_sized(_network(name), chosen.batch).shape)}, chosen.limit
            )
            record["rows"].append(found)
            record["summary"] = summary(record["rows"], chosen.dtype)
            print(f"{' | '.join(_cells(found))} | {found['took']:.1f} s", file=sys.stderr, flush=True)
            if chosen.out:
                save_results(chosen.out, record)
    finally:
        worker.stop()
    show(record)


if __name__ == "__main__":
    main()
