"""What a user asks of kernel groups beyond being fast: operators to leave alone, a name, a single launch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fusewright.errors import UnsupportedError
from fusewright.ir.node import Graph, Node
from fusewright.schedule.chain import word

# Other words for operators than those that kernels are named by.
_SYNONYMS = {
    "avgpool": "avg",
    "maxpool": "max",
    "matmul": "linear",
    "adaptiveavgpool": "avg",
    "amax": "max",
    "amin": "min",
    "transposedconv": "convtranspose",
}


@dataclass(frozen=True)
class Wishes:
    """`keep` operators as they are, or replace `only` some; `name` for kernels; a `single` launch without scratch."""

    keep: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    name: str = ""
    single: bool = False

    def left_alone(self, graph: Graph) -> Callable[[Node], bool]:
        """Whether an operation is one of `graph`'s that is to stay as it is.

        Raises `UnsupportedError` for operators that the graph does not have.
        """
        if not (self.keep or self.only):
            return lambda _: False
        nodes = [node for node in graph.nodes() if word(node) is not None]
        there = sorted({str(word(node)) for node in nodes})
        keep, only = _known("--keep", self.keep, there), _known("--only", self.only, there)
        kept = {
            (repr(node.op), node.shape) for node in nodes if word(node) in keep or (only and word(node) not in only)
        }
        return lambda node: (repr(node.op), node.shape) in kept


NO_WISHES = Wishes()


def _known(option: str, asked: Iterable[str], there: list[str]) -> set[str]:
    """Words for operators as kernels' names have them."""
    found = set()
    for text in asked:
        plain = re.sub(r"[123]d$", "", text.strip().lower()).replace("_", "")
        plain = _SYNONYMS.get(plain, plain)
        match = next((name for name in there if name.replace("_", "") == plain), None)
        if match is None:
            raise UnsupportedError(f"{option} {text}: the model has no such operator; it has {', '.join(there)}")
        found.add(match)
    return found
