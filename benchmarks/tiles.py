"""Times of the tiles of contraction groups beside their estimates: what these are fitted to, or choices judged by.

    python benchmarks/tiles.py --out benchmarks/results/h200_joined_phases.json
    python benchmarks/tiles.py --models few --rows 18,14,13 --out benchmarks/results/h200_spread_taps.json
    python benchmarks/tiles.py --models unfolded --rows 1,18,3,14,4,2 --each 3 --out h200_unfolded_taps.json
    python benchmarks/tiles.py --models one_tap --each 3 --out one_tap.json
    python benchmarks/tiles.py --models large --each 3 --out benchmarks/results/h200_halves_of_tf32.json
    python benchmarks/tiles.py --models pairs --out benchmarks/results/h200_pairs.json
    python benchmarks/tiles.py --models windows --each 2 --out windows.json
    python benchmarks/tiles.py --models "" --rows 24,9 --each 8 --out rows.json           # random models of seed 1

Of every model's longest contraction group, `--each` tiles of every way to cut it (and, for transposed convolutions, of
every number of dimensions whose phases are joined; with and without spread taps; with taps along d or h as channels;
of odd and even numbers of vectors of channels; in tf32 and as halves) are built and run; `error` is how far each is
from ATen's result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from random_configurations import drawn
from torch import nn

import fusewright.codegen.cuda as cuda
from fusewright import racing
from fusewright.measure import environment, save_results
from fusewright.pipeline import build
from fusewright.runtime.native import launcher
from fusewright.runtime.operators import reference_of
from fusewright.schedule import warpgroup, warpgroup_pools, warpgroup_positions, warpgroup_windows
from fusewright.schedule.changed import changed
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.group import Group, sizes
from fusewright.schedule.warpgroup_staging import in_halves, takes_halves, vector
from fusewright.tuning import Decision, Tuner


class Model(nn.Module):
    """A layer, and a function of what it gives."""

    def __init__(self, layer: nn.Module, chain: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.chain = layer, chain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the chain has it."""
        return self.chain(self.layer(x))


WAYS = warpgroup, warpgroup_positions, warpgroup_pools, warpgroup_windows


def transposed() -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Transposed convolutions with several phases, behind which values are written, pooled or reduced."""
    up3 = {"stride": 2, "padding": 1, "output_padding": 1}
    yield (
        "convT3d 32->64 k3 s2, relu",
        nn.Sequential(nn.ConvTranspose3d(32, 64, 3, **up3), nn.ReLU()),
        _x(16, 32, 16, 32, 32),
    )
    yield "convT3d 64->16 k3 s2, rows of odd length", nn.ConvTranspose3d(64, 16, 3, stride=2), _x(16, 64, 16, 32, 32)
    up2 = {"stride": 2, "padding": 1}
    yield (
        "convT2d 64->128 k4 s2, relu",
        nn.Sequential(nn.ConvTranspose2d(64, 128, 4, **up2), nn.ReLU()),
        _x(32, 64, 64, 64),
    )
    pool = nn.Sequential(nn.ConvTranspose2d(64, 64, 4, **up2), nn.MaxPool2d(2), nn.Hardtanh())
    yield "convT2d 64->64 k4 s2, maxpool 2, hardtanh", pool, _x(64, 64, 64, 64)
    reduced = Model(nn.ConvTranspose3d(32, 48, 3, **up3), lambda y: y.logsumexp(1))
    yield "convT3d 32->48 k3 s2, logsumexp", reduced, _x(16, 32, 16, 32, 32)


def few() -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Large kernels with few features, as the last layers of generators of images and of sound have them."""
    image = nn.Sequential(nn.Conv2d(64, 3, 7, padding=3), nn.Tanh())
    yield "conv2d 64->3 k7, tanh", image, _x(16, 64, 256, 256)
    yield "conv2d 32->3 k9, clamp", nn.Sequential(nn.Conv2d(32, 3, 9, padding=4), nn.Hardtanh()), _x(8, 32, 512, 512)
    yield "conv2d 64->3 k3", nn.Conv2d(64, 3, 3, padding=1), _x(16, 64, 256, 256)
    yield "conv2d 64->27 k5, relu", nn.Sequential(nn.Conv2d(64, 27, 5, padding=2), nn.ReLU()), _x(16, 64, 256, 256)
    yield "conv1d 32->1 k7, tanh", nn.Sequential(nn.Conv1d(32, 1, 7, padding=3), nn.Tanh()), _x(16, 32, 2**18)


