"""The handful of PTX instructions that generated kernels use, each behind a small function.

A kernel's text starts with the primitives it uses, so it depends on nothing.  Tests replace these texts by ones with
the same meaning on a CPU (`tests/emulation`), and leave everything else as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache

from fusewright.codegen.cuda.functions import used_functions

# name -> CUDA text.  Everything else in a kernel is plain CUDA C++ (shuffles, barriers, vector types).
PRIMITIVES: dict[str, str] = {
    "nonfinite": r"""
// NVRTC has no <cmath> to define these.
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#endif
""",
    "await_launches": r"""
// Wait until what was launched before is done: from sm_90 on, blocks may be let in while it ends.
__device__ __forceinline__ void await_launches() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
""",
    "mma_tf32": r"""
// d += a * b for one 16x8x8 tile: a is 16x8 row-major, b is 8x8 column-major, both rounded to tf32, d in float32.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
""",
    "mma_bf16": r"""
// d += a * b for one 16x8x16 tile: a is 16x16 row-major, b is 16x8 column-major, two neighbouring k to a register, the
// lower k in its low half; d in float32.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
""",
    "mma_fp16": r"""
// d += a * b for one 16x8x16 tile: a is 16x16 row-major, b is 16x8 column-major, two neighbouring k to a register, the
// lower k in its low half; d in float32.
__device__ __forceinline__ void mma_fp16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
""",
    "mma_f64": r"""
// d += a * b for one 16x8x8 tile in float64, as four 8x8x4 instructions.
__device__ __forceinline__ void mma_f64(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int m = 0; m < 2; ++m)
            asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
                         : "+d"(d[2 * m]), "+d"(d[2 * m + 1])
                         : "d"(a[2 * k + m]), "d"(b[k]));
}
""",
    "round_tf32": r"""
// The tf32 value nearest to x, in the bits of a float32: one instruction from sm_90 on.
__device__ __forceinline__ unsigned round_tf32(float x) {
    unsigned bits;
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#else
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#endif
    return bits;
}
""",
    "fence_async_global": r"""
// What was written to global memory is there for copies in bulk, after a barrier.
__device__ __forceinline__ void fence_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
""",
    "halves": r"""
// Two halves, the first one in the lower bits: those nearest to x and y; and each of them.
__device__ __forceinline__ unsigned pair_of_halves(float x, float y) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}
__device__ __forceinline__ float first_half(unsigned pair) {
    float x;
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a; }" : "=f"(x) : "r"(pair));
    return x;
}
__device__ __forceinline__ float second_half(unsigned pair) {
    float x;
    asm("{ .reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b; }" : "=f"(x) : "r"(pair));
    return x;
}
""",
    "largest_halves": r"""
// Of two pairs of halves, the larger sizes; those of infinities and NaN are the largest.
__device__ __forceinline__ unsigned largest_halves(unsigned sizes, unsigned pair) {
    asm("{ .reg .b32 size; abs.f16x2 size, %1; max.NaN.f16x2 %0, %0, size; }" : "+r"(sizes) : "r"(pair));
    return sizes;
}
""",
    "smallest_halves": r"""
// Of two pairs of halves, the smaller sizes; those of numbers where others are NaN.
__device__ __forceinline__ unsigned smallest_halves(unsigned sizes, unsigned pair) {
    asm("{ .reg .b32 size; abs.f16x2 size, %1; min.f16x2 %0, %0, size; }" : "+r"(sizes) : "r"(pair));
    return sizes;
}
""",
    "extremes": r"""
// The greater and the smaller of two values; NaN wins.
__device__ __forceinline__ float greater(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ __forceinline__ float smaller(float a, float b) {
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
__device__ __forceinline__ double greater(double a, double b) { return a > b || a != a ? a : b; }
__device__ __forceinline__ double smaller(double a, double b) { return a < b || a != a ? a : b; }
""",
    "saturated_product": r"""
// A product between 0 and 1; 0 where it is NaN.
__device__ __forceinline__ float saturated_product(float a, float b) {
    float c;
    asm("mul.sat.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
""",
    "approximations": r"""
// 2^x and 1/x to 2 ulp; results below the normal numbers are zero.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
""",
    "copy_async": r"""
// Start copying BYTES (4, 8 or 16, all addresses aligned to it) to shared memory, or zeros where not `inside`; nothing
// where not `active`, which a branch would say in more instructions.  NEAR: by way of the level-1 cache, where warps
// find what their neighbours have read, as all copies of fewer than 16 go.
template <int BYTES, bool NEAR = false>
__device__ __forceinline__ void copy_async(void* to_shared, const void* from_global, bool inside, bool active = true) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(to_shared));
    const int bytes = inside ? BYTES : 0;
    if constexpr (BYTES == 16 && !NEAR)
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.cg.shared.global [%0], [%1], 16, %2; }"
            ::"r"(to), "l"(from_global), "r"(bytes), "r"(int(active)));
    else
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %3, 0; @p cp.async.ca.shared.global [%0], [%1], %4, %2; }"
            ::"r"(to), "l"(from_global), "r"(bytes), "r"(int(active)), "n"(BYTES));
}
// Close the group of copies started so far; wait until at most PENDING groups are still under way.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;"); }
template <int PENDING>
__device__ __forceinline__ void copy_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING)); }
""",
    "cluster": r"""
