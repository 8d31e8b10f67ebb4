"""Kernels that find statistics in launches of their own, ahead of the one that reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusewright.codegen.cuda import stream_text
from fusewright.codegen.cuda.primitives import preamble
from fusewright.codegen.cuda.stream import Writer
from fusewright.codegen.text import fill
from fusewright.ir.node import Node
from fusewright.kernel import Array, Expression, Kernel, Launch

# The array of parts of sums; what follows may have one of its own.
PARTS = "parts_of_rows"


def behind_statistics(
    sums: Writer, behind: Writer, statistics: Mapping[Node, str], rows: Expression, how: str
) -> Kernel:
    """The launches of `sums`, which write these `statistics` of so many rows, and those of what is `behind` them.

    how  what the text says of both, ``"statistics, {}; the rest, {}"``
    """
    first, second = sums.kernel(""), behind.kernel("")
    entries = ", ".join(f"statistics::{launch.entry}" for launch in first.launches)
    sections = (
        *("\n".join(fill(stream_text.TOOLS)), ""),
        *("namespace statistics {", f"{sums.body(tools=False)}}}  // namespace statistics", f"using {entries};", ""),
        behind.body(tools=False),
    )
    body = "\n".join(sections)
    about = f"// {behind.name}: {how.format(sums.about()[:-1], behind.about())}"
    return replace(
        second,
        source=f"{about}\n\n{preamble(body, 'nonfinite', 'elements')}\n{body}",
        scratch=(
            *(Array(statistic, (rows,), s.dtype) for s, statistic in statistics.items()),
            *(replace(a, name=PARTS) for a in first.scratch),
            *second.scratch,
        ),
        launches=(*map(_with_parts, first.launches), *second.launches),
        notes=tuple(dict.fromkeys((*first.notes, *second.notes))),
        counts=tuple(dict.fromkeys((*first.counts, *second.counts))),
    )


def _with_parts(launch: Launch) -> Launch:
    """A launch of the statistics, with the array of parts under its own name."""
    arguments = (replace(a, text=PARTS) if (a.kind, a.text) == ("pointer", "scratch") else a for a in launch.arguments)
    return replace(launch, arguments=tuple(arguments))
