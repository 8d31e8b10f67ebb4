"""The docstring of a solution file: what was done and why, the work it saves, what was verified and measured."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from fusewright.ir.pointwise import functions
from fusewright.kernel import Kernel
from fusewright.plan import KernelChoice, Plan
from fusewright.report.text import duration, less, scaled
from fusewright.schedule.wishes import NO_WISHES, Wishes

WIDTH = 110

# How a plan says that an operation is not understood.
_UNKNOWN = " runs as it did"

_PLACES = {"cuda": "On a GPU", "cpu": "On a CPU"}

_WORDS = {
    "conv": "convolution",
    "convtranspose": "transposed convolution",
    "avg": "average pooling",
    "linear": "matrix product",
    "rangesum": "sums over positions",
    "mul": "multiplication",
    "add": "addition",
    "div": "division",
    "sub": "subtraction",
}

# One of those in a kernel's name: some functions have underscores.
_OPERATION = re.compile("|".join([*(name for name in functions() if "_" in name), "[^_]+"]))

# A call of PyTorch's in a program's text by name, and names of those that compute nothing.
_CALLED = re.compile(r"(?<![\w.])(\w+)\.(\w+)\(")
_VIEWS = frozenset(
    {"reshape", "view", "permute", "expand", "flatten", "squeeze", "unsqueeze", "narrow", "unfold", "to"}
)


@dataclass(frozen=True)
class Checked:
    """What is known of a file once it has been tried: facts of `fusewright.emit.fresh`, or where it only compiled."""

    facts: dict[str, Any] = field(default_factory=dict)
    compiled_for: tuple[str, ...] = ()
    date: str = ""
    version: str = ""


@dataclass(frozen=True)
class Part:
    """What a file has for one device; the `rest` are names of what PyTorch computes beside the kernels."""

    target: str
    plan: Plan
    kernels: tuple[Kernel, ...]
    served: str = ""
    checked: Checked = Checked()
    rest: tuple[str, ...] = ()


def header(name: str, parts: Sequence[Part], wishes: Wishes = NO_WISHES, remarks: Sequence[str] = ()) -> str:
    """The text between a solution file's first quotes; `name` is the problem file's, `remarks` are sentences on it."""
    paragraphs = [_title(name, parts)]
    for part in parts:
        plan = part.plan
        where = [f"{_PLACES[part.target]}."] if len(parts) > 1 else []
        paragraphs.append(_wrap(" ".join([*where, *_story(part), *_asked(wishes)])))
        if plan.before is not None and plan.after is not None:
            paragraphs.append("\n".join(_work(plan)))
        paragraphs.append("\n".join(_wrap(line, "    ") for line in _evidence(part)))
    made = " ".join(
        [
            *(f"Serves {own} of the model that get_init_inputs() describes." for own in _served(parts)),
            "Other constructor arguments and other calls give the same results by the original forward.",
            *remarks,
        ]
    )
    by = f"Written by fusewright {parts[0].checked.version}."
    return "\n\n".join([*paragraphs, f"{_wrap(made)}\n{by}"]) + "\n"


def _served(parts: Sequence[Part]) -> list[str]:
    """The calls that kernels serve, said once where they are the same on all devices."""
    if len({part.served for part in parts}) == 1:
        return [parts[0].served]
    return [f"{_PLACES[part.target][0].lower()}{_PLACES[part.target][1:]} {part.served}" for part in parts]


def _wrap(text: str, hanging: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)


def _title(name: str, parts: Sequence[Part]) -> str:
    if not any(part.kernels for part in parts):
        return f"{name} with its forward rewritten to do less."
    counts = []
    for part in parts:
        kind = {"cuda": "CUDA", "cpu": "CPU"}[part.target]
        count = len(part.kernels)
        plural = f"{count} generated {kind} kernels" if count else f"PyTorch's own {kind} kernels"
        counts.append(f"one generated {kind} kernel" if count == 1 else plural)
    return f"{name} with its forward in {', or in '.join(counts)}."


def operations(name: str) -> list[str]:
    """The short words for operations that a kernel is named after."""
    return _OPERATION.findall(re.sub(r"_\d+$", "", name.removeprefix("fused_")))


def computed_by(kernel: Kernel) -> list[str]:
    """The operations of a kernel, be it named after them or as somebody asked."""
    return operations(kernel.name) if kernel.name.startswith("fused_") else called_in(kernel.reference)


def called_in(program: str) -> list[str]:
    """The operations that a program asks PyTorch for by name, views left out."""
    called = (name for owner, name in _CALLED.findall(program) if owner == "F" or name not in _VIEWS)
    return list(dict.fromkeys(called))


def listed(items: list[str]) -> str:
    """``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _story(part: Part) -> Iterator[str]:
    """A few sentences: what was rewritten, what became kernels, what was left alone and why."""
    plan, kernels = part.plan, part.kernels
    yield from _rewrites(plan)
    for kernel in kernels:
        launches = "one launch" if len(kernel.launches) == 1 else f"{len(kernel.launches)} launches"
        computes = listed([_WORDS.get(word, word) for word in computed_by(kernel)] or ["that"])
        yield f"{kernel.name} computes {computes} in {launches}{_times(plan, kernel)}."
    if kernels and plan.before is not None and plan.after is not None and plan.after.bytes < plan.before.bytes:
        before, after = scaled(plan.before.bytes, "B"), scaled(plan.after.bytes, "B")
        yield (
            f"These operators had the most to give: what they hand to each other no longer goes through memory, "
            f"so {after} are moved instead of {before}."
        )
    yield from _left_alone(part)
    yield from (f"{note[0].upper()}{note[1:]}." for note in plan.precision if "tf32" in note)


