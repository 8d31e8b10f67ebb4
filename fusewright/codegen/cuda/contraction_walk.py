"""The text of a tile's walk over a contraction's cells (`schedule.residues`): how many tiles there are, where one
begins, and which rows it stages."""

from __future__ import annotations

from collections.abc import Mapping

from fusewright.codegen.text import Lines, fill
from fusewright.kernel import Expression
from fusewright.schedule.residues import Walk, Walks


def tiles(walks: Walks, lengths: Mapping[str, Expression], cells: tuple[int, int, int]) -> Expression:
    """How many tiles of so many cells there are (`residues.tiles`), as an expression over the lengths along d, h, w."""
    return " * ".join(tiles_along(walk, lengths[a], k) for walk, a, k in zip(walks, "dhw", cells, strict=True))


def tiles_along(walk: Walk, length: Expression, cells: int) -> Expression:
    """The same along one dimension (`Walk.tiles`)."""
    if walk.between == 1:
        return f"ceil_div({length}, {cells})"
    stretch = walk.between * cells
    rest = f"{length} - {length} // {stretch} * {stretch}"
    return f"({length} // {stretch} * {walk.between} + min({rest}, {walk.between}))"


def constants(walks: Walks) -> Lines:
    """Of dimensions whose cells or rows a tile does not have side by side, and the functions that go through them."""
    d, h, _ = walks
    lines: Lines = []
    if d.step * h.step > 1:
        lines += fill(_STEPS, d=d.step, h=h.step)
    if d.between * h.between > 1:
        lines += fill(_BETWEEN, d=d.between, h=h.between)
    return lines


def counted(tile: str) -> dict[str, str]:
    """The place of a tile along each dimension, of tiles that are counted."""
    return {"d": f"{tile} / (tiles_w * tiles_h)", "h": f"{tile} / tiles_w % tiles_h", "w": f"{tile} % tiles_w"}


COUNTED = counted("tile")


def names(walks: Walks, places: Mapping[str, str] = COUNTED) -> dict[str, object]:
    """What templates say about tiles: how many along d and h, the first cell of the one at these `places` along each
    dimension, and the staged rows' distance."""
    found: dict[str, object] = {"first_w": f"{places['w']} * CELLS_W"}
    for a, walk in zip("dh", walks[:2], strict=True):
        big = a.upper()
        by = f"<CELLS_{big}, BETWEEN_{big}>"
        apart = walk.between > 1
        found[f"tiles_{a}"] = f"tiles_along{by}(cells_{a})" if apart else f"ceil_div(cells_{a}, CELLS_{big})"
        found[f"by_{a}"] = f" * STEP_{big}" if walk.step > 1 else ""
        found[f"first_{a}"] = f"first_cell{by}({places[a]})" if apart else f"{places[a]} * CELLS_{big}"
    return found


def moved(start: str, by: str, walk: Walk, name: str) -> str:
    """A cell along d or h, so many cells of the tile behind another."""
    if walk.between == 1:
        return f"{start} + {by}"
    by = f"({by})" if " + " in by and not by.startswith("(") else by
    return f"{start} + {by} * BETWEEN_{name.upper()}"


_STEPS = """
constexpr int STEP_D = $d, STEP_H = $h;    // input rows from one that is staged to the next
"""

_BETWEEN = """
constexpr int BETWEEN_D = $d, BETWEEN_H = $h;    // cells from one of a tile to the next: its rows have no gaps

// Tiles of so many cells along a dimension: all of whose residues there are cells left.
template <int CELLS, int BETWEEN>
__device__ __forceinline__ int tiles_along(int length) {
    return length / (CELLS * BETWEEN) * BETWEEN + min(length % (CELLS * BETWEEN), BETWEEN);
}
// The first cell of one of them: neighbouring tiles have neighbouring residues.
template <int CELLS, int BETWEEN>
__device__ __forceinline__ int first_cell(int index) {
    return index / BETWEEN * (CELLS * BETWEEN) + index % BETWEEN;
}
"""
