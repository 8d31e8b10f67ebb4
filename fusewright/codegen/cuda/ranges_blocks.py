"""CUDA C++ of range reductions of many slots: one axis after the other, in shared memory.

A line is copied there; of planes and volumes, the outermost axis is summed while it is read.  Threads keep the sums
that a group of slots is made of in registers where they can (`ranges_blocks_kept`), and else sum slot by slot, what
slots share coming from the first cache.  Sums lie in two halves of shared memory by turns.  Threads that work side by
side have the same slots: of neighbouring columns, or of neighbouring rows at an odd pitch, so that no two of a warp
want the same bank.
"""

from __future__ import annotations

from math import prod

import torch

from fusewright.codegen.cpp import ELEMENT
from fusewright.codegen.cuda import ranges_blocks_text as texts
from fusewright.codegen.cuda.primitives import primitives
from fusewright.codegen.cuda.ranges_blocks_kept import KeptStages, plus
from fusewright.codegen.text import Lines, fill
from fusewright.kernel import Argument, Kernel, Launch
from fusewright.schedule.range_blocks import THREADS, Cut, shared_bytes
from fusewright.schedule.range_order import Digits, terms
from fusewright.schedule.range_sums import RangeReduction


def kernel(r: RangeReduction, cut: Cut, name: str, reference: str = "") -> Kernel:
    """The kernel of a range reduction of up to three axes, cut into blocks like this; leading sizes are a call's."""
    return _Writer(r, name, cut).kernel(reference)


