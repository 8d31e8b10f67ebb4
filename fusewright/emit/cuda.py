"""The text around a CUDA kernel in a solution file: its launcher in C++, and the Python function that calls it.

The kernel's own text is `Kernel.source`, character for character.  A launcher takes plain pointers and numbers, so no
header of PyTorch's is compiled; `ctypes` calls it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch

from fusewright.codegen.text import block
from fusewright.emit.arithmetic import Arithmetic
from fusewright.kernel import Argument, Array, Kernel, Launch

# More dynamic shared memory, or larger clusters, need permission.
_PLAIN_SHARED, _PORTABLE_CLUSTER = 48 << 10, 8

_C_TYPES = {"int": ("int", "ctypes.c_int"), "long": ("long long", "ctypes.c_longlong")}


@dataclass(frozen=True)
class _Parameter:
    """One parameter of a ``__global__`` function, as its source has it."""

    type: str
    name: str


class CudaText:
    """Everything a solution file says about one kernel."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.numbers = Arithmetic([name for name, _, _ in kernel.sizes])
        self.passed: dict[str, str] = {}  # numbers that the launcher takes: name -> kind
        self.launches = [self._launch(launch) for launch in kernel.launches]
        self.shape = self._dims(kernel.output)
        self.scratch = [self._dims(array) for array in kernel.scratch]

    # -- C++ -----------------------------------------------------------------------------------------------------------

    @property
    def constant(self) -> str:
        """The name of the constant that holds the kernel's source."""
        return self.kernel.name.upper()

    @property
    def launcher(self) -> str:
        """C++ of the functions that make the kernel ready and launch it."""
        kernel = self.kernel
        numbers = [f"{_C_TYPES[kind][0]} {name}" for name, kind in self.passed.items()]
        parameters = [*(f"{kind} {name}" for name, kind in self.pointers.items()), *numbers, "cudaStream_t stream"]
        body: list[str] = []
        for i, lines in enumerate(self.launches):
            last = i == len(self.launches) - 1
            body += [*lines, "return failure(cudaGetLastError());" if last else _RETURN_ON_FAILURE]
        head = f'extern "C" const char* launch_{kernel.name}({", ".join(parameters)})'
        lines = block(head, body)
        if self.prepares:
            lines = [*block(f'extern "C" const char* prepare_{kernel.name}()', self._preparation()), "", *lines]
        return "\n".join(_wrapped(lines)) + "\n"

    @cached_property
    def pointers(self) -> dict[str, str]:
        """The launcher's pointers with their types: operands, output, scratch."""
        kernel = self.kernel
        names = (*kernel.operands, kernel.output.name, *(array.name for array in kernel.scratch))
        types: dict[str, str] = {}
        for launch in kernel.launches:
            for argument, parameter in zip(launch.arguments, parameters_of(kernel.source, launch.entry), strict=True):
                if argument.kind == "pointer" and types.get(argument.text, "const").startswith("const"):
                    types[argument.text] = parameter.type  # what a launch writes is not const
        return {name: types[name] for name in names if name in types}

    @property
    def prepares(self) -> bool:
        """Whether a kernel must be given more than what every kernel may have."""
        return any(n.shared > _PLAIN_SHARED or n.cluster > _PORTABLE_CLUSTER for n in self.kernel.launches)

    def _preparation(self) -> list[str]:
        calls = []
        for launch in self.kernel.launches:
            if launch.shared > _PLAIN_SHARED:
                attribute = f"cudaFuncAttributeMaxDynamicSharedMemorySize, {launch.shared}"
                calls.append(f"cudaFuncSetAttribute({launch.entry}, {attribute})")
            if launch.cluster > _PORTABLE_CLUSTER:
                calls.append(f"cudaFuncSetAttribute({launch.entry}, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)")
        checked = [f"if (const char* error = failure({call})) return error;" for call in calls[:-1]]
        return [*checked, f"return failure({calls[-1]});"]

    def _launch(self, launch: Launch) -> list[str]:
        """The lines of one launch."""
        parameters = parameters_of(self.kernel.source, launch.entry)
        pairs = list(zip(launch.arguments, parameters, strict=True))
        arguments = [self._argument(argument, parameter.name) for argument, parameter in pairs]
        grid = [self._passed(n, name, "int") for n, name in zip(launch.grid, ("blocks", "rows", "layers"), strict=True)]
        while len(grid) > 1 and grid[-1] == "1":
            grid.pop()
        shape = grid[0] if len(grid) == 1 else f"dim3({', '.join(grid)})"
        return [
            f"{launch.entry}<<<{shape}, {launch.threads}, {launch.shared}, stream>>>({', '.join(arguments)});",
        ]

    def _argument(self, argument: Argument, name: str) -> str:
        return argument.text if argument.kind == "pointer" else self._passed(argument.text, name, argument.kind)

    def _passed(self, expression: str, wanted: str, kind: str) -> str:
        """The C++ text of a number: a literal, or a parameter of the launcher."""
        name = self.numbers.name(wanted, expression)
        if not name.isidentifier():
            return name
        known = self.passed.get(name, "int")
        self.passed[name] = "long" if "long" in (known, kind) else "int"
        return name

    # -- Python --------------------------------------------------------------------------------------------------------

    @property
    def argtypes(self) -> str:
        """The launcher's ctypes signature."""
        types = ["ctypes.c_void_p"] * len(self.pointers) + [_C_TYPES[kind][1] for kind in self.passed.values()]
        runs = [(name, len(list(run))) for name, run in groupby([*types, "ctypes.c_void_p"])]
        return " + ".join(f"[{name}] * {count}" if count > 1 else f"[{name}]" for name, count in runs)

    def _dims(self, array: Array) -> str:
        dims = [self.numbers.name(f"{array.name}_{i}", n) for i, n in enumerate(array.shape)]
        return _tuple(dims)

    def sizes_function(self) -> list[str]:
        """A function of the call's sizes: what to allocate, and the numbers that the launcher takes."""
        kernel, names = self.kernel, [name for name, _, _ in self.kernel.sizes]
        results = [self.shape, *self.scratch, _tuple(list(self.passed))]
        what = " ".join(["the output's shape,", *(f"that of {a.name}," for a in kernel.scratch)])
        ints = [name for name, kind in self.passed.items() if kind == "int"]
        ints += [self.numbers.text(count) for count in kernel.counts]
        largest = f"max({', '.join(ints)})" if len(ints) > 1 else "".join(ints)
        check = [
            f"if {largest} >= 2**31:",
            f'    raise ValueError(f"{kernel.name} counts in 32 bits, too few for {_formatted(names)}")',
        ]
        return [
            "@lru_cache(maxsize=256)",
            f"def {kernel.name}_sizes({', '.join(f'{name}: int' for name in names)}) -> tuple[tuple[int, ...], ...]:",
            f'    """Gives {what} and the numbers that the launcher takes."""',
            *(f"    {line}" for line in self.numbers.lines),
            *(f"    {line}" for line in (check if largest else [])),
            f"    return {', '.join(results)}",
        ]

    def launch_function(self) -> list[str]:
        """The function that runs the kernel on CUDA tensors."""
        kernel, name = self.kernel, self.kernel.name
        arrays = [kernel.output.name, *(array.name for array in kernel.scratch)]
        known = [f"{array}_shape" for array in arrays]
        sizes = ", ".join(f"{kernel.operands[i]}.shape[{dim}]" for _, i, dim in kernel.sizes)
        allocations = [
            f"{array.name} = torch.empty({shape}, dtype={array.dtype}, device={kernel.operands[0]}.device"
            f"{_memory_format(array.layout, len(array.shape))})"
            for array, shape in zip((kernel.output, *kernel.scratch), known, strict=True)
        ]
        pointers = ", ".join(f"{pointer}.data_ptr()" for pointer in self.pointers)
        stream = "torch.cuda.current_stream().cuda_stream"
        return [
            f"def {name}_launch({', '.join(f'{o}: torch.Tensor' for o in kernel.operands)}) -> torch.Tensor:",
            f'    """Launches the kernel on dense operands and returns {kernel.output.name}."""',
            *(f"    {line}" for line in self._dense()),
            f"    {', '.join(known)}, numbers = {name}_sizes({sizes})",
            *(f"    {line}" for line in allocations),
            f"    launch = library({kernel.operands[0]}.device.index).launch_{name}",
            f'    check("{name}", launch({pointers}, *numbers, {stream}))',
            f"    return {kernel.output.name}",
        ]

    def _dense(self) -> list[str]:
        kernel = self.kernel
        lines = []
        for i, operand in enumerate(kernel.operands):
            dtype = kernel.dtypes[i] if kernel.dtypes else torch.float32
            ndim = 1 + max((dim for _, number, dim in kernel.sizes if number == i), default=3)
            layout = _memory_format(kernel.layouts[i], ndim)
            lines.append(f'{operand} = dense("{kernel.name}", "{operand}", {operand}, {dtype}{layout})')
        return lines

    def reference_function(self) -> list[str]:
        """The kernel's reference under its own name, over the operands' names."""
        text = self.kernel.reference.replace("def reference(", f"def {self.kernel.name}_reference(", 1)
        words = set(re.findall(r"\w+", text))
        for i, operand in enumerate(self.kernel.operands):
            if operand not in words:
                text = re.sub(rf"\boperand_{i}\b", operand, text)
        lines = without_unused(text.rstrip("\n")).split("\n")
        return [lines[0], '    """The same in PyTorch\'s own operations, which gradients go through."""', *lines[1:]]

    def call_function(self, says: str) -> list[str]:
        """The function that the forward calls."""
        name, operands = self.kernel.name, ", ".join(self.kernel.operands)
        return [
            f"def {name}({', '.join(f'{o}: torch.Tensor' for o in self.kernel.operands)}) -> torch.Tensor:",
            f'    """{says}"""',
            f"    return differentiable({name}_launch, {name}_reference, {operands})",
        ]


