"""The few functions of the CUDA driver that launching needs, straight from its library.

A launch through `ctypes` with everything but the stream packed beforehand costs about 0.15 microseconds on top of the
driver's own time, less than any binding; every status is looked at, here or by `fusewright.runtime.launch`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import Array, byref, c_int, c_uint, c_ulonglong, c_void_p
from functools import lru_cache, partial
from typing import Any, Protocol

import torch

from fusewright.errors import UnsupportedError
from fusewright.runtime.nvrtc import KernelError

# Starts a launch that is ready, on the stream of its configuration; returns a status.
Start = Callable[[], int]

_MAX_DYNAMIC_SHARED, _NON_PORTABLE_CLUSTER = 8, 14  # CUfunction_attribute
_THREAD_LOCAL, _RELAXED = 1, 2  # CUstreamCaptureMode
_NON_BLOCKING = 1  # CUstream_flags
_PLAIN_SHARED = 48 << 10  # bytes that need no permission
_PORTABLE_CLUSTER = 8  # blocks
_PROGRAMMATIC_SERIALIZATION = 6  # CUlaunchAttributeID


class Configuration(Protocol):
    """How a launch is configured; its stream is left to be set."""

    stream: int


class Driver(Protocol):
    """What launching asks of a driver; `kind` is the type of its devices, which go by PyTorch's indices."""

    kind: str

    def capability(self, index: int) -> int:
        """Compute capability times ten."""

    def current(self) -> int:
        """The calling thread's device."""

    def guard(self, index: int) -> AbstractContextManager[Any]:
        """Makes a device the thread's own for a while."""

    def stream(self, index: int) -> int:
        """PyTorch's current stream on a device."""

    def attach(self, index: int) -> None:
        """Sees to it that the calling thread, whose device is `index`, can launch on it."""

    def load(self, cubin: bytes) -> int:
        """A module on the thread's device, kept until the process ends."""

    def function(self, module: int, entry: str, shared: int, cluster: int) -> int:
        """An entry point, allowed that many bytes of dynamic shared memory and blocks per cluster."""

    def start(
        self,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        parameters: Array[c_void_p],
        early: bool,
    ) -> tuple[Configuration, Start]:
        """A launch with these addresses of its arguments, ready but for its stream; `early`: its blocks may begin
        while the launch before it ends, for which the kernel itself waits."""

    def new_stream(self, index: int) -> int:
        """The handle of a new stream on a device."""

    def relaxed(self) -> AbstractContextManager[None]:
        """Lets the thread do meanwhile what is refused while anyone captures a graph, and touches no stream."""

    def begin_capture(self, stream: int) -> None:
        """From here on, what the thread launches on a stream is captured instead."""

    def end_capture(self, stream: int) -> int:
        """A graph of what was captured, ready to start."""

    def start_graph(self, graph: int, stream: int) -> None:
        """Launches all that a graph holds, on a stream."""

    def free_graph(self, graph: int) -> None:
        """Gives up a graph; one that is on its way ends first."""

    def error(self, status: int) -> str:
        """What a status other than 0 means."""


