"""Measurements for people: everything that ran one model, beside eager."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from fusewright.report.text import duration, heading, render, table, times

if TYPE_CHECKING:
    from fusewright.measure import Sample
    from fusewright.peers import Bench


def render_bench(title: str, bench: Bench, width: int | None = None) -> str:
    """One model's measurements as plain text, `width` columns wide."""
    return render(bench_view(title, bench), width)


def bench_view(title: str, bench: Bench) -> RenderableType:
    """One model's measurements: medians, and how many times as fast as eager each is."""
    numbers = ["forward", "speedup"]
    with_training = any(row.training is not None for row in bench.rows)
    if with_training:
        # The trailing space tells the two speedup columns apart.
        numbers += ["with backward", "speedup "]
    made = table(["", *numbers, "remark"], right=numbers, fixed=[""])
    for row in bench.rows:
        cells = _cells(row.forward, row.ratio)
        if with_training:
            cells += _cells(row.training, row.training_ratio)
        made.add_row(Text(row.name), *cells, Text(row.reason))
    facts = bench.environment
    where = f"{facts['device']}, {facts['threads']} threads, torch {facts['torch']}, {facts['date'][:10]}"
    return Group(heading(title), Text(where, style="dim"), made)


def _cells(sample: Sample | None, ratio: float | None) -> list[str]:
    return ["-" if sample is None else duration(sample.median), "-" if ratio is None else times(ratio)]