// Thread block clusters (sm_90): rank in the cluster, a barrier over it, and reading another block's shared memory.
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ float cluster_load(const float* shared, unsigned rank) {
    const unsigned own = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    unsigned remote;
    float value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(rank));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");
    return value;
}
__device__ __forceinline__ double cluster_load(const double* shared, unsigned rank) {
    const unsigned own = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    unsigned remote;
    double value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(rank));
    asm volatile("ld.shared::cluster.f64 %0, [%1];" : "=d"(value) : "r"(remote) : "memory");
    return value;
}
""",
    "elements": r"""
// Elements of tensors in half precisions are bits until they are read: bf16 and fp16 <-> float32.
struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };
__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ double widened(double x) { return x; }
__device__ __forceinline__ float widened(bf16 x) { return __uint_as_float(unsigned(x.bits) << 16); }
__device__ __forceinline__ float widened(fp16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
template <typename E> struct narrow_to;
template <> struct narrow_to<float> { static __device__ __forceinline__ float of(float x) { return x; } };
template <> struct narrow_to<double> { static __device__ __forceinline__ double of(double x) { return x; } };
template <> struct narrow_to<bf16> {
    static __device__ __forceinline__ bf16 of(float x) {
        bf16 y;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};
template <> struct narrow_to<fp16> {
    static __device__ __forceinline__ fp16 of(float x) {
        fp16 y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
        return y;
    }
};
""",
}

PRIMITIVES["warpgroup"] = r"""
// Matrices in shared memory for the tensor cores of a warpgroup (sm_90a): eight rows of 16 bytes lie one behind the
// other, `along` bytes lead to their next 16 bytes and `down` bytes to the next eight rows.  One more is 16 bytes on.
__device__ __forceinline__ unsigned long long shared_matrix(const void* start, int along, int down) {
    const unsigned long long at = __cvta_generic_to_shared(start);
    return (at & 0x3ffff) >> 4 | (unsigned long long)(along >> 4) << 16 | (unsigned long long)(down >> 4) << 32;
}
// What was written to shared memory is there for the tensor cores, after a barrier.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// Before the first product, after the last, and until all are done.
__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
"""

PRIMITIVES["warpgroup_wait_but"] = r"""
// Until all products are done but those that were committed last, so many times.
template <int PENDING>
__device__ __forceinline__ void warpgroup_wait_but() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
"""

PRIMITIVES["barriers"] = r"""
// Barriers for `threads` of a block's, whole warps: some wait, and some only say that they have come so far.
__device__ __forceinline__ void barrier_wait(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
"""

PRIMITIVES["landing"] = r"""
// In shared memory, whether what some threads stage is there (sm_90): the turns 0, 1, 0, ... of a landing end when each
// of them has closed its part, and the bulk copies that they had started there have landed.
__device__ __forceinline__ void landing_open(unsigned long long* landing, int threads) {
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(landing));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(threads) : "memory");
}
__device__ __forceinline__ void landing_close(unsigned long long* landing) {
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(landing));
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void landing_wait(unsigned long long* landing, int turn) {
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(landing));
    int landed;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
                     : "=r"(landed) : "r"(at), "r"(turn) : "memory");
    } while (!landed);
}
"""

PRIMITIVES["copy_bulk"] = r"""
// Start a copy of whole 16 bytes to shared memory, which no thread makes.
__device__ __forceinline__ void copy_bulk(void* to_shared, const void* from_global, int bytes,
                                          unsigned long long* landing) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(to_shared));
    const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(landing));
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from_global), "r"(bytes), "r"(at) : "memory");
}
"""

PRIMITIVES["registers"] = r"""
// The warps of a warpgroup have as many registers from here on: what some give, others get (sm_90a).
template <int COUNT>
__device__ __forceinline__ void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
__device__ __forceinline__ void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
"""

PRIMITIVES["at_hand"] = r"""
// Whatever the compiler knows of a number or pointer, it is in its register from here on.
__device__ __forceinline__ void at_hand(float& x) { asm volatile("" : "+f"(x)); }
__device__ __forceinline__ void at_hand(unsigned& x) { asm volatile("" : "+r"(x)); }
template <class T> __device__ __forceinline__ void at_hand(const T*& x) { asm volatile("" : "+l"(x)); }
"""

PRIMITIVES["take_over"] = r"""
// to = from, one after the other: of registers side by side, moved at once, there would be a copy of each.
__device__ __forceinline__ void take_over(float& to, float from) {
    asm volatile("mov.f32 %0, %1;" : "=f"(to) : "f"(from));
}
"""

PRIMITIVES["arrived"] = r"""
// A number that was read, when it has arrived: an operation that the assembler does not see through waits for it.
__device__ __forceinline__ float arrived(float x, int zero) { return __int_as_float(__float_as_int(x) | zero); }
"""

PRIMITIVES["read_only"] = r"""
// An element of an operand, which nobody writes to meanwhile: so it may be read or left out without a branch.
__device__ __forceinline__ float read_only(const float* x) { return __ldg(x); }
__device__ __forceinline__ uint4 read_only(const uint4* x) { return __ldg(x); }
__device__ __forceinline__ unsigned read_only(const unsigned* x) { return __ldg(x); }
template <class T> __device__ __forceinline__ T read_only(const T* x) { return {__ldg(&x->bits)}; }
"""

PRIMITIVES["forgotten"] = r"""
// A number of which the compiler knows nothing, so that what follows from it is not kept in registers between uses.
__device__ __forceinline__ unsigned forgotten(unsigned x) {
    asm volatile("" : "+r"(x));
    return x;
}
// A pointer to global memory from which others are one instruction away: the compiler would find each of them from the
// kernel's argument.
template <class T> __device__ __forceinline__ T* forgotten(T* x) {
    asm("" : "+l"(x));
    __builtin_assume(__isGlobal(x));
    return x;
}
"""

# The columns that one instruction of a warpgroup may have, and what it multiplies: PTX's names, and k.
COLUMNS = range(8, 257, 8)
_PRODUCTS = {"tf32": ("tf32", 8), "bf16": ("bf16", 16), "fp16": ("f16", 16)}


def _warpgroup_product(flavour: str, columns: int, *, rows: bool = False) -> str:
    """The text of ``wgmma_<flavour>_<columns>``, or with `rows` in registers of ``wgmma_rows_<flavour>_<columns>``."""
    kind, k = _PRODUCTS[flavour]
    count = columns // 2
    numbers = [f"%{i}" for i in range(count)]
    outputs = [f'"+f"(d[{i // 4}][{i % 4}])' for i in range(count)]
    registers = "\n".join(
        f'        "{", ".join(numbers[i : i + 16])}{"," if i + 16 < count else ""}"' for i in range(0, count, 16)
    )
    bound = ",\n          ".join(", ".join(outputs[i : i + 4]) for i in range(0, count, 4))
    transposed = "" if flavour == "tf32" else ", 0" if rows else ", 0, 0"
    if rows:
        return f"""
