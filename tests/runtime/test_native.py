"""CPU kernels: compiled by the system's compiler, cached, called with raw pointers in PyTorch's own threads."""

from __future__ import annotations

import copy
import os
import pickle
import re
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fusewright
from fusewright import doctor
from fusewright.errors import UnsupportedError
from fusewright.kernel import Argument, Array, Kernel, Launch
from fusewright.runtime import cache, compiler
from fusewright.runtime.native import GRAIN, NativeLauncher, launcher
from fusewright.runtime.nvrtc import KernelError
from fusewright.runtime.operators import operator

SOURCE = """
// y = x * w + the number of threads that the call was given, where that is asked for; x is (N, C) and w is (C).
extern "C" void blend(const float* x, const float* w, float* y, long long rows, int columns, int threads) {
#pragma omp parallel for num_threads(threads)
    for (long long row = 0; row < rows; ++row)
        for (int c = 0; c < columns; ++c) y[row * columns + c] = x[row * columns + c] * w[c];
}
extern "C" void count(float* y, int threads) { *y = threads; }
"""
HEADER = "import torch\nimport torch.nn.functional as F\n\n\n"


def blend(**changes: Any) -> Kernel:
    pointers = tuple(Argument("pointer", name) for name in ("x", "w", "y"))
    arguments = (*pointers, Argument("long", "N"), Argument("int", "C"), Argument("threads", "N * C"))
    record: dict[str, Any] = {
        "name": "fused_blend",
        "source": SOURCE,
        "operands": ("x", "w"),
        "layouts": ("contiguous", "contiguous"),
        "sizes": (("N", 0, 0), ("C", 0, 1)),
        "output": Array("y", ("N", "C"), torch.float32),
        "scratch": (),
        "launches": (Launch("blend", arguments, ("N", "C", "1")),),
        "reference": HEADER + "def reference(x, w):\n    return x * w\n",
        "dtypes": (torch.float32, torch.float32),
        "shapes": (("N", "C"), ("C",)),
        "target": "cpu",
    }
    return Kernel(**record | changes)


def test_kernels_that_differ_by_their_number_are_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    x, w = torch.rand(3, 5), torch.rand(5)
    for name in ("fused_blend", "fused_blend_2", "fused_blend_30"):
        source, launch = SOURCE.replace("blend(", f"{name}("), replace(blend().launches[0], entry=name)
        run = launcher(blend(name=name, source=source, launches=(launch,)))
        torch.testing.assert_close(run(x, w), x * w)
    assert len(list((tmp_path / "cache").rglob("*.so"))) == 1


def counting(work: str) -> Kernel:
    """A kernel whose output is the number of threads it was called with."""
    arguments = (Argument("pointer", "y"), Argument("threads", work))
    return blend(output=Array("y", ("1",), torch.float32), launches=(Launch("count", arguments),))


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def operands() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 3), torch.randn(3)


def libraries(directory: Path) -> list[Path]:
    return sorted(directory.glob("kernels/*.so"))


# -- compiling -------------------------------------------------------------------------------------------------------


