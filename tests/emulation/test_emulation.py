"""The emulator on small hand-written kernels: right ones give what torch gives, wrong numbers are visible."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from emulation import EmulationError, emulate
from emulation.build import UNTOUCHED
from emulation.records import DYNAMIC, assert_right, assert_visible, in_all_orders, kernel, ramp, saxpy
from fusewright.codegen.cuda.primitives import PRIMITIVES, primitives
from fusewright.kernel import Argument, Array, Kernel, Launch


def test_saxpy() -> None:
    x, z = torch.randn(1000), torch.randn(1000)
    assert_right(saxpy(), 2 * x + z, x, z)


def test_what_no_thread_writes_is_nan() -> None:
    got = emulate(saxpy(grid="n // 64"), torch.ones(100), torch.ones(100))
    assert bool((got[:64] == 3).all()) and bool(got[64:].isnan().all())


TREE = """
    __shared__ float part[256];
    part[threadIdx.x] = x[blockIdx.x * 256 + threadIdx.x];
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) y[blockIdx.x] = part[0];
"""


def tree(body: str = TREE) -> Kernel:
    return kernel(body, "const float* x", "float* y", shape=("n // 256",), grid="n // 256", threads=256)


def test_tree_reduction() -> None:
    assert_right(tree(), ramp(1024).reshape(4, 256).sum(1), ramp(1024))


def test_missing_barrier_is_visible() -> None:
    missing = TREE.replace("        __syncthreads();\n", "")
    assert_visible(tree(missing), ramp(1024).reshape(4, 256).sum(1), ramp(1024))


def test_missing_barrier_before_reuse_is_visible() -> None:
    body = """
    __shared__ float part[64];
    float sum = 0;
    for (int step = 0; step < 4; ++step) {
        part[threadIdx.x] = x[step * 64 + threadIdx.x];
        __syncthreads();
        sum += part[63 - threadIdx.x];
        __syncthreads();
    }
    y[threadIdx.x] = sum;
    """
    want = ramp(256).reshape(4, 64).flip(1).sum(0)
    assert_right(kernel(body, "const float* x", "float* y", shape=("64",)), want, ramp(256))
    broken = body.replace("sum += part[63 - threadIdx.x];\n        __syncthreads();", "sum += part[63 - threadIdx.x];")
    assert_visible(kernel(broken, "const float* x", "float* y", shape=("64",)), want, ramp(256))


def test_missing_barrier_is_visible_where_nan_is_ignored() -> None:
    body = TREE.replace(
        "part[threadIdx.x] += part[threadIdx.x + half]",
        "part[threadIdx.x] = fmaxf(part[threadIdx.x], part[threadIdx.x + half])",
    )
    x = ramp(1024)
    assert_right(tree(body), x.reshape(4, 256).amax(1), x)
    missing = tree(body.replace("        __syncthreads();\n", ""))
    assert_visible(missing, x.reshape(4, 256).amax(1), x)
    assert_visible(missing, x.flip(0).reshape(4, 256).amax(1), x.flip(0))


SHUFFLES = """
    float sum = 0;
    for (long long i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) sum += x[i];
    for (int by = 16; by > 0; by /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, by);
    __shared__ float part[8];
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
        sum = threadIdx.x < 8 ? part[threadIdx.x] : 0.0f;
        for (int by = 4; by > 0; by /= 2) sum += __shfl_down_sync(0xffffffffu, sum, by);
        if (threadIdx.x == 0) y[blockIdx.x] = sum;
    }
