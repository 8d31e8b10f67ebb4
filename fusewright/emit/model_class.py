"""``class ModelNew``: the original with the rewritten forward, or several of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from textwrap import dedent

from fusewright.codegen.aten import HEADER, attribute
from fusewright.emit.draft import Draft
from fusewright.emit.kernel_text import on_current_device, with_constants, without_unused
from fusewright.emit.model_code import method

_ON = {"cuda": " on a GPU", "cpu": " on a CPU"}


def signature(draft: Draft) -> tuple[str, str]:
    """The parameters of Model's forward with ``self``, and the arguments that hand them on."""
    arguments = method(draft.problem.source, draft.problem.model_class.__name__, "forward")
    if arguments is None:
        return "self, *args, **kwargs", "*args, **kwargs"
    handed = [a.arg for a in (*arguments.posonlyargs, *arguments.args)][1:]
    handed += [f"*{arguments.vararg.arg}"] if arguments.vararg else []
    handed += [f"{a.arg}={a.arg}" for a in arguments.kwonlyargs]
    handed += [f"**{arguments.kwarg.arg}"] if arguments.kwarg else []
    return ast.unparse(arguments), ", ".join(handed)


def model_class(drafts: Sequence[Draft]) -> str:
    """The text of the class."""
    first = drafts[0]
    parameters, arguments = signature(first)
    *others, last = drafts
    calls = []
    for draft in others:
        device = f"{draft.inputs.tensors[0]}.device"
        calls += [f'if kernels_for({device}) == "{draft.target}":', *(f"    {line}" for line in _call(draft))]
    calls += _call(last)
    lines = [
        "class ModelNew(Model):",
        '    """`Model` with its forward computed by the kernels, where they were made for the call."""',
        "",
        f"    def forward({parameters}):",
        '        """As the original."""',
        f"        if not covers(self, {arguments}):",
        f"            return super().forward({arguments})",
        *(f"        {line}" for line in calls),
    ]
    for draft in drafts:
        on = _ON[draft.target] if draft.suffix else ""
        derive, fused = _functions(draft)
        lines += _method(fused, draft.method("fused"), f"The rewritten forward{on}.")
        if draft.program.derived:
            lines += _method(derive, draft.method("derive"), f"What the forward{on} needs of weights alone.")
    return first.indexed("\n".join(lines))


def _call(draft: Draft) -> list[str]:
    """The lines that run a draft's program."""
    values = list(draft.inputs.tensors)
    if draft.program.derived:
        derive = f"self.{draft.method('derive')}"
        sources = [attribute("self", path) for path in draft.program.sources]
        values.append(f"*derived({', '.join((derive, *sources))})")
    call = f"return self.{draft.method('fused')}({', '.join(values)})"
    if draft.target == "cuda":
        return [f"with torch.cuda.device({draft.inputs.tensors[0]}.get_device()):", f"    {call}"]
    return [call]


def _method(function: str, name: str, says: str) -> list[str]:
    """A function of a program as a method."""
    first, *rest = without_unused(function).split("\n")
    head = re.sub(r"^def \w+\(", f"def {name}(", first)
    return ["", f"    {head}", f'        """{says}"""', *(f"    {line}" for line in rest)]


def _functions(draft: Draft) -> tuple[str, str]:
    """The texts of a program's two functions."""
    source = on_current_device(dedent(draft.program.source.removeprefix(HEADER)))
    for kernel in draft.kernels:
        source = re.sub(rf"(?<![\w.]){kernel.name}\(", f"{kernel.name}{draft.suffix}(", with_constants(source, kernel))
    derive, forward = source.split("\n\n\n")
    return derive.strip("\n"), forward.strip("\n")
