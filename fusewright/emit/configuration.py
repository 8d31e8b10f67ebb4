"""What a solution file says that its model is made of, where that can be said."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from pprint import pformat
from types import CodeType, FunctionType
from typing import Any

import torch

from fusewright.emit import support
from fusewright.emit.draft import Draft
from fusewright.errors import UnsupportedError

# More text than anybody would read, or a model should be compared with at every change.
_MOST = 200_000

_IMPORTS = """
from functools import partial
from logging import Logger
from math import isfinite
from types import FunctionType, MethodType, ModuleType
import torch
"""


@dataclass(frozen=True)
class Configuration:
    """What a model is made of, as a literal; the text that finds it out, and the condition that it is the same."""

    literal: str
    text: str
    condition: str


def configuration(draft: Draft) -> Configuration:
    """What the solution file compares its model with.

    Raises `UnsupportedError` for what the model holds that has no text of its own: functions that share a name, objects
    that show nothing but their address.
    """
    found = _plain(draft)
    if found is not None:
        return Configuration(
            _literal(found), support.PLAIN_CONFIGURATION, "repr(configuration(model)) == repr(MADE_FOR)"
        )
    return Configuration(_literal(_described(draft)), support.CONFIGURATION, "repr(described(model)) == repr(MADE_FOR)")


def _literal(found: object) -> str:
    return pformat(found, width=110, sort_dicts=False, compact=True)


def _scope(draft: Draft, text: str) -> dict[str, Any]:
    scope: dict[str, Any] = {"Model": draft.problem.model_class}
    exec(_IMPORTS + text, scope)  # our own text
    return scope


def _plain(draft: Draft) -> object:
    """The configuration of a model of plain values that cannot change, `None` for any other."""
    found = _scope(draft, support.PLAIN_CONFIGURATION)
    try:
        values = found["configuration"](draft.model)
    except RecursionError:  # it holds itself
        return None
    return values if _is_plain(values) and len(repr(values)) <= _MOST else None


def _is_plain(value: object) -> bool:
    """Whether a value is what its text says."""
    if type(value) in (dict, tuple):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))  # type: ignore[call-overload]
    return type(value) in (bool, int, str, type(None), torch.dtype) or (type(value) is float and isfinite(value))


def _described(draft: Draft) -> object:
    """The configuration of a model of anything."""
    functions: list[FunctionType] = []
    scope = _scope(draft, support.CONFIGURATION)
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
    return found


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
