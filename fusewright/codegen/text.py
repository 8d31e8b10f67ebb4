"""Filling templates of C++ text line by line, so that what comes out is indented like hand-written code."""

from __future__ import annotations

from collections.abc import Sequence
from string import Template
from textwrap import wrap

Lines = list[str]


def indent(lines: Sequence[str], by: int = 1) -> Lines:
    """The lines moved to the right; directives stay where they are."""
    return [line if line.startswith("#") or not line else "    " * by + line for line in lines]


def opened(entry: str, parameters: Sequence[str]) -> Lines:
    """``entry(parameters) {``, in lines of ordinary length, no parameter in two of them."""
    glued = ", ".join(p.replace(" ", "~") for p in parameters)
    lines = wrap(f"{entry}({glued})~{{", width=116, subsequent_indent="    ", break_long_words=False)
    return [line.replace("~", " ") for line in lines]


def block(head: str, body: Sequence[str]) -> Lines:
    """``head { body }``; the head may be empty."""
    return [f"{head} {{" if head else "{", *indent(body), "}"]


def where(conditions: Sequence[str]) -> str:
    """What stands ahead of a statement for where all of them hold: nothing where there are none."""
    return f"if ({' && '.join(conditions)}) " if conditions else ""


def fill(text: str, **names: object) -> Lines:
    """The lines of `text` with ``$name`` replaced; a name alone on its line may stand for several lines, or none."""
    words = {name: value for name, value in names.items() if not isinstance(value, list)}
    lines: Lines = []
    for line in text.removeprefix("\n").removesuffix("\n").split("\n"):
        bare = line.strip()
        value = names.get(bare[1:]) if bare.startswith("$") else None
        if isinstance(value, list):
            lines += indent(value, (len(line) - len(bare)) // 4)
        else:
            lines.append(Template(line).substitute(words))
    return lines
