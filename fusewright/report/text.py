"""Numbers with units, and tables as plain text."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterable
from typing import Literal

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

NARROWEST, WIDEST = 60, 120


def scaled(value: float, unit: str) -> str:
    """A count with a decimal prefix and three significant digits: ``2.31 GFLOP``, ``37.7 MB``."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # Half a unit in the last digit below the factor already rounds up to it: 999.7 kB reads 1 MB.
        if abs(value) >= factor * 0.9995:
            return f"{_three_digits(value / factor)} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}"


def duration(seconds: float) -> str:
    """Milliseconds, or seconds from ten seconds on."""
    return f"{_three_digits(seconds)} s" if seconds >= 10 else f"{_three_digits(seconds * 1e3)} ms"


def times(ratio: float) -> str:
    """A factor, as in ``3.6x``."""
    return f"{_three_digits(ratio)}x"


def less(before: float, after: float) -> str:
    """How much less `after` is than `before`, in words."""
    if before == after:
        return "same"
    if after == 0:
        return "all gone"
    if before == 0:
        return "new"
    ratio, word = (before / after, "less") if after < before else (after / before, "more")
    # 1.00x less reads as a figure and says nothing.
    return "about the same" if times(ratio) == times(1.0) else f"{times(ratio)} {word}"


def table(headings: Iterable[str], *, right: Iterable[str] = (), fixed: Iterable[str] = ()) -> Table:
    """An empty table in the house style: columns in `right` hold numbers; neither these nor those in `fixed` wrap."""
    numbers, unwrapped = set(right), {*right, *fixed}
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="bold")
    for name in headings:
        justify: Literal["left", "right"] = "right" if name in numbers else "left"
        made.add_column(name, justify=justify, no_wrap=name in unwrapped, overflow="fold")
    return made


def heading(text: str) -> Text:
    """A section's title."""
    return Text(f"\n{text}", style="bold cyan")


def bullets(lines: Iterable[str]) -> Table:
    """A list of sentences whose wrapped lines stay indented."""
    made = Table.grid(padding=(0, 1, 0, 0))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for line in lines:
        made.add_row("-", Text(line))
    return made


def render(view: RenderableType, width: int | None = None) -> str:
    """A view as plain text without colour, `width` columns wide; by default as wide as the terminal, within reason."""
    if width is None:
        width = min(max(shutil.get_terminal_size((100, 24)).columns, NARROWEST), WIDEST)
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, force_terminal=False, legacy_windows=False).print(view)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).strip("\n")


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude >= 99.95:
        return f"{value:,.0f}"
    if magnitude >= 9.995:
        return f"{value:.1f}"
    if magnitude >= 0.01:
        return f"{value:.2f}"
    return f"{value:.1e}"
