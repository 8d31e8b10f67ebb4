"""A verdict for people: one row per named check, or a few lines inside a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from fusewright.report.text import heading, render, table

if TYPE_CHECKING:
    from fusewright.verification.verdict import Check, Verdict

_RESULT = {True: ("ok", "green"), False: ("FAILED", "bold red"), None: ("not checked", "yellow")}


def render_verdict(verdict: Verdict, width: int | None = None) -> str:
    """A verdict as plain text, `width` columns wide."""
    return render(verdict_view(verdict), width)


def verdict_view(verdict: Verdict) -> RenderableType:
    """Every check of a verdict, as something a rich console prints."""
    return Group(_headline(verdict), heading("Checks"), _rows(verdict.rows))


def verdict_summary(verdict: Verdict) -> RenderableType:
    """The outcome, what it was checked against, and in full only the checks that did not pass."""
    return Group(*_summary(verdict))


def _summary(verdict: Verdict) -> Iterator[RenderableType]:
    yield _headline(verdict)
    passed = [row.name for row in verdict.rows if row.ok]
    if passed:
        yield Text(f"passed: {', '.join(passed)}", style="dim")
    others = [row for row in verdict.rows if not row.ok]
    if others:
        yield _rows(others)


def _headline(verdict: Verdict) -> RenderableType:
    passed, failed = sum(row.ok is True for row in verdict.rows), len(verdict.failed)
    skipped = len(verdict.rows) - passed - failed
    if failed:
        outcome = Text("FAILED", style="bold red")
    elif verdict.ok:
        outcome = Text("verified", style="bold green")
    else:
        outcome = Text("nothing could be checked", style="bold red")
    counts = [f"{passed} passed", f"{failed} failed" if failed else "", f"{skipped} not checked" if skipped else ""]
    outcome.append(f": {', '.join(filter(None, counts))}, in {verdict.seconds:.1f} s", style="not bold default")
    return Group(outcome, Text(f"checked {verdict.checked}"))


def _rows(rows: Iterable[Check]) -> RenderableType:
    made = table(("check", "result", "error", "allowed", "evidence"), right=("error", "allowed"), fixed=("result",))
    for row in rows:
        result, style = _RESULT[row.ok]
        error, allowed = ("" if value is None else f"{value:.1e}" for value in (row.error, row.tolerance))
        made.add_row(Text(row.name), Text(result, style=style), error, allowed, Text(row.detail))
    return made
