"""CUDA C++ of range reductions of many slots: one axis after the other, in shared memory.

A line is copied there; of planes and volumes, the outermost axis is summed while it is read: by threads that keep all
its different sums in registers, so that every element is read once, or slot by slot, where the first cache has what
slots share.  Sums lie in two halves of shared memory by turns.  Threads that work side by side have the same slot: of
neighbouring columns, or of neighbouring rows at an odd pitch, so that no two of a warp want the same bank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from textwrap import wrap

import torch

from fusewright.codegen.cpp import ELEMENT
from fusewright.codegen.cuda import ranges_blocks_text as texts
from fusewright.codegen.cuda.primitives import primitives
from fusewright.codegen.cuda.ranges_common import CudaRangeSections
from fusewright.codegen.range_tables import runs
from fusewright.codegen.text import Lines, fill
from fusewright.kernel import Argument, Kernel, Launch
from fusewright.schedule.range_blocks import (
    PER_MULTIPROCESSOR,
    THREADS,
    Cut,
    Part,
    buffers,
    in_registers,
    kept_shapes,
    parts_of,
    shared_bytes,
    sum_type,
)
from fusewright.schedule.range_order import counted
from fusewright.schedule.range_sums import RangeReduction

FEW = 8  # additions in a row that may be in float32


def kernel(r: RangeReduction, cut: Cut, name: str, reference: str = "") -> Kernel:
    """The kernel of a range reduction of up to three axes, cut into blocks like this; leading sizes are a call's."""
    return _Writer(r, name, cut).kernel(reference)


def _plus(text: str, more: str) -> str:
    return text if more == "0" else f"{more} + {text}"


