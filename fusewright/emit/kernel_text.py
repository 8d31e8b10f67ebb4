"""The text around a kernel in a solution file, whatever it runs on: a launcher in C++, Python functions that call it.

The kernel's own text is `Kernel.source`, character for character.  A launcher takes plain pointers and numbers, so no
header of PyTorch's is compiled; `ctypes` calls it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import ClassVar

import torch

from fusewright.codegen.text import Lines, block
from fusewright.emit.arithmetic import FUNCTIONS, Arithmetic, readable
from fusewright.kernel import Argument, Array, Expression, Fixed, Kernel, Launch

_C_TYPES = {"int": ("int", "ctypes.c_int"), "long": ("long long", "ctypes.c_longlong")}


@dataclass(frozen=True)
class Parameter:
    """One parameter of an entry point, as its source has it."""

    type: str
    name: str


class KernelText(ABC):
    """Everything a solution file says about one kernel.

    target       the device that its kernels run on
    says         what they are called in a sentence
    returns      the launcher's type in C++ and in ctypes
    last         its last parameter: in C++, in ctypes, and what Python passes
    alignment    what support.OPERANDS says of where operands begin: in words, and in Python
    failure      the text of what all launchers use

    Of one kernel: `name`, which Python's functions have (with a suffix where files are for several devices), `builder`,
    that of the function that builds it, `reference`, that of its reference, which two kernels may share.
    """

    target: ClassVar[str]
    says: ClassVar[str]
    returns: tuple[str, str]
    last: ClassVar[tuple[str, str, str]]
    alignment: ClassVar[tuple[str, str]]
    failure: ClassVar[str] = ""

    def __init__(self, kernel: Kernel, suffix: str = "") -> None:
        self.kernel = kernel
        self.name = kernel.name + suffix
        self.several = bool(suffix)  # whether the file is for several devices
        self.builder = f"{self.target}_library" if suffix else "library"
        self.reference = f"{self.name}_reference"
        self.numbers = Arithmetic([name for name, _, _ in kernel.sizes])
        self.passed: dict[str, str] = {}  # numbers that the launcher takes: name -> kind
        self.launches = [self._launch(launch) for launch in kernel.launches]
        self.shapes = [self._dims(array) for array in kernel.arrays]

    @abstractmethod
    def _launch(self, launch: Launch) -> Lines:
        """The lines of C++ of one launch."""

    @abstractmethod
    def _called(self, arguments: str) -> Lines:
        """The lines of Python that call the launcher."""

    @property
    def declarations(self) -> Lines:
        """The lines of Python that tell ctypes of the launcher."""
        name = f"kernels.launch_{self.kernel.name}"
        return [f"{name}.argtypes = {self.argtypes}", f"{name}.restype = {self.returns[1]}"]

    def sources(self, among: int) -> list[str]:
        """The constants that are compiled, in order, where `among` kernels are."""
        return [self.constant, f"{self.constant}_LAUNCHER"]

    # -- C++ -----------------------------------------------------------------------------------------------------------

    @property
    def constant(self) -> str:
        """The name of the constant that holds the kernel's source."""
        return self.name.upper()

    @property
    def launcher(self) -> str:
        """C++ of the functions that make the kernel ready and launch it."""
        return "\n".join(_wrapped(self._launcher())) + "\n"

    def _launcher(self) -> Lines:
        numbers = [f"{_C_TYPES[kind][0]} {name}" for name, kind in self.passed.items()]
        parameters = [*(f"{kind} {name}" for name, kind in self.pointers.items()), *numbers, self.last[0]]
        head = f'extern "C" {self.returns[0]}launch_{self.kernel.name}({", ".join(parameters)})'
        return block(head, self._body())

    def _body(self) -> Lines:
        return [line for lines in self.launches for line in lines]

    @cached_property
    def pointers(self) -> dict[str, str]:
        """The launcher's pointers with their types: operands, results, scratch."""
        kernel = self.kernel
        names = (*kernel.operands, *(array.name for array in kernel.arrays))
        types: dict[str, str] = {}
        for launch in kernel.launches:
            for argument, parameter in zip(launch.arguments, parameters_of(kernel.source, launch.entry), strict=True):
                if argument.kind == "pointer" and types.get(argument.text, "const").startswith("const"):
                    types[argument.text] = parameter.type  # what a launch writes is not const
        return {name: types[name] for name in names if name in types}

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
    def returned(self) -> str:
        """What its functions return."""
        return "tuple[torch.Tensor, ...]" if self.kernel.also else "torch.Tensor"

    @property
    def argtypes(self) -> str:
        """The launcher's ctypes signature."""
        types = ["ctypes.c_void_p"] * len(self.pointers) + [_C_TYPES[kind][1] for kind in self.passed.values()]
        runs = [(name, len(list(run))) for name, run in groupby([*types, self.last[1]])]
        return " + ".join(f"[{name}] * {count}" if count > 1 else f"[{name}]" for name, count in runs)

    def _dims(self, array: Array) -> str:
        dims = [self.numbers.name(f"{array.name}_{i}", n) for i, n in enumerate(array.shape)]
        return _tuple(dims)

    def sizes_function(self) -> list[str]:
        """A function of the operands' shapes: what to allocate, and the numbers that the launcher takes."""
        kernel, names = self.kernel, [name for name, _, _ in self.kernel.sizes]
        results = [*self.shapes, _tuple(list(self.passed))]
        what = " ".join(["the output's shape,", *(f"that of {a.name}," for a in kernel.arrays[1:])])
        ints = [name for name, kind in self.passed.items() if kind == "int"]
        ints += [self.numbers.text(count) for count in kernel.counts]
        largest = f"max({', '.join(ints)})" if len(ints) > 1 else "".join(ints)
        check = [
            f"if {largest} >= 2**31:",
            f'    raise ValueError(f"{kernel.name} counts in 32 bits, too few for {_formatted(names)}")',
        ]
        parameters = ", ".join(f"{operand}_shape: torch.Size" for operand in kernel.operands)
        return [
            "@lru_cache(maxsize=256)",
            f"def {self.name}_sizes({parameters}) -> tuple[tuple[int, ...], ...]:",
            f'    """Gives {what} and the numbers that the launcher takes."""',
            *(f"    {line}" for line in self._shape_checks()),
            *(f"    {line}" for line in self.numbers.lines),
            *(f"    {line}" for line in (check if largest else [])),
            f"    return {', '.join(results)}",
        ]

    def _shape_checks(self) -> list[str]:
        """Lines that read the call's sizes from the operands' shapes, and compare everything else with the record's."""
        kernel = self.kernel
        given = {(operand, dim): name for name, operand, dim in kernel.sizes}
        readers = list(dict.fromkeys(operand for _, operand, _ in kernel.sizes))
        known: set[str] = set()
        lines, again = [], []
        for i in (*readers, *(i for i in range(len(kernel.operands)) if i not in readers)):
            later = [dim for dim, n in enumerate(kernel.shapes[i]) if given.get((i, dim)) != n and _names(n) - known]
            open_ = {*later, *(dim for operand, dim in given if operand == i)}
            lines.append(self._expects(i, open_))
            own = {name: f"{kernel.operands[i]}_shape[{dim}]" for (operand, dim), name in given.items() if operand == i}
            lines += [f"{', '.join(own)} = {', '.join(own.values())}"] if own else []
            known |= own.keys()
            again += [self._expects(i, set())] if later else []
        for rows in (n for n, i, _ in kernel.sizes if kernel.looks_up and kernel.operands[i].startswith("weight")):
            again += [f"if {rows} == 0:", f'    raise IndexError("{kernel.name} looks rows up where there are none")']
        return [*lines, *again]

    def _expects(self, operand: int, open_: set[int]) -> str:
        """The line that compares an operand's shape, but for the `open_` dimensions."""
        name = self.kernel.operands[operand]
        dims = ["None" if d in open_ else readable(n) for d, n in enumerate(self.kernel.shapes[operand])]
        return f'expect("{self.kernel.name}", "{name}", {name}_shape, {_tuple(dims)})'

    def calls(self, function: str) -> bool:
        """Whether the arithmetic of sizes calls `function`."""
        return any(f"{function}(" in line for line in (*self._shape_checks(), *self.numbers.lines))

    def launch_function(self) -> list[str]:
        """The function that runs the kernel on tensors of its device."""
        kernel, name = self.kernel, self.name
        known = [f"{array.name}_shape" for array in kernel.arrays]
        shapes = ", ".join(f"{operand}.shape" for operand in kernel.operands)
        allocations = [
            f"{array.name} = torch.empty({shape}, dtype={array.dtype}, device={kernel.operands[0]}.device"
            f"{_memory_format(array.layout, len(array.shape))})"
            for array, shape in zip(kernel.arrays, known, strict=True)
        ]
        pointers = ", ".join(f"{pointer}.data_ptr()" for pointer in self.pointers)
        results = ", ".join(array.name for array in kernel.results)
        return [
            f"def {name}_launch({', '.join(f'{o}: torch.Tensor' for o in kernel.operands)}) -> {self.returned}:",
            f'    """Launches the kernel and returns {results}."""',
            f"    {', '.join(known)}, numbers = {name}_sizes({shapes})",
            *(f"    {line}" for line in self._dense()),
            *(f"    {line}" for line in allocations),
            *(f"    {line}" for line in self._called(f"{pointers}, *numbers, {self.last[2]}")),
            f"    return {results}",
        ]

    def _dense(self) -> list[str]:
        kernel = self.kernel
        lines = []
        for i, operand in enumerate(kernel.operands):
            dtype = kernel.dtypes[i] if kernel.dtypes else torch.float32
            layout = _memory_format(kernel.layouts[i], len(kernel.shapes[i])).replace("memory_format=", "")
            device = f'"{self.target}", ' if self.several else ""
            lines.append(f'{operand} = dense("{kernel.name}", "{operand}", {operand}, {device}{dtype}{layout})')
        return lines

    def reference_function(self) -> list[str]:
        """The kernel's reference under its own name, over the operands' names."""
        text = self.kernel.reference.replace("def reference(", f"def {self.reference}(", 1)
        words = set(re.findall(r"\w+", text))
        for i, operand in enumerate(self.kernel.operands):
            if operand not in words:
                text = re.sub(rf"\boperand_{i}\b", operand, text)
        lines = without_unused(on_current_device(text.rstrip("\n"))).split("\n")
        return [lines[0], '    """The same in PyTorch\'s own operations, which gradients go through."""', *lines[1:]]

    def call_function(self, says: str) -> list[str]:
        """The function that the forward calls, with the kernel's constants by name, as one of PyTorch's is called."""
        fixed, operands = self.kernel.fixed, self.kernel.operands
        takes = [f"{operand}: torch.Tensor" for operand in operands]
        about, check = [f'    """{says}"""'], []
        if fixed:
            takes += ["*", *map(_keyword, fixed)]
            more = "Keywords name the kernel's constants, as the rewritten program has them; others raise `ValueError`."
            about = [f'    """{says}', "", f"    {more}", '    """']
            given, wanted = _tuple([f.name for f in fixed]), _tuple([repr(f.value) for f in fixed])
            check = [f"    expect_arguments({self.name}, {given}, {wanted})"]
        return [
            f"def {self.name}({', '.join(takes)}) -> {self.returned}:",
            *about,
            *check,
            f"    return differentiable({self.name}_launch, {self.reference}, {', '.join(operands)})",
        ]


