"""Loops over the lanes of vectors, and functions that go through them again where an argument was rare (`ordinary`)."""

from __future__ import annotations

from collections.abc import Sequence

from fusewright.codegen.cpp import Scalars
from fusewright.codegen.cpu.ordinary import with_maths
from fusewright.codegen.cpu.text import function
from fusewright.codegen.text import Lines, block
from fusewright.ir import ops

SIMD = "#pragma omp simd"
Parameters = Sequence[tuple[str, str]]  # types and names


class LaneScalars(Scalars):
    """Statements of the body of such a loop: functions of floats are those of ``Maths``, known divisors factors."""

    multiplies = True

    def template(self, op: ops.Pointwise, compute: str) -> str:
        """As `Scalars` has it."""
        if compute != "float":
            return super().template(op, compute)
        return with_maths(op.traits.cpu or super().template(op, compute))


def calls(lines: Sequence[str]) -> bool:
    """Whether functions of `Maths` are called."""
    return any("(maths, " in line for line in lines)


def lanes(head: str, body: Sequence[str], lane: str = "") -> Lines:
    """The loop `head`, whose iterations are the lanes of vectors; short ones note by `lane` who was rare."""
    if not calls(body):
        return [SIMD, *block(head, body)]
    pragma = SIMD if lane else f"{SIMD} reduction(| : rare)"
    return [pragma, *block(head, ["Maths maths;", *body, f"rare{f'[{lane}]' if lane else ''} |= maths.rare;"])]


def procedure(about: str, name: str, parameters: Parameters, body: Sequence[str], width: str = "") -> Lines:
    """The function `name`; where it calls functions of `Maths` it computes its results again when an argument was rare,
    so it must not write what it reads.  `width`: see `attempt`."""
    if not calls(body):
        return [about, *function((f"inline void {name}", _declared(parameters)), body)]
    again = repeated(name, [p for _, p in parameters])
    return [*attempt(about, name, parameters, body, width), "", *procedure(about, name, parameters, again)]


def attempt(about: str, name: str, parameters: Parameters, body: Sequence[str], width: str = "") -> Lines:
    """The function ``<name>_with<Maths>``, which says whether an argument was rare: of the first `width` lanes, where
    loops note by lane."""
    before, after = ["int rare = 0;"], ["return rare;"]
    if width:
        before = ["int rare[BLOCK] = {}, found = 0;"]
        after = [f"for (int e = 0; e < {width}; ++e) found |= rare[e];", "return found;"]
    about = f"{about[:-1]}; says whether an argument was rare."
    head = (f"inline bool {name}_with", _declared(parameters))
    return [about, "template <typename Maths>", *function(head, [*before, *body, *after])]


def repeated(name: str, arguments: Sequence[str]) -> Lines:
    """The statement that calls `attempt`, and once more where an argument was rare."""
    given = ", ".join(arguments)
    return [f"if ({name}_with<Ordinary>({given}))", f"    {name}_with<Any>({given});"]


def _declared(parameters: Parameters) -> list[str]:
    return [" ".join(p) for p in parameters]