_RETURN_ON_FAILURE = "if (const char* error = failure(cudaGetLastError())) return error;"


def parameters_of(source: str, entry: str) -> list[_Parameter]:
    """The parameters of an entry point, read from the source."""
    found = re.search(rf"\b{entry}\(([^)]*)\)\s*\{{", source)
    assert found is not None, f"no entry point {entry}"
    parameters = []
    for text in found[1].split(","):
        kind, name = text.replace("__restrict__", " ").rsplit(None, 1)
        stars = len(name) - len(name.lstrip("*"))
        parameters.append(_Parameter(" ".join(kind.split()) + "*" * stars, name.lstrip("*")))
    return parameters


def without_unused(function: str) -> str:
    """The text of a function without the names that it gives to sizes and to results of calls, and does not use."""
    lines = function.split("\n")
    kept = []
    for line in lines:
        found = re.fullmatch(r"(\s+)(\w+) = (\w+\.shape\[\d+\]|torch\.ops\..*)", line)
        others = "\n".join(re.sub(r"#.*", "", other) for other in lines if other is not line)
        if found is None or re.search(rf"\b{found[2]}\b", others):
            kept.append(line)
        elif found[3].startswith("torch.ops."):
            kept.append(found[1] + found[3])  # for its effect
    return "\n".join(kept)


def _memory_format(layout: str, ndim: int) -> str:
    if layout == "contiguous":
        return ""
    return f", memory_format=torch.channels_last{'_3d' if ndim == 5 else ''}"


def _wrapped(lines: list[str], width: int = 116) -> list[str]:
    """Long lines of C++ broken at commas."""
    result = []
    for line in lines:
        depth = len(line) - len(line.lstrip())
        while len(line) > width:
            at = line.rfind(", ", 0, width) + 1
            if at <= depth + 8:
                break
            result.append(line[:at])
            line = " " * (depth + 4) + line[at + 1 :]
        result.append(line)
    return result


def _tuple(items: list[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


def _formatted(names: list[str]) -> str:
    return ", ".join(f"{name}={{{name}}}" for name in names)
