"""The text of a solution file, from a problem and the programs that were made of its model, one for each device."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Sequence
from pathlib import Path

from fusewright.emit.building import TEXTS, constants, functions, kernel_texts
from fusewright.emit.draft import Draft
from fusewright.emit.model_class import model_class, signature
from fusewright.emit.model_code import ModelCode, cleaned, defines, escaped, import_block
from fusewright.emit.serving import serving
from fusewright.errors import UnsupportedError

# Names that a solution file imports: statement, and what a use of it looks like.
_IMPORTED = {
    "import ctypes": "ctypes.",
    "import inspect": "inspect.",
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


def text(drafts: Sequence[Draft], code: ModelCode, header: str) -> str:
    """The whole file, unformatted; the same for the same problem and its code, programs and header.

    Raises `UnsupportedError` where something of the problem or a program cannot be put into one file.
    """
    first = drafts[0]
    for draft in drafts:
        _check_constants(draft)
    kernels = kernel_texts(drafts)
    sections = []
    for target, kind in TEXTS.items():
        if own := [kernel for kernel in kernels if kernel.target == target]:
            title = f"{kind.says} kernels" if len(drafts) > 1 else "Kernels"
            sections.append(_section(f"{title}, in the order in which they run", *constants(own)))
    if kernels:
        sections.append(_section("Building and calling them", *functions(kernels)))
    parameters = signature(first)[0].removeprefix("self").removeprefix(", ")
    sections.append(_section("The model that does less", *serving(drafts, parameters), model_class(drafts)))
    ours = cleaned("\n\n\n".join(sections))
    _check_names(first.problem.path, code, ours)
    _check_arguments(first.problem.path, ours)
    theirs = _section("The model as it was", code.body)
    return f'"""{escaped(header)}"""\n\n{_imports(code, ours)}\n\n{theirs}\n\n\n{ours}\n'


def _check_constants(draft: Draft) -> None:
    """Refuses a program that reads tensors of its own, which no text holds."""
    if draft.program.constants:
        name, tensor = next(iter(draft.program.constants.items()))
        raise UnsupportedError(
            f"{draft.problem.path}: the forward uses a tensor ({name}, {tuple(tensor.shape)}) that is no parameter or "
            "buffer of the model; register it as a buffer, and modules in a list as nn.ModuleList"
        )


def _check_names(path: Path, code: ModelCode, ours: str) -> None:
    """Refuses a problem that gives another meaning to a name that our part of the file defines, imports or reads."""
    tree = ast.parse(ours)
    own = {name for node in tree.body for name in defines(node)}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and hasattr(builtins, node.id)}
    own |= {statement.split()[-1] for statement in _imports_of(ours)}
    same = {statement.split()[-1] for statement in code.imports if statement in (*_IMPORTED, _OTHER_F)}
    clash = next(iter(sorted((own & code.names) - same)), None)
    if clash is not None:
        raise UnsupportedError(f"{path}: it defines {clash}, which a solution file needs for itself; rename it there")


def _check_arguments(path: Path, ours: str) -> None:
    """Refuses a forward whose argument has a name that our part reads or binds beside it."""
    body = ast.parse(ours).body
    covered = next(node for node in body if isinstance(node, ast.FunctionDef) and node.name == "covered")
    ours_of_model = next(node for node in body if isinstance(node, ast.ClassDef) and node.name == "ModelNew")
    forward = next(node for node in ours_of_model.body if isinstance(node, ast.FunctionDef) and node.name == "forward")
    calls = [node.func for function in (covered, forward) for node in ast.walk(function) if isinstance(node, ast.Call)]
    taken = {"model", "own", "torch", "KINDS"} | {called.id for called in calls if isinstance(called, ast.Name)}
    given = {node.arg for node in ast.walk(forward.args) if isinstance(node, ast.arg)}
    if clash := sorted(given & taken):
        raise UnsupportedError(
            f"{path}: its forward has an argument {clash[0]}, a name that a solution file needs for itself; rename it "
            "there"
        )


def _imports(code: ModelCode, ours: str) -> str:
    """The problem's imports, and those of the rest."""
    theirs = [statement for statement in code.imports if statement != _OTHER_F]
    also = ["import torch.nn.functional as F"] if _OTHER_F in code.imports else []
    return import_block([*theirs, *also, *_imports_of(ours)])


def _imports_of(ours: str) -> list[str]:
    """The statements that import what our text uses."""
    return [statement for statement, sign in _IMPORTED.items() if re.search(rf"(?<![\w.]){re.escape(sign)}", ours)]


def _section(title: str, *parts: str) -> str:
    rule = f"# {'-' * 4} {title} "
    return "\n\n\n".join([rule.ljust(120, "-"), *(part.strip("\n") for part in parts if part)])
