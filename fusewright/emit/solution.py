"""The text of a solution file, from a problem and the programs that were made of its model, one for each device."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fusewright.emit.building import TEXTS, constants, functions, kernel_texts
from fusewright.emit.draft import Draft
from fusewright.emit.model_class import model_class, signature
from fusewright.emit.model_code import ModelCode, import_block, model_code
from fusewright.emit.serving import serving
from fusewright.errors import UnsupportedError

# Names that a solution file imports: statement, and what a use of it looks like.
_IMPORTED = {
    "import ctypes": "ctypes.",
    "from functools import cache": "@cache",
    "from functools import lru_cache": "@lru_cache",
    "from functools import partial": "partial)",
    "from itertools import chain": "chain.",
    "from itertools import islice": "islice(",
    "from logging import Logger": "Logger,",
    "from math import isfinite": "isfinite(",
    "from operator import is_": "is_,",
    "from types import FunctionType": "FunctionType)",
    "from types import MethodType": "MethodType)",
    "from types import ModuleType": "ModuleType,",
    "from weakref import WeakKeyDictionary": "WeakKeyDictionary(",
    "import torch": "torch",
    "import torch.nn.functional as F": "F.",
    "from torch.utils.cpp_extension import load_inline": "load_inline(",
}
_OTHER_F = "from torch.nn import functional as F"

# Names that it defines besides the problem's own.
_DEFINED = (
    *("ModelNew", "FAILURE", "ceil_div", "spread", "library", "cuda_library", "cpu_library", "check", "expect"),
    *(
        "dense",
        "Recomputed",
        "differentiable",
        "MADE_FOR",
        "OF_ALL_MODULES",
        "held",
        "given",
        "described",
        "configuration",
    ),
    *("named", "CONTAINERS", "HOOKS", "SEEN", "views", "weights", "KINDS", "kernels_for", "ordinary"),
    *("called_plainly", "tf32_allowed", "covers", "KEPT", "derived"),
)


def text(drafts: Sequence[Draft], header: str) -> str:
    """The whole file, unformatted; the same for the same problem, programs and header.

    Raises `UnsupportedError` where something of the problem or a program cannot be put into one file.
    """
    first = drafts[0]
    code = model_code(first.problem.path, first.problem.source)
    for draft in drafts:
        _check(draft, code)
    kernels = kernel_texts(drafts)
    sections = [_section("The model as it was", code.body)]
    for target, kind in TEXTS.items():
        if own := [kernel for kernel in kernels if kernel.target == target]:
            title = f"{kind.says} kernels" if len(drafts) > 1 else "Kernels"
            sections.append(_section(f"{title}, in the order in which they run", *constants(own)))
    if kernels:
        sections.append(_section("Building and calling them", *functions(kernels)))
    parameters = signature(first)[0].removeprefix("self").removeprefix(", ")
    sections.append(_section("The model that does less", *serving(drafts, parameters), model_class(drafts)))
    body = "\n\n\n".join(sections)
    return f'"""{header}"""\n\n{_imports(code, body)}\n\n{body}\n'


def _check(draft: Draft, code: ModelCode) -> None:
    """Refuses what one file cannot hold."""
    path, program = draft.problem.path, draft.program
    theirs = {statement for statement in code.imports if statement in (*_IMPORTED, _OTHER_F)}
    own = {*_DEFINED, *(statement.split()[-1] for statement in _IMPORTED)}
    own |= {kernel.name + draft.suffix for kernel in program.kernels}
    clash = next(iter(sorted((own & code.names) - {statement.split()[-1] for statement in theirs})), None)
    if clash is not None:
        raise UnsupportedError(f"{path}: it defines {clash}, which a solution file needs for itself; rename it there")
    if program.constants:
        name, tensor = next(iter(program.constants.items()))
        raise UnsupportedError(
            f"{path}: the forward uses a tensor ({name}, {tuple(tensor.shape)}) that is no parameter or buffer of the "
            "model; register it as a buffer"
        )


def _imports(code: ModelCode, body: str) -> str:
    """The problem's imports, and those of the rest."""
    own = [statement for statement, sign in _IMPORTED.items() if re.search(rf"(?<![\w.]){re.escape(sign)}", body)]
    theirs = [statement for statement in code.imports if statement != _OTHER_F]
    return import_block([*theirs, *own])


def _section(title: str, *parts: str) -> str:
    rule = f"# {'-' * 4} {title} "
    return "\n\n\n".join([rule.ljust(120, "-"), *(part.strip("\n") for part in parts if part)])
