"""Turns a kernel's CUDA C++ into something this machine runs, once per text."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

import platformdirs

from fusewright.codegen.cuda.primitives import PRIMITIVES
from fusewright.codegen.kernel import Kernel

HERE = Path(__file__).parent
# Unset locals hold a pattern (-1.7e38 as a float), so that reading one shows.
FLAGS = ("-std=c++17", "-w", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-ftrivial-auto-var-init=pattern")
SANITIZERS = ("-g1", "-DEMULATION_PROGRAM", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RUNTIME = ("fibers", "launch")
DYNAMIC_SHARED = re.compile(r"extern\s+__shared__[^;]*\bshared_memory\[\];")
# Plain C++ to the emulator: it means the same on a CPU.
UNTOUCHED = {"nonfinite"}


class EmulationError(Exception):
    """What is wrong with a kernel, and where."""


def translation_unit(kernel: Kernel) -> str:
    """The kernel's text with every primitive's taken out, line numbers kept, behind the header that emulates CUDA."""
    text, used = kernel.source, []
    for name, primitive in PRIMITIVES.items():
        found = primitive.strip("\n")
        if name not in UNTOUCHED and found in text:
            used.append(name)
            text = text.replace(found, "\n" * found.count("\n"))
    if re.search(r"\basm\b", re.sub(r"//.*", "", text)):
        raise EmulationError(f"{kernel.name} has PTX outside the primitives")
    text = DYNAMIC_SHARED.sub("", text)
    entries = dict.fromkeys(launch.entry for launch in kernel.launches)
    return "\n".join(
        [
            *(f"#define USES_{name}" for name in used),
            '#include "cuda.h"',
            "namespace {",
            f'#line 1 "{kernel.name}.cu"',
            text,
            "}  // namespace",
            "extern constexpr emulation::Entry emulation_entries[] = {",
            *(f'    emulation::entry<{entry}>("{entry}", {entry}),' for entry in entries),
            "};",
            f"const int emulation_entry_count = {len(entries)};",
        ]
    )


def cache() -> Path:
    """Where builds are kept between runs."""
    folder = platformdirs.user_cache_path("fusewright") / "emulation"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _tool(name: str, *arguments: str | Path) -> None:
    done = subprocess.run([name, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise EmulationError(f"{name} refused it:\n{done.stderr[:4000]}")


@functools.cache
def _headers() -> str:
    digest = hashlib.sha256()
    for path in sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")]):
        digest.update(path.read_bytes())
    version = subprocess.run(["g++", "-dumpfullversion", "-dumpmachine"], capture_output=True, text=True, check=True)
    return digest.hexdigest() + version.stdout


def _once(suffix: str, key: str, *arguments: str | Path, text: str | None = None) -> Path:
    """The file that g++ makes of these arguments; made beside its place and moved there, so that builds may race."""
    digest = hashlib.sha256("\0".join([_headers(), key, *map(str, arguments), text or ""]).encode()).hexdigest()[:32]
    place = cache() / f"{digest}{suffix}"
    if place.exists():
        return place
    with tempfile.TemporaryDirectory(dir=cache()) as folder:
        made = Path(folder) / f"made{suffix}"
        source = Path(folder) / "kernel.cpp"
        if text is not None:
            source.write_text(text)
        _tool("g++", *arguments, *([source] if text is not None else []), "-o", made)
        if text is not None:  # .bss holds the shared variables and nothing else
            _tool("objcopy", "--rename-section", ".bss=cuda_shared", made)
        os.replace(made, place)
    return place


def build(kernel: Kernel, sanitize: bool) -> Path:
    """A library with `emulation_run`, or the program that does the same under sanitizers."""
    flags = (*FLAGS, *(SANITIZERS if sanitize else ()))
    objects = [_once(".o", "runtime", *flags, "-O2", "-c", HERE / f"{name}.cpp") for name in RUNTIME]
    kind = () if sanitize else ("-shared", "-fno-gnu-unique")
    compiled = _once(".o", "kernel", *flags, "-O1", "-c", "-I", HERE, text=translation_unit(kernel))
    return _once("" if sanitize else ".so", "linked", *flags, *kind, compiled, *objects)
