"""Which tiles of warpgroups are worth an estimate, and which of those a kernel: the same for every kind of tile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from math import ceil, gcd, prod
from typing import Protocol, TypeVar

from fusewright.schedule.changed import changed
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.residues import useful
from fusewright.schedule.tiling import MOST_SHARED
from fusewright.schedule.warpgroup_staging import (
    MOST_VECTORS,
    Tile,
    chunks,
    shared_bytes,
    staged,
    takes_turns,
    taps_of,
    unfoldings,
    vector,
)


class Shaped(Protocol):
    """A tile of which few alike are worth measuring."""

    @property
    def traits(self) -> tuple[object, ...]:
        """In what they are alike."""


AnyTile = TypeVar("AnyTile", bound=Shaped)

# So many of the tiles that are alike but for their shape are worth an estimate.
SHAPES = 2


def leanest(
    c: Contraction, tiles: Iterable[Tile], lengths: tuple[int, int, int], alike: Callable[[Tile], object]
) -> list[Tile]:
    """Of tiles that are `alike`, those few that compute and stage the least for every useful cell, whether they fit or
    not: others need more."""
    kinds: dict[object, list[tuple[float, Tile]]] = defaultdict(list)
    for t in tiles:
        lay = staged(c, t)
        computed = prod(t.region) * prod(a.cell for a in c.axes) + prod(lay.lengths)
        kinds[alike(t)].append((computed / (prod(t.cells) * useful(lay.walks, lengths, t.cells)), t))
    return [t for kind in kinds.values() for _, t in sorted(kind, key=lambda pair: pair[0])[:SHAPES]]


def few_alike(tiles: Iterable[tuple[float, AnyTile]], count: int, *, alike: int) -> list[tuple[float, AnyTile]]:
    """The first `count`, of those that are alike in their `traits` so many at most."""
    found: list[tuple[float, AnyTile]] = []
    met: dict[tuple[object, ...], int] = {}
    for score, t in tiles:
        met[t.traits] = met.get(t.traits, 0) + 1
        if met[t.traits] <= alike:
            found.append((score, t))
        if len(found) == count:
            break
    return found


def few_of_each(
    c: Contraction, tiles: list[tuple[float, Tile]], count: int, *, alike: int
) -> list[list[tuple[float, Tile]]]:
    """The same of those without producers whose operands are all in shared memory, of others, and of those whose
    warpgroups take turns besides, which estimates do not compare well with others."""
    groups = dict(unfoldings(c))
    kinds: list[list[tuple[float, Tile]]] = [[], [], []]
    for score, t in tiles:
        kinds[(t.producers > 0 or t.held) + takes_turns(groups[t.unfolded], t)].append((score, t))
    return [few_alike(kind, count, alike=alike) for kind in kinds]


def chunk_sizes(c: Contraction) -> list[int]:
    """Input channels staged at a time: of whole instructions, all, or equal parts of an odd number of vectors, those of
    one tap where taps are channels."""
    every = ceil(c.channels / vector(c))
    each = every if c.unfolded is None or c.unfolded.dense else c.unfolded.channels // vector(c)
    fewer = [n for n in (2, 4, 8, 16) if n < every]
    parts = [n for n in range(1, each + 1) if each % 2 and each % n == 0]
    return [n * vector(c) for n in dict.fromkeys((*fewer, *parts, every)) if n <= MOST_VECTORS]


def rows_at_a_time(c: Contraction) -> Iterator[tuple[int, int]]:
    """Rows of a cell that may be computed at a time along d and h: only windows' are computed in pieces."""
    d, h = (max(len(p.elements) for p in a.phases) for a in c.axes[:2])
    if c.window is None:
        yield d, h
    else:
        yield from product(_divisors(d), _divisors(h))


def slices(c: Contraction, t: Tile) -> Iterator[Tile]:
    """The tile with weights that stay, and with those of all rows of taps at a time, or of as many as fit."""
    rows = max(p.rows for p in taps_of(c))
    stay = changed(t, tap_rows=rows, stay=True)
    if shared_bytes(c, stay) <= MOST_SHARED:
        yield stay
    if chunks(c, t) == 1 and shared_bytes(c, stay) <= MOST_SHARED // 2:
        return
    fewer = [gcd(rows, max(len(p.taps) for p in c.axes[1].phases)), 1] if t.joined < 2 else []
    if t.chunk // vector(c) % 2:  # two rows go together
        fewer = [min(rows, n + n % 2) for n in fewer]
    for tap_rows in dict.fromkeys((rows, *fewer)):
        cut = changed(t, tap_rows=tap_rows, stay=False)
        if shared_bytes(c, cut) <= MOST_SHARED:
            yield cut
            return


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]
