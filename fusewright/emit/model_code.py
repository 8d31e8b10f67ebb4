"""The user's part of a solution file: the code of `Model`, with what it needs and nothing else.

A solution file may hold neither ``pass`` nor that word (the field's checkers look for it), so an empty body becomes
``...`` and comments and docstrings with the word in them are left out.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusewright.errors import UnsupportedError

_ENTRIES = ("Model", "get_inputs", "get_init_inputs")
_WORD = re.compile(r"\bpass\b", re.IGNORECASE)
_OPENING = re.compile(r"""(\w*)(\"{3}|'{3}|["'])""")
_STANDARD = frozenset({*sys.stdlib_module_names, "torch"})


@dataclass(frozen=True)
class ModelCode:
    """What a problem file holds: import statements, all other text that is needed, and the names they define.

    remarks  what of it is not as in other solution files, one sentence each
    """

    imports: tuple[str, ...]
    body: str
    names: frozenset[str]
    remarks: tuple[str, ...] = ()


def model_code(path: Path, source: str) -> ModelCode:
    """The parts of a problem file that its model and its inputs need.

    Raises `UnsupportedError` where it imports a file beside it, which one solution file cannot take along.
    """
    tree = ast.parse(source)
    statements = [node for node in tree.body if not _is_docstring(node) and not _is_main(node)]
    needed = _needed(statements)
    imports, foreign, kept = [], [], []
    for node in statements:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for text, name, module in _imported(node):
                if name in needed or name == "annotations" or name == "*":
                    imports.append(text)
                    foreign += [module] if module not in _STANDARD else []
        elif defines(node) & needed or not defines(node):
            kept.append(node)
    for module in foreign:
        if not module or (path.parent / f"{module}.py").exists() or (path.parent / module).is_dir():
            raise UnsupportedError(
                f"{path}: it imports {module or 'a file beside it'}, which lies beside it and cannot go into one "
                "solution file; put what Model needs into the problem file"
            )
    body = _joined(source, kept)
    names = frozenset().union(*map(defines, kept), (n for i in imports for n in _bound(i)))
    return ModelCode(tuple(dict.fromkeys(imports)), body, names, tuple(_remarks(foreign, kept)))


def _remarks(foreign: Sequence[str], kept: Sequence[ast.stmt]) -> Iterator[str]:
    if foreign:
        yield f"Needs {' and '.join(dict.fromkeys(foreign))} beside PyTorch, as the model's own code does."
    if any(isinstance(node, ast.Try | ast.TryStar) for statement in kept for node in ast.walk(statement)):
        yield "The model's own code catches exceptions, which checkers of this field refuse."


def method(source: str, class_name: str, name: str) -> ast.arguments | None:
    """The parameters of a method of the class, or of its base in the same file, if any."""
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    while class_name in classes:
        found = classes[class_name]
        for node in found.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                return node.args
        class_name = next((b.id for b in found.bases if isinstance(b, ast.Name) and b.id in classes), "")
    return None


def _needed(statements: list[ast.stmt]) -> set[str]:
    """The names that the entry points use, directly or through others; statements that define nothing have effects."""
    uses: dict[str, set[str]] = {}
    needed = set(_ENTRIES)
    for node in statements:
        read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        read |= {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        for name in defines(node):
            uses.setdefault(name, set()).update(read)
        if not defines(node):
            needed |= read
    stack = list(needed)
    while stack:
        for name in uses.get(stack.pop(), set()) - needed:
            needed.add(name)
            stack.append(name)
    return needed


def defines(node: ast.stmt) -> frozenset[str]:
    """The module's names that a statement binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return frozenset({node.name})
    if isinstance(node, ast.Import | ast.ImportFrom):
        return frozenset(name for _, name, _ in _imported(node))
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if all(isinstance(t, ast.Name | ast.Tuple | ast.List) for t in targets):  # others change an object
            return frozenset(n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
    return frozenset()


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str, str]]:
    """For each name: a statement that imports it alone, the name, and the outermost module it comes from."""
    for alias in node.names:
        suffix = f" as {alias.asname}" if alias.asname else ""
        if isinstance(node, ast.Import):
            if alias.asname == alias.name.rpartition(".")[2] and "." in alias.name:
                text = f"from {alias.name.rpartition('.')[0]} import {alias.asname}"
            else:
                text = f"import {alias.name}{suffix}"
            yield text, alias.asname or alias.name.partition(".")[0], alias.name.partition(".")[0]
        else:
            module = "." * node.level + (node.module or "")
            yield f"from {module} import {alias.name}{suffix}", alias.asname or alias.name, module.partition(".")[0]


def _bound(statement: str) -> set[str]:
    (node,) = ast.parse(statement).body
    return set(defines(node))


def import_block(statements: list[str]) -> str:
    """Import statements in the order of the field's formatters: the future, the standard library, the rest."""
    merged: dict[str, set[str]] = {}
    plain = set()
    for statement in statements:
        if statement.startswith("from "):
            module, _, names = statement.removeprefix("from ").partition(" import ")
            merged.setdefault(module, set()).add(names)
        else:
            plain.add(statement)
    sections: list[list[str]] = [[], [], []]
    for statement in sorted(plain, key=str.casefold):
        sections[_section(statement.split()[1])].append(statement)
    for module in sorted(merged, key=str.casefold):
        taken = sorted(merged[module], key=lambda name: (not name.isupper(), not name[:1].isupper(), name))
        sections[_section(module)].append(f"from {module} import {', '.join(taken)}")
    return "\n\n".join("\n".join(section) for section in sections if section)


def _section(module: str) -> int:
    outermost = module.partition(".")[0]
    return 0 if outermost == "__future__" else 1 if outermost in sys.stdlib_module_names else 2


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _text(source: str, node: ast.stmt) -> str:
    """A statement's own text, decorators and the comments just above it included."""
    return "\n".join(source.split("\n")[_first(source, node) : node.end_lineno])


def _first(source: str, node: ast.stmt) -> int:
    """The index of a statement's first line."""
    lines = source.split("\n")
    decorators: list[ast.expr] = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)]) - 1
    while first > 0 and lines[first - 1].startswith("#"):
        first -= 1
    return first


