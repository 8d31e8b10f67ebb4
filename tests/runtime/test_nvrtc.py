"""Compiling without a GPU: what is built, what is kept of it, what is refused, and who waits for whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fusewright.errors import FusewrightError, UnsupportedError
from fusewright.runtime import cache, nvrtc

SCALE = """
extern "C" __global__ void scale(const float* x, float* y, float factor, int count) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] = factor * x[i];
}
"""
# 200 live values per thread, for which 1024 threads have 64 registers each.
SPILLING = """
extern "C" __global__ void __launch_bounds__(1024) spilling(const float* x, float* y) {
    float held[200];
#pragma unroll
    for (int i = 0; i < 200; ++i) held[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 200; ++i) sum += held[i] * held[199 - i] * held[(i * 7) % 200];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 200; ++i) sum = sum * held[i] + held[(i * 3) % 200];
    y[threadIdx.x] = sum;
}
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(path))
    return path


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The architectures that NVRTC itself was asked for, in order."""
    asked: list[str] = []
    inner = nvrtc._compiled

    def counted(source: str, arch: str, name: str) -> bytes:
        asked.append(arch)
        return inner(source, arch, name)

    monkeypatch.setattr(nvrtc, "_compiled", counted)
    return asked


def kept(root: Path) -> Path:
    (found,) = (root / "kernels").iterdir()
    return found


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_resources(arch: str) -> None:
    found = nvrtc.resources(nvrtc.compile(SCALE + SPILLING, arch))
    assert found.keys() == {"scale", "spilling"}
    assert 4 <= found["scale"].registers <= 24
    assert found["scale"].stack == 0
    assert found["spilling"].registers == 64
    assert found["spilling"].stack > 100


def test_an_error_names_the_kernel_and_its_first_line() -> None:
    with pytest.raises(FusewrightError) as caught:
        nvrtc.compile("__device__ void f() {\n  int x = y;\n  z = 1;\n}", "sm_90", name="fused_sum")
    message = str(caught.value)
    assert message.startswith("kernel fused_sum does not compile for sm_90: ")
    assert 'fused_sum(2): error: identifier "y" is undefined' in message
    assert "\n" not in message


def test_an_unknown_architecture() -> None:
    with pytest.raises(FusewrightError, match="kernel demo does not compile for sm_12345"):
        nvrtc.compile(SCALE, "sm_12345", name="demo")


@pytest.mark.parametrize("missing", ["cuda.core", "cuda.bindings"])
def test_without_nvrtc(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc._toolchain.cache_clear()
    monkeypatch.setitem(sys.modules, missing, None)
    if missing == "cuda.core":
        monkeypatch.setitem(sys.modules, "cuda.core.experimental", None)
    with pytest.raises(UnsupportedError, match=r"NVRTC, which is not available .*; pip install"):
        nvrtc.compile(SCALE, "sm_90")


FIRST_OF_EIGHT = """
from concurrent.futures import ThreadPoolExecutor
from fusewright.runtime import nvrtc
with ThreadPoolExecutor(8) as pool:
    print(len(set(pool.map(lambda _: nvrtc.version(), range(8)))))
