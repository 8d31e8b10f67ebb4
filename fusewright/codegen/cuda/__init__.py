"""CUDA C++ of kernel groups: which ways there are to cut a group into tiles, and the kernel of one of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import ceil, inf, prod
from typing import Any

from fusewright.codegen.cuda import (
    contraction,
    direct,
    direct_taps,
    estimate,
    kept_rows,
    last_order,
    matmul,
    normalization,
    pairs,
    ranges,
    ranges_blocks,
    ranges_walks,
    rearrangement,
    sample,
    scan,
    several_elements,
    several_folds,
    stacked_rows,
    stream,
    warpgroup,
)
from fusewright.codegen.product import of_tensors
from fusewright.codegen.reference import reference_text
from fusewright.ir.node import Graph, Node
from fusewright.kernel import Kernel
from fusewright.runtime.device import LARGE_GPU
from fusewright.schedule import residues
from fusewright.schedule.chain import Shares
from fusewright.schedule.changed import changed
from fusewright.schedule.contraction import MOST_ELEMENTS, Contraction, match
from fusewright.schedule.direct import DirectTile
from fusewright.schedule.direct_choice import UNDERESTIMATED
from fusewright.schedule.direct_choice import shortlist as direct_shortlist
from fusewright.schedule.direct_taps import TapTile
from fusewright.schedule.direct_taps import shortlist as by_taps
from fusewright.schedule.group import Group, sizes
from fusewright.schedule.kept_rows_record import KeptRows
from fusewright.schedule.last_order import (
    TurnedFolds,
    TurnedRows,
    TurnedStatistics,
    TurnedStream,
    of_folds,
    of_range,
    of_rows,
    of_statistics,
    of_stream,
)
from fusewright.schedule.matmul import Extent, Linear, MatmulTile
from fusewright.schedule.matmul import seconds as matmul_seconds
from fusewright.schedule.matmul import tiles as matmul_tiles
from fusewright.schedule.normalization import ChannelStatistics, Normalization
from fusewright.schedule.product import Product, contraction_of
from fusewright.schedule.range_blocks import Cut, cuts
from fusewright.schedule.range_sums import RangeReduction, in_one_pass
from fusewright.schedule.range_walks import Walk, ahead, walks
from fusewright.schedule.rearrangement import Rearrangement
from fusewright.schedule.scan import Scan
from fusewright.schedule.several_folds import SeveralFolds
from fusewright.schedule.stream import parse
from fusewright.schedule.stream_record import Stream
from fusewright.schedule.tiling import MULTIPROCESSORS, Tiling, shortlist
from fusewright.schedule.tiling import estimate as estimate_of
from fusewright.schedule.warpgroup import WarpgroupTile
from fusewright.schedule.warpgroup import shortlist as by_features
from fusewright.schedule.warpgroup_carried import CarriedTile, in_parts
from fusewright.schedule.warpgroup_carried import shortlist as by_carried
from fusewright.schedule.warpgroup_pools import PoolTile
from fusewright.schedule.warpgroup_pools import shortlist as by_pools
from fusewright.schedule.warpgroup_positions import PositionTile
from fusewright.schedule.warpgroup_positions import shortlist as by_positions
from fusewright.schedule.warpgroup_staging import WarpgroupCut, in_halves, of_tile, takes_halves
from fusewright.schedule.warpgroup_windows import WindowTile
from fusewright.schedule.warpgroup_windows import shortlist as by_windows
from fusewright.schedule.window_ends import at_ends

# So many tilings of a contraction are worth measuring; so many tiles of warpgroups, and tilings then; of each way to
# multiply by warpgroups so many at least, and so many beside them whose blocks have producers, with and without turns.
WORTH_MEASURING = 14
OF_WARPGROUPS, BESIDE_WARPGROUPS = 20, 6
OF_EACH_WAY, OF_PRODUCERS = 10, 12
# Of those with producers that multiply halves, of all ways together: the best was the 35th of all by estimate once
# (benchmarks/results/h200_halves_of_tf32.json).  Beside these so many in tf32, with producers and without: they were
# slower for all six groups of that file.
OF_HALVES, BESIDE_HALVES = 24, 8

# How many times the estimate of the best another tile of warpgroups may have: kernels whose estimate was 3.3 and 4.1
# times the best one's took 3.4 and 4.4 times as long (benchmarks/results/h100_pools.json).
FAR = 4.0

# And so many cuts of a range reduction into blocks; with more different sums than these, one pass is slower.
CUTS = 4
FEW_SUMS = 64

# So many ways to walk along the outermost axis, and cuts beside them; one of them alone where a cut should be as fast.
WALKS, BESIDE_WALKS = 3, 2
AS_FAST = 1.5

# Cycles per second of a GPU that estimates are made for.
CLOCK = 1.75e9

# Seconds from which on it pays to multiply halves, with a second launch that, mostly, only looks whether it is needed.
WORTH_WATCHING = 1e-4

# Of the best so many, also the form in which one cluster of blocks finishes a sample in the same launch.
WORTH_CLUSTERING = 6

# Whether the kernel of a contraction forms the window sums that it reads, at the pace of memory.
FORMS_WINDOW_SUMS = True

# Whether there are kernels of rearrangements, and of several results.
MOVES_ELEMENTS = True

# The tiles that an option may have: of warpgroups, and of all tensor cores.
OF_WARPGROUP: dict[str, Any] = {
    "warpgroup": WarpgroupTile,
    "positions": PositionTile,
    "carried": CarriedTile,
    "pools": PoolTile,
    "windows": WindowTile,
}
TILES: dict[str, Any] = {"tiling": Tiling, **OF_WARPGROUP}

# Tiles that read and write rows, whichever way images come.
OF_ROWS = {"direct", "taps"}

Option = dict[str, Any]
Layouts = Mapping[Node, str]

# Tiles of warpgroups with their estimates.
Scored = list[tuple[float, warpgroup.Tile]]

# What finds tiles of warpgroups, for every way to multiply by them.
Finders = tuple[Callable[..., list[list[tuple[float, Any]]]], ...]
OF_EVERY_WAY: Finders = (by_features, by_positions, by_carried, by_pools, by_windows)


def options(
    group: Group, hints: Mapping[Any, int], layouts: Layouts, *, tf32: bool = False, capability: int | None = None
) -> list[Option]:
    """Ways to cut the group, best estimate first; one empty option where there is nothing to choose, none at all
    where the family finds no way.

    layouts     has the operands that do not come contiguous (see `Kernel.layouts`)
    tf32        whether float32 operands of products may be rounded to it
    capability  compute capability times ten of the device, where there is one: what only it can run is an option then
    """
    last = [n for n in group.operands if layouts.get(n) == "channels_last"]
    if isinstance(group.record, RangeReduction):
        return [*_as_they_lie(group.record, last), *_of_ranges(group.record, hints)]
    if isinstance(group.record, Linear):
        rounded = tf32 and group.record.convolves
        if capability != matmul.CAPABILITY or (tf32 and not rounded):
            return []  # the library rounds as well
        tiles = matmul_tiles(group.record, _extent(group.record, hints), rounded=rounded)
        return [{"matmul": asdict(t)} for t in tiles]
    if isinstance(group.record, Normalization):
        return normalization.options(group.record, capability, last=last)
    if isinstance(group.record, KeptRows):
        return [*_as_they_lie(group.record, last), *kept_rows.options(group.record)]
    if isinstance(group.record, Rearrangement):
        return [*stacked_rows.options(group.record), *rearrangement.options(group.record)]
    if isinstance(group.record, Scan):
        return scan.options(group.record)
    if not isinstance(group.record, Contraction | Product):
        none = group.family == "sample program" and _is_over_pairs(group)
        return [] if none else [*_as_they_lie(group.record, last), {}]
    c = _as_read(group, layouts)
    if prod(sizes(c.x, hints)[1:]) > MOST_ELEMENTS:
        return []
    if any(layouts.get(n, "contiguous") != c.layout for n in c.elements):
        return []  # a copy would cost what there is to gain
    found = _of_contraction(
        c, _cells(c, hints), sizes(c.x, hints)[0], isinstance(group.record, Product), tf32, capability
    )
    if c.layout_written == "channels_last" and group.order == "eager":
        return [option for option in found.options if not option.keys() & OF_ROWS]
    return list(found.options)


def _as_they_lie(record: Any, last: Sequence[Node]) -> list[Option]:
    """Ways to compute a stream, sums, or rows that are kept, of images whose channels lie `last`, as they lie."""
    found = _turned(record) if last else None
    if found is None or any(i not in last for i in found.turned.images):
        return []
    ways: list[Option] = kept_rows.options(found.k) if isinstance(found, TurnedRows) else [{}]
    return [{"last": True, **way} for way in ways]


def _turned(record: Any) -> TurnedStream | TurnedFolds | TurnedRows | TurnedStatistics | None:
    if isinstance(record, RangeReduction):
        return of_range(record)
    if isinstance(record, KeptRows):
        return of_rows(record)
    if isinstance(record, SeveralFolds):
        return of_folds(record)
    if isinstance(record, ChannelStatistics):
        return of_statistics(record)
    return of_stream(record) if isinstance(record, Stream) else None


def _is_over_pairs(group: Group) -> bool:
    """Whether a sample program is a stream over pairs, which reads less often what it has read."""
    root = group.bodies[0]
    found = parse(root, Graph((), (root,)).users())
    return isinstance(found, Stream) and pairs.pairs(found) is not None


def early(
    group: Group, hints: Mapping[Any, int], layouts: Layouts, *, tf32: bool = False, capability: int | None = None
) -> float:
    """About how long it takes to end before the group's pool or softmax and to begin anew from memory, over how long
    the whole group does; infinite where no other way is in sight than through it."""
    assert group.shorter is not None
    y = group.shorter.root
    whole = _seconds(group, hints, layouts, tf32, capability)
    shares = isinstance(getattr(group.record, "shares", None), Shares)
    times = 3 if shares else 2  # read for the statistics of its rows, too
    passing = times * prod(sizes(y, hints)) * y.dtype.itemsize / LARGE_GPU.memory + LARGE_GPU.launch
    shorter = _seconds(group.shorter, hints, layouts, tf32, capability) + passing
    return shorter / whole if shorter < inf else inf


def pays(
    group: Group,
    option: Option,
    hints: Mapping[Any, int],
    layouts: Layouts,
    *,
    tf32: bool = False,
    capability: int | None = None,
) -> bool:
    """Whether the kernel of `group` should be faster than ATen's operations (`estimate`); `option` is its best cut."""
    seconds = 0.0
    if isinstance(group.record, Linear):
        seconds = matmul_seconds(group.record, MatmulTile(**option["matmul"]), _extent(group.record, hints))
    elif isinstance(group.record, Scan):
        blocks = max(1.0, scan.blocks(group.record, option, hints))
        seconds = estimate.moved(group, hints) / (estimate.OF_BLOCK * blocks)
    elif isinstance(group.record, Contraction | Product):
        seconds = _seconds(group, hints, layouts, tf32, capability) / _busy(contraction_of(group.record), option, hints)
    return estimate.pays(group, seconds, hints, tf32=tf32)