def unfolded() -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Convolutions that read each input often: volumes, first layers, large kernels with strides."""
    volume = nn.Sequential(nn.Conv3d(64, 64, 3, padding=1), nn.ReLU())
    yield "conv3d 64->64 k3, relu", volume, _x(16, 64, 16, 28, 28)
    first = nn.Sequential(nn.Conv3d(3, 64, (3, 7, 7), (1, 2, 2), (1, 3, 3)), nn.ReLU())
    yield "conv3d 3->64 k3,7,7 s1,2,2, relu", first, _x(8, 3, 16, 112, 112)
    yield "conv3d 32->24 k5, maxpool 2", nn.Sequential(nn.Conv3d(32, 24, 5), nn.MaxPool3d(2)), _x(16, 32, 32, 32, 32)
    strided = nn.Sequential(nn.Conv3d(32, 32, 3, stride=2), nn.ReLU())
    yield "conv3d 32->32 k3 s2, relu", strided, _x(32, 32, 32, 48, 48)
    image = nn.Sequential(nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2))
    yield "conv2d 3->64 k7 s2, relu, maxpool 2", image, _x(64, 3, 224, 224)
    yield "conv2d 64->128 k5 s3, relu", nn.Sequential(nn.Conv2d(64, 128, 5, stride=3), nn.ReLU()), _x(32, 64, 128, 128)


def one_tap() -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Convolutions of one tap along some dimensions, whose rows are short or fit no tile."""
    yield "conv3d 5250->134 k1", nn.Conv3d(5250, 134, 1), _x(64, 5250, 24, 10, 7)
    half = Model(nn.Conv2d(128, 160, 1), lambda y: nn.functional.hardswish(y).mean((2, 3))).bfloat16()
    yield "conv2d 128->160 k1, hardswish, mean, bfloat16", half, _x(128, 128, 56, 56).bfloat16()
    yield "conv2d 256->64 k1, relu", nn.Sequential(nn.Conv2d(256, 64, 1), nn.ReLU()), _x(64, 256, 28, 28)
    half = nn.Sequential(nn.Conv2d(256, 64, 1), nn.ReLU()).bfloat16()
    yield "conv2d 256->64 k1, relu, bfloat16", half, _x(64, 256, 28, 28).bfloat16()
    half = nn.Sequential(nn.Conv2d(1024, 256, 1), nn.ReLU()).bfloat16()
    yield "conv2d 1024->256 k1, relu, bfloat16", half, _x(64, 1024, 14, 14).bfloat16()
    last = Model(nn.Conv2d(320, 1280, 1), lambda y: nn.functional.hardswish(y).mean((2, 3)))
    yield "conv2d 320->1280 k1, hardswish, mean", last, _x(256, 320, 7, 7)
    yield "conv2d 16->96 k1, relu6", nn.Sequential(nn.Conv2d(16, 96, 1), nn.ReLU6()), _x(64, 16, 112, 112)
    volume = nn.Sequential(nn.Conv3d(64, 64, (3, 1, 1), padding=(1, 0, 0)), nn.ReLU())
    yield "conv3d 64->64 k3,1,1, relu", volume, _x(16, 64, 16, 14, 14)


