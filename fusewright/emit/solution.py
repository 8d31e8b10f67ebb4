"""The text of a solution file, from a problem and the program that was made of its model."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
from dataclasses import dataclass
from pprint import pformat
from textwrap import dedent
from typing import Any

import torch
from torch import nn

from fusewright import kernel as kernel_module
from fusewright.codegen.aten import HEADER, Program, attribute
from fusewright.codegen.text import fill
from fusewright.dispatch import Args, Entry, Guard, Kwargs
from fusewright.emit import conditions, support
from fusewright.emit.cpu import CpuText
from fusewright.emit.cuda import CudaText
from fusewright.emit.kernel_text import KernelText, without_unused
from fusewright.emit.model_code import ModelCode, import_block, method, model_code
from fusewright.errors import UnsupportedError
from fusewright.plan import Plan
from fusewright.problem import Problem
from fusewright.runtime import compiler
from fusewright.schedule.wishes import NO_WISHES, Wishes
from fusewright.verification.numerics import tf32_allowed

# Names that a solution file defines or imports besides the problem's own.
_OWN = frozenset(
    (
        *("ctypes", "torch", "F", "cache", "lru_cache", "islice", "load_inline", "WeakKeyDictionary"),
        *("ModelNew", "FAILURE", "ceil_div", "spread", "library", "check", "dense", "Recomputed"),
        *("differentiable", "KEPT", "derived", "MADE_FOR", "configuration", "described", "runs_kernels"),
        *("ordinary", "called_plainly", "weights", "KINDS", "covers", "tf32_allowed"),
    )
)


# What writes the text around a kernel, by the kernel's target.
TEXTS: dict[str, type[KernelText]] = {"cuda": CudaText, "cpu": CpuText}


@dataclass(frozen=True)
class Draft:
    """Everything that the text of a solution is made of, but for what is known once it has run."""

    problem: Problem
    model: nn.Module
    args: Args
    kwargs: Kwargs
    entry: Entry
    precision: str = "eager"
    wishes: Wishes = NO_WISHES
    either_mode: bool = False  # the forward is the same in training and in evaluation mode
    target: str = "cuda"

    @property
    def plan(self) -> Plan:
        """What was done, and why."""
        assert self.entry.plan is not None
        return self.entry.plan

    @property
    def program(self) -> Program:
        """What runs."""
        assert self.entry.runner is not None
        return self.entry.runner.program

    @property
    def guard(self) -> Guard:
        """The calls it serves."""
        assert self.entry.runner is not None
        return self.entry.runner.guard


def text(draft: Draft, header: str) -> str:
    """The whole file, unformatted; the same for the same problem, program and header.

    Raises `UnsupportedError` where something of the problem or its program cannot be put into one file.
    """
    code = model_code(draft.problem.path, draft.problem.source)
    _check(draft, code)
    kernels = [TEXTS[kernel.target](kernel) for kernel in draft.program.kernels]
    sections = [_section("The model as it was", code.body)]
    if kernels:
        sections.append(_section("Kernels, in the order in which they run", *_kernels(kernels)))
        sections.append(_section("Building and calling them", *_calling(draft, kernels)))
    sections.append(_section("The model that does less", *_guards(draft), _model(draft)))
    body = "\n\n\n".join(sections)
    return f'"""{header}"""\n\n{_imports(code, body)}\n\n{body}\n'


def _check(draft: Draft, code: ModelCode) -> None:
    """Refuses what one file cannot hold."""
    path, program = draft.problem.path, draft.program
    own = _OWN | {kernel.name for kernel in program.kernels}
    imported = {"torch": "import torch", "F": "import torch.nn.functional as F"}
    clash = next((n for n in sorted(own & code.names) if imported.get(n) not in code.imports), None)
    if clash is not None and not (clash == "F" and "from torch.nn import functional as F" in code.imports):
        raise UnsupportedError(f"{path}: it defines {clash}, which a solution file needs for itself; rename it there")
    if program.constants:
        name, tensor = next(iter(program.constants.items()))
        raise UnsupportedError(
            f"{path}: the forward uses a tensor ({name}, {tuple(tensor.shape)}) that is no parameter or buffer of the "
            "model; register it as a buffer"
        )


def _imports(code: ModelCode, body: str) -> str:
    """The problem's imports, and those of the rest."""
    wanted = {
        "import ctypes": "ctypes.",
        "from functools import cache": "@cache",
        "from functools import lru_cache": "@lru_cache",
        "from itertools import islice": "islice(",
        "from weakref import WeakKeyDictionary": "WeakKeyDictionary(",
        "import torch": "torch",
        "import torch.nn.functional as F": r"F.",
        "from torch.utils.cpp_extension import load_inline": "load_inline(",
    }
    own = [statement for statement, sign in wanted.items() if re.search(rf"(?<!\w){re.escape(sign)}", body)]
    theirs = [statement for statement in code.imports if statement != "from torch.nn import functional as F"]
    return import_block([*theirs, *own])


