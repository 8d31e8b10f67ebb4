"""How the input of a block gets to shared memory, where warpgroups multiply: chunk after chunk, tile after tile.

A thread reads vectors of neighbouring channels, which wait in its registers until the step before they are multiplied
writes them.  Where it has more of them than it reads at a time, the others are read and written in that step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fusewright.codegen.cuda import contraction_walk
from fusewright.codegen.cuda import warpgroup_input_text as text
from fusewright.codegen.cuda.warpgroup_text import operand
from fusewright.codegen.text import Lines, fill
from fusewright.schedule import warpgroup_staging as staging
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.tiling import REGISTERS
from fusewright.schedule.warpgroup_estimate import keeps_places
from fusewright.schedule.warpgroup_staging import WarpgroupCut


@dataclass(frozen=True)
class Input:
    """Writes the staging of one group and tile.

    passes   how often a tile's chunks are gone through
    per_sm   blocks at a time on a multiprocessor
    """

    c: Contraction
    t: WarpgroupCut
    passes: int
    per_sm: int

    @property
    def chunks(self) -> int:
        """Of a tile's channels."""
        return staging.chunks(self.c, self.t)

    @property
    def once(self) -> bool:
        """Whether a tile's input is staged as a whole."""
        return staging.inputs(self.c, self.t) == 1

    # -- functions: what a thread reads and writes at a time

    def functions(self) -> Lines:
        """How runs of vectors are found, read and written."""
        c, walks = self.c, staging.staged(self.c, self.t).walks
        names: dict[str, object] = self._columns()
        for i, a in enumerate("dhw"):
            low, advance = c.reads(i)
            over = f" / {advance.denominator}" if advance.denominator > 1 else ""
            names |= {f"low_{a}": low, f"advance_{a}": f"{advance.numerator}{over}"}
        names |= contraction_walk.names(walks)
        said, changed, written = self._put
        there = f"places.to[n] > {names['no_run']}" + (text.ALONE if self._last_alone else "")
        return fill(
            text.STAGE,
            **names,
            **self._indices(),
            **self._offsets(f"d{names['by_d']}", f"h{names['by_h']}"),
            run=staging.run(c, self.t),
            runs="(VECTORS + 1) / RUN" if self._last_alone else "VECTORS / RUN",
            threads=staging_threads(self.t),
            at_once=staging.staged_by_thread(c, self.t)[1],
            order="v = i % VECTORS, at = i / VECTORS" if c.channels_last else "v = i / COLUMNS * RUN, at = i % COLUMNS",
            plane=[] if c.channels_last else fill(text.PLANE),
            start=self._at("first", "low_d", "low_h", "low_w"),
            read=self._read(),
            changed=fill(changed) if changed else [],
            write=fill(written, there=there),
            rounding=said,
            operand=operand(c),
            most=", unsigned& most" if c.halves else "",
        )

    @property
    def _put(self) -> tuple[str, str, str]:
        """Texts: what becomes of what was read, in words and in statements, and how that is written."""
        if self.c.halves:
            return ", as halves", text.HALVED, text.WRITE_HALVES
        if self._words:
            return "", text.TURNED, text.WRITE_WORDS
        if self.c.multiplied == torch.float32:
            return ", rounded to tf32", text.ROUND, text.WRITE_VECTOR
        return "", "", text.WRITE_VECTOR

    @property
    def _words(self) -> staging.Words | None:
        """What rows are read as, where that is words."""
        return staging.staged(self.c, self.t).words

    def _columns(self) -> dict[str, object]:
        """What a thread finds for every run: a column, or two that are one word."""
        words = self._words
        if words is None:
            return dict(text.COLUMNS)
        constants = fill(text.CONSTANTS_OF_WORDS, before=words.before, words=words.count)
        return {**text.WORDS, "constants": constants}

    @property
    def _last_alone(self) -> bool:
        """Whether a column's last run has fewer vectors than the others."""
        return staging.staged(self.c, self.t).vectors % staging.run(self.c, self.t) > 0

    def _indices(self) -> dict[str, object]:
        """Which channels and rows a chunk begins with, and which of the tile's a run has: what is the same for all runs
        is not found out for each."""
        u, lay = self.c.unfolded, staging.staged(self.c, self.t)
        d, h, _ = lay.lengths
        own = "int(index >> 24)" if lay.vectors > staging.run(self.c, self.t) else "0"
        rows = {"d": "int(index >> 16 & 255)" if d > 1 else "0", "h": "int(index >> 8 & 255)" if h > 1 else "0"}
        both = d > 1 and h > 1
        found: dict[str, object] = {"tap": [], "first": "chunk * CHUNK", "some": "", "moved_d": "", "moved_h": ""}
        inside = [f"unsigned(low_{a} + {a}) < unsigned({a.upper()})" for a in "dhw"]
        channel = fill(text.CHANNEL, own=own)
        if u is not None:
            dim = "dhw"[u.dim]
            if self._of_one_tap:
                found |= {
                    "tap": fill(text.TAP),
                    "first": "chunk % (OF_TAP / CHUNK) * CHUNK",
                    f"moved_{dim}": " + tap * APART",
                }
            elif u.dense:
                channel = fill(text.FIRST_MULTIPLIED, own=own)
                found |= {"first": "0"}
                del inside[u.dim]  # which depends on the tap
            else:
                rows[dim] += " + tap * APART"
                channel = fill(text.CHANNEL_AND_TAP, own=own)
                found |= {"first": "0", "some": " && tap < UNFOLDED"}
        found |= {"row_d": "row / X_H" if both else "0" if d == 1 else "row"}
        found |= {"row_h": "row % X_H" if both else "0" if h == 1 else "row"}
        found |= {"inside": inside[0], "inside_too": " && ".join(inside[1:])}
        return {**found, "channel": channel, "own_d": rows["d"], "own_h": rows["h"]}

    @property
    def _of_one_tap(self) -> bool:
        """Whether a chunk has channels of one tap, of taps that are channels."""
        u = self.c.unfolded
        return u is not None and u.channels % self.t.chunk == 0

    def _read(self) -> Lines:
        """Read a run: whole vectors, where they lie so in memory; zeros for channels that there are not."""
        c, n, u = self.c, staging.vector(self.c), self.c.unfolded
        if u is not None and u.dense:
            lengths = {"length": "DHW"[u.dim], "step": ("APART * H * W", "APART * W", "APART")[u.dim]}
            return fill(text.READ_DENSE, dim="dhw"[u.dim], **lengths)
        ends = c.channels_of_x % (n if c.unfolded is not None and not self._of_one_tap else self.t.chunk)
        some = "inside && channel + k * VECTOR < channels" if ends or self._last_alone else "inside"
        if c.channels_last and c.channels_of_x % n == 0:
            return fill(text.READ_TWO_WORDS if c.halves else text.READ_VECTOR, some=some)
        whole = c.channels_of_x % n == 0
        names = {
            "some": some,
            "all": [] if whole else fill(text.ALL),
            "which": "some" if whole else f"(j < {c.channels_of_x % n} ? some : all)",
        }
        if self._words:
            return fill(text.READ_WORDS, **names)
        return fill(text.READ, **names, step="1" if c.channels_last else "plane")

    def _offsets(self, d: str, h: str) -> dict[str, object]:
        """How far behind the first a run is: kept by its thread, or worked out again; `d`, `h` are rows of a tile."""
        if not self._roomy:
            u = self.c.unfolded
            first = "0" if u is not None and u.dense else "channel"
            return {"kept_too": "", "kept_member": [], "kept_at": [], "from": self._at(first, "d", "h", "w")}
        w = "(int(w) - BEFORE)" if self._words else "w"
        return {
            "kept_too": ", elements of x",
            "kept_member": ["int from[AT_ONCE];"],
            "kept_at": [f"places.from[n] = {self._at('v * VECTOR', d, h, w)};"],
            "from": "places.from[n]",
        }

    def _at(self, channel: str, d: str, h: str, w: str) -> str:
        """How far an element is from a sample's first."""
        if self.c.channels_last:
            return f"(({d} * H + {h}) * W + {w}) * (GROUPS * C) + {channel}"
        return f"(({channel} * D + {d}) * H + {h}) * W + {w}"

    @property
    def _roomy(self) -> bool:
        """Whether a thread that stages has registers to spare for what it could work out again."""
        if self.c.unfolded is not None and not self._of_one_tap:  # runs are not as far from each other in every chunk
            return False
        if self.t.producers:
            return True
        most = min(255, REGISTERS // (self.t.threads * self.per_sm))
        return self.t.registers(self.c) + staging.staged_by_thread(self.c, self.t)[1] <= most

    # -- statements of the kernel

    def statements(self) -> Lines:
        """How the kernel reads what is next, and writes it."""
        return [*self.walk(), *self.staging()]

    def walk(self) -> Lines:
        """How the kernel finds the next tile without dividing, where it does."""
        return fill(text.WALK) if self.once else []

    def staging(self) -> Lines:
        """The same once it has that."""
        each, at_once = staging.staged_by_thread(self.c, self.t)
        names, most = self._staged, {"most": ", most" if self.c.halves else ""}
        others: Lines = []
        if each > at_once:
            kept = not self.t.producers or keeps_places(self.c, self.t, self.per_sm)
            thread = staging_thread(self.t, "threadIdx.x" if kept else "forgotten(threadIdx.x)")
            at = {"chunk": names["chunk"], "cell": names["cell"]}
            others = fill(text.OTHERS, **at, **most, thread=thread, threads=staging_threads(self.t))
        about, read = (text.WRITE, []) if self.t.producers else (text.WRITE_AND_READ, ["read_input();"])
        own = {"thread": staging_thread(self.t), "others": others, "about": fill(about), "read": read}
        return fill(text.STAGING, **names, **own, **most, operand=operand(self.c))

    @property
    def follow(self) -> Lines:
        """Go on to what is staged next."""
        return self._staged["follow"]  # type: ignore[no-any-return]

    @property
    def _staged(self) -> dict[str, Any]:
        """What is staged next."""
        if self.once:
            return text.WALKED
        chunk = "staged_chunk" if self.passes == 1 else f"staged_chunk % {self.chunks}" if self.chunks > 1 else "0"
        found = {**text.DIVIDED, "chunk": chunk, "follow": fill(text.NEXT_CHUNK, per_tile=self.chunks * self.passes)}
        if self.c.carried is None:
            return found
        slab = f"(staged_chunk / {self.chunks})" if self.chunks > 1 else "staged_chunk"
        d = contraction_walk.moved("staged.d", slab, staging.staged(self.c, self.t).walks[0], "d")
        return {**found, "cell": f"Cell{{{d}, staged.h, staged.w}}"}

    def each_tile(self) -> dict[str, object]:
        """How the kernel goes through the tiles of a block."""
        loop, tile, another = text.TILES_WALKED if self.once else text.TILES_DIVIDED
        follows = [f"const bool another = {another};    // tile follows"]
        return {"loop": loop, "tile": tile, "another": [] if self.t.stay or self.t.producers else follows}


def staging_thread(t: WarpgroupCut, thread: str = "threadIdx.x") -> str:
    """Text: which of the threads that stage a block's `thread` is."""
    return f"({thread} % PRODUCERS)" if t.producers else thread


def staging_threads(t: WarpgroupCut) -> str:
    """Text: how many those are."""
    return "PRODUCERS" if t.producers else "THREADS"


def all_threads(t: WarpgroupCut) -> str:
    """Text: how many threads a block has."""
    return "ALL_THREADS" if t.producers else "THREADS"
