"""What a plan tells its reader besides what was done: precision notes, and what would allow more."""

from __future__ import annotations

import torch

from fusewright.ir import ops
from fusewright.pipeline import Built


def precision_notes(built: Built) -> tuple[str, ...]:
    """How the rewritten arithmetic differs from the original's."""
    classes = {fired.exactness for fired in built.rewritten.fired}
    notes: list[str] = []
    if classes == {"exact"}:
        notes.append("exact: the same bits as the original, non-finite values included")
    if "reassociates" in classes:
        notes.append("reassociates: the same real number, other rounding; an Inf may surface as NaN or the reverse")
    if "finite" in classes:
        notes.append("finite: a dependence was dropped, so a NaN of the original may vanish")
    computed = {n.dtype for n in built.rewritten.graph.nodes() if not isinstance(n.op, ops.Number)}
    if torch.float64 in computed and not any(n.dtype == torch.float64 for n in built.captured.graph.nodes()):
        notes.append("total sums are carried in float64 through the contraction that follows")
    return tuple(notes)


def advice(built: Built) -> tuple[str, ...]:
    """What the user could do to let more of the algebra apply."""
    found: list[str] = []
    for declined in built.rewritten.declined:
        if "another user" in declined.reason:
            found.append(f"{declined.where}: {declined.rule} would apply if {declined.reason.replace('has', 'had no')}")
        if "finite" in declined.reason:
            found.append(
                f"{declined.where}: for finite inputs {declined.rule} holds: is that intended? finite=True allows it"
            )
    if built.captured.reasons:
        found.append(f"{len(built.captured.reasons)} operations were not understood and run as they did")
    return tuple(dict.fromkeys(found))
