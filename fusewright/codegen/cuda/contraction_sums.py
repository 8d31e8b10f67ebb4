"""Sums of overlapping windows as straight text: what several windows have together is added once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations, product

from fusewright.codegen.text import Lines
from fusewright.schedule.contraction import Contraction


def along_w(c: Contraction, skip: int) -> Lines:
    """The sums of one row `v` that has `skip` elements in front of the windows, one per tap along w."""
    windows = [[f"v[{skip + at}]" for at in window] for window in _windows(c, 2)]
    return shared_sums(windows, [f"sums[{tap}]" for tap in range(len(windows))])


def across_rows(c: Contraction) -> Lines:
    """The sums of a cell, of its taps at `tw` along w, from the sums of its `rows`."""
    pairs = list(product(_windows(c, 0), _windows(c, 1)))
    windows = [[f"rows[{d}][{h}][tw]" for d, h in product(*pair)] for pair in pairs]
    return shared_sums(windows, [f"sums[{tap} * BOX_TAPS_W + tw]" for tap in range(len(pairs))])


def shared_sums(windows: Sequence[Sequence[str]], results: Sequence[str]) -> Lines:
    """Lines that assign the sums of the terms of each window to the results."""
    partial, sums = _shared(tuple(map(tuple, windows)))
    return [
        *(f"const Compute s{i} = {a} + {b};" for i, (a, b) in enumerate(partial)),
        *(f"{result} = {' + '.join(terms)};" for result, terms in zip(results, sums, strict=True)),
    ]


Terms = tuple[str, ...]


@lru_cache(maxsize=256)
def _shared(sums: tuple[Terms, ...]) -> tuple[list[tuple[str, str]], tuple[Terms, ...]]:
    """Sums of two terms, `s0` first, and what is left to add: the pair that most windows have becomes a term, again and
    again while there is one that two of them have."""
    partial: list[tuple[str, str]] = []
    while counts := Counter(pair for terms in sums for pair in combinations(terms, 2)):
        (a, b), count = counts.most_common(1)[0]
        if count < 2:
            break
        name = f"s{len(partial)}"
        partial.append((a, b))
        sums = tuple(
            tuple(name if term == a else term for term in terms if term != b) if {a, b} <= {*terms} else terms
            for terms in sums
        )
    return partial, sums


def _windows(c: Contraction, axis: int) -> list[list[int]]:
    """Elements along one dimension of each tap's window."""
    assert c.box is not None
    count, step, dilation = c.box.count[axis], c.box.step[axis], c.axes[axis].phases[0].per_tap
    return [[tap * dilation + i * step for i in range(count)] for tap in range(c.axes[axis].taps)]
