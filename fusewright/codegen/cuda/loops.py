"""Loops in CUDA C++: unrolled ones, and those that a block's threads share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from fusewright.codegen.text import Lines, block, fill, indent

UNROLL = "#pragma unroll"

# Threads that should be side by side at least, where there is work for as many.
SIDE_BY_SIDE = 64


def nest(heads: Sequence[str], body: Lines) -> Lines:
    """`body` in nested unrolled loops."""
    if not heads:
        return body
    if len(heads) > 1:
        return [UNROLL, heads[0], *indent(nest(heads[1:], body))]
    return [UNROLL, *(block(heads[0], body) if len(body) > 1 else [heads[0], *indent(body)])]


@dataclass(frozen=True)
class Dealt:
    """What threads share: `count` of what `name` calls; `text` says how many of them in C++."""

    name: str
    text: str
    count: int


def dealt(
    threads: int, across: Dealt, along: Dealt, body: Lines, *, once: Sequence[str] = (), at_once: int = 4
) -> Lines:
    """Loops of a block's `threads` through `along` for each of `across` that one has, several `at_once`.

    What is alike along the way is found out once: by the statements `once`, or by the compiler.
    """
    side_by_side = _side_by_side(threads, across.count, along.count)
    sets = threads // side_by_side
    each = ceil(along.count / sets)
    head = f"for (int {along.name} = threadIdx.x / LANES; {along.name} < {along.text}; {along.name} += SETS)"
    loops = fill(
        _LOOPS,
        across=across.name,
        count=across.text,
        at_once=max(1, at_once // each),
        body=[*once, f"{UNROLL} {min(at_once, each)}", *block(head, body)],
    )
    if sets * side_by_side < threads:
        loops = ["if (threadIdx.x < SETS * LANES)", *indent(loops)]
    return fill(_DEALT, lanes=side_by_side, loops=loops)


def _side_by_side(threads: int, across: int, along: int) -> int:
    """Threads side by side, each with one of `across` columns at a time, so that all are done after the fewest turns.

    The others take the same columns in other rows, of `along` rows.  Where columns are many, at least two warps are
    side by side: what those read and write lies together.
    """
    fewest = ceil(across / threads)
    most = min(fewest + 8, max(fewest, across // SIDE_BY_SIDE))

    def turns(rounds: int) -> int:
        return rounds * (1 + ceil(along / (threads // ceil(across / rounds))))

    return ceil(across / min(range(fewest, most + 1), key=turns))


_DEALT = """
{
    constexpr int LANES = $lanes, SETS = THREADS / LANES;  // threads side by side, and such sets of them
    $loops
}
"""

_LOOPS = """
#pragma unroll $at_once
for (int $across = threadIdx.x % LANES; $across < $count; $across += LANES) {
    $body
}
"""
