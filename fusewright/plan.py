"""What was decided for one model and one signature, and why: the value behind `fusewright.explain`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fusewright.verification import Verdict

Status = Literal["rewritten", "unchanged", "untouched"]
Mode = Literal["forward", "forward+backward", "with input gradients"]


@dataclass(frozen=True)
class Work:
    """Arithmetic, traffic and launches of a graph, and the roofline time they add up to on the plan's device."""

    flops: float
    bytes: float
    launches: float
    seconds: float


@dataclass(frozen=True)
class Fired:
    """One application of a rule: the estimated work of the whole graph just before and just after it.

    `rivals` are the other rules that could have been applied to the same node.
    """

    rule: str
    where: str
    exactness: Literal["exact", "reassociates", "finite"]
    before: Work
    after: Work
    rivals: tuple[str, ...] = ()


@dataclass(frozen=True)
class Declined:
    """A rule that matched and was not taken, with the reason in a few words."""

    rule: str
    where: str
    reason: str


@dataclass(frozen=True)
class Kept:
    """Which path serves calls of one mode, why, and the measured medians in seconds (`None` where not measured).

    The modes: without gradients, with those of parameters, with those of inputs as well.  A path that is `recorded` is
    the rewritten program as a CUDA graph.
    """

    mode: Mode
    path: Literal["recorded", "rewritten", "original"]
    reason: str
    original: float | None = None
    rewritten: float | None = None
    recorded: float | None = None


@dataclass(frozen=True)
class KernelChoice:
    """A group that a generated kernel covers, which of the two runs it, and the measured times of both in seconds.

    `tried` counts the tile shapes that were measured; times are `None` where nothing was.  A `part` lies within a
    group that was left to ATen before.
    """

    name: str
    family: str
    where: str
    path: Literal["generated", "ATen"]
    generated: float | None = None
    aten: float | None = None
    tried: int = 0
    part: bool = False


@dataclass(frozen=True)
class Plan:
    """The answer of `fusewright.explain`: printable, and JSON through `to_json`.

    `no_kernels` says why none could be generated, where that is so; `refused`, what was wrong with programs that
    measured faster than the one kept.
    """

    model: str
    status: Status
    reason: str
    device: str
    signature: str
    before: Work | None = None
    after: Work | None = None
    rules: tuple[Fired, ...] = ()
    declined: tuple[Declined, ...] = ()
    opaque: tuple[str, ...] = ()
    kernels: tuple[KernelChoice, ...] = ()
    no_kernels: str = ""
    kept: tuple[Kept, ...] = ()
    precision: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    verdict: Verdict | None = None
    program: str = ""

    def to_json(self, indent: int | None = 2) -> str:
        """The whole plan as JSON text."""
        record: dict[str, Any] = {k: getattr(self, k) for k in self.__dataclass_fields__ if k != "verdict"}
        for name in ("before", "after"):
            record[name] = None if record[name] is None else asdict(record[name])
        for name in ("rules", "declined", "kernels", "kept"):
            record[name] = [asdict(entry) for entry in record[name]]
        record["verdict"] = None if self.verdict is None else json.loads(self.verdict.to_json())
        return json.dumps(record, indent=indent)

    def __str__(self) -> str:
        from fusewright.report import render_plan

        return render_plan(self)
