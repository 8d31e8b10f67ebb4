"""Which compiler is taken, with which flags, and in whose threads its code runs: compilers of several minds."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shutil import which

import pytest
import torch
from test_native import IN_A_PROCESS, blend, counting

import fusewright
from fusewright import doctor
from fusewright.errors import UnsupportedError
from fusewright.runtime import cache, compiler
from fusewright.runtime.native import GRAIN, launcher
from fusewright.runtime.nvrtc import KernelError

FAKE = """#!/bin/sh
for word in "$@"; do
    case "$word" in
{cases}
    esac
done
exec {real} "$@"
"""
REFUSED = """    {flag}) echo "error: unsupported option '{flag}'" >&2; exit 1;;"""
SAID = """    --version) echo "{said}"; exit 0;;"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    compiler._compiler.cache_clear()
    yield tmp_path / "bin"
    compiler._compiler.cache_clear()


def fake(directory: Path, name: str, *refused: str, said: str = "", real: str = "") -> str:
    """A compiler that does not know some flags, and may call itself something else; it comes first on no path."""
    directory.mkdir(exist_ok=True)
    cases = [REFUSED.format(flag=flag) for flag in refused] + ([SAID.format(said=said)] if said else [])
    path = directory / name
    path.write_text(FAKE.format(cases="\n".join(cases), real=real or which("g++")))
    path.chmod(0o755)
    return str(path)


