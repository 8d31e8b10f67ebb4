"""Generated C++ to a shared library: the system's compiler, without PyTorch's headers.  Cached by content.

Threads are those of the OpenMP runtime that PyTorch has loaded: a library is compiled with OpenMP and linked without
it, so its symbols resolve to that one.  A second runtime would keep threads of its own, and each pool's would wait
busily on the other's cores.  So a compiler that calls PyTorch's runtime is preferred (g++ calls GNU's, which PyTorch's
wheels for Linux bring; clang++ calls LLVM's), and where there is none, kernels run in one thread.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from fusewright.errors import UnsupportedError
from fusewright.runtime import cache
from fusewright.runtime.nvrtc import KernelError

# Some compilers are fast and loose unasked, or where a user's CXX says so; what they link then flushes small numbers.
EXACT = "-fno-fast-math"
# What every kernel is compiled with.  Nobody looks at errno or floating-point exceptions; NaN, infinities, signed zeros
# and the order of sums are kept, a*b + c may become one fma.
FLAGS = ("-std=c++17", "-O3", "-fPIC", EXACT, "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
# What this machine's processor can do, in the compilers' several words for it.
NATIVE = ("-march=native", "-mcpu=native")
# Where vectors of 512 bits exist, as PyTorch uses them.
WIDE = "-mprefer-vector-width=512"
# Who is asked where nobody is named.
COMMANDS = ("c++", "g++", "clang++")
# How OpenMP is asked for: Apple's compiler hides it behind its driver's back.  Without threads, vectors remain.
OPENMP = (("-fopenmp",), ("-Xclang", "-fopenmp"))
SIMD = "-fopenmp-simd"
# A compiler may come without the C++ library.
_HEADERS = "".join(
    f'#if !__has_include(<{name}>)\n#error "the C++ library is not there: no <{name}>"\n#endif\n'
    for name in ("algorithm", "cmath", "cstring", "vector")
)
# Loops as kernels have them: what they call is what the runtime must have.
_LOOPS = """
void loops(double* x, long long n, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long long i = 0; i < n; ++i) x[i] += 1;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int i = 0; i < threads; ++i) x[i] += 1;
#pragma omp for schedule(dynamic)
        for (long long i = 0; i < n; ++i) x[i] += 1;
    }
}
"""
_LIBRARIES = ("libgomp.so.1", "libomp.so", "libiomp5.so", "libomp.dylib")
SECONDS = 120.0  # that one kernel may take


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command, the flags it understands, and what it says its version is.

    openmp  whether its code runs in the threads of the OpenMP runtime that PyTorch has loaded, else in one
    """

    command: tuple[str, ...]
    flags: tuple[str, ...]
    version: str
    openmp: bool

    @property
    def identity(self) -> str:
        """What machine code depends on besides its source: it must not run on another processor."""
        return "\0".join((*self.command, *self.flags, self.version, processor()))

    @property
    def one_thread(self) -> str:
        """Why kernels run in one thread, and what helps; empty where they run in PyTorch's."""
        if self.openmp:
            return ""
        return f"{self.command[0]} does not build for PyTorch's OpenMP runtime; set CXX to one that does, such as g++"


def compile(source: str, *, name: str = "kernel") -> bytes:
    """The shared library of C++ `source`, for this machine.

    Raises `UnsupportedError` where there is no compiler, `KernelError` where the source, called `name`, does not
    compile.
    """
    chosen = compiler()
    key = hashlib.sha256(f"{chosen.identity}\0{source}".encode()).hexdigest()
    try:
        path = cache.cache_subdirectory("kernels") / f"{key}.so"
    except UnsupportedError:
        return _compiled(chosen, source, name)  # no safe cache: compile every time
    return cache.built(path, lambda: _compiled(chosen, source, name), timeout=SECONDS)


def compiler() -> Compiler:
    """The compiler of this machine: ``$CXX``, else of c++, g++ and clang++ the first whose code can use PyTorch's
    threads, else the first that works.

    Raises `UnsupportedError` where there is none, or it does not work.
    """
    return _compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@lru_cache(maxsize=8)
def _compiler(chosen: str, path: str) -> Compiler:
    if chosen.strip():
        return _examined(_words(chosen))
    there = [name for name in COMMANDS if shutil.which(name, path=path)]
    if not there:
        raise UnsupportedError("CPU kernels are compiled by a C++ compiler, and there is none; install g++ or set CXX")
    found: list[Compiler] = []
    for name in there:
        with suppress(UnsupportedError):
            found.append(_examined((name,)))
            if found[-1].openmp:
                return found[-1]
    return found[0] if found else _examined((there[0],))