def _section(title: str, *parts: str) -> str:
    rule = f"# {'-' * 4} {title} "
    return "\n\n\n".join([rule.ljust(120, "-"), *(part.strip("\n") for part in parts if part)])


def _kernels(kernels: list[KernelText]) -> list[str]:
    """The constants that hold the kernels' text, and the text of their launchers."""
    failure = kernels[0].failure
    parts = [f'FAILURE = r"""{failure}"""'] if failure else []
    for kernel in kernels:
        assert '"""' not in kernel.kernel.source
        parts.append(f'{kernel.constant} = r"""{kernel.kernel.source}"""')
        parts.append(f'{kernel.constant}_LAUNCHER = r"""\n{kernel.launcher}"""')
    return parts


def _calling(draft: Draft, kernels: list[KernelText]) -> list[str]:
    """Python that builds the kernels, and a function for each."""
    parts = []
    used = "\n".join(line for kernel in kernels for line in kernel.numbers.lines)
    for function in (kernel_module.ceil_div, kernel_module.spread):
        if f"{function.__name__}(" in used:
            if function is kernel_module.spread and "ceil_div(" not in used:
                parts.append(inspect.getsource(kernel_module.ceil_div))
            parts.append(inspect.getsource(function))
    parts.append(_library(kernels))
    parts.append(support.GRADIENTS)
    for kernel in kernels:
        functions = (
            kernel.sizes_function(),
            kernel.launch_function(),
            kernel.reference_function(),
            kernel.call_function(_says(draft, kernel)),
        )
        parts += ["\n".join(lines) for lines in functions]
    return parts


def _says(draft: Draft, kernel: KernelText) -> str:
    """One line about a kernel."""
    words = kernel.kernel.name.removeprefix("fused_").split("_")
    launches = len(kernel.launches)
    return f"{', '.join(words)} in {'one launch' if launches == 1 else f'{launches} launches'}."


def _library(kernels: list[KernelText]) -> str:
    """The function that builds the kernels, and what calls of them need."""
    first = kernels[0]
    sources = [*(["FAILURE"] if first.failure else []), *(c for k in kernels for c in k.sources(len(kernels)))]
    digest = hashlib.sha256("".join(k.kernel.source + k.launcher for k in kernels).encode()).hexdigest()[:8]
    flags = ", ".join(f'"{flag}"' for flag in _flags()) if first.kernel.target == "cpu" else ""
    made = fill(
        first.library,
        extension=f"{first.kernel.name}_{digest}",
        sources=", ".join(sources),
        flags=flags,
        declarations=[line for kernel in kernels for line in kernel.declarations],
    )
    return "\n".join([*made, "", "", *fill(support.DENSE, **first.words)])


def _flags() -> list[str]:
    """What this machine's compiler of CPU kernels is told, without what `load_inline` says itself."""
    return [flag for flag in compiler.compiler().flags if flag != "-fPIC"]