def only(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compilers but those of the test's."""
    for tool in ("sh", "as", "ld"):
        (directory / tool).symlink_to(which(tool) or pytest.fail(f"{tool} is needed"))
    monkeypatch.setenv("PATH", str(directory))


def test_flags_of_this_machine() -> None:
    found = compiler.compiler()
    assert found.command[0] in compiler.COMMANDS and set(compiler.FLAGS) < set(found.flags)
    assert found.openmp and "-fopenmp" in found.flags and compiler.SIMD not in found.flags
    assert any(flag in found.flags for flag in compiler.NATIVE)


def test_without_openmp_in_one_thread(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Apple's compiler where no flag helps: vectors remain, and a sentence says what is missing."""
    monkeypatch.setenv("CXX", fake(directory, "c++", "-fopenmp", "-Xclang", said="Apple clang version 15.0.0"))
    found = compiler.compiler()
    assert not found.openmp and compiler.SIMD in found.flags and "-fopenmp" not in found.flags
    x, w = torch.randn(2000, 64), torch.randn(64)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        torch.testing.assert_close(launcher(blend())(x, w), x * w)
    finally:
        torch.set_num_threads(before)
    (fact,) = (f for f in doctor.examine() if f.name == "CPU kernels")
    assert fact.ok and "run in one thread" in fact.value and "set CXX to one that does, such as g++" in fact.value


def test_without_any_flag_of_its_own(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that knows nothing beyond C++17."""
    unknown = ("-fopenmp", "-fopenmp-simd", "-Xclang", *compiler.NATIVE, compiler.WIDE)
    monkeypatch.setenv("CXX", fake(directory, "c++", *unknown))
    assert compiler.compiler().flags == compiler.FLAGS
    x, w = torch.randn(7, 5), torch.randn(5)
    torch.testing.assert_close(launcher(blend())(x, w), x * w)


def test_openmp_behind_the_drivers_back(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's compiler: `-fopenmp` is refused alone and taken after `-Xclang`."""
    text = '#!/bin/sh\ncase "$*" in\n*"-Xclang -fopenmp"*) ;;\n*-fopenmp*) exit 1;;\nesac\n'
    text += 'for word in "$@"; do shift; [ "$word" = -Xclang ] || set -- "$@" "$word"; done\n'
    directory.mkdir()
    (directory / "c++").write_text(text + f'exec {which("g++")} "$@"\n')
    (directory / "c++").chmod(0o755)
    monkeypatch.setenv("CXX", str(directory / "c++"))
    found = compiler.compiler()
    assert found.openmp and found.flags[len(compiler.FLAGS) :][:2] == ("-Xclang", "-fopenmp")
    x, w = torch.randn(2000, 64), torch.randn(64)
    torch.testing.assert_close(launcher(blend())(x, w), x * w)


def test_the_one_that_shares_pytorchs_threads_is_preferred(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(directory, "c++", "-fopenmp", "-Xclang", said="another clang")
    fake(directory, "g++")
    only(directory, monkeypatch)
    assert compiler.compiler().command == ("g++",) and compiler.compiler().openmp
    (directory / "g++").unlink()
    compiler._compiler.cache_clear()
    assert compiler.compiler().command == ("c++",) and not compiler.compiler().openmp


def test_one_that_does_not_work_is_passed_over(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(directory, "c++", "-std=c++17")
    fake(directory, "g++")
    only(directory, monkeypatch)
    assert compiler.compiler().command == ("g++",)
    (directory / "g++").unlink()
    compiler._compiler.cache_clear()
    with pytest.raises(UnsupportedError, match=r"need a C\+\+ compiler, c\+\+ does not work: .*'-std=c\+\+17'"):
        compiler.compiler()


NAN = 'extern "C" void count(float* y, int) { *y = 1; volatile float nan = 0.0f / 0.0f; float x = nan; *y = x != x; }'


def test_fast_mathematics_is_not_for_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some compilers assume that there are no NaNs unless they are told otherwise."""
    monkeypatch.setenv("CXX", "g++ -ffast-math")
    assert launcher(replace(counting("1"), source=NAN))(torch.ones(5, 3), torch.ones(3)).item() == 1
    denormal = torch.tensor([1e-40]) * 0.5
    assert denormal.item() > 0  # nor has loading it changed how this thread computes


def test_a_place_that_nothing_may_be_run_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary directory mounted noexec, as the loader complains of it."""
    run = launcher(blend())
    compiler.compiler()

    def refused(path: str, *_: object) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(ctypes, "CDLL", refused)
    with pytest.raises(KernelError, match=r"kernel fused_blend cannot be loaded: .*; set TMPDIR to where programs may"):
        run(torch.ones(5, 3), torch.ones(3))


def test_without_the_library_of_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ -nostdinc++")
    with pytest.raises(
        UnsupportedError, match=r"g\+\+ does not work: .*the C\+\+ library is not there: no <algorithm>"
    ):
        compiler.compiler()


def test_one_that_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(UnsupportedError, match=r"need a C\+\+ compiler, true does not work"):
        compiler.compiler()


def test_a_variable_that_is_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++ '-O2")
    with pytest.raises(UnsupportedError, match=r"CXX is \"g\+\+ '-O2\", which is no command: No closing quotation"):
        compiler.compiler()


def test_one_that_does_not_answer(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", fake(directory, "c++", real="sleep 60;"))
    monkeypatch.setattr(compiler, "SECONDS", 0.5)
    with pytest.raises(UnsupportedError, match=r"c\+\+ does not work: no answer in"):
        compiler.compiler()


def test_a_new_path_is_looked_at(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(directory))
        with pytest.raises(UnsupportedError, match="there is none"):
            compiler.compiler()
    assert compiler.compiler()


def test_threads_of_a_runtime_that_is_not_pytorchs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the code calls is there, but it is not what PyTorch calls."""
    monkeypatch.setattr(compiler, "_address", lambda library, symbol: id(library))
    assert not compiler.compiler().openmp


# -- clang -------------------------------------------------------------------------------------------------------------

needs_clang = pytest.mark.skipif(which("clang++") is None, reason="clang++ is not installed")


@needs_clang
def test_clang_shares_threads_or_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "clang++")
    found = compiler.compiler()
    has_llvms = hasattr(ctypes.CDLL(torch._C.__file__), "__kmpc_fork_call")
    assert found.openmp == has_llvms and (found.openmp or compiler.SIMD in found.flags)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert launcher(counting(str(GRAIN)))(torch.ones(5, 3), torch.ones(3)).item() == 3
        x, w = torch.randn(2000, 64), torch.randn(64)
        torch.testing.assert_close(launcher(blend())(x, w), x * w)
    finally:
        torch.set_num_threads(before)


@needs_clang
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_clang_brings_no_second_runtime() -> None:
    code = IN_A_PROCESS.format(path=[str(Path(__file__).parent)])
    environment = {**os.environ, "CXX": "clang++"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    before, after, runtimes = map(int, done.stdout.split())
    assert before == after and runtimes == 1


def test_the_plan_says_that_kernels_run_in_one_thread(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And they are right, without OpenMP's threads but with its vectors."""
    monkeypatch.setenv("CXX", fake(directory, "c++", "-fopenmp", "-Xclang"))
    assert_runs_kernels("generated kernels run in one thread:")


@needs_clang
def test_models_run_kernels_of_clangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "clang++")
    assert_runs_kernels("" if compiler.compiler().openmp else "generated kernels run in one thread: clang++ does not")


def assert_runs_kernels(advice: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 20, 3), torch.nn.GELU(), torch.nn.MaxPool2d(2)).eval()
    x = torch.randn(2, 3, 34, 34)
    fast = fusewright.optimize(model, (x,), kernels="always", verify=False, measure=False)
    plan = fusewright.explain(fast)
    assert plan.kernels and all(choice.path == "generated" for choice in plan.kernels) and not plan.no_kernels
    assert bool(advice) == any("one thread" in line for line in plan.advice) and advice in "\n".join(plan.advice)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