def pairs() -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Convolutions of few channels, or of an odd number of vectors of them: first layers, and what is not padded."""
    image = nn.Sequential(nn.Conv2d(3, 64, 7, stride=2, padding=3), nn.ReLU())
    yield "conv2d 3->64 k7 s2, relu", image, _x(64, 3, 224, 224)
    yield "conv2d 3->32 k3, relu", nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU()), _x(64, 3, 224, 224)
    yield "conv2d 12->64 k5, relu", nn.Sequential(nn.Conv2d(12, 64, 5, padding=2), nn.ReLU()), _x(32, 12, 160, 160)
    yield "conv2d 20->40 k3, relu", nn.Sequential(nn.Conv2d(20, 40, 3, padding=1), nn.ReLU()), _x(32, 20, 160, 160)
    yield "conv1d 4->64 k9, relu", nn.Sequential(nn.Conv1d(4, 64, 9, padding=4), nn.ReLU()), _x(32, 4, 2**17)
    volume = nn.Sequential(nn.Conv3d(3, 32, 3, padding=1), nn.ReLU())
    yield "conv3d 3->32 k3, relu", volume, _x(16, 3, 32, 96, 96)


def softmaxes() -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Transposed convolutions with a softmax over channels behind them, of rows of even and of odd length."""
    for features, more in ((128, 1), (128, 0), (64, 1), (96, 1)):
        layer = nn.ConvTranspose2d(64, features, 4, stride=2, padding=1, output_padding=more)
        model = Model(layer, lambda y: torch.sigmoid(torch.softmax(y, 1) * 2.0))
        yield f"convT2d 64->{features} k4 s2 o{more}, softmax, sigmoid", model, _x(64, 64, 64, 64)
    relu = nn.Sequential(nn.ConvTranspose2d(64, 128, 4, stride=2, padding=1, output_padding=1), nn.ReLU())
    yield "convT2d 64->128 k4 s2 o1, relu", relu, _x(64, 64, 64, 64)


def large() -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Convolutions of many products, whose results are written, reduced or pooled."""
    yield "conv2d 64->128 k3, relu", nn.Sequential(nn.Conv2d(64, 128, 3), nn.ReLU()), _x(64, 64, 128, 128)
    yield "conv2d 64->128 k3, min", Model(nn.Conv2d(64, 128, 3), lambda y: y.amin(1)), _x(32, 64, 256, 256)
    pooled = nn.Sequential(nn.Conv2d(64, 128, 3), nn.Hardswish(), nn.MaxPool2d(2))
    yield "conv2d 64->128 k3, hardswish, maxpool 2", pooled, _x(64, 64, 128, 128)
    yield "convT2d 64->64 k3, gelu", nn.Sequential(nn.ConvTranspose2d(64, 64, 3), nn.GELU()), _x(16, 64, 256, 256)
    up = nn.Sequential(nn.ConvTranspose2d(64, 64, 4, stride=2, padding=1), nn.Tanh())
    yield "convT2d 64->64 k4 s2, tanh", up, _x(32, 64, 128, 128)
    volume = nn.Sequential(nn.ConvTranspose3d(32, 64, 3, stride=2, padding=1, output_padding=1), nn.ReLU())
    yield "convT3d 32->64 k3 s2, relu", volume, _x(16, 32, 16, 32, 32)


def windows() -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Average pools that slide ahead of convolutions."""
    image = Model(nn.Conv2d(8, 64, 3), lambda y: nn.functional.avg_pool2d(y, 4).sigmoid().sum((1, 2, 3)))
    yield "conv2d 8->64 k3, avgpool 4, sigmoid, sum", image, _x(128, 8, 384, 384)
    written = Model(nn.Conv2d(16, 32, 3), lambda y: torch.relu(nn.functional.avg_pool2d(y, 2)))
    yield "conv2d 16->32 k3, avgpool 2, relu", written, _x(64, 16, 256, 256)
    dilated = Model(nn.Conv2d(24, 78, (3, 2), dilation=2), lambda y: nn.functional.avg_pool2d(y, 6).tanh())
    yield "conv2d 24->78 k3,2 d2, avgpool 6, tanh", dilated, _x(16, 24, 352, 360)
    signal = Model(nn.Conv1d(32, 96, 7), lambda y: torch.avg_pool1d(y, 4).relu().amin(1))
    yield "conv1d 32->96 k7, avgpool 4, relu, min", signal, _x(16, 32, 2**18)
    volume = Model(nn.Conv3d(8, 16, 3), lambda y: nn.functional.avg_pool3d(y, 2).sigmoid().mean((2, 3, 4)))
    yield "conv3d 8->16 k3, avgpool 2, sigmoid, mean", volume, _x(64, 8, 32, 64, 64)


MODELS = {
    "large": large,
    "softmaxes": softmaxes,
    "transposed": transposed,
    "few": few,
    "unfolded": unfolded,
    "one_tap": one_tap,
    "pairs": pairs,
    "windows": windows,
}


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda")


