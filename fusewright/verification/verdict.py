"""What a verification answers: one row per named check, and the verdict over all of them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Check:
    """One named check.

    `ok` is `None` where the check does not apply or its turn did not come within the budget; `detail` says which.
    `error` and `tolerance` belong to the element nearest to its limit, in units of its tensor's root mean square.
    """

    name: str
    ok: bool | None
    detail: str = ""
    error: float | None = None
    tolerance: float | None = None


@dataclass(frozen=True)
class Verdict:
    """Printable evidence that a candidate does, or does not, compute what its reference computes."""

    rows: tuple[Check, ...]
    checked: str
    """What was compared against what, and at which size."""
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether something was checked and nothing failed."""
        return any(row.ok for row in self.rows) and not self.failed

    @property
    def failed(self) -> tuple[Check, ...]:
        """The rows that failed."""
        return tuple(row for row in self.rows if row.ok is False)

    def to_json(self, indent: int | None = 2) -> str:
        """The whole verdict as standard JSON text; figures that are not finite become strings."""
        record = {"ok": self.ok, "checked": self.checked, "seconds": round(self.seconds, 3)}
        rows = [{key: _plain(value) for key, value in asdict(row).items()} for row in self.rows]
        return json.dumps({**record, "rows": rows}, indent=indent)

    def __str__(self) -> str:
        from fusewright.report import render_verdict

        return render_verdict(self)


def _plain(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
