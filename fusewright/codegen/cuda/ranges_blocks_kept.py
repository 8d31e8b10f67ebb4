"""Sums along an axis whose slots are made of few different sums: a thread keeps those of a group of slots in registers.

What slots share is read and added once.  Groups that repeat are alike but for where they begin.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from fusewright.codegen.cpp import compute_type
from fusewright.codegen.cuda import ranges_blocks_text as texts
from fusewright.codegen.cuda.loops import Dealt, dealt
from fusewright.codegen.cuda.ranges_blocks_sections import FEW, BlockSections, Kept
from fusewright.codegen.range_tables import runs
from fusewright.codegen.text import Lines, fill
from fusewright.schedule.range_families import Family, group_of
from fusewright.schedule.range_sums import Axis


def plus(*terms: str) -> str:
    """Terms that are not empty, added."""
    return " + ".join(t for t in terms if t)


def times(*factors: str) -> str:
    """Factors that are not empty, multiplied."""
    return " * ".join(f"({f})" if " + " in f or " - " in f else f for f in factors if f)


def _moved(text: str, by: int) -> str:
    """A number added to what stands before it."""
    return f"{text} {'-' if by < 0 else '+'} {abs(by)}" if by else text


class KeptStages(BlockSections):
    """Writes such stages; `column`, `plane` and `halves` say where what is summed lies."""

    @property
    def halves(self) -> tuple[str, str]:
        """Where the last axis is summed from, and to."""
        return ("odd", "even") if len(self.parts) == 3 else ("even", "odd")

    def plane(self, i: str) -> str:
        """The block's `i`-th plane; the last block may have fewer."""
        return f"min(first + {i}, planes - 1)" if self.cut.planes > 1 else "first"

    def column(self) -> str:
        """Where a column begins, in elements of its plane."""
        w = self.begin(len(self.parts) - 1)
        if len(self.parts) == 2:
            return plus(w, "column")
        h = self.begin(1)
        if self.parts[-1].read == self.parts[-1].length:
            return plus(times(h, "W") if h else "", "column")
        return plus(times(plus(h, "column / READ_W"), "W"), w, "column % READ_W")

    @property
    def row(self) -> str:
        """Elements from one index of the outermost axis to the next."""
        return "(H * W)" if len(self.parts) == 3 else "W"

    @property
    def pitch(self) -> str:
        """Sums from one of its slots to the next."""
        return "COLUMNS" if len(self.parts) == 3 else "PITCH"

    def kept_outer(self) -> Lines:
        """The outermost axis, in memory."""
        groups, several = self._groups(0), self.cut.planes > 1
        one = "one" if several or not groups else "group"
        plane = f"one / {groups}" if groups else "one"
        body = self._stage(
            0,
            place=[f"const int group = one % {groups};"] if several and groups else [],
            start=f"const Element* const from = x + {self.plane(plane)} * PLANE + {self.column()};",
            element=lambda index: f"value(from[{times(index, self.row)}])",
            to=plus("even", self._first(0, plane if several else "", self.pitch), "column"),
            pitch=self.pitch,
        )
        count = self.cut.planes * self.parts[0].groups
        ones = Dealt(one, times("PLANES" if several else "", self._groups_here(0)) or "1", count)
        about = f"Sums along {self.letters[0]}: what slots share is read and added once."
        return self.dealt(about, self.columns, ones, body, 1)

    def kept_middle(self) -> Lines:
        """The axis between two others, in shared memory."""
        groups = self._groups(1)
        body = self._stage(
            1,
            place=["const int w = i % READ_W, group = i / READ_W;"] if groups else [],
            start="const Sum* const from = even + before * COLUMNS + w;",
            element=lambda index: f"from[{times(index, 'READ_W')}]",
            to=plus("odd", self._first(1, "before", "PITCH"), "w"),
            pitch="PITCH",
        )
        across = Dealt(
            *(("i", f"{groups} * READ_W") if groups else ("w", "READ_W")), self.parts[1].groups * self.parts[2].read
        )
        return self.dealt("Sums along h, columns side by side.", across, self.before, body, 1)

    def kept_last(self) -> Lines:
        """The last axis, in shared memory."""
        last, (source, target) = len(self.parts) - 1, self.halves
        groups = self._groups(last)
        body = self._stage(
            last,
            place=[],
            start=f"const Sum* const from = {source} + row * PITCH;",
            element=lambda index: f"from[{index}]",
            to=plus(target, f"{self.out_row} * OUT_PITCH", "group * GROUP_W" if groups else ""),
            pitch="",
        )
        across = Dealt("group", groups or "1", self.parts[last].groups)
        return self.dealt("Sums along w, rows side by side.", self.all_rows, across, body, 1)

    # ---- what they have in common

    @property
    def columns(self) -> Dealt:
        """What the outermost axis is summed over."""
        return Dealt("column", "COLUMNS", prod(p.read for p in self.parts[1:]))

    @property
    def before(self) -> Dealt:
        """What is left of the outermost of three axes."""
        return Dealt("before", times("PLANES", self.part(0)), self.cut.planes * self.parts[0].slots)

    @property
    def all_rows(self) -> Dealt:
        """What is left of all axes but the last."""
        return Dealt("row", "ROWS", self.cut.planes * prod(p.slots for p in self.parts[:-1]))

    @property
    def out_row(self) -> str:
        """Where the sums of a row go."""
        return "row"

    def dealt(self, about: str, across: Dealt, along: Dealt, body: Lines, at_once: int = 4) -> Lines:
        """A stage whose threads go through `along` for each of `across` that they have, several `at_once`."""
        return [f"// {about}", *dealt(self.threads, across, along, body, at_once=at_once)]

    def _family(self, axis: int) -> Family:
        family = self.parts[axis].family
        assert family is not None
        return family

    def _groups(self, axis: int) -> str:
        """How many groups a block has, where it has several."""
        return f"GROUPS_{self.letters[axis].upper()}" if self._family(axis).groups > 1 else ""

    def _groups_here(self, axis: int) -> str:
        """The same; the last part of an axis may have fewer, and those beyond may not be read."""
        p, family, groups = self.parts[axis], self._family(axis), self._groups(axis)
        if p.parts * p.groups <= family.groups:
            return groups
        return f"min({groups}, {family.groups} - part_{self.letters[axis]} * {groups})"

    def _first(self, axis: int, before: str, pitch: str) -> str:
        """Where the results of a thread's group begin: behind those of `before`, and of the groups before it."""
        group = f"group * GROUP_{self.letters[axis].upper()}" if self._groups(axis) else ""
        slot = plus(times(before, self.part(axis)) if before else "", group)
        return times(slot, pitch) if slot else ""

    def _begin(self, axis: int) -> tuple[Lines, str]:
        """A statement that says where a thread's group begins, and the text of an index of it."""
        p, family, a = self.parts[axis], self._family(axis), self.letters[axis]
        base = 0 if p.parts > 1 or not self.staged(axis) else p.begins[0]
        if family.groups == 1:
            return [], _moved("index", family.first - base)
        group = f"(part_{a} * GROUPS_{a.upper()} + group)" if p.parts > 1 else "group"
        text = _moved(f"{group} * {family.distance}", family.first - base)
        text += f" - from_{a}" if p.parts > 1 and self.staged(axis) else ""
        return [f"const int begin = {text};"], "begin + index"

    def _stage(
        self,
        axis: int,
        *,
        place: Lines,
        start: str,
        element: Callable[[str], str],
        to: str,
        pitch: str,
    ) -> Lines:
        """A stage that sums from `start`, where an index lies at `element`, to `to`."""
        p, family, a = self.parts[axis], self._family(axis), self.letters[axis]
        begin, index = self._begin(axis)
        inside = p.within if self.staged(axis) else family.inside
        at = {"index": index, "element": element(index)}
        at["most"] = f"READ_{a.upper()}" if self.staged(axis) else a.upper()
        at["T"] = self.sum if self.staged(axis) else compute_type(self.r.value.dtype)
        return self.grouped(
            axis,
            place=[*place, *begin, start],
            at=fill(texts.AT if inside else texts.AT_WITHIN, **at),
            to=[f"Sum* const to = {to};"],
            store=[f"to[{times('s', pitch)}] = sum;"],
        )

    def grouped(self, axis: int, *, place: Lines, at: Lines, to: Lines, store: Lines) -> Lines:
        """What a thread does for a group: sums of what it keeps, `unlike` groups by tables of their own."""
        p, family, a = self.parts[axis], self._family(axis), self.letters[axis]
        slots = f"GROUP_{a.upper()}" if family.groups > 1 else self.part(axis)
        uneven = family.groups > 1 and p.slots % family.slots and family.groups - 1 not in family.unlike
        some = [f"if (group * {slots} + s >= {self.part(axis)}) break;"] if uneven else []
        unlike: Lines = []
        for g in family.unlike:
            unlike += fill(texts.UNLIKE, group=g, **self._sums(group_of(p.axis, family, g), "", [], store))
        sums = self._sums(family.group, slots, some, store)
        return fill(texts.KEPT, place=place, at=at, to=to, unlike=unlike, **sums)

    def _sums(self, group: Axis, slots: str, some: Lines, store: Lines) -> dict[str, Lines]:
        """Sums of the slots of a group, so many of them, and tables of what those are made of."""
        kept = Kept(runs(group), len(group.slots or ()))
        slots = slots or str(kept.slots)
        if not kept.runs:
            return {"tables": [], "sums": fill(texts.NOTHING, slots=slots, store=store)}
        sums = fill(
            texts.SUMS,
            read=[f"kept[k] = {self._read(kept, group.period)};"],
            slots=slots,
            some=some,
            add=fill(texts.ADD_MANY if kept.many else texts.ADD_FEW),
            store=store,
        )
        return {"tables": self._tables(kept, slots), "sums": sums}

    def _tables(self, kept: Kept, slots: str) -> Lines:
        """Where the kept sums begin, how many elements they have, and which slots they are in."""
        lines = [f"constexpr int KEPT = {len(kept.runs)};"]
        lines += self.table_of("int BEGIN[KEPT]", [str(run.first) for run in kept.runs], "constexpr")
        if kept.longest > 1:
            lines += self.table_of("int COUNT[KEPT]", [str(run.count) for run in kept.runs], "constexpr")
        masks = [f"{mask:#x}" for mask in kept.masks]
        return lines + self.table_of(f"unsigned long long KEPT_OF[{slots}]", masks, "constexpr")

    def _read(self, kept: Kept, period: int) -> str:
        """The k-th kept sum."""
        if kept.longest == 1:
            return "at(BEGIN[k])"
        step = f"{period} * j" if period > 1 else "j"
        function = f"few_of<{kept.longest}>" if kept.longest <= FEW else "sum_of"
        text = f"{function}([&](int j) {{ return at(BEGIN[k] + {step}); }}, COUNT[k])"
        return self.narrowed(text, kept.longest > FEW)
