"""Float32 contractions whose operands tensor cores multiply as halves, float16, where tf32 would do (sm_90a).

A half has the digits of a tf32 number, takes half the room and half the time, and has a smaller range: it is infinite
from 65520 on, and has fewer digits below 2^-14.  So blocks *watch*: every one of those that lay operands out says, in a
word of its own, whether it met a number that is not finite as a half, or a channel, or the weights of a feature, whose
numbers, as far as it sampled them, are all small.  A second kernel of the same group, which multiplies in tf32,
follows: unless some block has said so it ends at once, and else it is the one whose results stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING

import torch

from fusewright.codegen.cuda.contraction_record import launched, record, splits_of
from fusewright.codegen.cuda.contraction_weights import PACKING_THREADS, Packing
from fusewright.codegen.cuda.primitives import with_primitives
from fusewright.codegen.text import Lines, fill
from fusewright.kernel import Argument, Array, Expression, Kernel, Launch
from fusewright.schedule.contraction import Contraction

if TYPE_CHECKING:
    from fusewright.codegen.cuda.warpgroup_writer import Writer

NOTE = "operands are multiplied as float16; where its range is too small for them, a second launch multiplies in tf32"
UNFIT = Argument("pointer", "unfit")


@dataclass(frozen=True)
class Guard:
    """What a kernel, and the launch that packs its weights, say or ask about whether halves hold what is multiplied:
    nothing, for most kernels.

    parameter   text of further parameters, behind the others' pointers; `arguments` for those
    functions   that the statements call
    begin, look, end    statements: ahead of all, once the block knows its sample, behind all
    pack_begin, pack_end    the same of the launch that packs
    """

    parameter: str = ""
    arguments: tuple[Argument, ...] = ()
    functions: Lines = field(default_factory=list)
    begin: Lines = field(default_factory=list)
    look: Lines = field(default_factory=list)
    end: Lines = field(default_factory=list)
    pack_begin: Lines = field(default_factory=list)
    pack_end: Lines = field(default_factory=list)


def watching(c: Contraction, threads: str, packing: int) -> Guard:
    """Of the kernel that multiplies halves, whose blocks have so many `threads` (text), and weights that stay, or a
    launch of so many `packing` blocks ahead of it."""
    # The word of a block is found again each time: a thread has no registers to keep its place in.
    packed = "*word_of_block(unfit)"
    word = f"*word_of_block(unfit + {packing})" if packing else packed
    row = "(group * C + channel) * O + feature" if c.op.transposed else "(group * O + feature) * C + channel"
    block = {"warps": f"({threads} / 32)", "warp": "warp", "word": word}
    look = fill(_LOOK, **block, channel="channel" if c.channels_last else "channel * plane")
    if not packing:
        every = {"block": "sample * parts + part", "blocks": "gridDim.x * parts", "group": "group"}
        look += fill(_LOOK_AT_WEIGHTS, **block, **every)
    ahead = {"block": "blockIdx.x + gridDim.x * blockIdx.z", "blocks": "gridDim.x * gridDim.z"}
    ahead |= {"warps": str(PACKING_THREADS // 32), "warp": "threadIdx.x / 32", "word": packed}
    return Guard(
        parameter=", unsigned* __restrict__ unfit",
        arguments=(UNFIT,),
        functions=fill(_WATCH, row=row, apart=" * (GROUPS * C)" if c.channels_last else ""),
        begin=fill(_BEGIN, word=word),
        look=look,
        end=fill(_END, word=word),
        pack_begin=[*fill(_BEGIN, word=packed), *fill(_LOOK_AT_WEIGHTS, **ahead, group="blockIdx.y / M_BLOCKS")],
        pack_end=fill(_END, word=packed),
    )


def asking(words: Expression) -> Guard:
    """Of the kernel that multiplies in tf32, where one of so many `words` says so."""
    unless = ["if (!asked(unfit, words)) return;"]
    return Guard(
        parameter=", const unsigned* __restrict__ unfit, int words",
        arguments=(UNFIT, Argument("int", words)),
        functions=fill(_ASKED),
        begin=unless,
        pack_begin=unless,
    )


def words(w: Writer) -> Expression:
    """So many blocks lay operands of a kernel out."""
    return f"{packing_blocks(w.weights.packing(w.name))} + N * {splits_of(w)} * {w.weights.blocks}"


def packing_blocks(packing: Packing | None) -> int:
    """Of the launch that packs weights, if there is one."""
    return 0 if packing is None else prod(map(int, packing.launch.grid))


def kernel(first: Writer, instead: Writer, *, arch: str, needs: int) -> Kernel:
    """The kernel that `first` writes, and behind it the one that computes the same `instead`; what joins the results of
    a sample's blocks comes last, whoever they are of."""
    made, splits = record(first, needs=needs, arch=arch), splits_of(first)
    own, other = (launched(w, splits, w.guard.arguments) for w in (first, instead))
    assert first.epilogue.results(first.name, splits) == instead.epilogue.results(first.name, splits), first.t
    unfit = Array("unfit", (instead.instead_of,), torch.int32)
    packed = [replace(array, name=f"{array.name}_again") for array in other.scratch]
    again = [
        replace(launch, arguments=tuple(_again(argument, other.scratch) for argument in launch.arguments))
        for launch in other.launches
    ]
    behind = made.launches[len(own.launches) :]
    brief = replace(made, scratch=(*made.scratch, unfit), launches=(*own.launches, *behind))
    sections = (
        *_named("in_halves", [*first.sections(), first.epilogue.finish(first.name)], (*own.launches, *behind)),
        *_named("in_tf32", instead.sections(), other.launches),
        fill(_TYPES),
    )
    return replace(
        made,
        source=with_primitives(sections),
        scratch=(*made.scratch, *packed, unfit),
        launches=(*own.launches, *again, *behind),
        notes=(*made.notes, NOTE),
        brief=brief,
    )


