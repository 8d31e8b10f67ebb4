"""Running a generated kernel on tensors: checked once per shape, then little more than the launch itself.

The first call on a device compiles the kernel and loads it, which takes up to seconds; `Launcher.load` does it
beforehand, as is wise before a CUDA graph is captured.  Everything runs on PyTorch's current stream and in memory that
PyTorch gives out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from ctypes import Array, addressof, c_uint64, c_void_p, sizeof
from functools import partial
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from fusewright.errors import UnsupportedError
from fusewright.ir.memory_order import is_channels_last
from fusewright.kernel import Argument, Kernel, evaluate
from fusewright.runtime import nvrtc
from fusewright.runtime.driver import Configuration, Driver, Start, cuda_driver
from fusewright.runtime.nvrtc import CountError, KernelError

# Shapes whose calls stay prepared, per kernel and thread.
KEPT = 256
# Compute capabilities (times ten) where launches begin while the ones before them end, as it was tried there.
EARLY = range(90, 100)
# Every operand starts at a multiple of this, so that kernels may load 16 bytes at once.
ALIGNMENT = 16
FORMATS = {
    "contiguous": dict.fromkeys(range(16), torch.contiguous_format),
    "channels_last": {4: torch.channels_last, 5: torch.channels_last_3d},
}

_torch: Any = torch  # some of what follows has no types
Results = Tensor | tuple[Tensor, ...]
Call = Callable[[tuple[Tensor, ...]], Results]
Allocated = tuple[tuple[int, ...], torch.dtype, str]  # shape, dtype and layout


class _Prepared(threading.local):
    """The calls that a thread has prepared: each has its own arguments and stream, so no two threads share one."""

    def __init__(self) -> None:
        self.calls: dict[tuple[Any, ...], Call] = {}


class Launcher:
    """A kernel as a function of its operands.

    Operands are made dense in the layout the kernel asks for where they are not; the output is new.  Raises
    `KernelError` for operands that the kernel was not generated for, and when the driver refuses a launch, `CountError`
    where there are more elements than it counts.
    """

    def __init__(self, kernel: Kernel, driver: Driver | None = None) -> None:
        self.kernel = kernel
        self._driver = driver
        self._prepared = _Prepared()
        self._loaded: dict[int, dict[str, int]] = {}
        self._built: dict[int, bytes] = {}
        self._lock, self._building = threading.Lock(), threading.Lock()

    def __call__(self, *tensors: Tensor) -> Results:
        key: tuple[Any, ...] = ()
        for t in tensors:
            key += t.shape, t.dtype, t.device
        prepared = self._prepared.calls
        call = prepared.get(key)
        if call is None:
            call = self._prepare(tensors)
            if len(prepared) >= KEPT:
                prepared.clear()
            prepared[key] = call
        return call(tensors)

    def build(self, index: int) -> None:
        """Compiles the kernel for device `index`, once until it is loaded: nearly all that loading takes, and nothing
        that the device or other launches would notice."""
        with self._building:
            if index not in self._built:
                kernel, capability = self.kernel, self.driver.capability(index)
                if not kernel.runs_on(capability):
                    raise UnsupportedError(
                        f"kernel {kernel.name} needs compute capability {kernel.needs / 10}"
                        f"{' and no other' if kernel.arch else ''}, device {self.driver.kind}:{index} has "
                        f"{capability / 10}"
                    )
                arch = kernel.arch or f"sm_{capability}"
                self._built[index] = nvrtc.compile(kernel.unnumbered.source, arch, name=kernel.name)

    def load(self, index: int) -> Mapping[str, Any]:
        """Builds the kernel and loads it on device `index`, once; returns its entry points."""
        if index in self._loaded:
            return self._loaded[index]
        with self._lock:
            if index in self._loaded:
                return self._loaded[index]
            self.build(index)
            try:
                self._loaded[index] = self._load(self._built.pop(index), index)
            except KernelError as error:
                where = f"{self.driver.kind}:{index}"
                raise KernelError(f"kernel {self.kernel.name} cannot be loaded on {where}: {error}") from error
        return self._loaded[index]

    def _load(self, cubin: bytes, index: int) -> dict[str, int]:
        with self.driver.guard(index):
            self.driver.attach(index)
            module = self.driver.load(cubin)
            launches = zip(self.kernel.launches, self.kernel.unnumbered.launches, strict=True)
            return {
                launch.entry: self.driver.function(module, built.entry, launch.shared, launch.cluster)
                for launch, built in sorted(launches, key=lambda both: both[0].shared)  # an entry keeps its largest
            }

    @property
    def kind(self) -> str:
        """The type of the devices it runs on."""
        return self.driver.kind

    @property
    def driver(self) -> Driver:
        """What it launches through."""
        if self._driver is None:
            self._driver = cuda_driver()
        return self._driver

    # -- once per shape and thread -----------------------------------------------------------------------------------

    def _prepare(self, tensors: tuple[Tensor, ...]) -> Call:
        sizes = self._check(tensors)
        kernel, driver = self.kernel, self.driver
        index = tensors[0].device.index or 0
        entries = self.load(index)
        with driver.guard(index):
            driver.attach(index)
        arrays = self._arrays(tensors, sizes)
        cells, parameters = self._pack(sizes)
        launches, early = [], driver.capability(index) in EARLY
        for launch, packed in zip(kernel.launches, parameters, strict=True):
            x, y, z = (evaluate(n, sizes) for n in launch.grid)
            if x * y * z:
                how = (x, y, z), launch.threads, launch.shared
                launches.append((launch.entry, *driver.start(entries[launch.entry], *how, packed, early)))
        new = [allocation(*array, self.kind) for array in arrays]
        formats = [FORMATS[layout][t.ndim] for layout, t in zip(kernel.layouts, tensors, strict=True)]
        return self._call(index, formats, new, cells, launches)

    def _call(
        self,
        index: int,
        formats: list[torch.memory_format],
        new: list[partial[Tensor]],
        cells: Array[c_uint64],
        launches: list[tuple[str, Configuration, Start]],
    ) -> Call:
        driver, results = self.driver, len(self.kernel.results)
        current, stream_of = driver.current, driver.stream
        is_dense, pointers = [dense(f) for f in formats], slice(len(formats) + len(new))

        def call(tensors: tuple[Tensor, ...]) -> Results:
            if current() != index:
                with driver.guard(index):
                    return call(tensors)
            addresses: list[c_uint64 | int] = []
            held: list[Tensor] = []  # whose memory nothing else may be given before everything is launched
            for i, t in enumerate(tensors):
                address = t.data_ptr()
                if address % ALIGNMENT or not is_dense[i](t):
                    held.append(t.clone(memory_format=formats[i]))
                    address = held[-1].data_ptr()
                addresses.append(address)
            made = [allocate() for allocate in new]
            for array in made:
                addresses.append(array.data_ptr())
            stream = stream_of(index)
            for entry, configuration, start in launches:
                # Ahead of every launch: between two of them a finalizer may run that calls the kernel as well.
                cells[pointers] = addresses
                configuration.stream = stream
                status = start()
                if status:
                    raise self._error(f"could not launch {entry} ({driver.error(status)})", tensors)
            return made[0] if results == 1 else tuple(made[:results])

        return call

    def _arrays(self, tensors: tuple[Tensor, ...], sizes: Mapping[str, int]) -> list[Allocated]:
        """What a call allocates, results first."""
        arrays = [(tuple(evaluate(n, sizes) for n in a.shape), a.dtype, a.layout) for a in self.kernel.arrays]
        if 0 not in arrays[0][0] and any(t.numel() == 0 for t in tensors):
            raise self._error("reads an empty tensor", tensors)
        return arrays

    def _check(self, tensors: tuple[Tensor, ...]) -> dict[str, int]:
        """The sizes of a call whose operands are what the kernel was generated for."""
        kernel, kind = self.kernel, self.kind
        if len(tensors) != len(kernel.operands):
            raise self._error(f"takes {len(kernel.operands)} tensors ({', '.join(kernel.operands)})", tensors)
        for name, tensor in zip(kernel.operands, tensors, strict=True):
            if tensor.device.type != kind or tensor.device != tensors[0].device:
                raise self._error(f"needs every operand on one {kind} device, {name} is on {tensor.device}", tensors)
        for name, tensor, layout in zip(kernel.operands, tensors, kernel.layouts, strict=True):
            if tensor.ndim not in FORMATS[layout]:
                raise self._error(f"needs {name} in {layout} format", tensors)
        for name, tensor, dtype in zip(kernel.operands, tensors, kernel.dtypes, strict=False):
            if tensor.dtype != dtype:
                raise self._error(f"was generated for {dtype} {name}, not {tensor.dtype}", tensors)
        for name, number, dimension in kernel.sizes:
            if dimension >= tensors[number].ndim:
                raise self._error(f"reads {name} from dimension {dimension} of {kernel.operands[number]}", tensors)
        sizes = sizes_of(kernel, tensors)
        for name, tensor, shape in zip(kernel.operands, tensors, kernel.shapes, strict=False):
            expected = tuple(evaluate(n, sizes) for n in shape)
            if tensor.shape != expected:
                raise self._error(f"was generated for {name} of shape {expected}", tensors)
        for text in kernel.counts:
            if evaluate(text, sizes) >= 2**31:
                raise CountError(str(self._error(f"counts {text} in 32 bits", tensors)))
        return sizes

    def _pack(self, sizes: Mapping[str, int]) -> tuple[Array[c_uint64], list[Array[c_void_p]]]:
        """Cells for all arguments, pointers first, and for each launch the addresses of those it takes."""
        kernel = self.kernel
        names = (*kernel.operands, *(array.name for array in kernel.arrays))
        places = {name: place for place, name in enumerate(names)}
        values = [0] * len(places)
        taken: list[list[int]] = []
        for launch in kernel.launches:
            taken.append([])
            for argument in launch.arguments:
                if argument.kind == "pointer":
                    taken[-1].append(places[argument.text])
                    continue
                taken[-1].append(len(values))
                values.append(self._number(argument, sizes))
        cells = (c_uint64 * len(values))(*values)  # a kernel reads the low half of a cell as an int
        base = addressof(cells)
        return cells, [(c_void_p * len(t))(*(base + sizeof(c_uint64) * place for place in t)) for t in taken]

    def _number(self, argument: Argument, sizes: Mapping[str, int]) -> int:
        value = evaluate(argument.text, sizes)
        if argument.kind == "int" and not -(2**31) <= value < 2**31:
            listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise CountError(f"kernel {self.kernel.name} counts {argument.text} in 32 bits, it is {value} for {listed}")
        return value

    def _error(self, what: str, tensors: tuple[Tensor, ...]) -> KernelError:
        given = ", ".join(f"{t.dtype} {tuple(t.shape)}".removeprefix("torch.") for t in tensors)
        return KernelError(f"kernel {self.kernel.name} {what}; it was given {given or 'nothing'}")


def sizes_of(kernel: Kernel, tensors: Sequence[Tensor]) -> dict[str, int]:
    """The named numbers of a call: ints, or `SymInt`s of tensors with symbolic shapes."""
    return {name: tensors[number].shape[dimension] for name, number, dimension in kernel.sizes}


def layout_of(tensor: Tensor) -> str:
    """The layout that a kernel should ask for to read `tensor` as it lies in memory, gaps aside."""
    return "channels_last" if is_channels_last(tensor) else "contiguous"


def dense(memory_format: torch.memory_format) -> Callable[[Tensor], bool]:
    """The function that says whether a tensor lies dense in a format; about the usual one it is quicker to ask so."""
    if memory_format == torch.contiguous_format:
        return Tensor.is_contiguous
    return methodcaller("is_contiguous", memory_format=memory_format)


def allocation(shape: tuple[int, ...], dtype: torch.dtype, layout: str, kind: str) -> partial[Tensor]:
    """Makes an array on a device of that type, the thread's own if there are several."""
    order = [*range(len(shape))]  # of the dimensions, the densest last
    if layout == "channels_last":
        order.append(order.pop(1))
    strides, step = [1] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    # What PyTorch's own generated code calls; the public way gets there in twice the time.
    guards = getattr(getattr(_torch._C, "_dynamo", None), "guards", None)
    quick = getattr(guards, f"_empty_strided_{kind}", None)
    if quick is None:
        return partial(torch.empty_strided, shape, tuple(strides), dtype=dtype, device=kind)
    return partial(quick, shape, tuple(strides), dtype)