def _words(chosen: str) -> tuple[str, ...]:
    """The words of ``$CXX``, as a shell has them."""
    try:
        return tuple(shlex.split(chosen))
    except ValueError as error:
        raise UnsupportedError(f"CXX is {chosen!r}, which is no command: {error}") from error


def _examined(command: tuple[str, ...]) -> Compiler:
    """What this compiler can do; raises `UnsupportedError` where it does not work."""
    said = run((*command, "--version"))
    works = said if said.returncode else _tried(command, FLAGS, _HEADERS)
    if works.returncode or not works.stdout:
        raise UnsupportedError(f"CPU kernels need a C++ compiler, {command[0]} does not work: {_complaint(works)}")
    openmp = next((flags for flags in OPENMP if _uses_pytorchs_threads(command, flags)), ())
    flags = [*FLAGS, *openmp]
    for words in (() if openmp else (SIMD,), NATIVE, (WIDE,)):
        flags += next(([word] for word in words if not _tried(command, (word,)).returncode), [])
    return Compiler(command, tuple(flags), said.stdout, bool(openmp))


def _uses_pytorchs_threads(command: tuple[str, ...], flags: tuple[str, ...]) -> bool:
    """Whether parallel loops, compiled with these flags, call the OpenMP runtime that PyTorch has loaded."""
    said = _tried(command, flags, _LOOPS)
    called = set(re.findall(r"\b_?((?:GOMP|__kmpc)_\w+)", said.stdout))
    if said.returncode or not called or os.name != "posix":
        return False
    for library in _LIBRARIES:
        with suppress(OSError, AttributeError):  # where PyTorch keeps it to itself, it is made known to others
            ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_GLOBAL)
    everybody, pytorch = ctypes.CDLL(None), ctypes.CDLL(torch._C.__file__)
    return all(_address(everybody, name) == _address(pytorch, name) != 0 for name in called)


def _address(library: ctypes.CDLL, symbol: str) -> int:
    """Where `symbol` is, as seen from a library and what it depends on; 0 where it is not."""
    return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value or 0 if hasattr(library, symbol) else 0


def _tried(command: tuple[str, ...], flags: tuple[str, ...], text: str = "") -> subprocess.CompletedProcess[str]:
    """What the compiler makes of a text, as assembly."""
    return run((*command, *flags, "-S", "-x", "c++", "-", "-o", "-"), text)


@lru_cache(maxsize=1)
def processor() -> str:
    """What code for this very processor depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        kept = re.findall(r"^(?:vendor_id|cpu family|model|stepping|flags|Features|CPU \w+)\s*:.*$", text, re.MULTILINE)
    except OSError:
        kept = []
    return "\n".join((platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability(), *kept))


def _compiled(chosen: Compiler, source: str, name: str) -> bytes:
    try:
        return _built(chosen, source, name)
    except OSError as error:
        raise KernelError(f"kernel {name} cannot be compiled in {tempfile.gettempdir()}: {error}") from error


def _built(chosen: Compiler, source: str, name: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="fusewright-") as folder:
        text, built, library = (Path(folder) / f"kernel.{suffix}" for suffix in ("cpp", "o", "so"))
        text.write_text(source)
        done = run((*chosen.command, *chosen.flags, "-c", str(text), "-o", str(built)))
        if not done.returncode:  # without -fopenmp, or it would bring a runtime of its own
            undefined = ("-undefined", "dynamic_lookup") if platform.system() == "Darwin" else ()
            done = run((*chosen.command, EXACT, "-shared", str(built), *undefined, "-o", str(library)))
        if done.returncode:
            raise KernelError(f"kernel {name} does not compile with {chosen.command[0]}: {_complaint(done)}")
        return library.read_bytes()


def run(command: tuple[str, ...], text: str = "") -> subprocess.CompletedProcess[str]:
    """The end of a command that reads `text`; one that cannot be started or takes too long has failed."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 127, "", f"no answer in {SECONDS:.0f} s")
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _complaint(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    found = next((line for line in lines if re.search(r"\berror\b", line)), lines[0] if lines else "no reason given")
    return re.sub(r"^\S*/(kernel\.cpp)", r"\1", found)
