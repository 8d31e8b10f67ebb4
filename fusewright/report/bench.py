"""Measurements for people: every candidate of one problem beside the original, fastest shown as a factor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from fusewright.report.text import duration, heading, render, table, times


@dataclass(frozen=True)
class BenchRow:
    """One candidate's medians in seconds on one problem; `None` where not measured, and then `note` says why."""

    candidate: str
    forward: float | None = None
    training: float | None = None
    note: str = ""

    def to_record(self) -> dict[str, Any]:
        """The row as plain data."""
        return asdict(self)


def render_bench(title: str, rows: Sequence[BenchRow], width: int | None = None) -> str:
    """One problem's measurements as plain text, `width` columns wide."""
    return render(bench_view(title, rows), width)


def bench_view(title: str, rows: Sequence[BenchRow]) -> RenderableType:
    """One problem's measurements; the first row is what the others are compared with."""
    names = ["candidate", "forward", "speedup"]
    with_training = any(row.training is not None for row in rows)
    if with_training:
        names += ["with backward", "speedup "]
    made = table([*names, "note"], right=names[1:])
    base = rows[0]
    for row in rows:
        cells = [*_cells(row.forward, base.forward)]
        if with_training:
            cells += _cells(row.training, base.training)
        made.add_row(Text(row.candidate), *cells, Text(row.note))
    return Group(heading(title), made)


def _cells(seconds: float | None, base: float | None) -> tuple[str, str]:
    if not seconds:
        return "-", "-"
    return duration(seconds), times(base / seconds) if base else "-"
