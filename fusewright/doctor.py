"""What this machine has: everything a bug report should say about it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fusewright.errors import UnsupportedError
from fusewright.peers import PEERS
from fusewright.runtime import cache, compiler, nvrtc
from fusewright.runtime.memory import available_bytes

_OPTIONAL = (*(package for peer in PEERS.values() for package in peer.needs), "matplotlib")
_COMPILERS = (("C++ compiler", os.environ.get("CXX", "g++")), ("CUDA compiler", "nvcc"))


@dataclass(frozen=True)
class Fact:
    """One line of the doctor's report; `ok` is `None` for what is merely absent."""

    name: str
    ok: bool | None
    value: str


def examine() -> Iterator[Fact]:
    """Every fact, in the order in which they are worth reading."""
    yield Fact("fusewright", True, importlib.metadata.version("fusewright"))
    yield Fact("Python", True, f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Fact("PyTorch", True, torch.__version__)
    yield _gpu()
    yield Fact("threads", True, f"{torch.get_num_threads()} of {os.cpu_count()} cores")
    free = available_bytes()
    yield Fact("free memory", None if free is None else True, "unknown" if free is None else f"{free / 1e9:.1f} GB")
    for name, command in _COMPILERS:
        yield _compiler(name, command)
    yield _kernels()
    yield _native_kernels()
    yield _backend()
    yield _cache()
    for package in _OPTIONAL:
        yield _package(package)


def _gpu() -> Fact:
    if not torch.cuda.is_available():
        return Fact(
            "GPU",
            None,
            f"none (PyTorch was built {'for CUDA ' + torch.version.cuda if torch.version.cuda else 'without CUDA'})",
        )
    names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    listed = ", ".join(f"{gpu.name} ({gpu.total_memory / 1e9:.0f} GB)" for gpu in names)
    return Fact("GPU", True, f"{listed}; CUDA {torch.version.cuda}")


def _kernels() -> Fact:
    try:
        return Fact("CUDA kernels", True, f"compiled by NVRTC {nvrtc.version()}")
    except UnsupportedError as error:
        return Fact("CUDA kernels", None, str(error))


def _native_kernels() -> Fact:
    try:
        found = compiler.compiler()
    except UnsupportedError as error:
        return Fact("CPU kernels", None, str(error))
    threads = "PyTorch's threads" if found.openmp else f"one thread: {found.one_thread}"
    native = next((flag for flag in compiler.NATIVE if flag in found.flags), "portable flags")
    return Fact("CPU kernels", True, f"compiled by {' '.join(found.command)} ({native}), run in {threads}")


def _backend() -> Fact:
    known = {point.name for point in importlib.metadata.entry_points(group="torch_dynamo_backends")}
    if "fusewright" in known:
        return Fact("torch.compile", True, 'has backend="fusewright"')
    return Fact("torch.compile", None, 'does not know backend="fusewright": install fusewright once more')


def _compiler(name: str, command: str) -> Fact:
    path = shutil.which(command)
    if path is None:
        return Fact(name, None, f"{command} is not on the PATH")
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Fact(name, False, f"{command} does not run: {error}")
    version = re.search(r"release (\d[\d.]*)", said) or re.search(r"\b(\d+\.\d[\d.]*)", said)
    return Fact(name, True, f"{command} {version.group(1) if version else '(version unknown)'}")


def _cache() -> Fact:
    try:
        size = sum(entry.size for entry in cache.entries())
    except UnsupportedError as error:
        return Fact("cache", False, str(error))
    return Fact("cache", True, f"{cache.cache_path()} ({size / 1e6:.1f} MB)")


def _package(package: str) -> Fact:
    try:
        return Fact(package, True, importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return Fact(package, None, "not installed")