// As below, to d = a * b where not `any`, with the rows of `a` in registers as mma.sync has them, 16 of each warp.
__device__ __forceinline__ void wgmma_rows_{flavour}_{columns}(float (&d)[{columns // 8}][4], const unsigned& a0,
                                                        const unsigned& a1, const unsigned& a2, const unsigned& a3,
                                                        unsigned long long b, bool any) {{
    asm volatile(
        "{{ .reg .pred p; setp.ne.b32 p, %{count + 5}, 0;"
        "wgmma.mma_async.sync.aligned.m64n{columns}k{k}.f32.{kind}.{kind} {{"
{registers}
        "}}, {{%{count}, %{count + 1}, %{count + 2}, %{count + 3}}}, %{count + 4}, p, 1, 1{transposed}; }}"
        : {bound}
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int(any)));
}}
"""
    return f"""
// Start d += a * b for 64 rows and {columns} columns of {k} numbers; of every eight columns a lane has mma.sync's.
__device__ __forceinline__ void wgmma_{flavour}_{columns}(float (&d)[{columns // 8}][4], unsigned long long a,
                                                   unsigned long long b) {{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n{columns}k{k}.f32.{kind}.{kind} {{"
{registers}
        "}}, %{count}, %{count + 1}, 1, 1, 1{transposed};"
        : {bound}
        : "l"(a), "l"(b));
}}
"""


for _columns in COLUMNS:
    for _flavour in _PRODUCTS:
        PRIMITIVES[f"wgmma_rows_{_flavour}_{_columns}"] = _warpgroup_product(_flavour, _columns, rows=True)
        PRIMITIVES[f"wgmma_{_flavour}_{_columns}"] = _warpgroup_product(_flavour, _columns)


def primitives(*names: str) -> str:
    """The texts of the named primitives, in the order of the table."""
    assert set(names) <= PRIMITIVES.keys(), f"unknown primitives {set(names) - PRIMITIVES.keys()}"
    return "".join(text for name, text in PRIMITIVES.items() if name in names).lstrip("\n")


def preamble(text: str, *always: str) -> str:
    """The primitives that a kernel's text calls, those named `always` among them, and the functions that it calls."""
    functions = used_functions(text)
    calls = set(re.findall(r"\w+", functions + text))
    used = [name for name, body in PRIMITIVES.items() if name in always or calls & _defined(body)]
    return "\n".join(part for part in (primitives(*used), functions) if part)


def with_primitives(sections: Iterable[Sequence[str]]) -> str:
    """The text of a kernel: its sections, a blank line between two, behind the preamble."""
    text = "\n\n".join("\n".join(lines).strip("\n") for lines in sections if lines) + "\n"
    return preamble(text) + "\n" + text


@cache
def _defined(body: str) -> frozenset[str]:
    """The names that a primitive's text defines."""
    found = re.findall(r"#define (\w+)|struct (\w+)|__forceinline__ [\w ]+? (\w+)\(", body)
    return frozenset(name for names in found for name in names if name)