def test_compiled_once(directory: Path, operands: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = operands
    torch.testing.assert_close(launcher(blend())(x, w), x * w)
    assert len(libraries(directory)) == 1
    monkeypatch.setattr(compiler, "_compiled", lambda *_: pytest.fail("compiled again"))
    torch.testing.assert_close(launcher(blend())(x, w), x * w)


def test_key_has_all_that_code_depends_on(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.compile(SOURCE)
    monkeypatch.setattr(compiler, "processor", lambda: "another processor")
    compiler.compile(SOURCE)
    assert len(libraries(directory)) == 2
    compiler.compile(SOURCE + "\n")
    assert len(libraries(directory)) == 3
    found = compiler.compiler()
    assert found.version in found.identity and all(flag in found.identity for flag in found.flags)


def test_processor_is_described() -> None:
    text = compiler.processor()
    if sys.platform == "linux":
        assert re.search(r"^(flags|Features)\s*:", text, re.MULTILINE)


@pytest.mark.parametrize("damage", ["flipped", "cut", "replaced", "link"])
def test_tampered_libraries_are_not_loaded(directory: Path, operands: tuple[Tensor, Tensor], damage: str) -> None:
    x, w = operands
    launcher(blend())(x, w)
    (path,) = libraries(directory)
    content = path.read_bytes()
    other = compiler.compile(SOURCE.replace("* w[c]", "- w[c]"))
    if damage == "flipped":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "replaced":
        path.write_bytes(content[:32] + other)
    else:
        moved = directory / "elsewhere"
        path.rename(moved)
        path.symlink_to(moved)
    torch.testing.assert_close(launcher(blend())(x, w), x * w)
    assert damage == "link" or path.read_bytes() == content


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_directory_that_others_can_write_is_not_used(
    directory: Path, operands: tuple[Tensor, Tensor], mode: int
) -> None:
    (directory / "kernels").mkdir(parents=True)
    (directory / "kernels").chmod(mode)
    x, w = operands
    torch.testing.assert_close(launcher(blend())(x, w), x * w)
    assert not libraries(directory)


def test_what_another_user_owns_is_not_used(
    directory: Path, operands: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = operands
    launcher(blend())(x, w)
    (path,) = libraries(directory)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    build, built = compiler._compiled, []
    monkeypatch.setattr(compiler, "_compiled", lambda *given: built.append(given) or build(*given))
    torch.testing.assert_close(launcher(blend())(x, w), x * w)
    assert built and cache.load(path) is None


def test_kept_for_its_owner_alone(directory: Path) -> None:
    compiler.compile(SOURCE)
    assert stat.S_IMODE((directory / "kernels").stat().st_mode) == 0o700


def test_a_cache_that_cannot_be_made(
    tmp_path: Path, operands: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "file" / "cache"))
    x, w = operands
    torch.testing.assert_close(launcher(blend())(x, w), x * w)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler._compiler.cache_clear()
    with pytest.raises(UnsupportedError, match=r"compiled by a C\+\+ compiler, and there is none; install g\+\+ or"):
        compiler.compiler()


def test_the_doctor_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    (fact,) = (f for f in doctor.examine() if f.name == "CPU kernels")
    assert fact.ok and "PyTorch's threads" in fact.value
    monkeypatch.setenv("CXX", "no-such-compiler")
    (fact,) = (f for f in doctor.examine() if f.name == "CPU kernels")
    assert fact.ok is None and "no-such-compiler does not work" in fact.value


def test_a_compiler_that_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(UnsupportedError, match="false does not work"):
        compiler.compiler()


def test_source_that_does_not_compile() -> None:
    with pytest.raises(KernelError, match=r"kernel fused_wrong does not compile with \S+: kernel\.cpp:1:\d+: error"):
        compiler.compile("int f() { return missing; }", name="fused_wrong")


def test_no_room_to_compile_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(KernelError, match=r"kernel fused_x cannot be compiled in .*: .*No space left on device"):
        compiler.compile(SOURCE, name="fused_x")


def test_an_entry_that_is_not_there(operands: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(KernelError, match=r"kernel fused_blend cannot be loaded: .*other"):
        launcher(blend(launches=(Launch("other", ()),)))(*operands)


def test_flags_that_are_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler without -march=native gets portable flags."""
    monkeypatch.setattr(compiler, "NATIVE", ("-march=nobody",))
    monkeypatch.setattr(compiler, "WIDE", "-mnothing")
    compiler._compiler.cache_clear()
    try:
        assert not any("nobody" in flag or "nothing" in flag for flag in compiler.compiler().flags)
        assert compiler.compile(SOURCE)
    finally:
        compiler._compiler.cache_clear()


# -- calling ---------------------------------------------------------------------------------------------------------


def test_operator(operands: tuple[Tensor, Tensor]) -> None:
    x, w = operands
    run = operator(blend())
    assert isinstance(run.launch, NativeLauncher)
    torch.testing.assert_close(run(x, w), x * w)
    for tensors in ((x, w), (x.clone().requires_grad_(), w.clone().requires_grad_())):
        torch.library.opcheck(run.overload, tensors)
    assert pickle.loads(pickle.dumps(run)) is run and copy.deepcopy(run) is run
    w.requires_grad_()
    run(x, w).square().sum().backward()
    torch.testing.assert_close(w.grad, (2 * x * x * w).sum(0))


def test_the_kernel_runs_and_not_the_reference(operands: tuple[Tensor, Tensor]) -> None:
    run = operator(blend(reference=HEADER + "def reference(x, w):\n    raise AssertionError\n"))
    with torch.no_grad():
        run(*operands)
        run.overload(*operands)
        torch.compile(lambda *t: run(*t), backend="eager", fullgraph=True)(*operands)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "strided", "unaligned"])
def test_memory_of_operands(layout: str) -> None:
    x, w = torch.randn(6, 8), torch.randn(8)
    made = {
        "transposed": lambda: x.T.contiguous().T,
        "expanded": lambda: x[:1].expand(6, 8),
        "strided": lambda: torch.stack([x, x], -1)[..., 1],
        "unaligned": lambda: torch.frombuffer(bytearray(6 * 8 * 4 + 1), dtype=torch.float32, offset=1).view(6, 8),
    }[layout]()
    got = launcher(blend())(made, w)
    torch.testing.assert_close(got, made.clone() * w)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            (torch.ones(5, 3, dtype=torch.float64), torch.ones(3)),
            "was generated for torch.float32 x, not torch.float64",
        ),
        ((torch.ones(5, 3), torch.ones(4)), r"was generated for w of shape \(3,\); it was given float32 \(5, 3\), .*"),
        ((torch.ones(5, 3),), r"takes 2 tensors \(x, w\)"),
        ((torch.ones(5, 3, device="meta"), torch.ones(3)), "needs every operand on one cpu device"),
    ],
)
def test_refuses(tensors: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(KernelError, match=f"kernel fused_blend {message}"):
        launcher(blend())(*tensors)


def test_nothing_to_do() -> None:
    assert launcher(blend())(torch.empty(0, 3), torch.empty(3)).shape == (0, 3)


def test_little_work_stays_in_one_thread(operands: tuple[Tensor, Tensor]) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert launcher(counting(str(GRAIN)))(*operands).item() == 3
        assert launcher(counting(str(GRAIN - 1)))(*operands).item() == 1
    finally:
        torch.set_num_threads(before)


def test_two_threads_call_one_kernel() -> None:
    run, w = launcher(blend()), torch.randn(64)

    def work(seed: int) -> bool:
        x = torch.randn(300 + seed % 3, 64, generator=torch.Generator().manual_seed(seed))
        return all(torch.equal(run(x, w), x * w) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(16)))


def test_the_interpreter_goes_on() -> None:
    """While a kernel runs, other Python threads do."""
    text = (
        'extern "C" void spin(const float*, float* y, int) { for (volatile long i = 0; i < 300000000; ++i); *y = 1; }'
    )
    arguments = (*(Argument("pointer", n) for n in "xy"), Argument("threads", "1"))
    kernel = blend(source=text, output=Array("y", ("1",), torch.float32), launches=(Launch("spin", arguments),))
    run, ticks = launcher(kernel), 0
    run.load(0)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run, torch.ones(1, 1), torch.ones(1))
        while not done.done():
            ticks += 1
            time.sleep(0.001)
    assert ticks > 20


IN_A_PROCESS = """
import os, sys, torch
sys.path[:0] = {path!r}
from test_native import blend
from fusewright.runtime.native import launcher
torch.set_num_threads(3)
x = torch.ones(1000, 1000)
(x * 2).sum()
before = len(os.listdir("/proc/self/task"))
launcher(blend())(x, torch.ones(1000))
after = len(os.listdir("/proc/self/task"))
runtimes = {{line.split()[-1] for line in open("/proc/self/maps") if "omp" in os.path.basename(line.split()[-1])}}
print(before, after, len(runtimes))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_threads_are_those_of_pytorch() -> None:
    code = IN_A_PROCESS.format(path=[str(Path(__file__).parent)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    before, after, runtimes = map(int, done.stdout.split())
    assert before >= 3 and after == before and runtimes == 1


# -- falling back ------------------------------------------------------------------------------------------------------


def test_without_a_compiler_the_program_runs_on_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.AvgPool2d(4)).eval()
    x = torch.randn(2, 3, 34, 34)
    fast = fusewright.optimize(model, (x,), rewrite="always", verify=False, measure=False)
    plan = fusewright.explain(fast)
    assert not plan.kernels and "no-such-compiler does not work" in plan.no_kernels
    assert "CPU kernels need a C++ compiler" in str(plan).replace("\n", " ")
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_optimised_models_run_kernels() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(2)).eval()
    x = torch.randn(2, 3, 34, 34)
    fast = fusewright.optimize(model, (x,), kernels="always", verify=False, measure=False)
    plan = fusewright.explain(fast)
    assert plan.kernels and all(choice.path == "generated" for choice in plan.kernels) and not plan.no_kernels
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert pickle.loads(pickle.dumps(fast))(x).equal(fast(x))