class _Configuration(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        *((name, c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("number_of_attributes", c_uint),
    )


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute`` with a value that is an int."""

    _fields_ = (("id", c_int), ("_pad", ctypes.c_char * 4), ("value", c_int), ("_rest", ctypes.c_char * 60))


_EARLY = _Attribute(id=_PROGRAMMATIC_SERIALIZATION, value=1)


def current_device() -> Callable[[], int]:
    """The function that gives the calling thread's device."""
    # The public way asks first, in Python, whether PyTorch has initialised CUDA; this one does so itself.
    quick: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)
    return quick or torch.cuda.current_device


def current_stream() -> Callable[[int], int]:
    """The function that gives the handle of a device's current stream."""
    # What PyTorch's own generated code calls; the public way makes a Stream object, as dear as a launch.
    quick: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return quick or (lambda index: torch.cuda.current_stream(index).cuda_stream)


class CudaDriver:
    """NVIDIA's driver, which PyTorch has initialised by the time a CUDA tensor exists."""

    kind = "cuda"

    def __init__(self) -> None:
        name = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
        try:
            self._cuda = ctypes.CDLL(name)
        except OSError as error:
            raise UnsupportedError(f"the CUDA driver ({name}) cannot be loaded: {error}") from error
        self._contexts: dict[int, int] = {}
        self.stream = current_stream()
        self.current = current_device()
        self.guard = torch.cuda.device

    def capability(self, index: int) -> int:
        major, minor = torch.cuda.get_device_capability(index)
        return 10 * major + minor

    def attach(self, index: int) -> None:
        # A thread that has only taken memory from PyTorch's cache has no context yet.
        context = c_void_p()
        self._check(self._cuda.cuCtxGetCurrent(byref(context)))
        if context.value != self._primary(index):
            self._check(self._cuda.cuCtxSetCurrent(c_void_p(self._primary(index))))

    def _primary(self, index: int) -> int:
        """The context that PyTorch uses on a device."""
        if index not in self._contexts:
            context, device = c_void_p(), c_int()
            self._check(self._cuda.cuDeviceGet(byref(device), c_int(index)))
            self._check(self._cuda.cuDevicePrimaryCtxRetain(byref(context), device))
            assert context.value is not None
            self._contexts[index] = context.value
        return self._contexts[index]

    def load(self, cubin: bytes) -> int:
        module = c_void_p()
        with self.relaxed():
            self._check(self._cuda.cuModuleLoadData(byref(module), cubin))
        assert module.value is not None
        return module.value

    def function(self, module: int, entry: str, shared: int, cluster: int) -> int:
        function = c_void_p()
        self._check(self._cuda.cuModuleGetFunction(byref(function), c_void_p(module), entry.encode()))
        if shared > _PLAIN_SHARED:
            self._check(self._cuda.cuFuncSetAttribute(function, c_int(_MAX_DYNAMIC_SHARED), c_int(shared)))
        if cluster > _PORTABLE_CLUSTER:
            self._check(self._cuda.cuFuncSetAttribute(function, c_int(_NON_PORTABLE_CLUSTER), c_int(1)))
        assert function.value is not None
        return function.value

    def start(
        self,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        parameters: Array[c_void_p],
        early: bool,
    ) -> tuple[Configuration, Start]:
        configuration = _Configuration(*grid, threads, 1, 1, shared)
        if early:
            configuration.attributes, configuration.number_of_attributes = ctypes.addressof(_EARLY), 1
        # With nothing left for `ctypes` to convert, which takes longer than the call itself.
        given = byref(configuration), c_void_p(function), byref(parameters), None
        return configuration, partial(self._cuda.cuLaunchKernelEx, *given)

    def new_stream(self, index: int) -> int:
        """A stream of a device that nobody else has, kept until the process ends."""
        stream = c_void_p()
        with self.guard(index):
            self.attach(index)
            self._check(self._cuda.cuStreamCreate(byref(stream), c_uint(_NON_BLOCKING)))
        assert stream.value is not None
        return stream.value

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        mode = c_int(_RELAXED)
        self._check(self._cuda.cuThreadExchangeStreamCaptureMode(byref(mode)))
        try:
            yield
        finally:
            self._check(self._cuda.cuThreadExchangeStreamCaptureMode(byref(mode)))

    def begin_capture(self, stream: int) -> None:
        self._check(self._cuda.cuStreamBeginCapture_v2(c_void_p(stream), c_int(_THREAD_LOCAL)))

    def end_capture(self, stream: int) -> int:
        recipe, graph = c_void_p(), c_void_p()
        self._check(self._cuda.cuStreamEndCapture(c_void_p(stream), byref(recipe)))
        try:
            self._check(self._cuda.cuGraphInstantiateWithFlags(byref(graph), recipe, c_ulonglong(0)))
        finally:
            self._check(self._cuda.cuGraphDestroy(recipe))
        assert graph.value is not None
        return graph.value

    def start_graph(self, graph: int, stream: int) -> None:
        self._check(self._cuda.cuGraphLaunch(c_void_p(graph), c_void_p(stream)))

    def free_graph(self, graph: int) -> None:
        self._check(self._cuda.cuGraphExecDestroy(c_void_p(graph)))

    def error(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(c_int(status), byref(text))
        return f"{text.value.decode() if text.value else 'unknown error'} ({status})"

    def _check(self, status: int) -> None:
        if status:
            raise KernelError(f"the CUDA driver says: {self.error(status)}")


@lru_cache(maxsize=1)
def cuda_driver() -> Driver:
    """The driver of this machine; raises `UnsupportedError` where there is none."""
    return CudaDriver()