def _again(argument: Argument, scratch: tuple[Array, ...]) -> Argument:
    """The argument, if it is one of these arrays, of the second kernel."""
    mine = argument.kind == "pointer" and argument.text in [array.name for array in scratch]
    return Argument("pointer", f"{argument.text}_again") if mine else argument


def _named(name: str, sections: list[Lines], launches: tuple[Launch, ...]) -> list[Lines]:
    """Sections with names of their own, but for what is launched."""
    entries = [f"using {name}::{launch.entry};" for launch in launches]
    return [[f"namespace {name} {{"], *sections, [f"}}  // namespace {name}", *entries]]


_TYPES = """
// What launches names the types of pointers: `Element` is the same of both.
using in_halves::Element;
using in_halves::Operand;
"""

_WATCH = """
// Halves have the digits of tf32 for numbers from 2^-14 to 65504: what is rounded off smaller ones counts if there are
// no others.
constexpr float SMALL = 0x1p-12f;

// The word in which this block says that halves do not do.
__device__ __forceinline__ unsigned* word_of_block(unsigned* unfit) {
    return unfit + (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
}
// Whether the largest sizes of some halves are those of infinities, or of NaN.
__device__ __forceinline__ bool beyond_halves(unsigned sizes) {
    return (sizes & 0xffffu) >= 0x7c00u || sizes >> 16 >= 0x7c00u;
}
// Whether several of the numbers that a warp has are none but small, and no other is but 0.
__device__ __forceinline__ bool all_small(const float (&sampled)[2]) {
    const unsigned some = __ballot_sync(0xffffffffu, sampled[0] != 0);
    const unsigned others = __ballot_sync(0xffffffffu, sampled[1] != 0);
    const bool large = fabsf(sampled[0]) >= SMALL || fabsf(sampled[1]) >= SMALL;
    return !__any_sync(0xffffffffu, large) && __popc(some) + __popc(others) > 2;
}
// The same of 64 that lie evenly among the `count` of a channel of the input, and among the weights of the first, the
// second, ... channel, and then of the first feature and those behind it.
__device__ __forceinline__ bool small_inputs(const Element* channel, long long count) {
    float sampled[2];
    for (int i = 0; i < 2; ++i) sampled[i] = channel[(threadIdx.x % 32 + 32 * i) * count / 64$apart];
    return all_small(sampled);
}
__device__ __forceinline__ bool small_weights(const Element* w, int group, int index) {
    const bool of_channel = index < C;
    float sampled[2];
    for (int i = 0; i < 2; ++i) {
        const long long at = (threadIdx.x % 32 + 32 * i) * (long long)((of_channel ? O : C) * TAPS) / 64;
        const int other = at / TAPS, tap = at % TAPS;
        const int channel = of_channel ? index : other, feature = of_channel ? other : index - C;
        sampled[i] = w[(long long)($row) * TAPS + tap];
    }
    return all_small(sampled);
}
"""

_BEGIN = """
unsigned most = 0;    // the largest sizes of the halves that this thread makes
if (threadIdx.x == 0) $word = 0;
__syncthreads();
"""

_END = """
if (beyond_halves(most)) $word = 1;
"""

_LOOK = """
// A sample's blocks look at every channel once.
for (int channel = part * $warps + $warp; channel < C; channel += parts * $warps) {
    const long long plane = (long long)D * H * W;
    if (small_inputs(x_sample + $channel, plane)) $word = 1;
}
"""

_LOOK_AT_WEIGHTS = """
// Blocks that have the same features look at the weights of every channel, and of every feature, once.
for (int i = ($block) * $warps + $warp; i < C + O; i += $blocks * $warps)
    if (small_weights(w, $group, i)) $word = 1;
"""

_ASKED = """
// Whether a block has met what halves do not hold.
__device__ __forceinline__ bool asked(const unsigned* unfit, int words) {
    bool found = false;
    for (int i = threadIdx.x; i < words; i += blockDim.x) found |= unfit[i] != 0;
    return __syncthreads_or(found);
}
"""
