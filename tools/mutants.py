"""Mutants of a source file: one small change each, made on the syntax tree.

Asserts, docstrings and annotations are left alone; phrases are only ever turned into `None`, which makes a refusing
condition accept.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}
STRONGER = {"reassociates": "exact", "finite": "reassociates"}


@dataclass(frozen=True)
class Mutant:
    """One changed file: `name` says where and what, and survives changes elsewhere in the file."""

    file: str
    name: str
    line: int
    source: str


def mutants(path: Path) -> list[Mutant]:
    """All mutants of the file, in order."""
    tree = ast.parse(path.read_text())
    found: list[Mutant] = []
    seen: Counter[str] = Counter()
    for owner, index in _sites(tree):
        for attempt in range(99):
            changed = copy.deepcopy(tree)
            node = _nodes(changed)[index]
            options = list(_changes(node, owner))
            if attempt >= len(options):
                break
            before = _text(node)
            _replace(changed, node, options[attempt])
            name = f"{owner}: {before} -> {_text(options[attempt])}"
            seen[name] += 1
            name += f" #{seen[name]}" if seen[name] > 1 else ""
            source = ast.unparse(ast.fix_missing_locations(changed))
            found.append(Mutant(str(path), name, getattr(node, "lineno", 0), source))
    return found


def _text(node: ast.AST) -> str:
    """The node as source, a statement by its head."""
    return f"if {ast.unparse(node.test)}" if isinstance(node, ast.If) else ast.unparse(node)


def _nodes(tree: ast.AST) -> list[ast.AST]:
    return list(ast.walk(tree))


def _sites(tree: ast.Module) -> list[tuple[str, int]]:
    """(function, index) of every node that may be changed, in the order of the text."""
    order = {id(node): i for i, node in enumerate(_nodes(tree))}
    return [(owner, order[id(node)]) for owner, node in _inside(tree, "")]


def _inside(node: ast.AST, owner: str) -> Iterator[tuple[str, ast.AST]]:
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Assert | ast.Import | ast.ImportFrom):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":  # of zip: an assertion, too
                continue
            named = isinstance(child, ast.FunctionDef | ast.ClassDef)
            inner = child.name if named else owner
            yield inner, child
            yield from _inside(child, inner)


def _changes(node: ast.AST, owner: str) -> Iterator[ast.AST]:
    """What the node may be turned into."""
    match node:
        case ast.Compare(ops=[op]):
            for other in COMPARISONS[type(op)]:
                yield _with(node, ops=[other()])
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Constant(value=float() as value):
            yield ast.Constant(value * 2 + 1)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.BoolOp(op=op, values=values):
            yield _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            for i in range(len(values)):
                rest = values[:i] + values[i + 1 :]
                yield rest[0] if len(rest) == 1 else _with(node, values=rest)
        case ast.BinOp(op=op, left=left, right=right) if type(op) in ARITHMETIC:
            yield _with(node, op=ARITHMETIC[type(op)]())
            yield from (left, right)
        case ast.Name(id=name) if name in NAMES:
            yield ast.Name(NAMES[name], ast.Load())
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield from (body, orelse)
            yield _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.If(test=test):
            yield _with(node, test=ast.Constant(False))
            yield _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.comprehension(ifs=[_, *_]):
            yield _with(node, ifs=[])
        case ast.Return(value=value) if value is not None and _phrases(value):
            yield from (_with(node, value=_without(value, i)) for i in range(len(_phrases(value))))
        case ast.keyword(arg="exactness", value=ast.Constant(value=str() as value)) if value in STRONGER:
            yield _with(node, value=ast.Constant(STRONGER[value]))


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _phrases(value: ast.expr) -> list[ast.expr]:
    """The texts that a condition returns."""
    if isinstance(value, ast.IfExp):
        return [*_phrases(value.body), *_phrases(value.orelse)]
    text = isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))
    return [value] if text else []


def _without(value: ast.expr, index: int) -> ast.expr:
    """The value with its phrase `index` turned into `None`."""
    changed = copy.deepcopy(value)
    phrase = _phrases(changed)[index]
    if phrase is changed:
        return ast.Constant(None)
    _replace(changed, phrase, ast.Constant(None))
    return changed


def _replace(tree: ast.AST, old: ast.AST, new: ast.AST) -> None:
    """Put `new` where `old` is."""
    for node in ast.walk(tree):
        for name, value in ast.iter_fields(node):
            if value is old:
                setattr(node, name, new)
                return
            if isinstance(value, list) and any(v is old for v in value):
                value[[v is old for v in value].index(True)] = new
                return
    raise AssertionError("the node is not in the tree")
