"""Launching: through a driver that runs on the CPU, through a stand-in for NVIDIA's library, and on a GPU."""

from __future__ import annotations

import ctypes
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_driver import BLEND, ENTRIES, FakeDriver, at, blend, rows
from torch import Tensor
from torch.utils.benchmark import Timer

from fusewright.errors import FusewrightError, UnsupportedError
from fusewright.kernel import Argument, Array, evaluate
from fusewright.runtime import cache, driver, launch, nvrtc
from fusewright.runtime.launch import Launcher


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path_factory.getbasetemp() / "kernels"))


def expected(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x) * w * w


def operands(n: int = 5, c: int = 3, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, c, generator=generator).to(device), torch.randn(c, generator=generator).to(device)


def test_expressions() -> None:
    sizes = {"N": 7, "C": 3}
    assert evaluate("ceil_div(N * C, 4) + min(N, C, 2) - max(1, N // 2)", sizes) == 6 + 2 - 3
    with pytest.raises(NameError):
        evaluate("len('abc')", sizes)


# -- what is launched ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (129, 7), (64, 130)])
def test_one_launch(shape: tuple[int, int]) -> None:
    fake = FakeDriver()
    run = Launcher(blend(), fake)
    x, w = operands(*shape)
    for _ in range(2):
        torch.testing.assert_close(run(x, w), expected(x, w))
    grid = (-(-x.numel() // 128), 1, 1)
    assert fake.launches == [("blend", 7 << 32, grid, 128, 0)] * 2
    assert len(fake.loads) == 1


def test_two_launches_with_scratch() -> None:
    fake = FakeDriver()
    x = torch.randn(9, 5, dtype=torch.float64)
    torch.testing.assert_close(Launcher(rows(), fake)(x), (x * x).sum(1))
    assert [entry for entry, *_ in fake.launches] == ["square", "sum_rows"]
    assert sorted(fake.functions) == [("square", 57024, 1), ("sum_rows", 0, 1)]


def test_several_results() -> None:
    """In the order that the kernel says, whatever else it allocates."""
    squares = rows().scratch
    kernel = replace(rows(), also=squares, scratch=(Array("unused", ("7",), torch.float32),))
    x = torch.randn(9, 5, dtype=torch.float64)
    torch.testing.assert_close(Launcher(kernel, FakeDriver())(x), ((x * x).sum(1), x * x))


def test_the_number_of_a_kernel_is_not_in_what_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that differ by it alone are built once."""
    built: list[str] = []
    monkeypatch.setattr(nvrtc, "compile", lambda source, arch, *, name: built.append(source) or b"")
    fake = FakeDriver()
    monkeypatch.setitem(ENTRIES, "fused_blend", ENTRIES["blend"])
    source = BLEND.replace("blend(", "fused_blend_12(")
    launches = (replace(blend().launches[0], entry="fused_blend_12"),)
    run = Launcher(blend(name="fused_blend_12", source=source, launches=launches), fake)
    x, w = operands()
    torch.testing.assert_close(run(x, w), expected(x, w))
    assert built == [BLEND.replace("blend(", "fused_blend(")] and fake.functions == [("fused_blend", 0, 1)]


@pytest.mark.parametrize("name", ["int_8", "main_1", "fused_2", "mine_20", "fused_blend"])
def test_a_name_that_somebody_chose_is_what_is_built(name: str) -> None:
    """Without its number it might be a word of C++."""
    kernel = blend(name=name, source=BLEND.replace("blend(", f"{name}("))
    assert kernel.unnumbered is kernel


def test_a_new_output_every_time() -> None:
    run = Launcher(blend(), FakeDriver())
    x, w = operands()
    first, second = run(x, w), run(x, 2 * w)
    torch.testing.assert_close(first, expected(x, w))
    torch.testing.assert_close(second, expected(x, 2 * w))


def test_operands_are_made_dense_and_aligned() -> None:
    run = Launcher(blend(), FakeDriver())
    x, w = operands(6, 4)
    wide = torch.randn(6, 8)
    shifted = torch.randn(25)[1:]
    assert shifted.data_ptr() % 16 == 4
    for strange in (x.t().contiguous().t(), wide[:, ::2], wide[:, :4], shifted.view(6, 4), x[:1].expand(6, 4)):
        torch.testing.assert_close(run(strange, w), expected(strange, w))
    torch.testing.assert_close(run(x, w[:1].expand(4)), expected(x, w[:1]))
    torch.testing.assert_close(run(x, w.flip(0)[::1]), expected(x, w.flip(0)))


def seen_addresses(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Where each launch's pointers lead, without running it."""
    seen: list[list[int]] = []

    def start(*given: Any) -> tuple[SimpleNamespace, Callable[[], int]]:
        parameters = given[4]
        return SimpleNamespace(), lambda: bool(seen.append([at(cell, ctypes.c_uint64)[0] for cell in parameters]))

    monkeypatch.setattr(fake, "start", start)
    return seen


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_channels_last(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    seen = seen_addresses(fake, monkeypatch)
    kernel = blend(
        operands=("x",), layouts=("channels_last",), dtypes=(), shapes=(), launches=(
            replace(blend().launches[0], arguments=(Argument("pointer", "x"),)),
        )
    )  # fmt: skip
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    x = torch.randn(shape).contiguous(memory_format=last)
    run = Launcher(kernel, fake)
    run(x)
    assert seen == [[x.data_ptr()]]  # as it is
    held: list[Tensor] = []
    clone = Tensor.clone
    monkeypatch.setattr(Tensor, "clone", lambda t, **how: held.append(clone(t, **how)) or held[-1])
    run(x.contiguous())
    assert seen[1] == [held[0].data_ptr()]
    assert held[0].is_contiguous(memory_format=last)
    with pytest.raises(FusewrightError, match=r"kernel fused_blend needs x in channels_last format; .* \(2, 3, 4\)"):
        run(torch.randn(2, 3, 4))


def test_numbers_keep_their_width_and_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, seen = FakeDriver(), []

    def start(*given: Any) -> tuple[SimpleNamespace, Callable[[], int]]:
        first, second = given[4]
        return SimpleNamespace(), lambda: bool(
            seen.append((at(first, ctypes.c_int32)[0], at(second, ctypes.c_int64)[0]))
        )

    monkeypatch.setattr(fake, "start", start)
    arguments = (Argument("int", "0 - N * 400000000"), Argument("long", "0 - N * 4000000000"))
    run = Launcher(blend(launches=(replace(blend().launches[0], arguments=arguments),)), fake)
    run(*operands(5))
    assert seen == [(-2_000_000_000, -20_000_000_000)]
    with pytest.raises(FusewrightError, match=r"counts 0 - N .* in 32 bits, it is -2400000000 for N=6, C=3"):
        run(*operands(6))


def test_what_is_counted_in_32_bits_must_fit() -> None:
    run = Launcher(replace(blend(), counts=("N * 536870912",)), FakeDriver())
    torch.testing.assert_close(run(*operands(3)), expected(*operands(3)))
    with pytest.raises(FusewrightError, match=r"counts N \* 536870912 in 32 bits; it was given float32 \(4, 3\)"):
        run(*operands(4))


def test_empty_tensors() -> None:
    fake = FakeDriver()
    run = Launcher(blend(), fake)
    assert run(torch.empty(0, 3), torch.ones(3)).shape == (0, 3)
    assert not fake.launches
    with pytest.raises(FusewrightError, match=r"kernel fused_square_sum reads an empty tensor; .*float64 \(4, 0\)"):
        Launcher(rows(), fake)(torch.empty(4, 0, dtype=torch.float64))


def test_a_launch_without_blocks_is_left_out() -> None:
    first, second = rows().launches
    fake = FakeDriver()
    run = Launcher(rows(launches=(replace(first, grid=("N - 1", "1", "1")), second)), fake)
    run(torch.ones(1, 2, dtype=torch.float64))
    assert [entry for entry, *_ in fake.launches] == ["sum_rows"]


# -- what is refused -----------------------------------------------------------------------------------------------

X, W = operands()
REFUSED: dict[str, tuple[tuple[Tensor, ...], str]] = {
    "count": ((X,), r"takes 2 tensors \(x, w\); it was given float32 \(5, 3\)"),
    "none": ((), r"takes 2 tensors \(x, w\); it was given nothing"),
    "dtype": ((X, W.double()), r"for torch.float32 w, not torch.float64; .*float32 \(5, 3\), float64 \(3,\)"),
    "shape": ((X, W[:2]), r"was generated for w of shape \(3,\); it was given float32 \(5, 3\), float32 \(2,\)"),
    "rank": ((X[0], W), r"reads C from dimension 1 of x"),
    "more": ((X[None], W), r"was generated for x of shape \(1, 5\)"),
    "device": ((X, W.to("meta")), r"needs every operand on one cpu device, w is on meta"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    tensors, message = REFUSED[case]
    fake = FakeDriver()
    with pytest.raises(FusewrightError, match=message) as caught:
        Launcher(blend(), fake)(*tensors)
    assert str(caught.value).startswith("kernel fused_blend ")
    assert not fake.launches


def test_a_status_names_kernel_launch_and_shapes() -> None:
    run = Launcher(blend(), FakeDriver(status=701))
    with pytest.raises(FusewrightError) as caught:
        run(*operands())
    assert str(caught.value) == (
        "kernel fused_blend could not launch blend (out of resources (701)); it was given float32 (5, 3), float32 (3,)"
    )


def test_an_older_device() -> None:
    with pytest.raises(UnsupportedError, match=r"fused_blend needs compute capability 9.0, device cpu:0 has 8.6"):
        Launcher(blend(needs=90), FakeDriver(capabilities=86))(*operands())


def test_another_architecture_than_the_one_it_is_written_for() -> None:
    """What only Hopper has is in no later device."""
    with pytest.raises(UnsupportedError, match=r"needs compute capability 9.0 and no other, device cpu:0 has 10.0"):
        Launcher(blend(needs=90, arch="sm_90a"), FakeDriver(capabilities=100))(*operands())
    fake = FakeDriver(capabilities=90)
    Launcher(blend(needs=90, arch="sm_90a"), fake)(*operands())
    assert fake.launches


def test_a_source_that_does_not_compile() -> None:
    with pytest.raises(FusewrightError, match=r"kernel fused_blend does not compile for sm_90: .*error"):
        Launcher(blend(source="nonsense"), FakeDriver())(*operands())


# -- threads, devices, many shapes ---------------------------------------------------------------------------------


def test_threads_do_not_share_arguments() -> None:
    fake = FakeDriver(before_launch=lambda: time.sleep(0.001))  # lets another thread in between packing and launch
    run = Launcher(blend(), fake)

    def work(seed: int) -> None:
        torch.manual_seed(seed)
        for _ in range(20):
            x, w = torch.randn(5, 3), torch.randn(3)
            torch.testing.assert_close(run(x, w), expected(x, w))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert len(fake.loads) == 1
    assert fake.attached >= 2  # the loading thread, and every one that launches


def test_loaded_once_by_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver()
    load = fake.load

    def slowly(cubin: bytes) -> int:
        time.sleep(0.05)
        return load(cubin)

    monkeypatch.setattr(fake, "load", slowly)
    run = Launcher(blend(), fake)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: run(*operands()), range(4)))
    assert len(fake.loads) == 1


def test_another_current_device_is_guarded() -> None:
    fake = FakeDriver()
    run = Launcher(blend(), fake)
    run(*operands())
    fake.guards.clear()
    run(*operands())
    assert fake.guards == []
    fake.device = 1
    run(*operands())
    assert fake.guards == [0]


def test_a_call_in_the_middle_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a finalizer makes it."""
    run, clone, inner = Launcher(blend(), FakeDriver()), Tensor.clone, []
    (x, w), (other, scale) = operands(), (2 * t for t in operands())

    def interrupted(t: Tensor, **how: Any) -> Tensor:
        inner.append(run(other, scale))
        return clone(t, **how)

    monkeypatch.setattr(Tensor, "clone", interrupted)
    torch.testing.assert_close(run(x, w.repeat_interleave(2)[::2]), expected(x, w))
    torch.testing.assert_close(inner, [expected(other, scale)])


def test_a_call_between_two_launches_of_another() -> None:
    """As when a finalizer makes it that runs once the first launch is under way."""
    fake, inner = FakeDriver(), []
    x, other = torch.ones(3, 4, dtype=torch.float64), 10 * torch.ones(3, 4, dtype=torch.float64)
    plain = fake.start

    def start(*how: Any) -> Any:
        configuration, go = plain(*how)

        def interrupted() -> int:
            status = go()
            if not inner:
                inner.append(None)
                inner[0] = run(other)
            return status

        return configuration, interrupted

    fake.start = start  # type: ignore[method-assign]
    run = Launcher(rows(), fake)
    torch.testing.assert_close(run(x), (x * x).sum(1))
    torch.testing.assert_close(inner, [(other * other).sum(1)])


def test_prepared_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "KEPT", 4)
    run = Launcher(blend(), FakeDriver())
    for n in range(1, 12):
        x, w = operands(n)
        torch.testing.assert_close(run(x, w), expected(x, w))
        assert len(run._prepared.calls) <= 4


def test_nothing_is_kept_alive() -> None:
    run = Launcher(rows(), FakeDriver())
    x = torch.ones(4, 6, dtype=torch.float64).t().contiguous().t()  # copied on the way in
    result = run(x)
    gone = [weakref.ref(x), weakref.ref(result)]
    del x, result
    assert [ref() for ref in gone] == [None, None]


# -- NVIDIA's interface, with a library in its place ----------------------------------------------------------------

STUB = r"""
#include <stdio.h>
#include <string.h>
static FILE* out;
static void* context;
#define LOG(...) (out = fopen(LOG_PATH, "a"), fprintf(out, __VA_ARGS__), fclose(out), 0)
int cuCtxGetCurrent(void** c) { *c = context; return 0; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal + 40; return 0; }
int cuDevicePrimaryCtxRetain(void** c, int device) { *c = (void*)0x700000001234; return LOG("retain %d\n", device); }
int cuCtxSetCurrent(void* c) { context = c; return LOG("context %p\n", c); }
int cuThreadExchangeStreamCaptureMode(int* mode) { int old = 9; LOG("mode %d\n", *mode); *mode = old; return 0; }
int cuModuleLoadData(void** module, const void* image) {
    if (memcmp(image, "\177ELF", 4)) return 200;
    *module = (void*)0x7000000000aa;
    return LOG("load\n");
}
int cuModuleGetFunction(void** function, void* module, const char* name) {
    *function = (void*)0x7000000000bb;
    return LOG("function %s of %p\n", name, module);
}
int cuFuncSetAttribute(void* function, int attribute, int value) {
    return value > 232448 ? 1 : LOG("attribute %d of %p = %d\n", attribute, function, value);
}
int cuGetErrorString(int status, const char** text) {
    if (status != 1) return 1;
    *text = "invalid argument";
    return 0;
}
int cuStreamBeginCapture_v2(void* stream, int mode) { return LOG("begin on %p, mode %d\n", stream, mode); }
int cuStreamEndCapture(void* stream, void** graph) {
    if (stream == (void*)0x700000000901) return 1;
    *graph = (void*)0x7000000000dd;
    return LOG("end on %p\n", stream);
}
int cuGraphInstantiateWithFlags(void** ready, void* graph, unsigned long long flags) {
    *ready = (void*)0x7000000000ee;
    return LOG("ready %p, flags %llu\n", graph, flags);
}
int cuGraphDestroy(void* graph) { return LOG("destroy %p\n", graph); }
int cuGraphLaunch(void* ready, void* stream) { return LOG("start %p on %p\n", ready, stream); }
int cuGraphExecDestroy(void* ready) { return LOG("free %p\n", ready); }
typedef struct {
    unsigned gx, gy, gz, bx, by, bz, shared;
    void* stream;
    const struct { int id; char pad[4]; int value; char rest[60]; }* attributes;
    unsigned count;
} CUlaunchConfig;
int cuLaunchKernelEx(const CUlaunchConfig* c, void* f, void** p, void** extra) {
    LOG("launch %p <%u %u %u, %u %u %u, %u> on %p, %lld %d, %p\n", f, c->gx, c->gy, c->gz, c->bx, c->by, c->bz,
        c->shared, c->stream, *(long long*)p[3], *(int*)p[4], (void*)extra);
    for (unsigned i = 0; i < c->count; ++i) LOG("with %d = %d\n", c->attributes[i].id, c->attributes[i].value);
    return c->gx > 1000;
}
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[driver.CudaDriver, Path]:
    """`CudaDriver` over a library that writes down its calls, serving CPU tensors."""
    log = tmp_path / "log"
    log.touch()
    source, library = tmp_path / "stub.c", tmp_path / "stub.so"
    source.write_text(STUB)
    subprocess.run(["gcc", "-shared", "-fPIC", f'-DLOG_PATH="{log}"', source, "-o", library], check=True)
    inner = ctypes.CDLL
    with monkeypatch.context() as patched:
        patched.setattr(ctypes, "CDLL", lambda name: inner(library))
        streams = iter(range(0x7000000000CC, 0x7000000000FF))
        patched.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: next(streams), raising=False)
        made = driver.CudaDriver()
    fake = FakeDriver()
    for name, value in {
        "kind": "cpu", "capability": fake.capability, "current": fake.current, "guard": fake.guard
    }.items():  # fmt: skip
        monkeypatch.setattr(made, name, value)
    return made, log


@pytest.mark.parametrize("quick", [True, False])
def test_the_handle_of_the_current_stream(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From PyTorch's quick way to it where there is one, else from its stream object."""
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    if quick:
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7 + index, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=70 + index))
    assert driver.current_stream()(1) == (8 if quick else 71)


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_what_a_call_allocates(layout: str, quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's short way where there is one, else the public one: the same tensor."""
    guards: Any = torch._C._dynamo.guards  # type: ignore[attr-defined]
    if not quick:
        monkeypatch.delattr(guards, "_empty_strided_cpu")
    made = launch.allocation((2, 3, 4, 5), torch.float16, layout, "cpu")()
    want = torch.empty((2, 3, 4, 5), dtype=torch.float16, memory_format=launch.FORMATS[layout][4])
    assert made.stride() == want.stride() and made.dtype == want.dtype and made.shape == want.shape


@pytest.mark.parametrize("quick", [True, False])
def test_the_current_device(quick: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_cuda_getDevice", raising=False)
    if quick:
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 3, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    assert driver.current_device()() == (3 if quick else 5)


def test_calls_of_the_library(stub: tuple[driver.CudaDriver, Path]) -> None:
    cuda, log = stub
    kernel = blend(launches=(replace(blend().launches[0], shared=100_000, cluster=16),))
    x, w = operands()
    run = Launcher(kernel, cuda)
    run(x, w)
    assert log.read_text().splitlines() == [
        "retain 40",
        "context 0x700000001234",
        "mode 2",
        "load",
        "mode 9",
        "function blend of 0x7000000000aa",
        "attribute 8 of 0x7000000000bb = 100000",
        "attribute 14 of 0x7000000000bb = 1",
        "launch 0x7000000000bb <1 1 1, 128 1 1, 100000> on 0x7000000000cc, 15 3, (nil)",
        "with 6 = 1",
    ]
    run(x, w)
    assert log.read_text().splitlines()[10:] == [  # a launch and nothing else, on the stream that is current by then
        "launch 0x7000000000bb <1 1 1, 128 1 1, 100000> on 0x7000000000cd, 15 3, (nil)",
        "with 6 = 1",
    ]


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_launches_begin_early_where_they_can(capability: int) -> None:
    fake = FakeDriver(capabilities=capability)
    Launcher(blend(), fake)(*operands())
    assert fake.early == [capability == 90]


def test_errors_of_the_library(stub: tuple[driver.CudaDriver, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, _ = stub
    with pytest.raises(FusewrightError, match=r"could not launch blend \(invalid argument \(1\)\); .*\(128128, 1\)"):
        Launcher(blend(), cuda)(*operands(128128, 1))
    greedy = blend(launches=(replace(blend().launches[0], shared=300_000),))
    with pytest.raises(
        FusewrightError, match=r"kernel fused_blend cannot be loaded on cpu:0: .*invalid argument \(1\)"
    ):
        Launcher(greedy, cuda)(*operands())
    monkeypatch.setattr(launch.nvrtc, "compile", lambda *_, **__: b"no code at all")
    with pytest.raises(FusewrightError, match=r"cannot be loaded .*unknown error \(200\)"):
        Launcher(blend(), cuda)(*operands())


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(UnsupportedError, match=r"the CUDA driver .* cannot be loaded"):
        driver.CudaDriver()


# -- on a GPU ------------------------------------------------------------------------------------------------------


def microseconds(call: Callable[[], object]) -> float:
    """The time a call takes on the host."""
    return 1e6 * float(Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=0.3).median)


def quickest(*calls: Callable[[], object]) -> list[float]:
    """The least of three times of each call, taken in turns: what else runs on the host only adds to them."""
    rounds = [[microseconds(call) for call in calls] for _ in range(3)]
    return [min(times) for times in zip(*rounds, strict=True)]


@pytest.mark.gpu
class TestGpu:
    @pytest.mark.parametrize("shape", [(1, 1), (5, 3), (129, 7), (1000, 1001)])
    def test_odd_sizes(self, shape: tuple[int, int]) -> None:
        x, w = operands(*shape, device="cuda")
        torch.testing.assert_close(Launcher(blend())(x, w), expected(x, w))

    def test_large_shared_memory_and_scratch(self) -> None:
        x = torch.randn(301, 77, dtype=torch.float64, device="cuda")
        torch.testing.assert_close(Launcher(rows())(x), (x * x).sum(1))

    def test_strange_operands(self) -> None:
        run = Launcher(blend())
        x, w = operands(6, 4, device="cuda")
        for strange in (x.t().contiguous().t(), torch.randn(25, device="cuda")[1:].view(6, 4), x[:1].expand(6, 4)):
            torch.testing.assert_close(run(strange, w), expected(strange, w))

    def test_the_current_stream(self) -> None:
        """What is queued before on the same stream is seen, though it takes a while."""
        run = Launcher(blend())
        x, w = operands(512, 512, device="cuda")
        run(x, w)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            moved = x + 1
            result = run(moved, w)
            later = result * 1
        stream.synchronize()
        torch.testing.assert_close(later, expected(x + 1, w))

    @pytest.mark.parametrize("warm", [True, False])
    def test_graph(self, warm: bool) -> None:
        """A captured call runs again on new content; even the first call may be captured."""
        run = Launcher(blend(name=f"fused_graph_{warm}"))
        x, w = operands(33, 5, device="cuda")
        if warm:
            run(x, w)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            result = run(x, w)
        for _ in range(2):
            x.normal_()
            graph.replay()
            torch.testing.assert_close(result, expected(x, w))

    def test_threads(self) -> None:
        run = Launcher(blend())

        def work(seed: int) -> None:
            generator = torch.Generator("cuda").manual_seed(seed)
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(200):
                    x = torch.randn(257, 9, device="cuda", generator=generator)
                    w = torch.randn(9, device="cuda", generator=generator)
                    torch.testing.assert_close(run(x, w), expected(x, w))

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(work, range(2)))

    def test_a_thread_that_has_no_context(self) -> None:
        run = Launcher(blend())
        x, w = operands(device="cuda")
        run(x, w)
        found: list[Tensor] = []
        thread = threading.Thread(target=lambda: found.append(run(x, w)))
        thread.start()
        thread.join()
        torch.testing.assert_close(found[0], expected(x, w))

    def test_refused(self) -> None:
        x, w = operands(device="cuda")
        with pytest.raises(FusewrightError, match=r"was generated for torch.float32 w, not torch.float64"):
            Launcher(blend())(x, w.double())
        with pytest.raises(FusewrightError, match="needs every operand on one cuda device, w is on cpu"):
            Launcher(blend())(x, w.cpu())

    def test_a_refused_launch_is_reported_and_harms_nothing(self) -> None:
        x, w = operands(device="cuda")
        bad = blend(launches=(replace(blend().launches[0], threads=2048),))
        with pytest.raises(
            FusewrightError, match=r"kernel fused_blend could not launch blend \(invalid argument \(1\)\)"
        ):
            Launcher(bad)(x, w)
        greedy = blend(launches=(replace(blend().launches[0], shared=1 << 20),))
        with pytest.raises(FusewrightError, match="kernel fused_blend cannot be loaded on cuda:0"):
            Launcher(greedy)(x, w)
        torch.testing.assert_close(Launcher(blend())(x, w), expected(x, w))

    def test_devices(self) -> None:
        if torch.cuda.device_count() < 2:
            pytest.skip("one device")
        run = Launcher(blend())
        for index in (1, 0, 1):  # the current device stays 0
            x, w = operands(device=f"cuda:{index}")
            result = run(x, w)
            assert result.device == x.device
            torch.testing.assert_close(result, expected(x, w))
        assert torch.cuda.current_device() == 0

    def test_overhead(self, capsys: pytest.CaptureFixture[str]) -> None:
        """At most 6 us over an ATen operation's call."""
        x, w = operands(8, 8, device="cuda")
        run = Launcher(blend())
        ours, aten = quickest(lambda: run(x, w), lambda: x * w)
        with capsys.disabled():
            print(f"\nlaunch {ours:.2f} us, x * w {aten:.2f} us, over it {ours - aten:.2f} us")
        assert ours - aten <= 6.0


def test_a_graph_is_captured_for_this_thread_alone(stub: tuple[driver.CudaDriver, Path]) -> None:
    made, log = stub
    made.begin_capture(0x7000000000CC)
    graph = made.end_capture(0x7000000000CC)
    made.start_graph(graph, 0x7000000000CD)
    with made.relaxed():
        made.free_graph(graph)
    assert log.read_text().splitlines() == [
        "begin on 0x7000000000cc, mode 1",
        "end on 0x7000000000cc",
        "ready 0x7000000000dd, flags 0",
        "destroy 0x7000000000dd",
        "start 0x7000000000ee on 0x7000000000cd",
        "mode 2",
        "free 0x7000000000ee",
        "mode 9",
    ]


def test_a_capture_that_failed_says_so(stub: tuple[driver.CudaDriver, Path]) -> None:
    with pytest.raises(nvrtc.KernelError, match="invalid argument"):
        stub[0].end_capture(0x700000000901)
