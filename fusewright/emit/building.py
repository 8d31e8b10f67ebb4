"""The parts of a solution file that hold its kernels, build them and call them."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence

from fusewright import kernel as kernel_module
from fusewright.codegen.text import fill
from fusewright.emit import support
from fusewright.emit.architecture import architecture
from fusewright.emit.cpu import CpuText
from fusewright.emit.cuda import CudaText
from fusewright.emit.draft import Draft
from fusewright.emit.header import computed_by
from fusewright.emit.kernel_text import KernelText
from fusewright.runtime import compiler

# What writes the text around a kernel, by the kernel's target.
TEXTS: dict[str, type[KernelText]] = {"cuda": CudaText, "cpu": CpuText}

# What every compiler that CPU kernels were tried with understands; the widest vectors are asked for where they exist.
_FLAGS = (*(flag for flag in compiler.FLAGS if flag != "-fPIC"), "-fopenmp", "-march=native")  # load_inline says -fPIC


def kernel_texts(drafts: Sequence[Draft]) -> list[KernelText]:
    """The kernels of all drafts; where two have the same reference, it is one function."""
    texts = [TEXTS[draft.target](kernel, draft.suffix) for draft in drafts for kernel in draft.kernels]
    for text in texts:
        alike = [other for other in texts if other.kernel.name == text.kernel.name]
        if len({(other.kernel.reference, other.kernel.operands) for other in alike}) == 1 < len(alike):
            text.reference = f"{text.kernel.name}_reference"
    return texts


def constants(kernels: Sequence[KernelText]) -> list[str]:
    """The constants that hold the text of one target's kernels, and that of their launchers."""
    failure = kernels[0].failure
    parts = [f'FAILURE = r"""{failure}"""'] if failure else []
    for kernel in kernels:
        assert '"""' not in kernel.kernel.source
        parts.append(f'{kernel.constant} = r"""{kernel.kernel.source}"""')
        parts.append(f'{kernel.constant}_LAUNCHER = r"""\n{kernel.launcher}"""')
    return parts


def functions(kernels: Sequence[KernelText]) -> list[str]:
    """Python that builds kernels, and a function for each."""
    targets = [target for target in TEXTS if any(kernel.target == target for kernel in kernels)]
    arithmetic = (kernel_module.ceil_div, kernel_module.spread)
    spread = any(kernel.calls("spread") for kernel in kernels)
    parts = [
        inspect.getsource(function)
        for function in arithmetic
        if any(kernel.calls(function.__name__) for kernel in kernels) or (spread and function is arithmetic[0])
    ]
    parts += [_library([kernel for kernel in kernels if kernel.target == target]) for target in targets]
    parts += [support.STREAM] if "cuda" in targets else []
    parts += [
        _operands(targets, several=kernels[0].several),
        *([support.ARGUMENTS] if any(k.kernel.fixed for k in kernels) else []),
    ]
    several = any(kernel.kernel.also for kernel in kernels)
    parts += ["\n".join(fill(support.GRADIENTS, **(support.OF_SEVERAL if several else support.OF_ONE)))]
    references: set[str] = set()
    for kernel in kernels:
        lines = [kernel.sizes_function(), kernel.launch_function()]
        lines += [kernel.reference_function()] if kernel.reference not in references else []
        references.add(kernel.reference)
        parts += ["\n".join(function) for function in (*lines, kernel.call_function(_says(kernel)))]
    return parts


def _operands(targets: Sequence[str], *, several: bool) -> str:
    """The functions that look at a kernel's operands."""
    if len(targets) == 1:
        multiple, alignment = TEXTS[targets[0]].alignment
    else:
        words, values = zip(*(TEXTS[target].alignment for target in targets), strict=True)
        multiple = f"{words[0]} on a GPU, of {words[1]} on a CPU"
        alignment = f'{values[0]} if device == "cuda" else {values[1]}'
    parameter, elsewhere, device = ["device: str,"], "tensor.device.type != device", "{device}"
    if not several:
        parameter, elsewhere, device = [], f"not tensor.is_{targets[0]}", targets[0]
    filled = {"multiple": multiple, "alignment": alignment, "elsewhere": elsewhere, "device": device}
    return "\n".join(fill(support.OPERANDS, parameter=parameter, **filled))


def _says(kernel: KernelText) -> str:
    """One line about a kernel."""
    launches = len(kernel.launches)
    return f"{', '.join(computed_by(kernel.kernel))} in {'one launch' if launches == 1 else f'{launches} launches'}."


def _library(kernels: Sequence[KernelText]) -> str:
    """The function that builds one target's kernels."""
    first = kernels[0]
    sources = [*(["FAILURE"] if first.failure else []), *(c for k in kernels for c in k.sources(len(kernels)))]
    digest = hashlib.sha256("".join(k.kernel.source + k.launcher for k in kernels).encode()).hexdigest()[:8]
    made = fill(
        support.LIBRARIES[first.target],
        library=first.builder,
        extension=f"{first.kernel.name}_{digest}",
        sources=", ".join(sources),
        flags=", ".join(f'"{flag}"' for flag in _FLAGS),
        wide=compiler.WIDE,
        arch=architecture(k.kernel for k in kernels).of_device,
        declarations=[line for kernel in kernels for line in kernel.declarations],
    )
    return "\n".join(made)