"""


def shuffles(blocks: int) -> Kernel:
    parameters = ("const float* x", "float* y", "long long n")
    return kernel(SHUFFLES, *parameters, shape=(f"{blocks}",), grid=f"{blocks}", threads=256)


def test_shuffle_reduction() -> None:
    x = torch.randn(5000)
    for got in [*in_all_orders(shuffles(3), x), emulate(shuffles(3), x, sanitize=True)]:
        torch.testing.assert_close(got.sum(), x.sum())


def test_four_million_elements_in_a_moment() -> None:
    x = torch.ones(1 << 22)
    emulate(shuffles(512), x[:1000].clone())  # builds it
    start = time.perf_counter()
    got = emulate(shuffles(512), x)
    assert time.perf_counter() - start < 3, "ten times what it takes"
    assert got.sum() == 1 << 22


@pytest.mark.parametrize(
    ("text", "lane"),
    [
        ("__shfl_sync(0xffffffffu, v, 3, 8)", lambda t: t // 8 * 8 + 3),
        ("__shfl_sync(0xffffffffu, v, threadIdx.x + 1)", lambda t: (t + 1) % 32),
        ("__shfl_up_sync(0xffffffffu, v, 3)", lambda t: t - 3 if t >= 3 else t),
        ("__shfl_down_sync(0xffffffffu, v, 3, 16)", lambda t: t + 3 if t % 16 < 13 else t),
        ("__shfl_xor_sync(0xffffffffu, v, 5)", lambda t: t ^ 5),
        ("__shfl_xor_sync(0xffffffffu, v, 12, 8)", lambda t: t ^ 12 if t & 8 else t),
    ],
)
@pytest.mark.parametrize("dtype", ["float", "double", "int"])
@pytest.mark.sampled
def test_shuffles(text: str, lane: object, dtype: str) -> None:
    assert callable(lane)
    types = {"float": torch.float32, "double": torch.float64, "int": torch.int32}
    body = f"    const {dtype} v = x[threadIdx.x]; y[threadIdx.x] = {text};"
    record = kernel(body, f"const {dtype}* x", f"{dtype}* y", dtype=types[dtype], threads=32)
    x = ramp(32, types[dtype])
    assert emulate(record, x).equal(x[[lane(t) for t in range(32)]])


def test_votes_and_parts_of_a_warp() -> None:
    body = """
    const int t = threadIdx.x;
    const unsigned half = t < 16 ? 0xffffu : 0xffff0000u;
    y[t] = __popc(__ballot_sync(half, x[t] > 4)) + 100 * __any_sync(half, x[t] > 20)
           + 200 * __all_sync(half, x[t] > 16);
    __syncwarp();
    y[t] += 1000 * __syncthreads_count(x[t] > 20);
    """
    record = kernel(body, "const int* x", "int* y", dtype=torch.int32, threads=32)
    assert_right(record, torch.tensor([12012] * 16 + [12316] * 16, dtype=torch.int32), ramp(32, torch.int32))


DOUBLE_BUFFER = """
    __shared__ __align__(16) float tile[2][64];
    float sum = 0;
    copy_async<4>(&tile[0][threadIdx.x], x + threadIdx.x, true);
    copy_async_commit();
    for (int step = 0; step < 5; ++step) {
        const int next = (step + 1) * 64 + threadIdx.x;
        if (step < 4) copy_async<4>(&tile[(step + 1) % 2][threadIdx.x], x + (next < n ? next : 0), next < n);
        copy_async_commit();
        copy_async_wait<1>();
        __syncthreads();
        sum += tile[step % 2][63 - threadIdx.x];
        __syncthreads();
    }
    copy_async_wait<0>();
    y[threadIdx.x] = sum;
"""


def double_buffer(body: str = DOUBLE_BUFFER) -> Kernel:
    before = primitives("copy_async")
    return kernel(body, "const float* x", "float* y", "int n", shape=("64",), before=before)


BUFFERED = torch.nn.functional.pad(ramp(300), (0, 20)).reshape(5, 64).flip(1).sum(0)


def test_asynchronous_copies() -> None:
    assert_right(double_buffer(), BUFFERED, ramp(300))


@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ("        copy_async_wait<1>();\n", ""),
        ("copy_async_wait<1>", "copy_async_wait<2>"),
        ("copy_async_wait<1>();\n        __syncthreads();", "copy_async_wait<1>();"),
        ("63 - threadIdx.x];\n        __syncthreads();", "63 - threadIdx.x];"),
        ("(step + 1) % 2", "step % 2"),
    ],
    ids=["no wait", "wait for too few", "no barrier after it", "no barrier before the next", "into what is read"],
)
def test_wrong_asynchronous_copies_are_visible(there: str, instead: str) -> None:
    assert there in DOUBLE_BUFFER
    assert_visible(double_buffer(DOUBLE_BUFFER.replace(there, instead)), BUFFERED, ramp(300))


def test_a_copy_that_nobody_waits_for_is_an_error() -> None:
    late = DOUBLE_BUFFER + "    copy_async<4>(&tile[0][threadIdx.x], x + threadIdx.x, true);\n"
    with pytest.raises(EmulationError, match="copies are on their way that nobody waited for in f, block"):
        emulate(double_buffer(late), ramp(300))


def test_misaligned_copy_is_an_error() -> None:
    with pytest.raises(EmulationError, match=r"copy_async<8>: a misaligned address in f, block \(0, 0, 0\), thread"):
        emulate(double_buffer(DOUBLE_BUFFER.replace("<4>", "<8>")), ramp(300))


MMA = """
    const int group = threadIdx.x / 4, member = threadIdx.x % 4;
    const REAL* a = x;
    const REAL* b = x + 128;
    REAL d[4] = {0, 0, 0, 0};
    const PART own_a[4] = {ROUND(a[group * 8 + member]), ROUND(a[(group + 8) * 8 + member]),
                           ROUND(a[group * 8 + member + 4]), ROUND(a[(group + 8) * 8 + member + 4])};
    const PART own_b[2] = {ROUND(b[member * 8 + group]), ROUND(b[(member + 4) * 8 + group])};
    for (int again = 0; again < 2; ++again) MMA(d, own_a, own_b);
    for (int i = 0; i < 4; ++i) y[(group + i / 2 * 8) * 8 + member * 2 + i % 2] = d[i];
