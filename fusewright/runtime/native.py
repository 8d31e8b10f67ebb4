"""Running a generated CPU kernel on tensors: a call of a function in a shared library, prepared once per shape.

Calls go through `ctypes` with raw pointers and release the GIL.  Every call works in as many threads as
`torch.get_num_threads` says, PyTorch's own (see `fusewright.runtime.compiler`), or in one where there is little to do.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusewright.kernel import Kernel, Launch, evaluate
from fusewright.runtime import compiler
from fusewright.runtime.launch import FORMATS, Call, Launcher, Results, allocation
from fusewright.runtime.nvrtc import KernelError

# Scalar operations that are worth waking PyTorch's threads for: some ten microseconds of vector instructions.
GRAIN = 65536

_TYPES: dict[str, Any] = {
    "pointer": ctypes.c_void_p,
    "int": ctypes.c_int,
    "long": ctypes.c_longlong,
    "threads": ctypes.c_int,
}
_ORDER = {"pointer": 0, "int": 1, "long": 1, "threads": 2}
Entries = Mapping[str, Callable[..., int | None]]


class NativeLauncher(Launcher):
    """A CPU kernel as a function of its operands; see `Launcher`.  Raises what eager does where it looks up no row."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._library: Entries | None = None
        self._loading = threading.Lock()

    @property
    def kind(self) -> str:
        return "cpu"

    def build(self, index: int = 0) -> None:
        """Compiles the kernel and loads it, which takes next to nothing."""
        self.load(index)

    def load(self, index: int = 0) -> Entries:
        """Compiles the kernel and loads it, once; returns its entry points."""
        if self._library is None:
            with self._loading:
                if self._library is None:
                    self._library = _loaded(self.kernel)
        return self._library

    def _prepare(self, tensors: tuple[Tensor, ...]) -> Call:
        sizes, entries = self._check(tensors), self.load()
        arrays = self._arrays(tensors, sizes)
        names = (*self.kernel.operands, *(a.name for a in self.kernel.arrays))
        places = {name: place for place, name in enumerate(names)}
        calls = [
            self._bound(entries[launch.entry], launch, places, sizes)
            for launch in self.kernel.launches
            if all(evaluate(n, sizes) for n in launch.grid)
        ]
        formats = [
            (FORMATS[layout][t.ndim], t.itemsize) for layout, t in zip(self.kernel.layouts, tensors, strict=True)
        ]
        new = [allocation(*array, self.kind) for array in arrays]

        results = len(self.kernel.results)

        def call(tensors: tuple[Tensor, ...]) -> Results:
            held = [
                t if t.is_contiguous(memory_format=f) and not t.data_ptr() % size else t.clone(memory_format=f)
                for t, (f, size) in zip(tensors, formats, strict=True)
            ]
            made = [allocate() for allocate in new]
            pointers = [t.data_ptr() for t in (*held, *made)]
            threads = torch.get_num_threads()
            for start in calls:
                if start(pointers, threads):
                    error, said = self.kernel.outside
                    raise error(said)
            return made[0] if results == 1 else tuple(made[:results])

        return call

    def _bound(
        self, entry: Callable[..., int | None], launch: Launch, places: Mapping[str, int], sizes: Mapping[str, int]
    ) -> Callable[[list[int], int], int | None]:
        """A launch that wants only its pointers and the number of threads, which come first and last."""
        kinds = [a.kind for a in launch.arguments]
        assert kinds == sorted(kinds, key=_ORDER.__getitem__), f"{launch.entry}: {kinds}"
        taken = [places[a.text] for a in launch.arguments if a.kind == "pointer"]
        numbers = [self._number(a, sizes) for a in launch.arguments if a.kind in ("int", "long")]
        work = max((evaluate(a.text, sizes) for a in launch.arguments if a.kind == "threads"), default=None)

        if work is None:
            return lambda pointers, threads: entry(*(pointers[i] for i in taken), *numbers)
        if work < GRAIN:
            return lambda pointers, threads: entry(*(pointers[i] for i in taken), *numbers, 1)
        return lambda pointers, threads: entry(*(pointers[i] for i in taken), *numbers, threads)


def _loaded(kernel: Kernel) -> Entries:
    """The entry points of a kernel, which stay loaded until the process ends."""
    built = kernel.unnumbered
    content = compiler.compile(built.source, name=kernel.name)
    # What was checked is what is loaded: the library is written to a place of its own, not loaded from the cache.
    try:
        with tempfile.TemporaryDirectory(prefix="fusewright-") as folder:
            path = Path(folder) / f"{kernel.name}.so"
            path.write_bytes(content)
            library = ctypes.CDLL(os.fspath(path))
        launches = zip(kernel.launches, built.launches, strict=True)
        return {launch.entry: _entry(library, found, kernel.looks_up) for launch, found in launches}
    except (OSError, AttributeError) as error:
        remedy = "; set TMPDIR to where programs may be run from" if "failed to map" in str(error) else ""
        raise KernelError(f"kernel {kernel.name} cannot be loaded: {error}{remedy}") from error


def _entry(library: ctypes.CDLL, launch: Launch, looks_up: bool) -> Callable[..., int | None]:
    function = getattr(library, launch.entry)
    function.argtypes = [_TYPES[a.kind] for a in launch.arguments]
    function.restype = ctypes.c_int if looks_up else None
    found: Callable[..., int | None] = function
    return found


def launcher(kernel: Kernel) -> Launcher:
    """What runs `kernel` on its target."""
    return NativeLauncher(kernel) if kernel.target == "cpu" else Launcher(kernel)


def _let_threads_go() -> None:
    """Before a fork, GNU's OpenMP runtime is to end the threads that it keeps for the one that forks.

    They do not live on in the child, which would wait for them for ever: in kernels as in PyTorch's own operations.
    The next parallel loop of either process starts new ones.  LLVM's runtime looks after forks itself, and does nothing
    when it is asked as softly as this.
    """
    _RUNTIME.omp_pause_resource_all(_SOFT)


_SOFT = 1  # omp_pause_soft
_RUNTIME = ctypes.CDLL(torch._C.__file__)  # PyTorch's, found through what has loaded it
if hasattr(os, "register_at_fork") and hasattr(_RUNTIME, "omp_pause_resource_all"):
    os.register_at_fork(before=_let_threads_go)
