"""What the C++ of every CPU kernel has around it."""

from __future__ import annotations

from collections.abc import Sequence

from fusewright.codegen.cpu.primitives import used_primitives
from fusewright.codegen.text import Lines, indent


def source(about: str, name: str, body: Sequence[str]) -> str:
    """The complete text of kernel `name`: a comment that says what it does, and its body in a namespace of its own."""
    text = "\n".join(body)
    head = [f"// {name}: {about}", "#include <algorithm>", "#include <cmath>", "#include <cstring>"]
    head += ["#include <vector>", ""] if "std::vector" in text else [""]
    return "\n".join(
        [*head, f"namespace {name} {{", "", used_primitives(text) + text, "", f"}}  // namespace {name}\n"]
    )


def function(head: tuple[str, Sequence[str]], body: Sequence[str]) -> Lines:
    """A function, its name with parameters, in lines of ordinary length."""
    name, parameters = head
    lines, line = [], f"{name}("
    for i, parameter in enumerate(parameters):
        end = ") {" if i == len(parameters) - 1 else ","
        if len(line) + len(parameter) + len(end) + 1 > 118:
            lines.append(line.rstrip())
            line = "    "
        line += parameter + end + (" " if end == "," else "")
    return [*lines, line, *indent(body), "}"]


def parallel(collapse: int = 1) -> Lines:
    """The directive over a loop whose iterations any thread may take; with `collapse`, over so many nested ones."""
    nested = f" collapse({collapse})" if collapse > 1 else ""
    return [f"#pragma omp parallel for num_threads(threads) schedule(static){nested}"]
