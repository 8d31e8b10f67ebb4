"""What a solution file says that its model is made of, where that can be said."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pprint import pformat
from types import CodeType, FunctionType
from typing import Any

from fusewright.emit import support
from fusewright.emit.draft import Draft
from fusewright.errors import UnsupportedError

# More text than anybody would read, or a model should be compared with at every change.
_MOST = 200_000

_IMPORTS = """
from functools import partial
from math import isfinite
from types import FunctionType, MethodType, ModuleType
import torch
"""


def configuration(draft: Draft) -> str:
    """The literal that ``described(model)`` in the solution file must equal.

    Raises `UnsupportedError` for what the model holds that has no text of its own: functions that share a name, objects
    that show nothing but their address.
    """
    functions: list[FunctionType] = []
    scope: dict[str, Any] = {"Model": draft.problem.model_class}
    exec(_IMPORTS + support.CONFIGURATION, scope)  # our own text
    name_of = scope["named"]

    def named(value: object) -> object:
        if isinstance(value, FunctionType):
            functions.append(value)
        return name_of(value)

    scope["named"] = named
    found = scope["described"](draft.model)
    for function in functions:
        _require_own_name(draft, function)
    for name, part in found.items():
        _require_text(draft, name, repr(part))
    return pformat(found, width=110, sort_dicts=False, compact=True)


def _require_own_name(draft: Draft, function: FunctionType) -> None:
    """Refuses a function where another piece of code has its name, which is all that a file can compare."""
    code, ours = function.__code__, function.__module__ == draft.problem.module.__name__
    if not ours and "<" not in code.co_qualname:
        return
    try:
        source = draft.problem.source if ours else inspect.getsource(sys.modules[function.__module__])
    except (KeyError, OSError, TypeError):
        source = ""
    if [inner.co_qualname for inner in _codes(compile(source, "module", "exec"))].count(code.co_qualname) != 1:
        raise UnsupportedError(
            f"-o: the model holds a function, and it is not the only one called {code.co_qualname}, so that a solution "
            "file cannot tell which it is; give it a name of its own, with def"
        )


def _codes(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes(inner)


def _require_text(draft: Draft, name: str, text: str) -> None:
    unclear = re.search(r"<(\S+ \S+|\S+) at 0x[0-9a-f]+>", text)
    why = f"holds {unclear[0].partition(' at ')[0]}>, which shows nothing of what it is" if unclear else ""
    why = f"holds {len(text)} characters of values" if len(text) > _MOST else why
    if why:
        kind = draft.problem.model_class.__name__
        raise UnsupportedError(
            f"-o: {kind}.{name} {why}, so that a solution file cannot compare it; take it out of the model or give it "
            "plain values"
        )