def _busy(c: Contraction, option: Option, hints: Mapping[Any, int]) -> float:
    """The share of the multiprocessors that have a tile."""
    found: list[Tiling | warpgroup.Tile]
    found = [kind(**option[key]) for key, kind in TILES.items() if key in option]
    if not found:
        return 1.0
    (t,) = found
    c = of_tile(c, t) if isinstance(t, WarpgroupCut) else c
    blocks_m = c.op.groups * ceil(c.features / t.block_m)
    tiles = sizes(c.x, hints)[0] * residues.tiles(residues.walks(c, t.cells), _cells(c, hints), t.cells)
    return min(1.0, max(1, tiles * blocks_m) / MULTIPROCESSORS)


def _seconds(group: Group, hints: Mapping[Any, int], layouts: Layouts, tf32: bool, capability: int | None) -> float:
    """About how many seconds the best way to cut a group with a product takes; infinite where there is none."""
    c = _as_read(group, layouts)
    return _seconds_of(c, isinstance(group.record, Product), hints, tf32, capability)


def _seconds_of(c: Contraction, product: bool, hints: Mapping[Any, int], tf32: bool, capability: int | None) -> float:
    if prod(sizes(c.x, hints)[1:]) > MOST_ELEMENTS:
        return inf
    lengths, samples = _cells(c, hints), sizes(c.x, hints)[0]
    return _taken(c, lengths, samples, _of_contraction(c, lengths, samples, product, tf32, capability).cycles)