def _asked(wishes: Wishes) -> Iterator[str]:
    if wishes.keep:
        yield f"Left to PyTorch as asked: {listed(list(wishes.keep))}."
    if wishes.only:
        yield f"All but {listed(list(wishes.only))} was left to PyTorch as asked."


def _rewrites(plan: Plan) -> Iterator[str]:
    rules = [rule for rule, _ in groupby(fired.rule for fired in plan.rules)]
    if not rules:
        return
    first, last = plan.rules[0].before, plan.rules[-1].after
    change = less(first.flops, last.flops)
    effect = f", which leaves {change} arithmetic" if "less" in change else ""
    yield f"The algebra was rewritten first, by {listed([f'`{rule}`' for rule in dict.fromkeys(rules)])}{effect}."


def _times(plan: Plan, kernel: Kernel) -> str:
    choice = next((c for c in plan.kernels if c.name == kernel.name), None)
    if choice is None or choice.generated is None or choice.aten is None:
        return ""
    return f" ({duration(choice.generated)}; PyTorch's own operations take {duration(choice.aten)})"


def left_to_pytorch(plan: Plan) -> list[KernelChoice]:
    """The groups that stay with PyTorch, without those that are parts of others."""
    return [choice for choice in plan.kernels if choice.path == "ATen" and not choice.part]


def _stays(choice: KernelChoice) -> str:
    why = "which measured faster" if choice.aten is not None else "which should be faster by estimate"
    if choice.generated is not None and choice.aten is not None:
        why += f" ({duration(choice.aten)}; a generated kernel takes {duration(choice.generated)})"
    return f"As one group, {listed(operations(choice.name))} stay with PyTorch, {why}."


def _left_alone(part: Part) -> Iterator[str]:
    plan = part.plan
    yield from dict.fromkeys(map(_stays, left_to_pytorch(plan)))
    if part.rest and part.kernels and not any(choice.path == "ATen" for choice in plan.kernels):
        yield f"PyTorch computes {listed(list(part.rest))}, which no kernel here covers."
    unknown = sorted({reason.removesuffix(_UNKNOWN) for reason in plan.opaque if reason.endswith(_UNKNOWN)})
    if unknown:
        yield f"No rule or kernel knows {listed(unknown)}, which PyTorch computes."
    written_in_place = sorted({reason for reason in plan.opaque if not reason.endswith(_UNKNOWN)})
    if written_in_place:
        yield f"Left to PyTorch: {listed(written_in_place)}."
    slower: list[str] = [kept.mode for kept in plan.kept if kept.path == "original"]
    if slower:
        yield f"Calls with {listed(slower)} run the original forward, which measured faster there."


def _work(plan: Plan) -> list[str]:
    before, after = plan.before, plan.after
    assert before is not None
    assert after is not None
    rows = [
        ("", "before", "after", ""),
        ("arithmetic", scaled(before.flops, "FLOP"), scaled(after.flops, "FLOP"), less(before.flops, after.flops)),
        ("memory traffic", scaled(before.bytes, "B"), scaled(after.bytes, "B"), less(before.bytes, after.bytes)),
        ("launches", f"{before.launches:g}", f"{after.launches:g}", less(before.launches, after.launches)),
    ]
    return [f"    {a:<16}{b:>12}{c:>14}    {d}".rstrip() for a, b, c, d in rows]


def of_eager_rounding(most: float) -> str:
    """What to know of a file that is further from eager than the field allows because eager rounds to tf32."""
    return (
        f"Eager rounds to tf32, this file's kernels do not: the two are up to {most:.1e} apart, and within 1e-4 where "
        "torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32 are False."
    )


def _evidence(part: Part) -> Iterator[str]:
    checked, facts = part.checked, part.checked.facts
    if "errors" in facts:
        on = f"on {facts.get('device', 'a CPU')}"
        on += ", with PyTorch's operations for the kernels" if facts["stands in"] else ""
        kinds = [f"{kind} are off by {e['new']:.1e} (eager: {e['eager']:.1e})" for kind, e in facts["errors"].items()]
        yield f"Verified {on}, against float64: {listed(kinds)} of their size."
    if "eager rounds" in facts:
        yield of_eager_rounding(facts["eager rounds"])
    if "milliseconds" in facts:
        times = facts["milliseconds"]
        cuda = f", CUDA {facts['cuda']}" if facts["cuda"] else ""
        yield (
            f"Measured on {facts['device']}, PyTorch {facts['torch']}{cuda}, {checked.date}: "
            f"{duration(times['new'] / 1e3)}, eager {duration(times['eager'] / 1e3)}; kernels built in "
            f"{facts['first call']:.1f} s."
        )
    elif checked.compiled_for:
        yield f"Not measured: there was no GPU; the kernels compile for {listed(list(checked.compiled_for))}."
    elif facts:
        yield f"Not measured, as asked; built in {facts['first call']:.1f} s."