"""


def mma(real: str, part: str, rounded: str, names: tuple[str, ...]) -> Kernel:
    body = MMA.replace("REAL", real).replace("PART", part).replace("ROUND", rounded).replace("MMA", names[0])
    dtype = torch.float32 if real == "float" else torch.float64
    parameters = (f"const {real}* x", f"{real}* y")
    return kernel(body, *parameters, shape=("16", "8"), dtype=dtype, threads=32, before=primitives(*names))


def test_mma_f64_is_a_product() -> None:
    x = torch.randn(192, dtype=torch.float64)
    assert_right(
        mma("double", "double", "", ("mma_f64",)), 2 * x[:128].view(16, 8) @ x[128:].view(8, 8), x, tolerance=1e-14
    )


def test_mma_tf32_is_a_product_of_rounded_operands() -> None:
    x = torch.randn(192)
    record = mma("float", "unsigned", "round_tf32", ("mma_tf32", "round_tf32"))
    rounded = ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)  # ties away from zero
    a, b = rounded[:128].view(16, 8), rounded[128:].view(8, 8)
    assert_right(record, 2 * a @ b, x, tolerance=1e-6)
    assert not torch.allclose(emulate(record, x), 2 * x[:128].view(16, 8) @ x[128:].view(8, 8), rtol=1e-6, atol=1e-6)


MMA_HALVES = """
    const int group = threadIdx.x / 4, member = threadIdx.x % 4;
    const unsigned* a = reinterpret_cast<const unsigned*>(x);    // 16x16 row-major, then 16x8 column-major, in pairs
    const unsigned* b = a + 128;
    float d[4] = {0, 0, 0, 0};
    const unsigned own_a[4] = {a[group * 8 + member], a[(group + 8) * 8 + member],
                               a[group * 8 + member + 4], a[(group + 8) * 8 + member + 4]};
    const unsigned own_b[2] = {b[group * 8 + member], b[group * 8 + member + 4]};
    for (int again = 0; again < 2; ++again) MMA(d, own_a, own_b);
    for (int i = 0; i < 4; ++i) y[(group + i / 2 * 8) * 8 + member * 2 + i % 2] = d[i];
