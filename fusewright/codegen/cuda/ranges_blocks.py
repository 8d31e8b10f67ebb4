"""CUDA C++ of range reductions of many slots: one axis after the other, in shared memory.

A line is copied there; of planes and volumes, the outermost axis is summed while it is read: by threads that keep all
its different sums in registers, so that every element is read once, or slot by slot, where the first cache has what
slots share.  Sums lie in two halves of shared memory by turns.  Threads that work side by side have the same slot: of
neighbouring columns, or of neighbouring rows at an odd pitch, so that no two of a warp want the same bank.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from fusewright.codegen.cpp import ELEMENT, compute_type
from fusewright.codegen.cuda import ranges_blocks_text as texts
from fusewright.codegen.cuda.primitives import primitives
from fusewright.codegen.cuda.ranges_blocks_sections import FEW, BlockSections
from fusewright.codegen.text import Lines, fill
from fusewright.kernel import Argument, Kernel, Launch
from fusewright.schedule.range_blocks import THREADS, Cut, shared_bytes
from fusewright.schedule.range_families import Family
from fusewright.schedule.range_order import Digits, terms
from fusewright.schedule.range_sums import RangeReduction


def kernel(r: RangeReduction, cut: Cut, name: str, reference: str = "") -> Kernel:
    """The kernel of a range reduction of up to three axes, cut into blocks like this; leading sizes are a call's."""
    return _Writer(r, name, cut).kernel(reference)


def _signed(number: int) -> str:
    """A number to add to what stands before it; nothing where that is 0."""
    return f" {'-' if number < 0 else '+'} {abs(number)}" if number else ""


def _sum(*terms: str) -> str:
    """Terms that are not empty, added."""
    return " + ".join(t for t in terms if t)


class _Writer(BlockSections):
    """Writes the kernel."""

    @property
    def halves(self) -> tuple[str, str]:
        """Where the last axis is summed from, and to."""
        return ("odd", "even") if len(self.parts) == 3 else ("even", "odd")

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
            primitives("nonfinite", "elements"),
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
        if len(self.parts) == 1:
            begin = _sum(self.begin(0), "i % READ_W")
            stages = fill(texts.COPY, plane=self._plane("i / READ_W"), at=begin)
        else:
            stages = self._kept_stage() if self.kept else self._outer_stage()
        if len(self.parts) == 3:
            stages += ["", *self._middle_stage()]
        return fill(
            texts.ENTRY,
            name=self.name,
            Result=ELEMENT[self.r.root.dtype],
            parts=self._of_block(),
            stages=[*stages, "", *self._last_stage()],
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

    def _plane(self, i: str) -> str:
        """The block's `i`-th plane; the last block may have fewer."""
        return f"min(first + {i}, planes - 1)" if self.cut.planes > 1 else "first"

    @property
    def _step(self) -> str:
        """How far the j-th element of a slot is from its first."""
        return "j * slot.step" if self.steps else "j"

    # ---- sums along one axis

    def _column(self) -> str:
        """Where a column begins, in elements of its plane."""
        *_, last = self.parts
        w = self.begin(len(self.parts) - 1)
        if len(self.parts) == 2:
            return _sum(w, "column")
        h = self.begin(1)
        if last.read == last.length:
            return _sum(f"{h} * W" if h else "", "column")
        row = f"({h} + column / READ_W)" if h else "column / READ_W"
        return _sum(f"{row} * W", w, "column % READ_W")

    @property
    def _row(self) -> str:
        """Elements from one index of the outermost axis to the next."""
        return "(H * W)" if len(self.parts) == 3 else "W"

    @property
    def _pitch(self) -> str:
        """Sums from one of its slots to the next."""
        return "COLUMNS" if len(self.parts) == 3 else "PITCH"

    def _kept_stage(self) -> Lines:
        a, family = self.letters[0], self.family
        assert family is not None
        tables = [f"constexpr int KEPT = {len(self.kept)};"]
        tables += self.table_of("int BEGIN[KEPT]", [str(run.first) for run in self.kept], "constexpr")
        if self.longest_run > 1:
            tables += self.table_of("int COUNT[KEPT]", [str(run.count) for run in self.kept], "constexpr")
        masks = [f"{mask:#x}" for mask in self.kept_of]
        names = {
            "A": a.upper(),
            "column": self._column(),
            "row": self._row,
            "read": self._run(family.group.period),
            "add": fill(texts.ADD_MANY if self.adds_many else texts.ADD_FEW),
            "pitch": self._pitch,
        }
        if family.groups == 1:
            tables += self.table_of(f"unsigned long long KEPT_OF[SLOTS_{a.upper()}]", masks, "constexpr")
            to = f"i / COLUMNS * SLOTS_{a.upper()} * {self._pitch}" if self.cut.planes > 1 else ""
            plane = self._plane("i / COLUMNS")
            return fill(texts.KEPT, a=a, plane=plane, to=_sum(to, "column"), tables=tables, **names)
        tables += self.table_of("unsigned long long KEPT_OF[GROUP]", masks, "constexpr")
        return self._repeated_stage(family, tables, names)

    def _repeated_stage(self, family: Family, tables: Lines, names: dict[str, Any]) -> Lines:
        """The same for slots that repeat in groups."""
        part, several = self.part(0), self.cut.planes > 1
        group = f"part_{self.letters[0]} * GROUPS + group" if self.parts[0].parts > 1 else "group"
        even = self.parts[0].slots % family.slots == 0
        return fill(
            texts.REPEATED,
            a=self.letters[0],
            tables=tables,
            planes="PLANES * " if several else "",
            group="i / COLUMNS % GROUPS" if several else "i / COLUMNS",
            plane=self._plane("i / (COLUMNS * GROUPS)"),
            begin=f"{f'({group})' if ' ' in group else group} * {family.distance}{_signed(family.first)}",
            at=fill(
                texts.AT_INSIDE if family.inside else texts.AT_CLIPPED, T=compute_type(self.r.value.dtype), **names
            ),
            to=_sum(
                f"i / (COLUMNS * GROUPS) * {part} * {self._pitch}" if several else "",
                f"group * GROUP * {self._pitch}",
                "column",
            ),
            some=[] if even else [f"if (group * GROUP + s >= {part}) break;"],
            **names,
        )

    def _run(self, period: int) -> Lines:
        """The statement that reads the k-th kept sum."""
        if self.longest_run == 1:
            return ["kept[k] = at(BEGIN[k]);"]
        step = f"{period} * j" if period > 1 else "j"
        function = f"few_of<{self.longest_run}>" if self.longest_run <= FEW else "sum_of"
        text = f"{function}([&](int j) {{ return at(BEGIN[k] + {step}); }}, COUNT[k])"
        return [f"kept[k] = {self.narrowed(text, self.longest_run > FEW)};"]

    def _outer_stage(self) -> Lines:
        a = self.letters[0]
        return fill(
            texts.OUTER,
            a=a,
            A=a.upper(),
            part=self.part(0),
            slot=self.slot(0),
            plane=self._plane(f"row / {self.part(0)}"),
            column=self._column(),
            pitch=self._pitch,
            sum=self.summed(self.parts[0], f"value(from[(slot.begin + {self._step}) * {self._row}])"),
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
            decode.append(f"const int {a} = {_sum(f'first_{a}' if p.parts > 1 else '', self._digit(i, 'i'))};")
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
    head = f"__device__ __forceinline__ int {name}(int {index})"
    return [f"// {about}", f"{head} {{", f"    return {' + '.join(terms(digits, index))};", "}", ""]
