"""Generated C++ to a shared library: the system's compiler, without PyTorch's headers.  Cached by content.

Threads are those of the OpenMP runtime that PyTorch has loaded: a library is compiled with OpenMP and linked without
it, so its symbols resolve to that one.  A second runtime would keep threads of its own, and each pool's would wait
busily on the other's cores.  Where the compiler wants another runtime than PyTorch's, kernels run in one thread.
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

# What every kernel is compiled with.  Nobody looks at errno or floating-point exceptions; NaN, infinities, signed zeros
# and the order of sums are kept, a*b + c may become one fma.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
# What this machine's processor can do, in the compilers' several words for it.
NATIVE = ("-march=native", "-mcpu=native")
# Where vectors of 512 bits exist, as PyTorch uses them.
WIDE = "-mprefer-vector-width=512"
# What the compilers' OpenMP calls, and the compilers, by what their versions say.
_RUNTIMES = {"clang": "__kmpc_fork_call", "": "GOMP_parallel"}
_LIBRARIES = ("libgomp.so.1", "libomp.so", "libiomp5.so", "libomp.dylib")
SECONDS = 120.0  # that one kernel may take


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command, the flags it understands, and what it says its version is.

    openmp  whether its code can use the OpenMP runtime that PyTorch has loaded
    """

    command: tuple[str, ...]
    flags: tuple[str, ...]
    version: str
    openmp: bool

    @property
    def identity(self) -> str:
        """What machine code depends on besides its source: it must not run on another processor."""
        return "\0".join((*self.command, *self.flags, self.version, processor()))


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
    """The compiler of this machine: ``$CXX``, else the first of c++, g++ and clang++.

    Raises `UnsupportedError` where there is none, or it does not work.
    """
    return _compiler(os.environ.get("CXX", ""))


@lru_cache(maxsize=8)
def _compiler(chosen: str) -> Compiler:
    command = tuple(shlex.split(chosen)) or next(((n,) for n in ("c++", "g++", "clang++") if shutil.which(n)), ())
    if not command:
        raise UnsupportedError("CPU kernels are compiled by a C++ compiler, and there is none; install g++ or set CXX")
    found = run((*command, "--version"))
    if found.returncode:
        raise UnsupportedError(f"CPU kernels need a C++ compiler, {command[0]} does not work: {_complaint(found)}")
    kind = "clang" if "clang" in found.stdout else ""
    openmp = _openmp(_RUNTIMES[kind])
    flags = [*FLAGS, *(["-fopenmp"] if openmp else ["-Wno-unknown-pragmas"])]
    flags += next(([flag] for flag in NATIVE if _understands(command, flag)), [])
    flags += [WIDE] if _understands(command, WIDE) else []
    return Compiler(command, tuple(flags), found.stdout, openmp)


def _openmp(symbol: str) -> bool:
    """Whether code that calls `symbol` finds it in a runtime that is loaded already."""
    if os.name != "posix":
        return False
    for library in _LIBRARIES:
        with suppress(OSError, AttributeError):  # where PyTorch keeps it to itself, it is made known to others
            ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_GLOBAL)
    return hasattr(ctypes.CDLL(None), symbol)


def _understands(command: tuple[str, ...], flag: str) -> bool:
    return run((*command, flag, "-fsyntax-only", "-x", "c++", os.devnull)).returncode == 0


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
            done = run((*chosen.command, "-shared", str(built), *undefined, "-o", str(library)))
        if done.returncode:
            raise KernelError(f"kernel {name} does not compile with {chosen.command[0]}: {_complaint(done)}")
        return library.read_bytes()


def run(command: tuple[str, ...], text: str = "") -> subprocess.CompletedProcess[str]:
    """The end of a command that reads `text`; one that cannot be started or takes too long has failed."""
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, env=environment, timeout=SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def _complaint(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    found = next((line for line in lines if re.search(r"\berror\b", line)), lines[0] if lines else "no reason given")
    return re.sub(r"^\S*/(kernel\.cpp)", r"\1", found)
