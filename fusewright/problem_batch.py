"""Another batch size for a problem file, by asking the file itself.

Problem files are written for large machines: generating gigabytes only to keep eight rows is slow, or impossible.  So
the batch is changed where the file states it: a global whose name says batch (``batch_size = 128``), then any other
global with that value, then every literal of that value inside ``get_inputs``.  An edit is believed only if the inputs'
shapes, which the meta device tells for free, come out as they should.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

Shapes: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class BatchEdit:
    """The file with its batch changed from `lead` to `size` in one place."""

    tree: ast.Module
    by_name: bool
    lead: int
    size: int

    def gives(self, before: Shapes, after: Shapes) -> bool:
        """Whether the edit changed what it should: every leading size, and nothing else unless the name says batch.

        A batch stated by name may sit elsewhere too (a recurrent state has it second), and the file knows best.
        """
        if [len(shape) for shape in before] != [len(shape) for shape in after]:
            return False
        pairs = [(old, new) for old, new in zip(before, after, strict=True) if old]
        if self.by_name:
            return all(new[0] == self.size for old, new in pairs if old[0] == self.lead)
        return all(new == (self.size, *old[1:]) for old, new in pairs)


def batch_edits(source: str, namespace: Mapping[str, object], lead: int, size: int) -> Iterator[BatchEdit]:
    """The places where a file may state its batch, the likeliest first."""
    names = [name for name in _global_names(source) if namespace.get(name) == lead]
    for name in sorted(names, key=lambda name: "batch" not in name.lower()):
        tree = _AssignGlobal(name, size).visit(ast.parse(source))
        yield BatchEdit(tree, "batch" in name.lower(), lead, size)
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "get_inputs":
            _ReplaceLiteral(lead, size).visit(node)
    yield BatchEdit(tree, False, lead, size)


def _global_names(source: str) -> list[str]:
    found: list[str] = []
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        found += [target.id for target in targets if isinstance(target, ast.Name)]
    return list(dict.fromkeys(found))


class _AssignGlobal(ast.NodeTransformer):
    """Gives every top-level assignment to one name a new value; functions keep their locals."""

    def __init__(self, name: str, value: int) -> None:
        self.name, self.value = name, value

    def visit_Module(self, node: ast.Module) -> ast.Module:
        for statement in node.body:
            if isinstance(statement, ast.Assign) and any(self._is_ours(target) for target in statement.targets):
                statement.value = ast.copy_location(ast.Constant(self.value), statement.value)
            if isinstance(statement, ast.AnnAssign) and statement.value and self._is_ours(statement.target):
                statement.value = ast.copy_location(ast.Constant(self.value), statement.value)
        return node

    def _is_ours(self, target: ast.expr) -> bool:
        return isinstance(target, ast.Name) and target.id == self.name


class _ReplaceLiteral(ast.NodeTransformer):
    """Replaces one integer wherever it is written."""

    def __init__(self, old: int, new: int) -> None:
        self.old, self.new = old, new

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        if type(node.value) is int and node.value == self.old:
            return ast.copy_location(ast.Constant(self.new), node)
        return node