@dataclass(frozen=True)
class _Writer(CudaRangeSections):
    cut: Cut

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return parts_of(self.r, self.cut)

    @property
    def letters(self) -> str:
        """The axes, outermost first."""
        return "dhw"[-len(self.parts) :]

    @property
    def sum(self) -> str:
        """The type of what is kept of a summed axis."""
        return ELEMENT[sum_type(self.r)]

    @property
    def halves(self) -> tuple[str, str]:
        """Where the last axis is summed from, and to."""
        return ("odd", "even") if len(self.parts) == 3 else ("even", "odd")

    # ---- the record

    def kernel(self, reference: str) -> Kernel:
        blocks = f"ceil_div({self.planes}, {self.cut.planes})" if self.cut.planes > 1 else f"({self.planes})"
        several = prod(p.parts for p in self.parts)
        arguments = (Argument("pointer", "x"), Argument("pointer", "out"), Argument("long", self.planes))
        grid = (f"{blocks} * {several}" if several > 1 else blocks, "1", "1")
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
            *self._constants(),
            "",
            *self.value(),
            *self._slots(),
            *self._functions(),
            *self._entry(),
        ]
        return "\n".join(lines) + "\n"

    def about(self) -> str:
        counts = " x ".join(str(len(p.all_slots)) for p in self.parts)
        if len(self.parts) == 1:
            return f"{counts} sums over index ranges of the last axis, from shared memory"
        return f"{counts} sums over index ranges of the last axes, one axis after the other"

    def _constants(self) -> Lines:
        pairs = list(zip(self.letters.upper(), self.parts, strict=True))
        names = ", ".join(f"{a} = {p.length}" for a, p in pairs)
        plane = " * ".join(a for a, _ in pairs)
        lines = [
            f"constexpr int THREADS = {THREADS}, BLOCKS = {self._resident()};  // of a block; per multiprocessor",
            f"constexpr int PLANES = {self.cut.planes};  // of a block",
            f"constexpr int {names}, PLANE = {plane};  // a plane in memory",
            f"constexpr int {', '.join(f'SLOTS_{a} = {len(p.all_slots)}' for a, p in pairs)};  // its results",
        ]
        for a, p in pairs:
            if p.parts > 1:
                lines.append(
                    f"constexpr int PARTS_{a} = {p.parts}, PART_{a} = {p.slots};  // blocks, and slots of each"
                )
                lines += self._wrapped(f"int BEGIN_{a}[PARTS_{a}]", list(map(str, p.begins)))
        read = [f"READ_{a} = {p.read}" for a, p in pairs[max(0, len(pairs) - 2) if len(pairs) == 3 else -1 :]]
        lines.append(f"constexpr int {', '.join(read)};  // of an axis, by a block")
        return [*lines, *self._places()]

    def _places(self) -> Lines:
        """How sums lie in shared memory."""
        *_, pitch, out_pitch = [(0,), *kept_shapes(self.parts)][-2:]
        rows = " * ".join(["PLANES", *(self._part(i) for i in range(len(self.parts) - 1))])
        columns = "READ_H * READ_W" if len(self.parts) == 3 else "READ_W"
        results = " * ".join(f"SLOTS_{a}" for a in self.letters.upper())
        return [
            *([f"constexpr int COLUMNS = {columns};  // of the outermost axis"] if len(self.parts) > 1 else []),
            f"constexpr int ROWS = {rows}, PITCH = {pitch[-1]}, OUT_PITCH = {out_pitch[-1]};  // of the last axis",
            f"constexpr int RESULTS = {results};  // of a plane",
            f"constexpr int EVEN = {buffers(self.r, self.cut)[0]};  // sums in the first half of shared memory",
        ]

    def _resident(self) -> int:
        """Blocks of a multiprocessor, by shared memory, threads and registers."""
        outer = self.parts[0]
        kept = len(runs(outer.axis)) if len(self.parts) > 1 and in_registers(outer) else 0
        registers = 48 + kept * sum_type(self.r).itemsize // 4
        by_memory = PER_MULTIPROCESSOR // (shared_bytes(self.r, self.cut) + 1024)
        return max(1, min(6, by_memory, 65536 // (THREADS * registers)))

    def _wrapped(self, declaration: str, entries: list[str], constant: str | None = None) -> Lines:
        """A table, on several lines where it is long."""
        head = f"{constant or self.constant} {declaration} = {{"
        line = f"{head}{', '.join(entries)}}};"
        if len(line) <= 116:
            return [line]
        return [head, *wrap(", ".join(e.replace(" ", "~") for e in entries), 112), "};"]

    def _slots(self) -> Lines:
        """Tables of the slots that are read from one after the other, and of what they are multiplied by."""
        tabled = [(a, p) for i, (a, p) in enumerate(self._pairs()) if i or not self._kept]
        steps = self._steps
        lines = fill(texts.SLOT_STEP if steps else texts.SLOT)
        for a, p in tabled:
            entries = []
            for i, s in enumerate(p.all_slots):
                begin = s.start if s.count else p.begins[i // p.slots]
                entries.append(f"{{{begin}, {s.count}, {s.step}}}" if steps else f"{{{begin}, {s.count}}}")
            lines += self._wrapped(f"Slot SLOT_{a.upper()}[SLOTS_{a.upper()}]", entries)
        for a, p in self._pairs():
            if self._scales_differ(p):
                entries = [repr(s.scale) for s in p.all_slots]
                lines += self._wrapped(f"double SCALE_{a.upper()}[SLOTS_{a.upper()}]", entries)
        return [line.replace("~", " ") for line in lines] + [""]

    def _pairs(self) -> list[tuple[str, Part]]:
        return list(zip(self.letters, self.parts, strict=True))

    @property
    def _steps(self) -> bool:
        """Whether a slot of the tables takes every second element, say."""
        return any(s.step > 1 and s.count > 1 for p in self.parts[1 if self._kept else 0 :] for s in p.all_slots)

    @property
    def _kept(self) -> bool:
        """Whether threads keep the sums of the outermost axis in registers."""
        return len(self.parts) > 1 and in_registers(self.parts[0])

    def _functions(self) -> Lines:
        """What adds a few, and many, values."""
        summed = self.parts[1 if self._kept else 0 :]
        long = any(p.longest > FEW for p in summed) or (self._kept and self._longest_run > FEW)
        few = [f"constexpr int FEW = {FEW};  // additions in a row in the type of the values", ""]
        wanted = long or (self._kept and self._adds_many)
        return [*(few if wanted else []), *fill(texts.FEW_OF), *(fill(texts.SUM_OF) if long else [])]

    @property
    def _longest_run(self) -> int:
        """The most elements that one kept sum has."""
        return max(count for _, _, count, _ in runs(self.parts[0].axis))

    @property
    def _adds_many(self) -> bool:
        """Whether a slot has so many kept sums that they are added in float64."""
        return max(self._members) > FEW

    @property
    def _members(self) -> list[int]:
        masks = [mask for *_, mask in runs(self.parts[0].axis)]
        return [sum(mask >> s & 1 for mask in masks) for s in range(len(self.parts[0].all_slots))]

    def _sum(self, p: Part, at: str) -> str:
        """The text of a sum over `slot`, of `at`, which says where element j is."""
        function = f"few_of<{p.longest}>" if p.longest <= FEW else "sum_of"
        return self._cast(f"{function}([&](int j) {{ return {at}; }}, slot.count)", p.longest > FEW)

    def _cast(self, text: str, wide: bool) -> str:
        return f"Sum({text})" if wide and self.sum == "float" else text

    def _part(self, i: int) -> str:
        """The slots of a block along axis `i`."""
        return f"{'PART' if self.parts[i].parts > 1 else 'SLOTS'}_{self.letters[i].upper()}"

    def _begin(self, i: int) -> str:
        """The first index that a block reads of axis `i`."""
        p = self.parts[i]
        return f"from_{self.letters[i]}" if p.parts > 1 else str(p.begins[0])

    def _slot(self, i: int, s: str = "s") -> str:
        """The slot that is the block's `s`-th along axis `i`."""
        p, a = self.parts[i], self.letters[i]
        if p.parts == 1:
            return s
        text = f"first_{a} + {s}"
        return text if p.parts * p.slots == len(p.all_slots) else f"min({text}, SLOTS_{a.upper()} - 1)"

    def _entry(self) -> Lines:
        stages = fill(texts.COPY.replace("from_w + ", "" if self._begin(0) == "0" else f"{self._begin(0)} + "))
        if len(self.parts) > 1:
            stages = self._kept_stage() if self._kept else self._outer_stage()
        if len(self.parts) == 3:
            stages += self._middle_stage()
        return fill(
            texts.ENTRY,
            name=self.name,
            Result=ELEMENT[self.r.root.dtype],
            parts=self._of_block(),
            stages=[*stages, *self._last_stage()],
            write=self._write(),
        )

    def _of_block(self) -> Lines:
        """Which planes, and which part of every axis, are a block's."""
        lines, behind = [], ""
        for a, p in reversed(self._pairs()):
            if p.parts == 1:
                continue
            lines.append(f"const int part_{a} = blockIdx.x{behind} % PARTS_{a.upper()};")
            begin = f"from_{a} = BEGIN_{a.upper()}[part_{a}], "
            lines.append(f"const int {begin}first_{a} = part_{a} * PART_{a.upper()};")
            behind += f" / PARTS_{a.upper()}"
        return [f"const index_t first = index_t(blockIdx.x{behind}) * PLANES;", *lines]

    def _offset(self) -> str:
        """Where a column begins, in elements of its plane."""
        *_, last = self.parts
        w = self._begin(len(self.parts) - 1)
        if len(self.parts) == 2:
            return _plus("column", w)
        h = self._begin(1)
        if last.read == last.length:
            return _plus("column", "0" if h == "0" else f"{h} * W")
        row = "column / READ_W" if h == "0" else f"({h} + column / READ_W)"
        return f"{row} * W + {_plus('column % READ_W', w)}"

    @property
    def _row(self) -> str:
        """Elements from one index of the outermost axis to the next."""
        return "(H * W)" if len(self.parts) == 3 else "W"

    def _kept_stage(self) -> Lines:
        a, p = self.letters[0], self.parts[0]
        found = runs(p.axis)
        pitch = "COLUMNS" if len(self.parts) == 3 else "PITCH"
        single = self._longest_run == 1
        masks = [
            f"{sum(1 << k for k, (*_, mask) in enumerate(found) if mask >> s & 1):#x}" for s in range(len(p.all_slots))
        ]
        tables = [f"constexpr int KEPT = {len(found)};"]
        tables += self._wrapped("int BEGIN[KEPT]", [str(first) for first, *_ in found], "constexpr")
        if not single:
            tables += self._wrapped("int COUNT[KEPT]", [str(count) for _, _, count, _ in found], "constexpr")
        tables += self._wrapped(f"unsigned long long KEPT_OF[SLOTS_{a.upper()}]", masks, "constexpr")
        step = f"{p.axis.period} * " if p.axis.period > 1 else ""
        function = f"few_of<{self._longest_run}>" if self._longest_run <= FEW else "sum_of"
        many = f"{function}([&](int j) {{ return value(from[(BEGIN[k] + {step}j) * {self._row}]); }}, COUNT[k])"
        read = f"value(from[BEGIN[k] * {self._row}])" if single else self._cast(many, self._longest_run > FEW)
        return fill(
            texts.KEPT,
            a=a,
            A=a.upper(),
            offset=self._offset(),
            to=f"i / COLUMNS * SLOTS_{a.upper()} * {pitch} + column",
            tables=tables,
            read=f"kept[k] = {read};",
            add=fill(texts.ADD_MANY if self._adds_many else texts.ADD_FEW),
            pitch=pitch,
        )

    def _outer_stage(self) -> Lines:
        a, p = self.letters[0], self.parts[0]
        step = "j * slot.step" if self._steps else "j"
        pitch = "COLUMNS" if len(self.parts) == 3 else "PITCH"
        at = f"value(from[(slot.begin + {step}) * {self._row}])"
        return fill(
            texts.OUTER,
            a=a,
            A=a.upper(),
            part=self._part(0),
            slot=self._slot(0),
            offset=self._offset(),
            to=f"row * {pitch} + column",
            sum=self._sum(p, at),
        )

    def _middle_stage(self) -> Lines:
        step = "j * slot.step" if self._steps else "j"
        return fill(
            texts.MIDDLE,
            a="h",
            A="H",
            outer=self._part(0),
            part=self._part(1),
            slot=self._slot(1),
            begin=self._begin(1),
            sum=self._sum(self.parts[1], f"from[{step} * READ_W]"),
        )

    def _last_stage(self) -> Lines:
        last = len(self.parts) - 1
        step = "j * slot.step" if self._steps else "j"
        source, target = self.halves
        return fill(
            texts.LAST,
            a="w",
            A="W",
            part=self._part(last),
            slot=self._slot(last),
            begin=self._begin(last),
            source=source,
            target=target,
            sum=self._sum(self.parts[last], f"from[{step}]"),
        )

    # ---- results

    @staticmethod
    def _scales_differ(p: Part) -> bool:
        return len({s.scale for s in p.all_slots if s.count}) > 1

    def _result(self) -> tuple[Lines, str]:
        """Statements, and the text of a finished sum as an element of the result."""
        factor = prod(
            next((s.scale for s in p.all_slots if s.count), 1.0) for p in self.parts if not self._scales_differ(p)
        )
        tables = [f"SCALE_{a.upper()}[{a}]" for a, p in self._pairs() if self._scales_differ(p)]
        terms = [*([repr(factor)] if factor != 1.0 else []), *tables]
        lines = [f"const double scale = {' * '.join(terms)};"] if tables else []
        text = "total" + (" * scale" if tables else f" * {factor!r}" if terms else "")
        return lines, text if self.r.root.dtype == torch.float64 else self.written(f"float({text})")

    def _write(self) -> Lines:
        target = self.halves[1]
        scales, result = self._result()
        if any(p.parts > 1 for p in self.parts):
            return self._write_parts(scales, result, target)
        slot, lines = "i", []
        order = "All results of the planes lie side by side."
        if self.r.stored is not None:
            order, slot = "Neighbours in the order of the result, which is not that of the slots.", "slot"
            lines = [f"const int slot = {counted(self.r.order[0], 'i')};"]
            if self.cut.planes > 1:
                lines = [f"const int place = i % RESULTS, slot = i - place + {counted(self.r.order[0], 'place')};"]
        used = [a for a, p in self._pairs() if self._scales_differ(p)]
        places = [f"const int {a} = {self._place(i, slot)};" for i, a in enumerate(self.letters) if a in used]
        at = f"{slot} / SLOTS_W * OUT_PITCH + {slot} % SLOTS_W"
        decode = [*lines, *places, *scales]
        return fill(texts.WRITE, order=order, decode=decode, total=f"{target}[{at}]", result=result)

    def _write_parts(self, scales: Lines, result: str, target: str) -> Lines:
        """Blocks that have a part of a plane's slots."""
        decode = [f"const int plane = i / ({' * '.join(self._part(i) for i in range(len(self.parts)))});"]
        beyond, slot = ["first + plane >= planes"], ""
        for i, (a, p) in enumerate(self._pairs()):
            first = f"first_{a} + " if p.parts > 1 else ""
            decode.append(f"const int {a} = {first}{self._place(i)};")
            if p.parts * p.slots > len(p.all_slots):
                beyond.append(f"{a} >= SLOTS_{a.upper()}")
            slot = f"{f'({slot})' if '+' in slot else slot} * SLOTS_{a.upper()} + {a}" if slot else a
        return fill(
            texts.WRITE_PARTS,
            part_w=self._part(len(self.parts) - 1),
            decode=decode,
            beyond=" || ".join(beyond),
            scales=[*scales, f"const int slot = {slot};"],
            target=target,
            result=result,
            at=f"(first + plane) * RESULTS + {self.place()}",
        )

    def _place(self, axis: int, index: str = "i") -> str:
        """Which of a block's slots along an axis a result is of."""
        inner = [self._part(k) for k in range(axis + 1, len(self.parts))]
        behind = f" / {inner[0]}" if len(inner) == 1 else f" / ({' * '.join(inner)})" if inner else ""
        return f"{index}{behind} % {self._part(axis)}"
