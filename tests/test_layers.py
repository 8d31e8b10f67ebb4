"""Imports point downward only: a module may use what lies below it or beside it, never what lies above."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fusewright"

# Low to high.  A name is a module or a whole package of fusewright; every module must be covered.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "tree", "plan", "kernel", "side_by_side"),
    ("ir", "runtime", "problem_batch"),
    ("rules", "capture", "schedule", "codegen"),
    ("autograd",),
    ("verification", "measure", "peers"),
    ("report", "racing", "random_operands"),
    ("tuning",),
    ("pipeline",),
    ("dispatch", "advice"),
    ("module", "reduced", "sides"),
    ("trial",),
    ("optimizer",),
    ("__init__",),
    ("problem", "doctor", "terminal"),
    ("emit",),
    ("cli", "backend", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

# Imports against the order that are right all the same, each with its reason.
ALLOWED = {
    ("plan", "report"): "printing a record is the report's work; imported when printed",
    ("verification", "report"): "printing a record is the report's work; imported when printed",
}

MODULES = sorted(PACKAGE.rglob("*.py"))


def part(module: str) -> str:
    """The layer's name of a dotted module inside fusewright."""
    return module.split(".")[1] if "." in module else "__init__"


def imports_at_run_time(tree: ast.AST) -> Iterator[str]:
    """Every fusewright module imported anywhere in a file, except for type checking only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "fusewright")
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fusewright":
            if node.module != "fusewright":
                yield node.module
            else:
                yield from (_target(name.name) for name in node.names)
        else:
            yield from imports_at_run_time(node)


def _target(name: str) -> str:
    """What ``from fusewright import name`` imports: a module of that name, else something of the package's own."""
    is_module = (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()
    return f"fusewright.{name}" if is_module else "fusewright"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    assert own in LEVEL, f"add {own} to the table of layers"
    for imported in imports_at_run_time(ast.parse(path.read_text(encoding="utf-8"))):
        used = part(imported)
        assert used in LEVEL, f"add {used} to the table of layers"
        fine = used == own or LEVEL[used] <= LEVEL[own] or (own, used) in ALLOWED
        assert fine, f"{own} imports {imported}, which lies above it"


def test_exceptions_are_still_needed() -> None:
    used = {
        (path.relative_to(PACKAGE).with_suffix("").parts[0], part(imported))
        for path in MODULES
        for imported in imports_at_run_time(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert set(ALLOWED) <= used


def test_no_relative_imports() -> None:
    """Absolute imports only, or the table above would not see them."""
    for path in MODULES:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        assert not any(isinstance(node, ast.ImportFrom) and node.level for node in nodes), path
