"""CUDA C++ of range reductions whose outermost axis is summed last (see `fusewright.schedule.range_walks`).

A step copies slices to shared memory and sums the last axis there, rows side by side.  Then every thread sums the
middle axis of its columns, and the outermost one of what it keeps of those; meanwhile the next slices are on their way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fusewright.codegen.cpp import ELEMENT
from fusewright.codegen.cuda import ranges_walks_text as texts
from fusewright.codegen.cuda.loops import Dealt
from fusewright.codegen.cuda.primitives import primitives
from fusewright.codegen.cuda.ranges_blocks_stages import Stages, counting
from fusewright.codegen.text import Lines, fill
from fusewright.kernel import Argument, Kernel, Launch
from fusewright.schedule.range_blocks import Cut, Part
from fusewright.schedule.range_sums import RangeReduction
from fusewright.schedule.range_walks import Walk, Walked, walked


def kernel(r: RangeReduction, walk: Walk, name: str, reference: str = "") -> Kernel:
    """The kernel of a range reduction whose blocks walk like this; leading sizes are a call's."""
    found = walked(r, walk)
    assert isinstance(found, Walked), found
    return _Writer(r, name, Cut(1, (1,) * len(r.axes)), found).kernel(reference)


@dataclass(frozen=True)
class _Writer(Stages):
    """Writes the kernel."""

    w: Walked

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        w, sizes = self.w, [len(axis.slots or ()) for axis in self.r.axes]
        middle = [Part(self.r.axes[1], w.height, sizes[1], w.height, (0,))] if w.windows else []
        return (w.outer, *middle, w.last)

    @property
    def threads(self) -> int:
        return self.w.walk.threads

    @property
    def from_slots(self) -> list[tuple[str, Part]]:
        """The middle axis has windows of its own."""
        return [(a, p) for a, p in super().from_slots if p is self.parts[-1]]

    @property
    def longest(self) -> int:
        return max([super().longest] + [w.count for w in self.w.windows])

    @property
    def adds_few(self) -> bool:
        return bool(self.w.windows) or super().adds_few

    @property
    def halves(self) -> tuple[str, str]:
        """Where the last axis is summed from, and to."""
        return "copied", "summed"

    @property
    def all_rows(self) -> Dealt:
        """The rows of a step."""
        return Dealt("row", "ROWS", self.w.fresh * self.w.height)

    @property
    def out_row(self) -> str:
        """Which row of sums a row of elements becomes."""
        w = self.w
        if w.padded == w.height:
            return "row"
        return "(row / H * ROWS_H + row % H + ABOVE)" if w.fresh > 1 else "(row + ABOVE)" if w.above else "row"

    # ---- the record

    def kernel(self, reference: str) -> Kernel:
        parts = self.w.parts
        arguments = (Argument("pointer", "x"), Argument("pointer", "out"), Argument("long", self.planes))
        grid = (f"({self.planes}) * {parts}" if parts > 1 else f"({self.planes})", "1", "1")
        launch = Launch(self.name, arguments, grid, self.threads, self.w.shared_bytes)
        return self.record(source=self.text(), scratch=(), launches=(launch,), reference=reference)

    # ---- the text

    def text(self) -> str:
        places = self.w.places
        moved = self.r.stored is not None
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
            *self._windows(),
            *self.slots(),
            *self.functions(),
            *(
                counting("The slot of a column along the inner axes.", "slot_of", "column", places.slots)
                if moved
                else []
            ),
            *(counting("Where the results of a column begin.", "place_of", "column", places.places) if moved else []),
            *self._entry(),
        ]
        return "\n".join(lines) + "\n"

    def about(self) -> str:
        counts = " x ".join(str(len(p.all_slots)) for p in self.parts)
        return f"{counts} sums over index ranges of the last axes, the outermost one last"

    def constants(self) -> Lines:
        """Sizes of planes and of their results, of what a step brings, and of what a thread keeps."""
        w, upper, d = self.w, [(a.upper(), p) for a, p in self.named], self.letters[0].upper()
        plane, slice = " * ".join(a for a, _ in upper), " * ".join(a for a, _ in upper[1:])
        columns = " * ".join(f"SLOTS_{a}" for a, _ in upper[1:])
        rows = "FRESH * H" if len(upper) == 3 else "FRESH"
        lines = [
            f"constexpr int THREADS = {self.threads}, BLOCKS = {w.resident};  // of a block; per multiprocessor",
            f"constexpr int {', '.join(f'{a} = {p.length}' for a, p in upper)};",
            f"constexpr int SLICE = {slice}, PLANE = {plane};  // in memory",
            f"constexpr int {', '.join(f'SLOTS_{a} = {len(p.all_slots)}' for a, p in upper)};",
            f"constexpr int COLUMNS = {columns}, RESULTS = SLOTS_{d} * COLUMNS;  // of a plane",
            f"constexpr int EACH = {w.each}, LOADS = {w.loads};  // columns of a thread, and its elements of a step",
            "",
            f"// Groups of slots along {d.lower()}: each begins DISTANCE slices behind the last one, and reads READ.",
            f"constexpr int GROUPS = {w.family.groups}, GROUP_{d} = {w.family.slots};",
            f"constexpr int FIRST = {w.family.first}, DISTANCE = {w.family.distance}, READ = {w.shared + w.fresh};",
            f"constexpr int FRESH = {w.fresh}, BEFORE = {w.before};  // slices of a step; steps ahead of a result",
            "",
        ]
        if w.parts > 1:
            lines.insert(-1, f"constexpr int PARTS = {w.parts}, PART = {w.groups};  // groups of a block")
        if w.windows:
            lines.append(f"constexpr int ABOVE = {w.above}, ROWS_H = {w.padded};  // rows of a slice with zeros around")
        f = w.last.family
        if f is not None and f.groups > 1:
            lines.append(f"constexpr int GROUPS_W = {f.groups}, GROUP_W = {f.slots};  // of a row, and slots of each")
        pitch, out_pitch = w.pitches
        lines.append(f"constexpr int ROWS = {rows}, PITCH = {pitch}, OUT_PITCH = {out_pitch};  // of the last axis")
        return [*lines, "constexpr int STEP = FRESH * SLICE, COPIED = ROWS * PITCH, READ_W = W;  // elements of a step"]

    def _windows(self) -> Lines:
        """The table of what slots of the middle axis sum."""
        windows = self.w.windows
        if not windows:
            return []
        entries = [f"{{{w.begin}, {w.count}}}" for w in windows]
        table = self.table_of("Window WINDOW_H[SLOTS_H]", entries, "__device__ const")
        return [f"constexpr int STEP_H = {windows[0].step};", *fill(texts.WINDOW), *table, ""]

    def _entry(self) -> Lines:
        w = self.w
        within, element, value = "unsigned(begin + i) < unsigned(PLANE)", "from_plane[begin + i]", "value(next[n])"
        if not w.inside:  # what lies beyond an end of the plane is zero
            element = f"{within} ? {element} : Element()"
            value = value if self.r.value is self.r.x else f"{within} ? {value} : Sum(0)"
        idle = ["step < BEFORE"] if w.before else []
        if w.columns % self.threads:
            idle.append("(c == EACH - 1 && threadIdx.x + c * THREADS >= COLUMNS)")
        return fill(
            texts.WALK,
            name=self.name,
            Result=self._element,
            part=self._of_block(),
            hold=self._hold(),
            column=self._column(),
            clear=[*(fill(texts.FORGET) if w.shared else []), *(fill(texts.ZEROS) if w.padded > w.height else [])],
            next=element,
            place="i" if w.pitches[0] == w.last.length else "i / W * PITCH + i % W",
            value=value,
            rows=self.last_stage() if w.last.family is None else self.kept_last(),
            outer=self.letters[0],
            take=self._take(),
            idle=[f"if ({' || '.join(idle)}) continue;"] if idle else [],
            results=self._results(),
        )

    @property
    def _element(self) -> str:
        """The type of a result."""
        return ELEMENT[self.r.root.dtype]

    def _of_block(self) -> Lines:
        """Which plane, and which groups of it, are a block's."""
        if self.w.parts == 1:
            return ["const index_t plane = blockIdx.x;", "constexpr int first_group = 0, steps = GROUPS + BEFORE;"]
        return [
            "const index_t plane = blockIdx.x / PARTS;",
            "const int first_group = blockIdx.x % PARTS * PART;",
            "const int steps = min(PART, GROUPS - first_group) + BEFORE;  // the last part may have fewer",
        ]

    # ---- columns

    @property
    def _cut_off(self) -> bool:
        """Whether some slots of the middle axis have fewer rows than others."""
        return len({w.count for w in self.w.windows}) > 1

    def _hold(self) -> Lines:
        """What a thread knows of its columns."""
        arrays = ["from[EACH]", *(["count[EACH]"] if self._cut_off else [])]
        arrays += ["place[EACH]"] if self.r.stored is not None else []
        return [f"int {', '.join(arrays)};", *(["Sum seen[EACH][READ - FRESH];"] if self.w.shared else [])]

    def _column(self) -> Lines:
        """Statements that find that out."""
        moved = self.r.stored is not None
        lines = [f"const int slot = {'slot_of(column)' if moved else 'column'};"]
        if self.w.windows:
            lines.append("const Window rows = WINDOW_H[slot / SLOTS_W];")
            lines.append("from[c] = (rows.begin + ABOVE) * OUT_PITCH + slot % SLOTS_W;")
        else:
            lines.append("from[c] = slot;")
        lines += ["count[c] = rows.count;"] if self._cut_off else []
        return lines + (["place[c] = place_of(column);"] if moved else [])

    def _take(self) -> Lines:
        """What a column has of the step's slices, behind what it has of earlier ones."""
        windows, shared = self.w.windows, self.w.shared
        most = max((w.count for w in windows), default=0)
        count = "count[c]" if self._cut_off else str(most)
        take = fill(texts.TAKE_WINDOWS, most=most, count=count) if windows else fill(texts.TAKE_ROWS)
        return [*(fill(texts.KEEP) if shared else []), *take, *(fill(texts.SHARE) if shared else [])]

    def _results(self) -> Lines:
        """The results of a group in a column, from registers to where they lie."""
        places = self.w.places
        column = "threadIdx.x + c * THREADS" if self.r.stored is None else "place[c]"
        within = self.table_of(
            f"int PLACE[GROUP_{self.letters[0].upper()}]", list(map(str, places.within)), "constexpr"
        )
        _, result = self.result_of_total()
        return self.grouped(
            0,
            place=within,
            at=fill(texts.AT_WINDOW),
            to=[f"{self._element}* const to = to_plane + group * {places.group} + {column};"],
            store=["const Sum total = sum;", f"to[PLACE[s]] = {result};"],
        )
