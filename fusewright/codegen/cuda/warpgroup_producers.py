"""Warps that only stage what the others of their block multiply (sm_90a).

Where every warp stages, what is on its way waits for products, products wait for it, and both wait for what follows
them.  Producers go on meanwhile: step after step they fill one half of shared memory while the other is read.  Two
teams of them take turns where every step has an input of its own, since a team waits for memory once a step.  A landing
of each half says that the operands of a step are there, a barrier, `READ`, that they have been multiplied.

Who waits at a landing waits for nobody else: one warpgroup may go on to the next step or tile while another is still at
what follows the last products, and the tensor cores have something to do.  Where a tile is one step, warpgroups take
turns at multiplying, so that they do come to be apart.

A fence between what was written and the tensor cores waits for all that a thread has under way: what comes next is read
behind it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusewright.codegen.cuda import contraction_layout
from fusewright.codegen.cuda.warpgroup_weights import WarpgroupWeights
from fusewright.codegen.text import Lines, fill, where
from fusewright.schedule.contraction import Contraction
from fusewright.schedule.warpgroup_staging import TEAM, WarpgroupCut, takes_turns

if TYPE_CHECKING:
    from fusewright.codegen.cuda.warpgroup_input import Input
    from fusewright.codegen.cuda.warpgroup_steps import Steps


def constants(c: Contraction, t: WarpgroupCut) -> Lines:
    """Of kernels that have producers."""
    if not t.producers:
        return []
    return [*fill(_CONSTANTS, teams=t.producers // TEAM), *(fill(_TURNS) if takes_turns(c, t) else [])]


def among(t: WarpgroupCut, lines: Lines) -> Lines:
    """Statements of the warps that multiply, which meet without those that stage."""
    if not t.producers:
        return lines
    return [line.replace("__syncthreads()", "barrier_wait(MULTIPLYING, THREADS)") for line in lines]


def first_turn(c: Contraction, t: WarpgroupCut) -> Lines:
    """The statement ahead of all tiles: the last warpgroup leaves the first turn to the first one."""
    return ["if (warp / 4 == WARPGROUPS - 1) barrier_arrive(TURN, NEIGHBOURS);"] if takes_turns(c, t) else []


def last_turn(c: Contraction, t: WarpgroupCut) -> Lines:
    """The statement behind all tiles, where the first one hears of the last turn."""
    return ["if (warp / 4 == 0) barrier_wait(TURN, NEIGHBOURS);"] if takes_turns(c, t) else []


def consumed(w: WarpgroupWeights, phases: list[int], steps: int, multiply: Lines) -> Lines:
    """The steps of one pass, of those who multiply."""
    if takes_turns(w.c, w.t):
        multiply = [
            "barrier_wait(TURN + warp / 4, NEIGHBOURS);    // until the warpgroup before has",
            *multiply,
            "barrier_arrive(TURN + (warp / 4 + 1) % WARPGROUPS, NEIGHBOURS);",
        ]
    after: Lines = []
    if w.inputs > 1:
        slices = w.slices(phases[0])
        whole = [f"(step + 1) % {slices} == 0"] if slices > 1 else []
        after.append(f"{where(whole)}x_now = 1 - x_now;")
    unrolled = ["#pragma unroll 1"] if steps > 1 else []
    return fill(_CONSUMED, steps=steps, unrolled=unrolled, landed=w.landed(), multiply=multiply, after=after)


def statements(steps: Steps, of_input: Input, registers: tuple[int, int] | None, end: Lines) -> Lines:
    """All that producers do, with `end` behind the rest; `registers` are those of a producer and of the others where
    they are not the same."""
    t = steps.t
    names = {"loop": of_input.each_tile()["loop"], "of_sample": contraction_layout.sample(steps.c)}
    return [
        *of_input.walk(),
        *fill(
            _PRODUCERS,
            **names,
            staging=_registers(registers, 0),
            multiplying=_registers(registers, 1),
            stage=of_input.staging(),
            inputs="" if t.producers > TEAM else ", inputs = 0",
            skip=fill(_SKIP, follow=of_input.follow) if t.producers > TEAM else [],
            body=_produced(steps),
            end=end,
        ),
    ]


def _produced(steps: Steps) -> Lines:
    """What producers do for a tile: the steps of all passes over it."""
    w, t = steps.weights, steps.t
    lines: Lines = []
    for phases in w.passes:
        slices = w.slices(phases[0])
        if w.inputs == 1:
            guard = where(["step == 0", *(f"from_{a} == 0" for a, _, _ in steps.pieces(phases[0]))])
        else:
            guard = where([f"step % {slices} == 0"] if slices > 1 else [])
        stage: Lines = []
        read: Lines = []
        if not t.stay:
            stage += w.copy(phases, "step", "steps % 2")
        if t.producers > TEAM:  # a step is an input
            stage.append("write_input(x_tile + steps % 2 * X_TILE);")
            read = ["skip();", "read_input();"]
        elif w.inputs > 1 or phases == w.passes[0]:
            stage.append(f"{guard}write_input(x_tile + inputs++ % 2 * X_TILE);")
            read = [f"{guard}read_input();"]
        lines += [*steps.loops(phases[0]), *fill(_PRODUCED, steps=w.chunks * slices, stage=stage, read=read)]
    return lines


def _registers(handed_over: tuple[int, int] | None, role: int) -> Lines:
    """The statement by which warps of a role get registers of the others, or leave them theirs."""
    if handed_over is None:
        return []
    more = handed_over[role] > handed_over[1 - role]
    return [f"{'more' if more else 'fewer'}_registers<{handed_over[role]}>();"]


_CONSTANTS = """
// Teams of further warps stage, step after step in turns.  Barriers: where those meet who multiply; where operands have
// been read, of both halves of shared memory.
constexpr int PRODUCERS = 128, TEAMS = $teams, ALL_THREADS = THREADS + TEAMS * PRODUCERS;
constexpr int MULTIPLYING = 1, READ = 2, MEETING = THREADS + PRODUCERS;
"""

_TURNS = """
// Further barriers: where a warpgroup waits for its turn to multiply, and the one before it says so.
constexpr int TURN = 4, WARPGROUPS = THREADS / 128, NEIGHBOURS = 256;
"""

_CONSUMED = """
$unrolled
for (int step = 0; step < $steps; ++step) {
    $landed
    $multiply
    warpgroup_wait();
    barrier_arrive(READ + steps % 2, MEETING);
    ++steps;
    $after
}
"""

_PRODUCED = """
for (int step = 0; step < $steps; ++step) {
    if (steps % TEAMS == team) {
        if (steps > 1) barrier_wait(READ + steps % 2, MEETING);    // until the last step's but one have been
        $stage
        fence_async();
        landing_close(landings + steps % 2);
        $read
    }
    ++steps;
}
"""

_PRODUCERS = """
fence_async();
__syncthreads();    // until what stays is there
if (warp >= THREADS / 32) {    // a producer
    $staging
    const int team = warp / (PRODUCERS / 32) - THREADS / PRODUCERS;
    const Element* const x_sample = forgotten(x + $of_sample);
    $stage
    int steps = 0$inputs;    // so many are staged
    $skip
    read_input();
    $loop {
        $body
    }
    // Those who multiply say of every step that it has been read.
    for (int step = max(steps - 2, 0); step < steps; ++step)
        if (step % TEAMS == team) barrier_wait(READ + step % 2, MEETING);
    $end
    return;
}
$multiplying
"""

# Of two teams.
_SKIP = """
const auto skip = [&] {    // what the other team stages
    $follow
};
if (team == 1) skip();
"""