def _guards(draft: Draft) -> list[str]:
    """What decides whether the kernels serve a call."""
    model, program = draft.model, draft.program
    paths = _read_tensors(model, program)
    tensors = dict(_named_tensors(model))
    weights = "".join(f"{attribute('model', path)}, " for path in paths)
    kinds = "".join(f"({tuple(tensors[p].shape)}, {tensors[p].dtype}), " for p in paths)
    made_for = pformat(_configured(model), width=110, sort_dicts=False, compact=True)
    parts = [
        f"# What the kernels were made for; a model that is configured otherwise runs its original forward.\n"
        f"MADE_FOR = {made_for}",
        support.CONFIGURATION,
        fill_text(support.ORDINARY, condition=_condition(draft), device=draft.target),
        f'def weights(model: Model) -> tuple[torch.Tensor, ...]:\n    """The tensors of the model that the forward'
        f' reads."""\n    return ({weights.rstrip(" ")})',
        f"# Their shapes and dtypes.\nKINDS = [{kinds.rstrip(', ')}]",
        *_tf32(draft),
        _covers(draft),
    ]
    if program.derived:
        parts.append(
            fill_text(
                support.DERIVED,
                sources="".join(f"{attribute('model', path)}, " for path in program.sources).rstrip(" "),
                derive=_method(draft, "derive"),
            )
        )
    return parts


def _condition(draft: Draft) -> str:
    """Whether a ``device`` is of the kind that the kernels run on."""
    if draft.target == "cpu":
        return 'device.type == "cpu"'
    needs = max((kernel.needs for kernel in draft.program.kernels), default=0)
    return f'device.type == "cuda" and torch.cuda.get_device_capability(device) >= ({needs // 10}, {needs % 10})'


def _tf32(draft: Draft) -> list[str]:
    """The function that says whether the settings allow what kernels do, where they round to tf32 by these settings."""
    if draft.target == "cpu":
        return []
    families = {choice.name: choice.family for choice in draft.plan.kernels}
    wide = {families[k.name] for k in draft.program.kernels if torch.float32 in k.dtypes}
    convolutions, products = tf32_allowed("eager")
    if products and wide - {"range reduction", "stream"}:  # the rarer setting; convolutions go along with it
        return [fill_text(support.TF32, operations="matrix products", setting="cuda.matmul")]
    if convolutions and "contraction" in wide:
        return [fill_text(support.TF32, operations="convolutions", setting="cudnn.conv")]
    return []


def fill_text(template: str, **names: str) -> str:
    """`template` with ``$name`` replaced."""
    return "\n".join(fill(template, **names))


def _configured(model: nn.Module) -> object:
    scope: dict[str, Any] = {"Model": nn.Module}
    exec(support.CONFIGURATION, scope)  # our own text
    return scope["configuration"](model)


def _named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def _read_tensors(model: nn.Module, program: Program) -> list[str]:
    """The paths of the tensors that a program reads."""
    return [
        path
        for path, _ in _named_tensors(model)
        if re.search(rf"(?<![\w.]){re.escape(attribute('self', path))}(?!\w)", program.source)
    ]


def _covers(draft: Draft) -> str:
    """The function that looks at a call."""
    inputs = conditions.inputs_of(draft.model.forward, draft.args, draft.kwargs)
    tensors = ", ".join(inputs.tensors)
    device = f"{inputs.tensors[0]}.device"
    checks = [*inputs.conditions, f"runs_kernels({device})", f"ordinary({device}, {tensors}, *held)"]
    checks.append("called_plainly(model)")
    for i, name in enumerate(inputs.tensors):
        checks += conditions.tensor_conditions(name, draft.guard, i)
    checks += conditions.size_conditions(inputs.tensors, draft.guard)
    checks.append("[(w.shape, w.dtype) for w in held] == KINDS")
    if not draft.either_mode:
        quantifier = "all" if draft.model.training else "not any"
        checks.append(f"{quantifier}(m.training for m in model.modules())")
    checks += ["tf32_allowed()"] if _tf32(draft) else []
    checks += _gradient_modes(draft, inputs.tensors)
    joined = "\n        and ".join(checks)
    parameters = _signature(draft, "forward")[0].removeprefix("self").removeprefix(", ")
    return (
        f"def covers(model: Model, {parameters}) -> bool:\n"
        '    """Whether the kernels were made for a call; the original forward serves all others."""\n'
        f"    held = weights(model)\n    return (\n        {joined}\n    )"
    )


