"""How vectors of channels go two by two into the instructions of a warpgroup, where a chunk has an odd number of them.

The second vector of an instruction may lie anywhere, as long as it is as far from the first one at every position.  So
the last vectors of two rows of taps go together; of a row that has no other, those of two taps along w; what is left is
multiplied by half its weights, twice: whatever an input is, it meets no zeros that are not there.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from fusewright.schedule.contraction import Contraction

if TYPE_CHECKING:
    from fusewright.schedule.warpgroup_staging import Taps


def together_along_w(c: Contraction) -> int:
    """How many taps further along w the columns of a tap are as far from its own for every position of a cell."""
    w = c.axes[2]
    per_tap = next((p.per_tap for p in w.phases if len(p.taps) > 1), 1)
    return w.advance // gcd(w.advance, per_tap)


def multiplied_vectors(c: Contraction, vectors: int, taps: Taps, rows: int) -> int:
    """Of a chunk of so many vectors, those that one feature multiplies for so many rows of taps."""
    if vectors % 2 == 0:
        return rows * taps.per_row * vectors
    apart = together_along_w(c)
    alone = sum(tap // apart % 2 == 0 for tap in range(taps.per_row))
    return rows * taps.per_row * (vectors - 1) + 2 * (rows // 2 * taps.per_row + rows % 2 * alone)
