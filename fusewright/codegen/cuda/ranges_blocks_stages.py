"""The stages of range reductions in blocks that sum an axis slot by slot, and what becomes of a finished sum."""

from __future__ import annotations

from math import prod

import torch

from fusewright.codegen.cuda import ranges_blocks_text as texts
from fusewright.codegen.cuda.loops import Dealt
from fusewright.codegen.cuda.ranges_blocks_kept import KeptStages, times
from fusewright.codegen.text import Lines, fill
from fusewright.schedule.range_order import Digits, terms


class Stages(KeptStages):
    """Writes such stages beside those that keep sums in registers."""

    # ---- sums along one axis

    def outer_stage(self) -> Lines:
        a, several = self.letters[0], self.cut.planes > 1
        body = fill(
            texts.OUTER,
            A=a.upper(),
            s=[f"const int s = row % {self.part(0)};"] if several else [],
            slot=self.slot(0, "s" if several else "row"),
            plane=self.plane(f"row / {self.part(0)}"),
            column=self.column(),
            pitch=self.pitch,
            sum=self.summed(self.parts[0], f"value(from[(slot.begin + {self.step}) * {self.row}])"),
        )
        about = f"Sums along {a}: what slots share is in the first cache when it is read again."
        rows = times("PLANES" if several else "", self.part(0))
        return self.dealt(about, self.columns, Dealt("row", rows, self.cut.planes * self.parts[0].slots), body)

    def middle_stage(self) -> Lines:
        begin, part = self.begin(1), self.parts[1]
        body = fill(
            texts.MIDDLE,
            part=self.part(1),
            slot=self.slot(1),
            begin=f"slot.begin - {begin}" if begin else "slot.begin",
            sum=self.summed(part, f"from[{self.step} * READ_W]"),
        )
        across = Dealt("i", f"{self.part(1)} * READ_W", part.slots * self.parts[2].read)
        return self.dealt("Sums along h, columns side by side.", across, self.before, body)

    def last_stage(self) -> Lines:
        last = len(self.parts) - 1
        (source, target), begin = self.halves, self.begin(last)
        body = fill(
            texts.LAST,
            slot=self.slot(last),
            begin=f"slot.begin - {begin}" if begin else "slot.begin",
            source=source,
            target=target,
            row=self.out_row,
            sum=self.summed(self.parts[last], f"from[{self.step}]"),
        )
        slots = Dealt("s", self.part(last), self.parts[last].slots)
        return self.dealt("Sums along w, rows side by side.", self.all_rows, slots, body)

    def result_of_total(self) -> tuple[Lines, str]:
        """Statements, and the text of a finished sum as an element of the result."""
        factor = prod(p.one_scale for p in self.parts if p.one_scale is not None)
        tables = [f"SCALE_{a.upper()}[{a}]" for a, p in self.named if p.one_scale is None]
        factors = [*([repr(factor)] if factor != 1.0 else []), *tables]
        if tables:
            return [f"const double scale = {' * '.join(factors)};"], self._stored("total * scale", "double")
        return [], self._stored(f"total * Sum({factor!r})" if factors else "total", self.sum)

    def _stored(self, text: str, kind: str) -> str:
        """A value of this type as an element of the result."""
        if self.r.root.dtype == torch.float64:
            return text
        return self.written(f"float({text})" if kind == "double" else text)


def counting(about: str, name: str, index: str, digits: Digits) -> Lines:
    """A function from results to results."""
    head, found = f"__device__ __forceinline__ int {name}(int {index})", terms(digits, index)
    first, *more = found if sum(map(len, found)) > 90 else [" + ".join(found)]
    lines = [f"    return {first}", *(f"        + {term}" for term in more)]
    lines[-1] += ";"
    return [f"// {about}", f"{head} {{", *lines, "}", ""]
