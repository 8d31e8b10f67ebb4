"""What the text of a range reduction in blocks says before its kernel: sizes, tables of slots, how a few are added."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from textwrap import wrap

from fusewright.codegen.cpp import ELEMENT
from fusewright.codegen.cuda import ranges_blocks_text as texts
from fusewright.codegen.cuda.ranges_common import CudaRangeSections
from fusewright.codegen.range_tables import Run, runs
from fusewright.codegen.text import Lines, fill
from fusewright.schedule.range_blocks import (
    ENOUGH_ALIKE,
    PER_MULTIPROCESSOR,
    Cut,
    Part,
    buffers,
    kept_shapes,
    parts_of,
    shared_bytes,
    sum_type,
)
from fusewright.schedule.range_families import group_of

FEW = 8  # additions in a row that may be in float32
# Where tables lie that neighbouring threads read at different places: constant memory serves one after the other.
GLOBAL = "__device__ const"


@dataclass(frozen=True)
class Kept:
    """Different sums of a group of `slots`, whose slots are sums of them."""

    runs: list[Run]
    slots: int

    @property
    def masks(self) -> list[int]:
        """Those that each slot is made of, a bit each."""
        return [sum(1 << k for k, run in enumerate(self.runs) if run.slots >> s & 1) for s in range(self.slots)]

    @property
    def longest(self) -> int:
        """The most elements of one of them."""
        return max((run.count for run in self.runs), default=0)

    @property
    def many(self) -> bool:
        """Whether a slot has so many of them that they are added in float64."""
        return any(mask.bit_count() > FEW for mask in self.masks)


@dataclass(frozen=True)
class BlockSections(CudaRangeSections):
    """Names and tables; `letters` call the axes d, h and w, outermost first."""

    cut: Cut

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The axes as blocks take them, outermost first."""
        return parts_of(self.r, self.cut)

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.cut.threads

    @property
    def letters(self) -> str:
        return "dhw"[-len(self.parts) :]

    @property
    def named(self) -> list[tuple[str, Part]]:
        return list(zip(self.letters, self.parts, strict=True))

    @property
    def sum(self) -> str:
        """The type of what is kept of a summed axis."""
        return ELEMENT[sum_type(self.r)]

    @property
    def from_slots(self) -> list[tuple[str, Part]]:
        """The axes that are summed slot by slot."""
        return [(a, p) for a, p in self.named if p.family is None]

    @property
    def kept(self) -> list[Kept]:
        """What threads keep of the others, in registers."""
        groups = [
            group
            for p in self.parts
            if p.family is not None
            for group in (p.family.group, *(group_of(p.axis, p.family, g) for g in p.family.unlike))
        ]
        return [Kept(runs(group), len(group.slots or ())) for group in groups]

    @property
    def steps(self) -> bool:
        """Whether a slot that is summed alone takes every second element, say."""
        return any(s.step > 1 and s.count > 1 for _, p in self.from_slots for s in p.all_slots)

    @property
    def longest(self) -> int:
        """The most elements that are added to one sum of one axis."""
        return max([p.longest for _, p in self.from_slots] + [k.longest for k in self.kept])

    @property
    def adds_few(self) -> bool:
        """Whether a function adds a few values."""
        return bool(self.from_slots) or self.longest > 1

    # ---- names

    @property
    def step(self) -> str:
        """How far the j-th element of a slot is from its first."""
        return "j * slot.step" if self.steps else "j"

    def part(self, axis: int) -> str:
        """The slots of a block along an axis."""
        return f"{'PART' if self.parts[axis].parts > 1 else 'SLOTS'}_{self.letters[axis].upper()}"

    def begin(self, axis: int) -> str:
        """The first index that a block reads of an axis; nothing where that is 0."""
        p = self.parts[axis]
        return f"from_{self.letters[axis]}" if p.parts > 1 else str(p.begins[0] or "")

    def slot(self, axis: int, s: str = "s") -> str:
        """The slot that is the block's `s`-th along an axis."""
        p, a = self.parts[axis], self.letters[axis]
        if p.parts == 1:
            return s
        return f"first_{a} + {s}" if p.even else f"min(first_{a} + {s}, SLOTS_{a.upper()} - 1)"

    def summed(self, p: Part, at: str) -> str:
        """The text of a sum over `slot`, of `at`, which says where element j is."""
        function = f"few_of<{p.longest}>" if p.longest <= FEW else "sum_of"
        return self.narrowed(f"{function}([&](int j) {{ return {at}; }}, slot.count)", p.longest > FEW)

    def narrowed(self, text: str, wide: bool) -> str:
        """A sum, which may be in float64, in the type that is kept."""
        return f"Sum({text})" if wide and self.sum == "float" else text

    # ---- sections

    def constants(self) -> Lines:
        """Sizes of planes, of their results, and of what a block has of both."""
        upper = [(a.upper(), p) for a, p in self.named]
        plane = " * ".join(a for a, _ in upper)
        lines = [
            f"constexpr int THREADS = {self.threads}, BLOCKS = {self.resident};  // of a block; per multiprocessor",
            f"constexpr int PLANES = {self.cut.planes};  // of a block",
            f"constexpr int {', '.join(f'{a} = {p.length}' for a, p in upper)}, PLANE = {plane};  // in memory",
            f"constexpr int {', '.join(f'SLOTS_{a} = {len(p.all_slots)}' for a, p in upper)};",
            f"constexpr int RESULTS = {' * '.join(f'SLOTS_{a}' for a, _ in upper)};  // of a plane",
        ]
        for i, (a, p) in enumerate(upper):
            if p.parts > 1:
                lines.append(f"constexpr int PARTS_{a} = {p.parts}, PART_{a} = {p.slots};  // slots of a block")
            if p.parts > 1 and self.staged(i):
                lines += self.table_of(f"int BEGIN_{a}[PARTS_{a}]", list(map(str, p.begins)))
        read = [f"READ_{a} = {p.read}" for i, (a, p) in enumerate(upper) if self.staged(i)]
        return [*lines, f"constexpr int {', '.join(read)};  // indices of a block", *self._places()]

    def staged(self, axis: int) -> bool:
        """Whether what a block reads along an axis is in shared memory."""
        return axis > 0 or len(self.parts) == 1

    def _places(self) -> Lines:
        """How sums lie in shared memory."""
        pitches = [shape[-1] for shape in kept_shapes(self.parts)][-2:]
        rows = " * ".join(["PLANES", *(self.part(i) for i in range(len(self.parts) - 1))])
        lines = []
        if len(self.parts) > 1:
            columns = "READ_H * READ_W" if len(self.parts) == 3 else "READ_W"
            lines.append(f"constexpr int COLUMNS = {columns};  // of the outermost axis")
        for a, p in self.named:
            if p.family is not None and p.family.groups > 1:
                names = f"GROUPS_{a.upper()} = {p.groups}, GROUP_{a.upper()} = {p.family.slots}"
                lines.append(f"constexpr int {names};  // of a block's slots, and slots of each")
        return [
            *lines,
            f"constexpr int ROWS = {rows}, PITCH = {pitches[0]}, OUT_PITCH = {pitches[1]};  // of the last axis",
            f"constexpr int EVEN = {buffers(self.r, self.cut)[0]};  // sums in the first half of shared memory",
        ]

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor, by shared memory, threads and registers."""
        kept = max((len(k.runs) for k in self.kept), default=0)
        registers = 48 + kept * sum_type(self.r).itemsize // 4
        by_memory = PER_MULTIPROCESSOR // (shared_bytes(self.r, self.cut) + 1024)
        return max(1, min(6, by_memory, 65536 // (self.threads * registers)))

    def table_of(self, declaration: str, entries: list[str], constant: str | None = None) -> Lines:
        """A table, on several lines where it is long."""
        head = f"{constant or self.constant} {declaration} = {{"
        if len(head) + len(", ".join(entries)) < 110:
            return [f"{head}{', '.join(entries)}}};"]
        rows = wrap(", ".join(e.replace(" ", "~") for e in entries), 100)
        return [head, *(f"    {row.replace('~', ' ')}" for row in rows), "};"]

    def slots(self) -> Lines:
        """Tables of the slots that are summed one after the other, and of what they are multiplied by."""
        lines = fill(texts.SLOT_STEP if self.steps else texts.SLOT) if self.from_slots else []
        for a, p in self.from_slots:
            entries = []
            for i, s in enumerate(p.all_slots):
                begin = s.start if s.count else p.begins[i // p.slots]
                entries.append(f"{{{begin}, {s.count}{f', {s.step}' if self.steps else ''}}}")
            lines += self.table_of(f"Slot SLOT_{a.upper()}[SLOTS_{a.upper()}]", entries, self._memory(a))
        for a, p in self.named:
            if p.one_scale is None:
                entries = [repr(s.scale) for s in p.all_slots]
                lines += self.table_of(f"double SCALE_{a.upper()}[SLOTS_{a.upper()}]", entries, GLOBAL)
        return [*lines, ""] if lines else []

    def _memory(self, axis: str) -> str:
        """Where a table of slots lies."""
        rows = self.cut.planes * prod(p.slots for p in self.parts[:-1])
        columns = prod(p.read for p in self.parts[1:])
        alike = rows if axis == "w" else self.parts[-1].read if axis == "h" and len(self.parts) == 3 else columns
        return self.constant if alike >= ENOUGH_ALIKE else GLOBAL

    def functions(self) -> Lines:
        """What adds a few, and many, values."""
        many = self.longest > FEW
        named = many or any(k.many for k in self.kept)
        few = [f"constexpr int FEW = {FEW};  // additions in a row in the type of the values", ""]
        some = fill(texts.FEW_OF) if self.adds_few else []
        return [*(few if named else []), *some, *(fill(texts.SUM_OF) if many else [])]
