"""Turns a kernel's CUDA C++ into something this machine runs, once per text."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import platformdirs

from fusewright.codegen.cuda.primitives import PRIMITIVES
from fusewright.kernel import Kernel, Launch

HERE = Path(__file__).parent
# Unset locals hold a pattern (-1.7e38 as a float), so that reading one shows.
FLAGS = ("-std=c++17", "-w", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-ftrivial-auto-var-init=pattern")
SANITIZERS = ("-g1", "-DEMULATION_PROGRAM", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
RUNTIME = ("fibers", "copies", "launch")
# GNU's other linker, where it is installed, takes a third of the time.
LINKER = ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()
# What is the same for all kernels, parsed once: it would be a third of the time that a kernel takes to compile.
PRECOMPILED = "cuda.h"
DYNAMIC_SHARED = re.compile(r"extern\s+__shared__[^;]*\bshared_memory\[\];")
# Plain C++ to the emulator: it means the same on a CPU.
UNTOUCHED = {"nonfinite"}


class EmulationError(Exception):
    """What is wrong with a kernel, and where."""


def translation_unit(kernel: Kernel) -> str:
    """The kernel's text with every primitive's taken out, line numbers kept, behind what emulates those; `PRECOMPILED`
    goes ahead of all."""
    text, used = kernel.source, []
    for name, primitive in PRIMITIVES.items():
        found = primitive.strip("\n")
        if name not in UNTOUCHED and found in text:
            used.append(name)
            text = text.replace(found, "\n" * found.count("\n"))
    if re.search(r"\basm\b", re.sub(r"//.*", "", text)):
        raise EmulationError(f"{kernel.name} has PTX outside the primitives")
    text = DYNAMIC_SHARED.sub("", text)
    entries = {launch.entry: launch for launch in kernel.launches}
    for launch in entries.values():
        _check_attributes(text, launch)
    return "\n".join(
        [
            *(f"#define USES_{name}" for name in used),
            '#include "primitives.h"',
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


def _check_attributes(text: str, launch: Launch) -> None:
    """What a launch asks for must agree with its kernel's attributes, where those are plain numbers."""
    found = re.search(rf"__global__([^;{{]*)\b{launch.entry}\s*\(", text)
    if not found:
        raise EmulationError(f"no __global__ function {launch.entry}")
    bound = re.search(r"__launch_bounds__\((\d+)", found[1])
    if bound and launch.threads > int(bound[1]):
        raise EmulationError(f"{launch.entry}: {launch.threads} threads, more than its {bound[0]})")
    cluster = re.search(r"__cluster_dims__\(([^,)]*)", found[1])
    if bool(cluster) != (launch.cluster > 1) or (
        cluster and cluster[1].isdigit() and int(cluster[1]) != launch.cluster
    ):
        raise EmulationError(f"{launch.entry}: launched with clusters of {launch.cluster}, {cluster and cluster[0]}")


def cache() -> Path:
    """Where builds are kept between runs."""
    folder = platformdirs.user_cache_path("fusewright-tests") / "emulation"
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


def _once(suffix: str, key: str, make: Callable[[Path], None]) -> Path:
    """The file that `make` writes for `key`; written beside its place and moved there, so that builds may race."""
    place = cache() / (hashlib.sha256((_headers() + key).encode()).hexdigest()[:32] + suffix)
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=cache()) as folder:
            made = Path(folder) / f"made{suffix}"
            make(made)
            os.replace(made, place)
    return place


def _runtime(name: str, flags: tuple[str, ...]) -> Path:
    """The scheduler's part `name`, compiled."""
    arguments = (*flags, "-O2", "-c", str(HERE / f"{name}.cpp"))
    return _once(".o", f"{name} {flags}", lambda made: _tool("g++", *arguments, "-o", made))


@functools.cache
def _precompiled(flags: tuple[str, ...]) -> Path:
    """What to include for `PRECOMPILED`: g++ takes the file beside it whose name has another ``.gch``."""
    arguments = (*flags, "-O1", "-x", "c++-header", HERE / PRECOMPILED)
    made = _once(".h.gch", f"{PRECOMPILED} {flags}", lambda made: _tool("g++", *arguments, "-o", made))
    return made.with_suffix("")


def build(kernel: Kernel, sanitize: bool) -> Path:
    """A library with `emulation_run`, or the program that does the same under sanitizers."""
    flags = (*FLAGS, *(SANITIZERS if sanitize else ()))
    runtime = [_runtime(name, flags) for name in RUNTIME]
    text = translation_unit(kernel)

    def make(made: Path) -> None:
        source, compiled = made.parent / "kernel.cpp", made.parent / "kernel.o"
        source.write_text(text)
        _tool("g++", *flags, "-O1", "-c", "-include", _precompiled(flags), "-I", HERE, source, "-o", compiled)
        # .bss holds the shared variables and nothing else: in a section with a C name, its ends have names too.
        _tool("objcopy", "--rename-section", ".bss=cuda_shared", compiled)
        kind = () if sanitize else ("-shared", "-fno-gnu-unique")
        _tool("g++", *flags, *LINKER, *kind, compiled, *runtime, "-o", made)

    return _once("" if sanitize else ".so", f"{flags}{text}", make)
