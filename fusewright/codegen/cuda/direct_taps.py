"""CUDA C++ of direct kernels whose warps multiply by channels and taps on tensor cores (`schedule.direct_taps`).

All but the products is as in `direct`: what a block stages, and what becomes of the values in shared memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from fusewright.codegen.cuda import direct
from fusewright.codegen.cuda.direct_epilogue import DirectEpilogue, times
from fusewright.codegen.text import Lines, fill
from fusewright.kernel import Kernel
from fusewright.schedule.axes import Phase
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.direct import with_windows
from fusewright.schedule.direct_taps import TapCut, TapTile


def generate(c: Contraction, t: TapTile, name: str, reference: str) -> Kernel:
    """The kernel of a group for one tile."""
    return _Writer(with_windows(c), t, name, reference).kernel()


@dataclass(frozen=True)
class _Writer(direct.Writer):
    t: TapTile

    @cached_property
    def epilogue(self) -> TapEpilogue:
        return TapEpilogue(self.c, TapCut.of(self.c, self.t))

    def weights(self, names: Mapping[str, object]) -> Lines:
        return fill(_WEIGHTS, of_team=self.epilogue.t.team_weights)

    def multiply(self) -> Lines:
        rounds = self.c.x.dtype == torch.float32
        operand = "round_tf32(x)" if rounds else "__float_as_uint(widened(x))"
        return fill(_MULTIPLY, operand=operand)

    def stage_weights(self) -> Lines:
        row = self.row_of_weights("feature", "channel")
        stage = [
            f"stage_phase<{_sizes(phases)}>(w, tile + {at}, round, {', '.join(str(p.taps[0]) for p in phases)});"
            for phases, at in self.epilogue.places
            if self.epilogue.t.steps(phases)
        ]
        return fill(_STAGE_WEIGHTS, row=row, stage=stage)

    def own(self) -> Lines:
        return fill(_OWN)

    def values(self) -> Lines:
        return []

    def products(self) -> Lines:
        return []


def _sizes(phases: tuple[Phase, ...]) -> str:
    return ", ".join(str(len(p.taps)) for p in phases)


@dataclass(frozen=True)
class TapEpilogue(DirectEpilogue):
    """Of a warp's products, lanes have two features of two units at a time."""

    t: TapCut

    @property
    def places(self) -> list[tuple[tuple[Phase, Phase, Phase], int]]:
        """The phases, and where the weights of each begin among those of a team."""
        found, at = [], 0
        for phases in self.box.phases:
            found.append((phases, at))
            at += self.t.steps(phases) * 8 * self.t.t.features
        return found

    def kept(self, phases: list[tuple[int, int, int]]) -> Lines:
        """The products of all units, each phase in turn."""
        return [line for phase, at in self.places for line in self._phase(phase, at)]

    def _phase(self, phases: tuple[Phase, Phase, Phase], at: int) -> Lines:
        assert self.c.window is not None
        joining, sides = self.pooling, self.box.sides
        first = [p.first - s.low for p, s in zip(phases, sides, strict=True)]
        start = (first[0] * sides[1].length + first[1]) * self.box.pitch + first[2]
        elements = [p.elements[0] for p in phases]
        own = [
            f"{times(f'(unit_{a} * {n} + {k})', s.period)}{f' + {e}' if e else ''}"
            for a, n, k, s, e in zip("dhw", self.t.t.own, ("pd", "rh", "r"), sides, elements, strict=True)
        ]
        units = [
            f"{times(f'unit_{a}', s.period)}{f' + {e}' if e else ''}"
            for a, s, e in zip("dhw", sides, elements, strict=True)
        ]
        features = "for (int n = 0; n < EIGHTS; ++n)", "for (int i = 0; i < 4; ++i)"
        feature = "const int feature = first_feature + team * FEATURES + 8 * n + 2 * quad + i % 2;"
        where = [feature, "const int at = group * O + min(feature, O - 1);"] if self.changes else []
        value = self.changed("acc[n][i]")
        there = self.there_or_empty("inside[i / 2]", value) if self.overhangs else value
        names: dict[str, object] = {
            "sizes": _sizes(phases),
            "at": at,
            "start": start,
            "running": self.kept_type,
            "empty": joining.empty,
            "changed": self.all_changed(["acc[n][i]"], features, where, []),
            "where": where if self.one_by_one else [],
            "joined": joining.join("pooled[n][i]", there),
            "place": self.at("(team * FEATURES + 8 * n + 2 * quad + i % 2)", self.t.extents, units),
            "inside": fill(_INSIDE, exists=self.exists([f"({text})" for text in own])) if self.overhangs else [],
        }
        multiplies = self.t.steps(phases) > 0
        names["multiply"] = fill(_STEPS) if multiplies else []
        names["weights"] = fill(_HELD, **names) if multiplies else []
        return fill(_PHASE, **names)


_WEIGHTS = """
// Weights as lanes take them, [team][phase][step][eight features][lane][two of a step's channels and taps].
constexpr int EIGHTS = FEATURES / 8, WARPS = TEAM / 32, UNITS = UNITS_D * UNITS_H * UNITS_W;
constexpr int W_TEAM = $of_team, W_TILE = TEAMS * W_TEAM;
"""