def _gradient_modes(draft: Draft, tensors: tuple[str, ...]) -> list[str]:
    """Which calls the kernels measured slower for."""
    modes = draft.entry.modes
    wants = " or ".join(f"{name}.requires_grad" for name in tensors)
    if {"forward+backward", "with input gradients"} <= modes:
        return []
    if "forward+backward" in modes:
        return [f"not (torch.is_grad_enabled() and ({wants}))"]
    if "with input gradients" in modes:
        return [f"(not torch.is_grad_enabled() or {wants})"]
    return ["not torch.is_grad_enabled()"]


def _signature(draft: Draft, name: str) -> tuple[str, str]:
    """The parameters of a method of Model with ``self``, and the arguments that hand them on."""
    arguments = method(draft.problem.source, draft.problem.model_class.__name__, name)
    if arguments is None:
        return "self, *args, **kwargs", "*args, **kwargs"
    handed = [a.arg for a in (*arguments.posonlyargs, *arguments.args)][1:]
    handed += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    handed += [f"{a.arg}={a.arg}" for a in arguments.kwonlyargs]
    handed += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return ast.unparse(arguments), ", ".join(handed)


def _method(draft: Draft, name: str) -> str:
    """A name that the model does not use."""
    while hasattr(draft.model, name):
        name += "_"
    return name


def _model(draft: Draft) -> str:
    """``class ModelNew``."""
    program = draft.program
    init, init_arguments = _signature(draft, "__init__")
    forward, forward_arguments = _signature(draft, "forward")
    inputs = conditions.inputs_of(draft.model.forward, draft.args, draft.kwargs)
    derive, fused = _functions(program.source)
    fits, derive_name, fused_name = _method(draft, "fits"), _method(draft, "derive"), _method(draft, "fused")
    values = [*inputs.tensors, *(["*derived(self)"] if program.derived else [])]
    call = [f"        return self.{fused_name}({', '.join(values)})"]
    if draft.target == "cuda":
        call = [f"        with torch.cuda.device({inputs.tensors[0]}.device):", f"    {call[0]}"]
    lines = [
        "class ModelNew(Model):",
        '    """`Model` with its forward computed by the kernels, where they were made for the call."""',
        "",
        f"    def __init__({init}):",
        f"        super().__init__({init_arguments})",
        f"        self.{fits} = configuration(self) == MADE_FOR",
        "",
        f"    def forward({forward}):",
        '        """As the original."""',
        f"        if not (self.{fits} and covers(self, {forward_arguments})):",
        f"            return super().forward({forward_arguments})",
        *call,
    ]
    methods = [(fused, "forward", fused_name, "The rewritten forward.")]
    if program.derived:
        methods.append((derive, "derive", derive_name, "What the forward needs of weights alone."))
    for function, old, new, says in methods:
        first, *rest = without_unused(function).split("\n")
        lines += ["", f"    {first.replace(f'def {old}(', f'def {new}(', 1)}", f'        """{says}"""']
        lines += [f"    {line}" for line in rest]
    return "\n".join(lines)


def _functions(source: str) -> tuple[str, str]:
    """The texts of a program's two functions."""
    derive, forward = dedent(source.removeprefix(HEADER)).split("\n\n\n")
    return derive.strip("\n"), forward.strip("\n")
