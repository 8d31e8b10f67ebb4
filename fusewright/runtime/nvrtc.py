"""Generated CUDA C++ to machine code: NVRTC through NVIDIA's Python packages.  Needs no GPU; cached by content.

`resources` reads what a kernel takes of the machine from the code itself, so that a test can refuse spilled registers.
"""

from __future__ import annotations

import hashlib
import re
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fusewright.errors import FusewrightError, UnsupportedError
from fusewright.runtime import cache

# IEEE arithmetic: divisions and square roots round to nearest, denormals stay; a*b + c may become one fma.
OPTIONS: dict[str, Any] = {"std": "c++17", "fma": True, "use_fast_math": False}


class KernelError(FusewrightError):
    """A generated kernel does not compile, load, take its operands or start; the message names it."""


class CountError(KernelError):
    """There is more in a call than what a generated kernel counts in 32 bits."""


@dataclass(frozen=True)
class Resources:
    """What one entry point takes per thread: registers, and bytes of stack (spilled registers and local arrays)."""

    registers: int
    stack: int


def compile(source: str, arch: str, *, name: str = "kernel") -> bytes:
    """The machine code (a cubin) of CUDA C++ `source` for `arch`, such as ``"sm_90"``.

    Raises `UnsupportedError` where NVRTC is missing, `KernelError` where the source, called `name`, does not compile.
    """
    parts = (version(), arch, repr(OPTIONS), source)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    try:
        path = cache.cache_subdirectory("kernels") / f"{key}.cubin"
    except UnsupportedError:
        return _compiled(source, arch, name)  # no safe cache: compile every time
    return cache.built(path, lambda: _compiled(source, arch, name))


def version() -> str:
    """NVRTC's version, such as ``"13.0"``; raises `UnsupportedError` where it is missing."""
    return str(_toolchain()[2])


# Imported by several threads at once, the packages fail.
_IMPORTING = threading.Lock()


@lru_cache(maxsize=1)
def _toolchain() -> tuple[Any, Any, str]:
    """``Program``, ``ProgramOptions`` and NVRTC's version."""
    try:
        with _IMPORTING:
            from cuda.bindings import nvrtc

            try:
                from cuda.core import Program, ProgramOptions
            except ImportError:  # before cuda-core 1.0
                from cuda.core.experimental import Program, ProgramOptions
        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise UnsupportedError(
            f"CUDA kernels are compiled by NVRTC, which is not available ({reason}); "
            "pip install 'fusewright[cuda]' nvidia-cuda-nvrtc"
        ) from error
    assert int(status) == 0, f"nvrtcVersion: {status}"
    return Program, ProgramOptions, f"{major}.{minor}"


def _compiled(source: str, arch: str, name: str) -> bytes:
    program_type, options_type, _ = _toolchain()
    try:
        program = program_type(source, "c++", options_type(arch=arch, name=name, **OPTIONS))
        return bytes(program.compile("cubin").code)
    except Exception as error:  # the packages' own types have changed between releases
        lines = str(error).replace("\0", "").splitlines()
        reason = next((line for line in lines if re.search(r"\berror\b", line)), lines[0] if lines else repr(error))
        raise KernelError(f"kernel {name} does not compile for {arch}: {reason.strip()}") from error


# What the section ".nv.info" of a cubin says about a function, as numbers of 32 bits: its symbol's index, a value.
_REGISTERS, _FRAME, _STACK = 0x2F, 0x11, 0x12
_OF_SYMBOL = 4  # the format of such a record


def resources(cubin: bytes) -> dict[str, Resources]:
    """What each entry point of a cubin (a 64-bit ELF file) takes."""
    sections = _sections(cubin)
    symbols = sections[".symtab"].offset
    names = sections[".strtab"].offset
    found: dict[int, dict[int, int]] = {}
    for attribute, symbol, value in _records(sections[".nv.info"].of(cubin)):
        found.setdefault(symbol, {})[attribute] = value
    return {
        _text(cubin, names + struct.unpack_from("<I", cubin, symbols + 24 * symbol)[0]): Resources(
            taken[_REGISTERS], max(taken.get(_FRAME, 0), taken.get(_STACK, 0))
        )
        for symbol, taken in found.items()
        if _REGISTERS in taken  # functions that are called have no number of their own
    }


@dataclass(frozen=True)
class _Section:
    offset: int
    size: int

    def of(self, content: bytes) -> bytes:
        return content[self.offset : self.offset + self.size]


def _sections(elf: bytes) -> dict[str, _Section]:
    assert elf[:5] == b"\x7fELF\x02", "not a 64-bit ELF file"
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", elf, 0x3A)
    # name (an offset), type, flags, address, offset, size
    headers = [struct.unpack_from("<IIQQQQ", elf, table + size * i) for i in range(count)]
    return {_text(elf, headers[of_names][4] + name): _Section(offset, size) for name, _, _, _, offset, size in headers}


def _records(info: bytes) -> Iterator[tuple[int, int, int]]:
    """(attribute, symbol, value) of the records about symbols; each is a format, an attribute and a size, then that."""
    at = 0
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind != _OF_SYMBOL:
            continue  # its value stood where the size would be
        if attribute in (_REGISTERS, _FRAME, _STACK):
            yield attribute, *struct.unpack_from("<II", info, at)
        at += size


def _text(content: bytes, offset: int) -> str:
    return content[offset : content.index(b"\0", offset)].decode()