def _joined(source: str, nodes: list[ast.stmt]) -> str:
    """Statements with as many blank lines between them as there were."""
    text, end = "", 0
    lines = source.split("\n")
    for node in nodes:
        first = _first(source, node)
        if first < end:  # on the line of the one before
            continue
        blank = 0
        while first - blank > 0 and not lines[first - blank - 1].strip():
            blank += 1
        text += "\n" * (1 + min(blank, 2) if end else 0) + cleaned(_text(source, node))
        end = node.end_lineno or first
    return text


def escaped(text: str) -> str:
    """The text of a string, or of others in brackets, with the same value and without the word."""
    opening = _OPENING.match(text)
    if opening is not None and "r" in opening[1].lower():  # knows no escapes, so it becomes two strings side by side
        return _WORD.sub(lambda word: f"{word[0][0]}{opening[2]} {opening[0]}{word[0][1:]}", text)
    return _WORD.sub(lambda word: rf"{word[0][0]}\x{ord(word[0][1]):02x}{word[0][2:]}", text)


def cleaned(text: str) -> str:
    """Python text without the word: statements become ``...``, comments and docstrings that have it go."""
    if not _WORD.search(text):
        return text
    docstrings = {
        (node.body[0].lineno, len(node.body) > 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) and _is_docstring(node.body[0])
    }
    lines = text.split("\n")
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(text).readline))):
        if not _WORD.search(token.string) or token.type not in (tokenize.NAME, tokenize.COMMENT, tokenize.STRING):
            continue
        first, last = token.start[0] - 1, token.end[0] - 1
        before, after = lines[first][: token.start[1]], lines[last][token.end[1] :]
        if token.type == tokenize.NAME:
            new = "..."
        elif token.type == tokenize.COMMENT or (token.start[0], True) in docstrings:
            new = ""
        elif (token.start[0], False) in docstrings:
            new = "..."
        else:
            new = escaped(token.string)
        line = (before + new + after).rstrip()
        lines[first : last + 1] = [line] if line else []
    return "\n".join(lines)
