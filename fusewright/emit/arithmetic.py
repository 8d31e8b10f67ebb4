"""Expressions of `fusewright.kernel` as lines of readable Python: parts that have a name get it, the rest is tidied."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from fusewright.kernel import Expression

FUNCTIONS = frozenset({"ceil_div", "spread", "min", "max"})


class Arithmetic:
    """Names numbers that one kernel's call needs, in the order in which they are asked for."""

    def __init__(self, sizes: Sequence[str]) -> None:
        self._names = {name: name for name in sizes}  # by the tidied expression
        self._taken = {*sizes, *FUNCTIONS}
        self.lines: list[str] = []

    def name(self, wanted: str, expression: Expression) -> str:
        """The text of `expression`: a number, the name it has, or `wanted`, which a new line defines."""
        tree = tidied(expression)
        text = ast.unparse(tree)
        if isinstance(tree, ast.Constant) or text in self._names:
            return self._names.get(text, text)
        name = wanted
        while name in self._taken:
            name += "_"
        self.lines.append(f"{name} = {self._with_names(tree)}")
        self._taken.add(name)
        self._names[text] = name
        return name

    def text(self, expression: Expression) -> str:
        """The text of `expression` over the names so far."""
        return self._with_names(tidied(expression))

    def _with_names(self, tree: ast.expr) -> str:
        names = self._names

        class Named(ast.NodeTransformer):
            def visit(self, node: ast.AST) -> ast.AST:
                name = names.get(ast.unparse(node)) if isinstance(node, ast.BinOp | ast.Call) else None
                return self.generic_visit(node) if name is None else ast.Name(name, ast.Load())

        return ast.unparse(Named().visit(ast.parse(ast.unparse(tree), mode="eval").body))


def readable(expression: Expression) -> str:
    """The tidied text of `expression`."""
    return ast.unparse(tidied(expression))


def tidied(expression: Expression) -> ast.expr:
    """The same value without what does nothing: ``a // 1``, ``a * 1``, ``a + 0``, ``a + -3``, numbers worked out."""
    tree: ast.expr = _Tidy().visit(ast.parse(expression, mode="eval").body)
    return tree


class _Tidy(ast.NodeTransformer):
    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        left: ast.expr = self.visit(node.left)
        right: ast.expr = self.visit(node.right)
        a, b = _number(left), _number(right)
        if a is not None and b is not None:
            return _constant(eval(ast.unparse(ast.BinOp(left, node.op, right))))  # two numbers and an operator
        match node.op:
            case ast.Add() if b is not None and b < 0:
                return self.visit_BinOp(ast.BinOp(left, ast.Sub(), _constant(-b)))
            case ast.Add() if a == 0:
                return right
            case ast.Mult() if a == 1:
                return right
            case ast.Add() | ast.Sub() if b == 0:
                return left
            case ast.Mult() | ast.FloorDiv() if b == 1:
                return left
        return _joined(ast.BinOp(left, node.op, right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        operand = self.visit(node.operand)
        value = _number(operand)
        if value is None or not isinstance(node.op, ast.USub):
            return ast.UnaryOp(node.op, operand)
        return _constant(-value)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        args = [self.visit(a) for a in node.args]
        assert isinstance(node.func, ast.Name)
        assert node.func.id in FUNCTIONS, node.func.id
        if node.func.id == "ceil_div" and _number(args[1]) == 1:
            first: ast.expr = args[0]
            return first
        if node.func.id == "ceil_div" and (a := _number(args[0])) is not None and (b := _number(args[1])) is not None:
            return _constant(-(-a // b))
        return ast.Call(node.func, args, [])


def _joined(node: ast.BinOp) -> ast.expr:
    """``(a - 3) + 1`` as ``a - 2``."""
    left, b = node.left, _number(node.right)
    if b is None or not isinstance(node.op, ast.Add | ast.Sub) or not isinstance(left, ast.BinOp):
        return node
    inner = _number(left.right)
    if inner is None or not isinstance(left.op, ast.Add | ast.Sub):
        return node
    total = (inner if isinstance(left.op, ast.Add) else -inner) + (b if isinstance(node.op, ast.Add) else -b)
    if total == 0:
        return left.left
    return ast.BinOp(left.left, ast.Add() if total > 0 else ast.Sub(), _constant(abs(total)))


def _number(node: ast.AST) -> int | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _number(node.operand)
        return None if value is None else -value
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int) else None


def _constant(value: int) -> ast.expr:
    return ast.Constant(value) if value >= 0 else ast.UnaryOp(ast.USub(), ast.Constant(-value))