_MULTIPLY = """
__device__ __forceinline__ unsigned operand(Element x) { return $operand; }

struct alignas(8) Pair { unsigned at[2]; };

// Channels and taps of a phase, so many taps along d, h, w; steps take eight of them at a time, all taps of a channel
// first.  Behind the last one there are none, whose weights are zeros.
template <int D, int H, int W>
struct Phase {
    static constexpr int TAPS = D * H * W, K = C * TAPS, STEPS = ceil_div(K, 8);
    // Where in the staged input lies what the `k`-th reads, behind what the first one does.
    static __device__ __forceinline__ int x(int k) {
        const int tap = k % TAPS, c = k / TAPS;
        return ((c * X_D + tap / (H * W) * TAP_D) * X_H + tap / W % H * TAP_H) * X_W + tap % W * TAP_W;
    }
};
"""

_STAGE_WEIGHTS = """
// Stage the weights of one phase, whose first taps are these, of a round's features, zeros where there are none.
template <int D, int H, int W>
__device__ __forceinline__ void stage_phase(const Element* w, Compute* tile, int round, int tap_d, int tap_h,
                                            int tap_w) {
    using P = Phase<D, H, W>;
    const int group = round / O_BLOCKS, first_feature = round % O_BLOCKS * BLOCK_O;
    for (int i = threadIdx.x; i < TEAMS * P::STEPS * EIGHTS * 64; i += THREADS) {
        const int lane = i / 2 % 32, n = i / 64 % EIGHTS, step = i / (64 * EIGHTS) % P::STEPS;
        const int team = i / (64 * EIGHTS * P::STEPS), k = 8 * step + i % 2 * 4 + lane % 4;
        const int feature = first_feature + (team * EIGHTS + n) * 8 + lane / 4;
        const int tap = k % P::TAPS, channel = k / P::TAPS;
        const int d = tap_d + tap / (H * W) * RESIDUES_D, h = tap_h + tap / W % H * RESIDUES_H;
        const bool there = k < P::K && feature < O;
        const int at = (d * TAPS_H + h) * TAPS_W + tap_w + tap % W * RESIDUES_W;
        const unsigned value = there ? operand(w[$row * TAPS + at]) : 0u;
        tile[team * W_TEAM + i % (64 * EIGHTS * P::STEPS)] = __uint_as_float(value);
    }
}

template <int SEVERAL>
__device__ __forceinline__ void stage_weights(const Element* w, Compute* tiles, int first_round, int) {
    for (int i = 0; i < SEVERAL; ++i) {
        Compute* const tile = tiles + i * W_TILE;
        const int round = first_round + i;
        $stage
    }
}
"""

_OWN = """
const int warp = unit / 32, row = unit % 32 / 4, quad = unit % 4;    // of a team; of sixteen units; of eight features
"""

_INSIDE = """
bool inside[2];
#pragma unroll
for (int half = 0; half < 2; ++half) {
    const int unit_d = of_d[half], unit_h = of_h[half], unit_w = of_w[half];
    inside[half] = $exists;
}
"""

_HELD = """
using Here = Phase<$sizes>;
unsigned weight[Here::STEPS][EIGHTS][2];
int x_of[Here::STEPS][2];
#pragma unroll
for (int step = 0; step < Here::STEPS; ++step) {
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n) {
        const Compute* const from = w_tile + $at + ((step * EIGHTS + n) * 32 + threadIdx.x % 32) * 2;
        const Pair pair = *reinterpret_cast<const Pair*>(from);
        weight[step][n][0] = pair.at[0];
        weight[step][n][1] = pair.at[1];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) x_of[step][half] = Here::x(min(8 * step + 4 * half + quad, Here::K - 1));
}
"""

_STEPS = """
#pragma unroll
for (int step = 0; step < Here::STEPS; ++step) {
    unsigned x_operand[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const Element value = x_row[i % 2][from + x_of[step][i / 2]];
        const bool there = Here::K % 8 == 0 || 8 * step + 4 * (i / 2) + quad < Here::K;
        x_operand[i] = there ? operand(value) : 0u;
    }
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n) mma_tf32(acc[n], x_operand, weight[step][n]);
}
"""

_PHASE = """
{
    $weights
    for (int first = 16 * warp; first < UNITS; first += 16 * WARPS) {
        int of_d[2], of_h[2], of_w[2];
        const Element* x_row[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int own = min(first + row + 8 * half, UNITS - 1);
            of_d[half] = own / (UNITS_W * UNITS_H), of_h[half] = own / UNITS_W % UNITS_H, of_w[half] = own % UNITS_W;
            const int x_h = of_d[half] * PLANES * ELEMENT_D * X_H + of_h[half] * ROWS * ELEMENT_H;
            x_row[half] = x_tile + $start + x_h * X_W + of_w[half] * RUN * ELEMENT_W;
        }
        $running pooled[EIGHTS][4];
#pragma unroll
        for (int i = 0; i < 4 * EIGHTS; ++i) pooled[i / 4][i % 4] = $empty;
#pragma unroll 1
        for (int own = 0; own < PLANES * ROWS; ++own) {
            const int pd = own / ROWS, rh = own % ROWS;
#pragma unroll
            for (int r = 0; r < RUN; ++r) {
                const int from = (pd * ELEMENT_D * X_H + rh * ELEMENT_H) * X_W + r * ELEMENT_W;
                Compute acc[EIGHTS][4] = {};
                $multiply
                $inside
                $changed
#pragma unroll
                for (int n = 0; n < EIGHTS; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        $where
                        pooled[n][i] = $joined;
                    }
            }
        }
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int unit_d = of_d[i / 2], unit_h = of_h[i / 2], unit_w = of_w[i / 2];
                if (first + row + 8 * (i / 2) < UNITS) strip[$place] = pooled[n][i];
            }
    }
}
"""