"""


@pytest.mark.parametrize(("element", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_mma_of_halves_is_a_product(element: str, dtype: torch.dtype) -> None:
    x = torch.randn(384).to(dtype)
    parameters = (f"const {element}* x", "float* y")
    before = primitives(f"mma_{element}", "elements")
    record = kernel(
        MMA_HALVES.replace("MMA", f"mma_{element}"), *parameters, shape=("16", "8"), threads=32, before=before
    )
    wide = x.float()
    assert_right(record, 2 * wide[:256].view(16, 16) @ wide[256:].view(8, 16).T, x, tolerance=1e-5)


def test_operand_that_is_not_rounded_is_an_error() -> None:
    record = mma("float", "unsigned", "__float_as_uint", ("mma_tf32",))
    with pytest.raises(EmulationError, match="is not rounded to tf32"):
        emulate(record, torch.full((192,), 1 / 3))
    emulate(record, torch.full((192,), 1.5))


CLUSTER = (
    DYNAMIC
    + """
    float* own = reinterpret_cast<float*>(shared_memory);
    own[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
    cluster_barrier();
    if (threadIdx.x == 0) {
        float sum = 0;
        for (unsigned rank = 0; rank < 4; ++rank)
            for (int i = 0; i < 64; ++i) sum += cluster_load(own + i, rank);
        y[blockIdx.x] = sum * (cluster_rank() + 1);
    }
    cluster_barrier();
"""
)


def cluster(body: str = CLUSTER, shared: int = 256) -> Kernel:
    before, parameters = primitives("cluster"), ("const float* x", "float* y")
    return kernel(body, *parameters, shape=("n // 64",), grid="n // 64", shared=shared, cluster=4, before=before)


def test_cluster_reduction() -> None:
    want = ramp(512).reshape(2, 256).sum(1, keepdim=True) * ramp(4)
    assert_right(cluster(), want.flatten(), ramp(512))


def test_cluster_without_its_barriers() -> None:
    first, last = (CLUSTER.index("    cluster_barrier();\n"), CLUSTER.rindex("    cluster_barrier();\n"))
    for at in (first, last):
        body = CLUSTER[:at] + CLUSTER[at:].replace("    cluster_barrier();\n", "", 1)
        with pytest.raises(EmulationError, match="have exited") if at == last else pytest.raises(AssertionError):
            for got in in_all_orders(cluster(body), ramp(512)):
                assert not got.isnan().any()


def test_cluster_refuses_static_shared_memory() -> None:
    with pytest.raises(EmulationError, match="static shared"):
        emulate(cluster("    __shared__ float part[2]; part[0] = 1; y[blockIdx.x] = part[0];"), ramp(512))


def halves() -> Tensor:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits


@pytest.mark.parametrize(("element", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_halves_widen_and_narrow_as_in_torch(element: str, dtype: torch.dtype) -> None:
    before = primitives("elements")
    x = halves().view(dtype)
    body = "    const int i = blockIdx.x * 64 + threadIdx.x; y[i] = widened(x[i]);"
    wide = kernel(body, f"const {element}* x", "float* y", grid="n // 64", before=before)
    assert emulate(wide, x).equal(x.float()) or torch.allclose(emulate(wide, x), x.float(), 0, 0, equal_nan=True)

    body = f"    const int i = blockIdx.x * 64 + threadIdx.x; y[i] = narrow_to<{element}>::of(x[i]);"
    narrow = kernel(body, "const float* x", f"{element}* y", grid="n // 64", before=before, dtype=dtype)
    for factor in (1.0, 1 + 2**-12, 1 + 2**-11, 1 + 2**-9, 1 + 2**-8, 3.7, 1e-4):
        z = x.float() * factor
        z = torch.cat([z, torch.randn(64)])
        torch.testing.assert_close(emulate(narrow, z), z.to(dtype), rtol=0, atol=0, equal_nan=True)


def test_names_of_a_kernel_may_be_ours() -> None:
    before = "struct Warp { int index; };\nstruct Same {};\n__device__ int product(int a) { return a; }"
    body = "    Warp index; index.index = product(3); y[threadIdx.x] = index.index;"
    assert emulate(kernel(body, "const float* x", "float* y", before=before), ramp(64)).equal(torch.full((64,), 3.0))


def has_a_meaning(*names: str) -> None:
    body = "    y[threadIdx.x] = 1;"
    emulate(kernel(body, "const float* x", "float* y", threads=32, before=primitives(*names)), ramp(32))


def test_every_primitive_has_a_meaning_here() -> None:
    names = sorted(PRIMITIVES.keys() - UNTOUCHED)
    for begin in range(0, len(names), 24):
        has_a_meaning(*names[begin : begin + 24])


@pytest.mark.slow
def test_every_primitive_has_a_meaning_by_itself() -> None:
    for name in PRIMITIVES.keys() - UNTOUCHED:
        has_a_meaning(name)


def test_shared_variables_of_templates_are_poisoned_at_every_block() -> None:
    before = """
template <int N> __device__ float stale() {
    __shared__ float part[N];
    const float found = part[0];
    __syncthreads();
    part[0] = 1;
    return found;
}
"""
    body = "    __shared__ float other; other = 1; y[blockIdx.x] = stale<4>();"
    record = kernel(body, "const float* x", "float* y", shape=("3",), grid="3", threads=1, before=before)
    got = emulate(record, ramp(1))  # whose poisons take turns
    assert got[0].isnan() and got[1] > 3e38 and got[2] < -1e38


def test_last_block_done() -> None:
    """Two launches and a counter: scratch starts as NaN, blocks come in any order, the last one adds up."""
    body = """
    if (threadIdx.x == 0) {
        part[blockIdx.x] = x[blockIdx.x];
        __threadfence();
        if (atomicInc(count, gridDim.x - 1) == gridDim.x - 1) {
            float sum = 0;
            for (int i = 0; i < gridDim.x; ++i) sum += part[i];
            y[0] = sum;
        }
    }
    """
    record = kernel(body, "const float* x", "float* y", "float* part", "unsigned* count", shape=(), grid="n")
    clear = 'extern "C" __global__ void clear(unsigned* count) { if (threadIdx.x == 0) *count = 0; }\n'
    launches = (Launch("clear", (Argument("pointer", "count"),), ("1", "1", "1"), 32), *record.launches)
    scratch = (Array("part", ("n",), torch.float32), Array("count", ("1",), torch.int32))
    both = replace(record, source=clear + record.source, scratch=scratch, launches=launches)
    assert_right(both, ramp(40).sum(), ramp(40))