class Table:
    """Stands in for `Tuner._raced`: every tile's time goes into the table."""

    def __init__(self, each: int) -> None:
        self.each = each
        self.found: list[dict[str, Any]] = []

    def __call__(self, tuner: Tuner, group: Group, name: str, options: list[Any], operands: list[Any]) -> Decision:
        if not isinstance(group.record, Contraction) or self.found:
            return Decision(options[0])
        tiles = list(self._tiles(group.record, tuner, group, options))
        kernels = [tuner._kernel(group, name, option) for _, option in tiles]
        launchers = [launcher(kernel) for kernel in kernels]
        with ThreadPoolExecutor(16) as pool:
            built = list(pool.map(lambda one: racing.can_load(one, tuner.device), launchers))
        want = reference_of(kernels[0])(*operands)
        self.found.append({"ATen": racing.seconds(partial(reference_of(kernels[0]), *operands), tuner.device) * 1e3})
        for (estimate, option), candidate, fits in zip(tiles, launchers, built, strict=True):
            row = {"estimate": estimate, **{k: v for k, v in option.items() if k != "channels_last"}}
            if fits:
                got = candidate(*operands)
                row["error"] = ((got - want).abs().max() / want.abs().max()).item()
                row["milliseconds"] = racing.seconds(partial(candidate, *operands), tuner.device) * 1e3
            self.found.append(row)
        best = min(range(1, len(self.found)), key=lambda i: self.found[i].get("milliseconds", 1e9))
        return Decision(tiles[best - 1][1])

    def _tiles(self, c: Contraction, tuner: Tuner, group: Group, options: list[Any]) -> Iterator[tuple[float, Any]]:
        yield 0.0, options[0]
        lengths = cuda._cells(c, tuner.hints)
        for way in WAYS:
            plain = list(self._few(c, way.shortlist(c, lengths, 400, tf32=True)))
            yield from ((score, cuda._of_warpgroup(c, t, None)) for score, t in plain)
            if way is warpgroup_windows:
                samples = sizes(c.x, tuner.hints)[0]
                parts = ((score, t, cuda.warpgroup.blocks_per_sample(c, t, samples, lengths)) for score, t in plain)
                yield from ((score, cuda._of_warpgroup(c, t, n)) for score, t, n in parts if n is not None)
                continue
            if takes_halves(c, tf32=True):
                for score, found in self._few(in_halves(c), way.shortlist(in_halves(c), lengths, 400, tf32=True)):
                    t = changed(found, halves=True)
                    instead = cuda.warpgroup.instead(c, t, [other for _, other in sorted(plain, key=itemgetter(0))])
                    if instead is not None:
                        yield score, cuda._watched(c, t, instead)
        for key in ("tiling", "direct"):
            yield from ((0.0, o) for o in [o for o in options if key in o][: self.each])

    def _few(self, c: Contraction, ways: list[list[tuple[float, Any]]]) -> Iterator[tuple[float, Any]]:
        met: dict[tuple[object, ...], int] = {}
        for score, t in chain(*ways):
            kind = _kind(c, t)
            met[kind] = met.get(kind, 0) + 1
            if met[kind] <= self.each:
                yield score, t


def _kind(c: Contraction, t: Any) -> tuple[object, ...]:
    """What tiles of one kind have in common."""
    if isinstance(t, warpgroup_windows.WindowTile):
        return t.near, t.buffers, t.own_h, t.own_w
    return t.joined, getattr(t, "spread", 0) > 0, t.unfolded, t.producers, t.chunk // vector(c) % 2


def main() -> None:
    """Prints and saves the tiles of every model, fastest first."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", choices=[*MODELS, ""], default="transposed")
    parser.add_argument("--rows", default="", help="random models of seed 1, too")
    parser.add_argument("--only", default="", help="models whose name contains one of these words (a,b,c)")
    parser.add_argument("--each", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    record: dict[str, Any] = {}
    models = chain(MODELS[arguments.models]() if arguments.models else (), drawn(arguments.rows))
    for name, model, x in models:
        if not any(word in name for word in arguments.only.split(",")):
            continue
        table = Table(arguments.each)
        Tuner._raced = lambda self, *given, table=table: table(self, *given)  # type: ignore[method-assign]
        build(model.to("cuda").eval().requires_grad_(False), (x,), {}, kernels="always")
        aten, *rows = table.found
        record[name] = {**aten, "tiles": sorted(rows, key=lambda row: row.get("milliseconds", 1e9))}
        print(name, aten)
        for row in record[name]["tiles"][:6]:
            print("  ", row)
        save_results(arguments.out, {"environment": environment("cuda"), "models": record})
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