class _Writer(KeptStages):
    """Writes the kernel."""

    @property
    def several(self) -> bool:
        """Whether several blocks work on a plane."""
        return any(p.parts > 1 for p in self.parts)

    # ---- the record

    def kernel(self, reference: str) -> Kernel:
        blocks = f"ceil_div({self.planes}, {self.cut.planes})" if self.cut.planes > 1 else f"({self.planes})"
        parts = prod(p.parts for p in self.parts)
        arguments = (Argument("pointer", "x"), Argument("pointer", "out"), Argument("long", self.planes))
        grid = (f"{blocks} * {parts}" if parts > 1 else blocks, "1", "1")
        launch = Launch(self.name, arguments, grid, THREADS, shared_bytes(self.r, self.cut))
        return self.record(source=self.text(), scratch=(), launches=(launch,), reference=reference)

    # ---- the text

    def text(self) -> str:
        lines = [
            f"// {self.name}: {self.about()}.",
            primitives("nonfinite", "await_launches", "elements"),
            "using index_t = long long;",
            f"using Element = {ELEMENT[self.r.x.dtype]};",
            f"using Sum = {self.sum};  // what is kept of an axis",
            "",
            *self.constants(),
            "",
            *self.value(),
            *self.slots(),
            *self.functions(),
            *self._moved(),
            *self._entry(),
        ]
        return "\n".join(lines) + "\n"

    def about(self) -> str:
        counts = " x ".join(str(len(p.all_slots)) for p in self.parts)
        if len(self.parts) == 1:
            return f"{counts} sums over index ranges of the last axis, from shared memory"
        return f"{counts} sums over index ranges of the last axes, one axis after the other"

    def _moved(self) -> Lines:
        """The function that counts through results in another order than that of their slots."""
        if self.r.stored is None:
            return []
        slots, places = self.r.order
        if self.several:
            return _counting("Where the result of a slot lies among those of its plane.", "place_of", "slot", places)
        return _counting("The slot whose result lies at a place among those of its plane.", "slot_at", "place", slots)

    def _entry(self) -> Lines:
        outer, last = self.parts[0], len(self.parts) - 1
        if len(self.parts) == 1:
            begin = plus(self.begin(0), "i % READ_W")
            stages = fill(texts.COPY, plane=self.plane("i / READ_W"), at=begin)
        else:
            stages = self._outer_stage() if outer.family is None else self.kept_outer()
        if len(self.parts) == 3:
            stages += ["", *(self._middle_stage() if self.parts[1].family is None else self.kept_middle())]
        stages += ["", *(self._last_stage() if self.parts[last].family is None else self.kept_last())]
        return fill(
            texts.ENTRY,
            name=self.name,
            Result=ELEMENT[self.r.root.dtype],
            parts=self._of_block(),
            stages=stages,
            write=self._write_parts() if self.several else self._write(),
        )

    def _of_block(self) -> Lines:
        """Which planes, and which part of every axis, are a block's."""
        lines, behind = [], ""
        for i, (a, p) in reversed(list(enumerate(self.named))):
            if p.parts == 1:
                continue
            begin = f"from_{a} = BEGIN_{a.upper()}[part_{a}], " if self.staged(i) else ""
            lines.append(f"const int part_{a} = blockIdx.x{behind} % PARTS_{a.upper()};")
            lines.append(f"const int {begin}first_{a} = part_{a} * PART_{a.upper()};")
            behind += f" / PARTS_{a.upper()}"
        return [f"const index_t first = index_t(blockIdx.x{behind}) * PLANES;", *lines]

    @property
    def _step(self) -> str:
        """How far the j-th element of a slot is from its first."""
        return "j * slot.step" if self.steps else "j"

    # ---- sums along one axis

    def _outer_stage(self) -> Lines:
        a = self.letters[0]
        return fill(
            texts.OUTER,
            a=a,
            A=a.upper(),
            part=self.part(0),
            slot=self.slot(0),
            plane=self.plane(f"row / {self.part(0)}"),
            column=self.column(),
            pitch=self.pitch,
            sum=self.summed(self.parts[0], f"value(from[(slot.begin + {self._step}) * {self.row}])"),
        )

    def _middle_stage(self) -> Lines:
        begin = self.begin(1)
        return fill(
            texts.MIDDLE,
            outer=self.part(0),
            part=self.part(1),
            slot=self.slot(1),
            begin=f"slot.begin - {begin}" if begin else "slot.begin",
            sum=self.summed(self.parts[1], f"from[{self._step} * READ_W]"),
        )

    def _last_stage(self) -> Lines:
        last = len(self.parts) - 1
        (source, target), begin = self.halves, self.begin(last)
        return fill(
            texts.LAST,
            part=self.part(last),
            slot=self.slot(last),
            begin=f"slot.begin - {begin}" if begin else "slot.begin",
            source=source,
            target=target,
            sum=self.summed(self.parts[last], f"from[{self._step}]"),
        )

    # ---- results

    def _result(self) -> tuple[Lines, str]:
        """Statements, and the text of a finished sum as an element of the result."""
        factor = prod(p.one_scale for p in self.parts if p.one_scale is not None)
        tables = [f"SCALE_{a.upper()}[{a}]" for a, p in self.named if p.one_scale is None]
        factors = [*([repr(factor)] if factor != 1.0 else []), *tables]
        lines = [f"const double scale = {' * '.join(factors)};"] if tables else []
        text = "total" + (" * scale" if tables else f" * {factor!r}" if factors else "")
        return lines, text if self.r.root.dtype == torch.float64 else self.written(f"float({text})")

    def _write(self) -> Lines:
        """Blocks that have all slots of their planes."""
        scales, result = self._result()
        order, slot, lines = "Results lie side by side.", "i", []
        if self.r.stored is not None:
            order, slot = "Results lie side by side, in another order than their slots.", "slot"
            lines = ["const int slot = slot_at(i);"]
            if self.cut.planes > 1:
                lines = ["const int place = i % RESULTS, slot = i - place + slot_at(place);"]
        scaled = [(i, a) for i, (a, p) in enumerate(self.named) if p.one_scale is None]
        lines += [f"const int {a} = {self._digit(i, slot)};" for i, a in scaled]
        at = f"{self.halves[1]}[{slot} / SLOTS_W * OUT_PITCH + {slot} % SLOTS_W]"
        count = "int(min(index_t(PLANES), planes - first)) * RESULTS" if self.cut.planes > 1 else "RESULTS"
        return fill(texts.WRITE, order=order, count=count, decode=[*lines, *scales], total=at, result=result)

    def _write_parts(self) -> Lines:
        """Blocks that have a part of the slots of one plane."""
        assert self.cut.planes == 1
        decode, beyond, slot = [], [], ""
        for i, (a, p) in enumerate(self.named):
            decode.append(f"const int {a} = {plus(f'first_{a}' if p.parts > 1 else '', self._digit(i, 'i'))};")
            if not p.even:
                beyond.append(f"{a} >= SLOTS_{a.upper()}")
            slot = f"{f'({slot})' if '+' in slot else slot} * SLOTS_{a.upper()} + {a}" if slot else a
        scales, result = self._result()
        return fill(
            texts.WRITE_PARTS,
            last="; the last part of an axis has fewer slots" if beyond else "",
            part_w=self.part(len(self.parts) - 1),
            decode=decode,
            beyond=[f"if ({' || '.join(beyond)}) continue;"] if beyond else [],
            scales=scales,
            slot=slot,
            target=self.halves[1],
            result=result,
            place="slot" if self.r.stored is None else "place_of(slot)",
        )

    def _digit(self, axis: int, index: str) -> str:
        """Which slot along an axis the result `index` is of."""
        inner = [self.part(k) for k in range(axis + 1, len(self.parts))]
        behind = f" / {inner[0]}" if len(inner) == 1 else f" / ({' * '.join(inner)})" if inner else ""
        whole = axis == 0 and self.cut.planes == 1
        return f"{index}{behind}" if whole else f"{index}{behind} % {self.part(axis)}"


def _counting(about: str, name: str, index: str, digits: Digits) -> Lines:
    """A function from results to results."""
    head, found = f"__device__ __forceinline__ int {name}(int {index})", terms(digits, index)
    first, *more = found if sum(map(len, found)) > 90 else [" + ".join(found)]
    lines = [f"    return {first}", *(f"        + {term}" for term in more)]
    lines[-1] += ";"
    return [f"// {about}", f"{head} {{", *lines, "}", ""]