def _taken(c: Contraction, lengths: tuple[int, int, int], samples: int, cycles: float) -> float:
    """Seconds that so many cycles of one multiprocessor per cell and output channel come to."""
    return cycles * samples * prod(lengths) * c.features * c.op.groups / (MULTIPROCESSORS * CLOCK)


def seconds_alone(conv: Node, hints: Mapping[Any, int], *, tf32: bool, capability: int | None) -> float:
    """About how many seconds the best kernel of a convolution alone takes, of rows; infinite where there is none."""
    found = match(conv, Graph((), (conv,)).users())
    return inf if isinstance(found, str) else _seconds_of(found, False, hints, tf32, capability)


def _extent(group: Linear, hints: Mapping[Any, int]) -> Extent:
    """How much there is of it in a call."""
    rows = prod(sizes(group.x, hints)) // group.summed
    matrix = prod(sizes(group.w, hints)[-2:]) // group.summed
    samples = prod(sizes(group.w, hints)[:-2])
    return Extent(rows // max(1, samples), matrix, samples)


def _as_read(group: Group, layouts: Layouts) -> Contraction:
    """The convolution of a group, or what stands for a product, as its kernel reads x."""
    c = at_ends(contraction_of(group.record))
    last = layouts.get(c.x) == "channels_last" and c.takes_channels_last
    return c.in_format(last=True, rows=group.order == "rows") if last else c


@dataclass(frozen=True)
class _Ways:
    """Options, and estimated cycles of one multiprocessor per cell and output channel of the best."""

    options: tuple[Option, ...]
    cycles: float


@lru_cache(maxsize=2)  # whoever wants the estimate has the options in view
def _of_contraction(
    c: Contraction, lengths: tuple[int, int, int], samples: int, product: bool, tf32: bool, capability: int | None
) -> _Ways:
    """Ways to cut a convolution with what follows it, or a matmul (`product`) as one, on tensor cores alone."""
    whole = c.cells_are_windows  # else threads pool together
    tilings = shortlist(c, lengths, WORTH_MEASURING, tf32=tf32) if whole else []
    counts = (contraction.blocks_per_sample, contraction.blocks_at_once)
    joined = [(t, count(c, t, samples, lengths)) for t in tilings[:WORTH_CLUSTERING] for count in counts]
    cuts = [*dict.fromkeys((t, n) for t, n in joined if n is not None), *((t, None) for t in tilings)]
    found: list[Option] = [{"tiling": asdict(t), "blocks": n, "channels_last": c.channels_last} for t, n in cuts]
    rival = estimate_of(c, tilings[0], lengths, tf32=tf32) if tilings else None
    if capability == warpgroup.CAPABILITY:
        best, more = _of_warpgroups(c, lengths, samples, tf32, OF_EVERY_WAY if whole else (by_pools,))
        if more:
            few = [option for option in found if option["tiling"] in [asdict(t) for t in tilings[:BESIDE_WARPGROUPS]]]
            ahead = rival is None or best <= UNDERESTIMATED * rival
            found = more + few if ahead else few + more
            rival = best / UNDERESTIMATED if ahead else rival
    if product:
        return _Ways(tuple(found), inf if rival is None else UNDERESTIMATED * rival)
    if c.channels_last and c.elements:  # copies of those would cost what there is to gain
        return _Ways(tuple(found), inf if rival is None else UNDERESTIMATED * rival)
    direct_tiles = direct_shortlist(c.in_format(last=False), lengths, samples, rival)
    others: list[Option] = [{"direct": asdict(t)} for t in direct_tiles.tiles]
    cycles = min(direct_tiles.best, inf if rival is None else UNDERESTIMATED * rival)
    found = others + found if direct_tiles.ahead else found + others
    best, taps = by_taps(c.in_format(last=False), lengths, samples, cycles, tf32=tf32)
    by_tap: list[Option] = [{"taps": asdict(t)} for t in taps]
    return _Ways(tuple(by_tap + found if best < cycles else found + by_tap), min(best, cycles))


def _of_ranges(r: RangeReduction, hints: Mapping[Any, int]) -> list[Option]:
    """In one pass where there are few different sums, else (and where that may be faster) one axis after the other, the
    outermost one first or last."""
    one: list[Option] = [] if in_one_pass(r) else ranges.worth_measuring(r)
    if one and (r.total or r.sums <= FEW_SUMS):
        return one
    planes = prod(sizes(r.x, hints)[: r.leading])
    found = cuts(r, planes, CUTS)
    walked = walks(r, planes, WALKS)
    fewer = [cut for cut in (ranges_blocks.of_fewer_threads(r, cut) for cut in found[:1]) if cut is not None]
    behind: list[Option] = [{"cut": asdict(cut)} for cut in found + fewer]
    before: list[Option] = [{"walk": asdict(walk)} for walk in walked]
    slower = ahead(r, walked[0], found[0], planes) if walked and found else 0.0
    if slower < 1.0:
        return [*before, *(behind[:BESIDE_WALKS] if walked else behind), *one]
    return [*behind, *(before[:1] if slower < AS_FAST else []), *one]


def _of_warpgroups(
    c: Contraction, lengths: tuple[int, int, int], samples: int, tf32: bool, finders: Finders
) -> tuple[float, list[Option]]:
    """Ways to cut a group for the tensor cores of Hopper, and the estimate of the best."""
    best, produced = _tiles_of_warpgroups(c, lengths, samples, tf32, finders)
    parts = [(t, warpgroup.blocks_per_sample(c, t, samples, lengths)) for _, t in best[:WORTH_CLUSTERING]]
    joined = [_of_warpgroup(c, t, n) for t, n in parts if n is not None]
    least = min((score for score, _ in best or produced), default=0.0)
    scored: list[tuple[float, warpgroup.Tile, warpgroup.Tile]] = []
    if takes_halves(c, tf32=tf32) and _taken(c, lengths, samples, least) >= WORTH_WATCHING:
        halves, filled = _tiles_of_warpgroups(in_halves(c), lengths, samples, tf32, finders)
        others = [t for _, t in sorted(best + produced, key=_score)]
        some = ((score, changed(t, halves=True)) for score, t in halves[:OF_EACH_WAY] + filled[:OF_HALVES])
        scored = [(score, t, other) for score, t in some if (other := warpgroup.instead(c, t, others)) is not None]
    watched = [_watched(c, t, other) for _, t, other in scored]
    few = BESIDE_HALVES if watched else None
    alone = [_of_warpgroup(c, t, None) for _, t in best[:few] + produced[:few]]
    return min([least, *(score for score, _, _ in scored)]), watched + joined + alone


def _tiles_of_warpgroups(
    c: Contraction, lengths: tuple[int, int, int], samples: int, tf32: bool, finders: Finders
) -> tuple[Scored, Scored]:
    """Tiles worth measuring with their estimates, best first, and those with producers, or with rows in registers:
    they come last, since files that are written by estimate alone were measured without them."""

    def parted(t: warpgroup.Tile) -> warpgroup.Tile:
        return in_parts(c, t, lengths, samples) if isinstance(t, CarriedTile) else t

    found = [find(c, lengths, OF_WARPGROUPS, tf32=tf32) for find in finders]
    least = min((score for of in found for way in of for score, _ in way), default=0.0)
    ways = [[scored for scored in of[0] if _score(scored) <= FAR * least] for of in found]
    produced = [scored for of in found for way in of[1:] for scored in way[:OF_PRODUCERS]]
    produced = [scored for scored in produced if _score(scored) <= FAR * least]
    some = [scored for way in ways for scored in way[:OF_EACH_WAY]]
    others = sorted((scored for way in ways for scored in way[OF_EACH_WAY:]), key=_score)
    best = some + others[: max(0, OF_WARPGROUPS - len(some))]
    best, produced = ([(score, parted(t)) for score, t in sorted(of, key=_score)] for of in (best, produced))
    return best, produced


def _score(scored: tuple[float, warpgroup.Tile]) -> float:
    return scored[0]


def _of_warpgroup(c: Contraction, t: warpgroup.Tile, blocks: int | None) -> Option:
    (kind,) = (key for key, tile in OF_WARPGROUP.items() if type(t) is tile)
    return {kind: asdict(t), "blocks": blocks, "channels_last": c.channels_last}


def _watched(c: Contraction, t: warpgroup.Tile, instead: warpgroup.Tile) -> Option:
    """The option that multiplies halves, and with the other tile in tf32 where these do not do."""
    return {**_of_warpgroup(c, t, None), "instead": _of_warpgroup(c, instead, None)}


def _cells(c: Contraction, hints: Mapping[Any, int]) -> tuple[int, int, int]:
    """Cells of the whole output along the three dimensions."""
    pooled = c.window is not None
    lengths = c.along_axes(sizes(c.window.node if c.window is not None else c.conv, hints)[2:])
    d, h, w = (-(-n // (1 if pooled else a.stride)) for n, a in zip(lengths, c.axes, strict=True))
    return d, h, w


def generate(group: Group, name: str, option: Option, *, tf32: bool) -> Kernel:
    """The kernel of `group`, called `name`; `tf32` says whether float32 operands of products may be rounded to it."""
    kernel = _generated(group, name, option, tf32=tf32)
    assert all(_waits(kernel.source, launch.entry) for launch in kernel.launches), f"{name} may begin too early"
    return kernel


def _waits(source: str, entry: str) -> bool:
    """Whether an entry point begins with waiting for earlier launches, so that it may be launched while they end."""
    return re.search(rf"\b{entry}\([^)]*\)\s*\{{\s*await_launches\(\);", source) is not None


def _generated(group: Group, name: str, option: Option, *, tf32: bool) -> Kernel:
    reference = reference_text(group)
    if "last" in option and (turned := _turned(group.record)) is not None:
        if isinstance(turned, TurnedStatistics):
            return last_order.read_by(normalization.of_channels(turned.c, name, reference), turned, group.seen)
        how = {key: value for key, value in option.items() if key != "last"}
        return replace(last_order.of_stream(turned, group.seen, name, **how), reference=reference)
    if group.family != "normalization":  # at other sizes, nothing may lie otherwise than in rows
        option = {key: value for key, value in option.items() if key != "last"}
    match group.family:
        case "contraction" if "direct" in option:
            return direct.generate(at_ends(group.record), DirectTile(**option["direct"]), name, reference)
        case "contraction" if "taps" in option:
            return direct_taps.generate(at_ends(group.record), TapTile(**option["taps"]), name, reference)
        case "contraction":
            c = at_ends(group.record).in_format(last=option["channels_last"], rows=group.order == "rows")
            return _on_tensor_cores(c, option, name, reference, tf32=tf32)
        case "product":
            return of_tensors(
                _on_tensor_cores(at_ends(group.record.contraction), option, name, reference, tf32=tf32), group.record
            )
        case "range reduction" if "cut" in option and not group.record.total:
            return ranges_blocks.kernel(group.record, Cut(**option["cut"]), name, reference)
        case "range reduction" if "walk" in option and not group.record.total:
            return ranges_walks.kernel(group.record, Walk(**option["walk"]), name, reference)
        case "range reduction":
            return ranges.kernel(group.record, name, reference, **option)
        case "matmul":
            return matmul.kernel(group.record, MatmulTile(**option["matmul"]), name, reference)
        case "statistics":
            return normalization.of_channels(group.record, name, reference)
        case "kept rows":
            return kept_rows.kernel(group.record, name, reference, **option)
        case "rearrangement" if "row" in option:
            return stacked_rows.kernel(group.record, name, reference, **option)
        case "rearrangement":
            return rearrangement.kernel(group.record, name, reference, **option)
        case "scan":
            return scan.kernel(group.record, name, reference, **option)
        case "normalization":
            return normalization.kernel(group.record, name, reference, **option)
        case "several reductions":
            return several_folds.kernel(group.record, name, reference)
        case "several elements":
            return several_elements.kernel(group.record, name, reference)
        case "sample program":
            return sample.kernel(group.record, name, reference)
    return pairs.kernel(group.record, name, reference) or stream.kernel(group.record, name, reference)


def _on_tensor_cores(c: Contraction, option: Option, name: str, reference: str, *, tf32: bool) -> Kernel:
    """The kernel of a convolution, or of a matmul as one, that warps or warpgroups multiply."""
    (key,) = TILES.keys() & option.keys()
    tile, blocks = TILES[key](**option[key]), option["blocks"]
    if "instead" in option:
        ((kind, other),) = ((kind, option["instead"][kind]) for kind in OF_WARPGROUP if kind in option["instead"])
        return warpgroup.generate(c, tile, name, reference, instead=OF_WARPGROUP[kind](**other))
    if key in OF_WARPGROUP:
        return warpgroup.generate(c, tile, name, reference, blocks=blocks)
    return contraction.generate(c, tile, name, reference, tf32=tf32, blocks=blocks)
