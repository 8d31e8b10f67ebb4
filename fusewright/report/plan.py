"""A plan for people: which rules fired where, the work before and after, what was kept and why, and what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from fusewright.plan import Fired, Kept, KernelChoice, Plan, Work
from fusewright.report.text import bullets, duration, heading, less, render, scaled, table, times
from fusewright.report.verdict import verdict_summary

_MOST_ROWS = 30
_STATUS = {
    "rewritten": ("rewritten", "bold green"),
    "unchanged": ("unchanged, nothing to gain", "bold yellow"),
    "untouched": ("untouched, it runs as it did", "bold yellow"),
}
_CLASS = {
    "exact": "exact: the same bits, non-finite values included",
    "reassociates": "reassociates: the same real number, other rounding; a NaN still reaches every output it reached",
    "finite": "finite: the same for finite values; a NaN may vanish",
}


def render_plan(plan: Plan, width: int | None = None) -> str:
    """A plan as plain text, `width` columns wide."""
    return render(plan_view(plan), width)


def plan_view(plan: Plan) -> RenderableType:
    """A plan as something a rich console prints."""
    return Group(*_sections(plan))


def _sections(plan: Plan) -> Iterator[RenderableType]:
    yield _title(plan)
    if plan.before is not None and plan.after is not None:
        yield heading("Work")
        yield _work(plan.before, plan.after)
    if plan.rules:
        yield heading("Rules that fired")
        yield from _rules(plan.rules)
    if plan.kernels:
        yield heading("Kernels")
        yield _kernels(plan.kernels)
    elif plan.no_kernels and plan.status == "rewritten":
        yield heading("Kernels")
        yield Text(f"none: {plan.no_kernels}; the program runs on PyTorch's own operators")
    if plan.kept:
        yield heading("What serves calls")
        yield _kept(plan.kept)
    if plan.verdict is not None:
        yield heading("Verified")
        yield verdict_summary(plan.verdict)
    for title, lines in (("Precision", plan.precision), ("Advice", plan.advice), ("Refused", plan.refused)):
        if lines:
            yield heading(title)
            yield bullets(lines)
    if plan.declined:
        yield heading("Rules that matched and were not taken")
        yield _declined(plan)
    if plan.opaque:
        yield heading("Runs as it did (not understood, so not touched)")
        yield Text(", ".join(_counted(plan.opaque)))


def _title(plan: Plan) -> RenderableType:
    words, style = _STATUS[plan.status]
    title = Text.assemble((plan.model, "bold"), ": ", (words, style))
    lines = [title, Text(f"on {plan.device}, for {plan.signature.removeprefix(', ') or 'no inputs'}", style="dim")]
    if plan.reason:
        lines.append(Text(plan.reason))
    return Group(*lines)


def _work(before: Work, after: Work) -> RenderableType:
    made = table(("", "before", "after", "change"), right=("before", "after"))
    made.add_row(
        "arithmetic", scaled(before.flops, "FLOP"), scaled(after.flops, "FLOP"), less(before.flops, after.flops)
    )
    made.add_row("memory traffic", scaled(before.bytes, "B"), scaled(after.bytes, "B"), less(before.bytes, after.bytes))
    made.add_row("launches", f"{before.launches:g}", f"{after.launches:g}", less(before.launches, after.launches))
    seconds = less(before.seconds, after.seconds)
    made.add_row("estimated time", duration(before.seconds), duration(after.seconds), seconds)
    return made


def _rules(rules: tuple[Fired, ...]) -> Iterator[RenderableType]:
    made = table(("rule", "class", "arithmetic", "estimate"), right=("arithmetic", "estimate"), fixed=("class",))
    groups = [list(group) for _, group in groupby(rules, key=lambda fired: (fired.rule, fired.exactness))]
    for group in groups[:_MOST_ROWS]:
        first, last = group[0], group[-1]
        where = first.where if len(group) == 1 else f"{first.where} and {len(group) - 1} more"
        made.add_row(
            Text.assemble(first.rule, "\n", (f"at {where}", "dim")),
            first.exactness,
            less(first.before.flops, last.after.flops),
            _change(duration(first.before.seconds), duration(last.after.seconds)),
        )
    yield made
    if len(groups) > _MOST_ROWS:
        yield Text(f"and {len(groups) - _MOST_ROWS} more rows", style="dim")
    used = {fired.exactness for fired in rules}
    yield Text("\n".join(meaning for name, meaning in _CLASS.items() if name in used), style="dim")


def _kernels(choices: tuple[KernelChoice, ...]) -> RenderableType:
    made = table(("group", "run by", "generated", "ATen"), right=("generated", "ATen"), fixed=("run by",))
    for choice, layers in Counter(replace(choice, where="") for choice in choices).items():
        shapes = f", in {layers} places" if layers > 1 else ""
        shapes += f", best of {choice.tried} tile shapes" if choice.tried > 1 else ""
        made.add_row(
            Text.assemble(choice.name, "\n", (f"{choice.family}{shapes}", "dim")),
            choice.path,
            "-" if choice.generated is None else duration(choice.generated),
            "-" if choice.aten is None else duration(choice.aten),
        )
    return made


def _change(before: str, after: str) -> str:
    """``2.31 -> 0.58 GFLOP`` where the units agree, both units where not, one figure where nothing moved."""
    if before == after:
        return after
    value, _, unit = before.partition(" ")
    return f"{value} -> {after}" if after.endswith(f" {unit}") else f"{before} -> {after}"


def _kept(kept: tuple[Kept, ...]) -> RenderableType:
    if all(entry.original is None and entry.rewritten is None for entry in kept):
        made = table(("calls", "run by", "why"), fixed=("calls", "run by"))
        for entry in kept:
            made.add_row(entry.mode, entry.path, Text(entry.reason))
        return made
    replayed = ("recorded",) if any(entry.recorded is not None for entry in kept) else ()
    numbers = ("original", "rewritten", *replayed, "speedup")
    made = table(("calls", "run by", *numbers), right=numbers, fixed=("run by",))
    for entry in kept:
        before, after = entry.original, entry.recorded if entry.path == "recorded" else entry.rewritten
        seconds = (before, entry.rewritten, *((entry.recorded,) if replayed else ()))
        made.add_row(
            # The reason goes below: a column of its own would leave a narrow terminal no room for the figures.
            Text.assemble(entry.mode, "\n", (entry.reason, "dim")) if entry.reason else Text(entry.mode),
            entry.path,
            *("-" if time is None else duration(time) for time in seconds),
            "-" if before is None or not after else times(before / after),
        )
    return made


def _declined(plan: Plan) -> RenderableType:
    made = table(("rule", "where", "why"))
    groups = [list(group) for _, group in groupby(plan.declined, key=lambda entry: (entry.rule, entry.reason))]
    for group in groups[:_MOST_ROWS]:
        where = group[0].where if len(group) == 1 else f"{group[0].where} and {len(group) - 1} more"
        made.add_row(Text(group[0].rule), Text(where), Text(group[0].reason))
    return made


def _counted(names: tuple[str, ...]) -> list[str]:
    return [name if count == 1 else f"{name} ({count} times)" for name, count in Counter(names).items()]
