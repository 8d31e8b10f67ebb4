"""CUDA C++ of range reductions of many slots: one axis after the other, in shared memory.

A line is copied there; of planes and volumes, the outermost axis is summed while it is read.  Threads keep the sums
that a group of slots is made of in registers where they can (`ranges_blocks_kept`), and else sum slot by slot, what
slots share coming from the first cache.  Sums lie in two halves of shared memory by turns.  Threads that work side by
side have the same slots: of neighbouring columns, or of neighbouring rows at an odd pitch, so that no two of a warp
want the same bank.  A thread keeps its column, or row, and goes through the slots, so that it finds out once where that
lies.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from math import prod
from operator import mul

from fusewright.codegen.cpp import ELEMENT
from fusewright.codegen.cuda import ranges_blocks_text as texts
from fusewright.codegen.cuda.loops import Dealt
from fusewright.codegen.cuda.primitives import primitives
from fusewright.codegen.cuda.ranges_blocks_kept import plus, times
from fusewright.codegen.cuda.ranges_blocks_stages import Stages, counting
from fusewright.codegen.text import Lines, fill
from fusewright.kernel import Argument, Kernel, Launch
from fusewright.schedule.range_blocks import Cut, shared_bytes
from fusewright.schedule.range_sums import RangeReduction


def kernel(r: RangeReduction, cut: Cut, name: str, reference: str = "") -> Kernel:
    """The kernel of a range reduction of up to three axes, cut into blocks like this; leading sizes are a call's."""
    return _Writer(r, name, cut).kernel(reference)


def of_fewer_threads(r: RangeReduction, cut: Cut) -> Cut | None:
    """The cut with half the threads, where what each keeps in registers lets more of them share a multiprocessor so."""
    half = replace(cut, threads=cut.threads // 2)
    before, after = (w.threads * w.resident for w in (_Writer(r, "", cut), _Writer(r, "", half)))
    return half if after > before else None


class _Writer(Stages):
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
        launch = Launch(self.name, arguments, grid, self.threads, shared_bytes(self.r, self.cut))
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
            return counting("Where the result of a slot lies among those of its plane.", "place_of", "slot", places)
        return counting("The slot whose result lies at a place among those of its plane.", "slot_at", "place", slots)

    def _entry(self) -> Lines:
        outer, last, together = self.parts[0], len(self.parts) - 1, ["__syncthreads();", ""]
        if len(self.parts) == 1:
            begin = plus(self.begin(0), "i % READ_W")
            stages = fill(texts.COPY, plane=self.plane("i / READ_W"), at=begin)
        else:
            stages = self.outer_stage() if outer.family is None else self.kept_outer()
        if len(self.parts) == 3:
            stages += [*together, *(self.middle_stage() if self.parts[1].family is None else self.kept_middle())]
        stages += [*together, *(self.last_stage() if self.parts[last].family is None else self.kept_last())]
        return fill(
            texts.ENTRY,
            name=self.name,
            Result=ELEMENT[self.r.root.dtype],
            parts=self._of_block(),
            stages=[*stages, *together],
            write=self._write() if self.r.stored is not None and not self.several else self._write_rows(),
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

    # ---- results

    def _write(self) -> Lines:
        """Blocks that have all slots of their planes, and leave the results in another order."""
        scales, result = self.result_of_total()
        lines = ["const int slot = slot_at(i);"]
        if self.cut.planes > 1:
            lines = ["const int place = i % RESULTS, slot = i - place + slot_at(place);"]
        scaled = [(i, a) for i, (a, p) in enumerate(self.named) if p.one_scale is None]
        lines += [f"const int {a} = {self._digit(i, 'slot', len(self.parts))};" for i, a in scaled]
        at = f"{self.halves[1]}[slot / SLOTS_W * OUT_PITCH + slot % SLOTS_W]"
        count = f"{self.here} * RESULTS" if self.cut.planes > 1 else "RESULTS"
        return fill(texts.WRITE, count=count, decode=[*lines, *scales], total=at, result=result)

    def _write_rows(self) -> Lines:
        """Blocks that leave results in the order of their slots, or have a part of those of one plane."""
        last = len(self.parts) - 1
        decode, beyond = [], []
        parted = [i for i, p in enumerate(self.parts) if p.parts > 1]
        apart = any(0 < i < last for i in parted)  # rows of the block do not follow each other in memory
        for i, (a, p) in enumerate(self.named):
            if (i == last and i in parted) or (i < last and (apart or not p.even or p.one_scale is None)):
                digit = "s" if i == last else self._digit(i, "row", last)
                decode.append(f"const int {a} = {plus(f'first_{a}' if i in parted else '', digit)};")
            if not p.even:
                beyond.append(f"{a} >= SLOTS_{a.upper()}")
        line = plus(times("first_" + self.letters[0], *self._slots(1, last)) if 0 in parted and last else "", "row")
        if apart:
            line = self.letters[0]
            for a in self.letters[1:last]:
                line = f"{times(line, f'SLOTS_{a.upper()}')} + {a}"
        scales, result = self.result_of_total()
        s = "s" if last in parted else "w"
        body = fill(
            texts.WRITE_ROWS,
            decode=decode,
            beyond=[f"if ({' || '.join(beyond)}) continue;"] if beyond else [],
            scales=scales,
            target=self.halves[1],
            s=s,
            result=result,
            place=self._place(line),
        )
        tail = "; the last part of an axis has fewer slots" if beyond else ""
        rows, slots = self.all_rows, Dealt(s, self.part(last), self.parts[last].slots)
        if self.cut.planes > 1:
            rows = replace(rows, text=times(self.here, *self._slots(0, last)))
        return self.dealt(f"The results of the block's slots, side by side{tail}.", slots, rows, body)

    def _place(self, line: str) -> str:
        """Where the result of slot `w` of a line lies in its plane; what a thread's lines share stands by itself."""
        start = times(line, "SLOTS_W")
        if self.r.stored is None:
            return f"{start} + w"
        behind = accumulate((size for size, _ in reversed(self.r.order[1])), mul)
        apart = len(self.parts[-1].all_slots) in behind
        return f"place_of({start}) + place_of(w)" if apart else f"place_of({start} + w)"

    @property
    def here(self) -> str:
        """The planes of a block: the last one may have fewer."""
        return "int(min(index_t(PLANES), planes - first))"

    def _slots(self, begin: int, end: int) -> list[str]:
        """Slots along some axes, of a whole plane."""
        return [f"SLOTS_{a.upper()}" for a in self.letters[begin:end]]

    def _digit(self, axis: int, index: str, axes: int) -> str:
        """Which of a block's slots along an axis `index` is of, which counts through those of the first `axes`."""
        inner = [self.part(k) for k in range(axis + 1, axes)]
        behind = f" / {inner[0]}" if len(inner) == 1 else f" / ({' * '.join(inner)})" if inner else ""
        whole = axis == 0 and self.cut.planes == 1
        return f"{index}{behind}" if whole else f"{index}{behind} % {self.part(axis)}"