"""


def test_first_met_by_several_threads_at_once() -> None:
    ran = subprocess.run([sys.executable, "-c", FIRST_OF_EIGHT], capture_output=True, text=True)
    assert ran.stdout == "1\n", ran.stderr


# -- the cache -----------------------------------------------------------------------------------------------------


def test_built_once(root: Path, builds: list[str]) -> None:
    first = nvrtc.compile(SCALE, "sm_90")
    assert nvrtc.compile(SCALE, "sm_90") == first
    assert builds == ["sm_90"]
    assert kept(root).stat().st_uid == os.getuid()


def test_everything_that_matters_is_in_the_key(builds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc.compile(SCALE, "sm_90")
    nvrtc.compile(SCALE, "sm_80")
    nvrtc.compile(SCALE + " ", "sm_90")
    monkeypatch.setitem(nvrtc.OPTIONS, "fma", False)
    nvrtc.compile(SCALE, "sm_90")
    monkeypatch.setattr(nvrtc, "version", lambda: "99.0")
    nvrtc.compile(SCALE, "sm_90")
    assert builds == ["sm_90", "sm_80", "sm_90", "sm_90", "sm_90"]


@pytest.mark.parametrize("harm", ["edited", "cut", "empty", "link"])
def test_a_tampered_file_is_built_again(harm: str, root: Path, tmp_path: Path, builds: list[str]) -> None:
    first = nvrtc.compile(SCALE, "sm_90")
    path = kept(root)
    content = bytearray(path.read_bytes())
    if harm == "edited":
        content[1000] ^= 1
    path.write_bytes({"edited": bytes(content), "cut": bytes(content[:-1]), "empty": b""}.get(harm, bytes(content)))
    if harm == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    assert nvrtc.compile(SCALE, "sm_90") == first
    assert nvrtc.compile(SCALE, "sm_90") == first
    assert len(builds) == 2
    assert not path.is_symlink()


def test_another_users_file_is_not_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc.compile(SCALE, "sm_90")
    assert cache.load(kept(root)) is not None
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert cache.load(kept(root)) is None


@pytest.mark.parametrize("unsafe", ["link", "writable"])
def test_an_unsafe_directory_is_neither_read_nor_written(
    unsafe: str, root: Path, tmp_path: Path, builds: list[str]
) -> None:
    (tmp_path / "outside").mkdir()
    cache.cache_directory()
    if unsafe == "link":
        (root / "kernels").symlink_to(tmp_path / "outside")
    else:
        (root / "kernels").mkdir()
        (root / "kernels").chmod(0o777)
    assert nvrtc.compile(SCALE, "sm_90") == nvrtc.compile(SCALE, "sm_90")
    assert len(builds) == 2
    assert not list((tmp_path / "outside").iterdir())
    assert not list((root / "kernels").iterdir())


def test_a_directory_that_cannot_be_written(root: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(cache, "write_atomic", full)
    assert nvrtc.compile(SCALE, "sm_90") == nvrtc.compile(SCALE, "sm_90")
    assert len(builds) == 2


# -- waiting -------------------------------------------------------------------------------------------------------


def test_threads_wait_for_the_first(tmp_path: Path) -> None:
    calls: list[int] = []

    def build() -> bytes:
        calls.append(1)
        time.sleep(0.2)
        return b"code"

    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(cache.built(tmp_path / "a", build))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [b"code"] * 4
    assert len(calls) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a"]  # no lock file stays


@pytest.fixture
def builder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, in the middle of building the file ``a``."""
    text = (
        "import fcntl, os, sys, time; handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "fcntl.flock(handle, fcntl.LOCK_EX); print('locked', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", text, tmp_path / ".a.lock"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()


def test_a_killed_builder_holds_nobody_up(tmp_path: Path, builder: subprocess.Popen[str]) -> None:
    os.kill(builder.pid, signal.SIGKILL)
    builder.wait()
    assert (tmp_path / ".a.lock").exists()
    before = time.monotonic()
    assert cache.built(tmp_path / "a", lambda: b"code", timeout=30.0) == b"code"
    assert time.monotonic() - before < 5.0


@pytest.mark.usefixtures("builder")
def test_a_slow_builder_is_waited_for_only_so_long(tmp_path: Path) -> None:
    before = time.monotonic()
    assert cache.built(tmp_path / "a", lambda: b"code", timeout=0.3) == b"code"
    assert 0.3 <= time.monotonic() - before < 5.0
    assert cache.load(tmp_path / "a") == b"code"


def test_a_failed_build_leaves_no_lock(tmp_path: Path) -> None:
    def fail() -> bytes:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cache.built(tmp_path / "a", fail)
    assert cache.built(tmp_path / "a", lambda: b"code", timeout=0.0) == b"code"
