"""The project's sources as parsed trees, for the architecture tests."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "headrace"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Source:
    """One module: its path inside the package, its text, its tree."""

    name: str
    text: str
    tree: ast.Module

    @property
    def room(self) -> str:
        return self.name.split("/")[0]

    def walk(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))


@cache
def sources() -> tuple[Source, ...]:
    """Every Python module of the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        found.append(Source(path.relative_to(PACKAGE).as_posix(), text, ast.parse(text)))
    return tuple(found)


def docstrings(tree: ast.AST) -> set[int]:
    """ids of the Constant nodes that are docstrings or bare string statements."""
    return {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for an attribute chain, else an empty string."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def scopes(source: Source) -> list[tuple[str, ast.AST]]:
    """``(qualified name, node)`` of every class and function."""
    found: list[tuple[str, ast.AST]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                name = f"{prefix}{child.name}"
                found.append((name, child))
                visit(child, name + ".")
            else:
                visit(child, prefix)

    visit(source.tree, "")
    return found


def scope_of(source: Source, line: int) -> str:
    """Name of the innermost class or function around a line, empty at module level."""
    inside = [(name, node) for name, node in scopes(source) if node.lineno <= line <= (node.end_lineno or node.lineno)]
    return max(inside, key=lambda item: item[1].lineno)[0] if inside else ""
