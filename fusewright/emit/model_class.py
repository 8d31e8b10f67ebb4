"""``class ModelNew``: the original with the rewritten forward, or several of them."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Mapping, Sequence
from textwrap import dedent

from fusewright.codegen.aten import HEADER, attribute
from fusewright.emit.draft import Draft, read_paths, reading
from fusewright.emit.kernel_text import on_current_device, with_constants, without_unused
from fusewright.emit.model_code import method

_ON = {"cuda": " on a GPU", "cpu": " on a CPU"}


def signature(draft: Draft) -> tuple[str, str]:
    """The parameters of Model's forward with ``self``, and the arguments that hand them on."""
    arguments = method(draft.problem.source, draft.problem.model_class.__name__, "forward")
    if arguments is None:
        return "self, *args, **kwargs", "*args, **kwargs"
    first = (arguments.posonlyargs or arguments.args)[0]
    first.arg, first.annotation = "self", None  # whatever the model calls it
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
    names = _names(drafts, parameters)
    calls = []
    for draft in others:
        device = f"{draft.inputs.tensors[0]}.device"
        calls += [f'if kernels_for({device}) == "{draft.target}":', *(f"    {line}" for line in _call(draft, names))]
    calls += _call(last, names)
    used = {name for name in names.values() if any(re.search(rf"(?<![\w.]){name}\b", line) for line in calls)}
    if used:
        other = None if re.search(r"\b_\b", parameters) else "_"
        targets = [name if name in used else other or name for name in names.values()]
        calls.insert(0, f"{', '.join(targets)}{',' * (len(targets) == 1)} = own")
    lines = [
        "class ModelNew(Model):",
        '    """`Model` with its forward computed by the kernels, where they were made for the call."""',
        "",
        f"    def forward({parameters}):",
        '        """As the original."""',
        f"        own = covered(self, {arguments})",
        "        if own is None:",
        f"            return super().forward({arguments})",
        *(f"        {line}" for line in calls),
    ]
    for draft in drafts:
        on = _ON[draft.target] if draft.suffix else ""
        derive, fused = _functions(draft)
        for path in _handed(draft):
            fused = re.sub(reading(path), names[path], fused).replace("):", f", {names[path]}):", 1)
        lines += _method(fused, draft.method("fused"), f"The rewritten forward{on}.")
        if draft.program.derived:
            lines += _method(derive, draft.method("derive"), f"What the forward{on} needs of weights alone.")
    return first.indexed("\n".join(lines))


def _handed(draft: Draft) -> list[str]:
    """The paths of the model's tensors that a draft's forward takes as they are, behind its other arguments."""
    _, fused = _functions(draft)
    return [path for path in read_paths([draft]) if re.search(reading(path), fused)]


def _names(drafts: Sequence[Draft], parameters: str) -> dict[str, str]:
    """What the tensors that the programs read are called where they are handed on, by their paths."""
    paths = read_paths(drafts)
    taken = {"self", "own", "torch", "covered", "derived", "kernels_for", "super", "_", "__debug__"}
    taken.update(re.findall(r"\w+", parameters))
    within: dict[str, set[str]] = {}  # for each tensor that a forward takes: the words of that
    for draft in drafts:
        handed = _handed(draft)
        for path in handed:
            others = re.sub("|".join(map(reading, handed)), "", _functions(draft)[1])
            within.setdefault(path, set()).update(re.findall(r"\w+", others))
    names: dict[str, str] = {}
    for path in paths:
        name = re.sub(r"\W", "_", path)
        name = name if name.isidentifier() and not keyword.iskeyword(name) else f"module_{name}"
        while name in taken | within.get(path, set()):
            name += "_"
        taken.add(name)
        names[path] = name
    return names


def _listed(paths: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """The arguments that hand on the tensors at these paths; what is no parameter or buffer has no name."""
    if {*paths} == {*names}:
        return ["*own"] if names else []
    return [names.get(path, attribute("self", path)) for path in paths]


def _call(draft: Draft, names: Mapping[str, str]) -> list[str]:
    """The lines that run a draft's program."""
    values = list(draft.inputs.tensors)
    if draft.program.derived:
        derive = f"self.{draft.method('derive')}"
        values.append(f"*derived({', '.join((derive, *_listed(draft.program.sources, names)))})")
    values += _listed(_handed(draft), names)
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