def with_constants(program: str, kernel: Kernel) -> str:
    """The text of a program that says in its calls of a kernel what that was made for, but for PyTorch's defaults."""
    said = "".join(f", {f.name}={f.value!r}" for f in kernel.fixed if f.value != f.default)
    return re.sub(rf"(?<![\w.])({kernel.name}\(.*)\)(?=  # )", rf"\1{said})", program)


def parameters_of(source: str, entry: str) -> list[Parameter]:
    """The parameters of an entry point, read from the source."""
    found = re.search(rf"\b{entry}\(([^)]*)\)\s*\{{", source)
    assert found is not None, f"no entry point {entry}"
    parameters = []
    for text in found[1].split(","):
        kind, name = text.replace("__restrict__", " ").rsplit(None, 1)
        stars = len(name) - len(name.lstrip("*"))
        parameters.append(Parameter(" ".join(kind.split()) + "*" * stars, name.lstrip("*")))
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


def on_current_device(text: str) -> str:
    """The text of a program that was made on one GPU, for whichever is the current one."""
    return re.sub(r'"cuda:\d+"', '"cuda"', text)


def _keyword(argument: Fixed) -> str:
    """A parameter with its type, and PyTorch's default."""
    kind = type(argument.value).__name__
    if isinstance(argument.value, tuple):
        kind = "tuple[int, ...]" if all(isinstance(n, int) for n in argument.value) else "tuple[tuple, ...]"
    kind += " | None" if argument.default is None else ""
    return f"{argument.name}: {kind}" + ("" if argument.default is ... else f" = {argument.default!r}")


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


def _names(expression: Expression) -> set[str]:
    """The sizes that an expression is over."""
    return set(re.findall(r"[A-Za-z_]\w*", expression)) - FUNCTIONS
