"""CUDA C++ of kernel groups: which ways there are to cut a group into tiles, and the kernel of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from math import prod
from typing import Any

from fusewright.codegen.aten import lower_function
from fusewright.codegen.cuda import contraction, direct, ranges, sample, stream
from fusewright.codegen.product import of_tensors
from fusewright.ir.node import Node
from fusewright.kernel import Kernel
from fusewright.schedule.contraction import MOST_ELEMENTS, Contraction
from fusewright.schedule.direct import DirectTile
from fusewright.schedule.direct_choice import shortlist as direct_shortlist
from fusewright.schedule.groups import Group, as_graph, body, sizes
from fusewright.schedule.product import Product
from fusewright.schedule.tiling import Tiling, estimate, shortlist

# So many tilings of a contraction are worth measuring.
WORTH_MEASURING = 14

# Of the best so many, also the form in which one cluster of blocks finishes a sample in the same launch.
WORTH_CLUSTERING = 4

# Whether the kernel of a contraction forms the window sums that it reads, at the pace of memory.
FORMS_WINDOW_SUMS = True

Option = dict[str, Any]
Layouts = Mapping[Node, str]


def options(group: Group, hints: Mapping[Any, int], layouts: Layouts) -> list[Option]:
    """Ways to cut the group, best estimate first; one empty option where there is nothing to choose, none at all
    where the family finds no way.  `layouts` has the operands that do not come contiguous (see `Kernel.layouts`)."""
    c = group.record.contraction if isinstance(group.record, Product) else group.record
    if not isinstance(c, Contraction):
        return [{}]
    last = c.channels_last or (layouts.get(c.x) == "channels_last" and c.takes_channels_last)
    c = replace(c, channels_last=last)
    lengths = _cells(c, hints)
    if prod(sizes(c.x, hints)[1:]) > MOST_ELEMENTS:
        return []
    tilings = shortlist(c, lengths, c.x.dtype.itemsize, WORTH_MEASURING)
    found: list[Option] = [{"tiling": asdict(t), "blocks": None, "channels_last": last} for t in tilings]
    samples = sizes(c.x, hints)[0]
    for t in tilings[:WORTH_CLUSTERING]:
        blocks = contraction.blocks_per_sample(c, t, samples, lengths)
        if blocks is not None:
            found.insert(0, {"tiling": asdict(t), "blocks": blocks, "channels_last": last})
    if isinstance(group.record, Product):
        return found
    rival = estimate(c, tilings[0], lengths, c.x.dtype.itemsize) if tilings else None
    direct_tiles = direct_shortlist(replace(c, channels_last=False), lengths, samples, rival)
    others: list[Option] = [{"direct": asdict(t)} for t in direct_tiles.tiles]
    return others + found if direct_tiles.ahead else found + others


def _cells(c: Contraction, hints: Mapping[Any, int]) -> tuple[int, int, int]:
    """Cells of the whole output along the three dimensions."""
    pooled = c.window is not None
    shape = sizes(c.window.node if c.window is not None else c.conv, hints)[2:]
    padded = (*(1,) * (3 - len(shape)), *shape)
    d, h, w = (-(-n // (1 if pooled else a.stride)) for n, a in zip(padded, c.axes, strict=True))
    return d, h, w


def generate(group: Group, name: str, option: Option, *, tf32: bool) -> Kernel:
    """The kernel of `group`, called `name`; `tf32` says whether float32 operands of products may be rounded to it."""
    graph = as_graph(body(group), group.operands)
    reference = lower_function("reference", graph)
    match group.family:
        case "contraction" if "direct" in option:
            return direct.generate(
                replace(group.record, channels_last=False), DirectTile(**option["direct"]), name, reference
            )
        case "contraction":
            tiling = Tiling(**option["tiling"])
            c = replace(group.record, channels_last=option.get("channels_last", False))
            return contraction.generate(c, tiling, name, reference, tf32=tf32, blocks=option["blocks"])
        case "product":
            tiling, c, blocks = Tiling(**option["tiling"]), group.record.contraction, option["blocks"]
            kernel = contraction.generate(c, tiling, name, reference, tf32=tf32, blocks=blocks)
            return of_tensors(kernel, group.record)
        case "range reduction":
            return ranges.kernel(group.record, name, reference)
        case "sample program":
            return sample.kernel(group.record, name, reference)
    return stream.kernel(group.record, name, reference)
