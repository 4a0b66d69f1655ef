"""Files, functions, classes, parameters and records stay small. The allowlist may only shrink."""

from __future__ import annotations

import ast
import json
from pathlib import Path

from sources import FUNCTIONS, Source, scopes, sources

ALLOWED = json.loads((Path(__file__).parent / "allowlist.json").read_text())["sizes"]
FILE_LINES, KERNEL_LINES, FUNCTION_LINES, CLASS_LINES = 500, 1500, 80, 300
BRANCHES, PARAMETERS, PUBLIC_METHODS, FIELDS = 12, 8, 12, 15
BRANCHING = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)


def _own_nodes(function: ast.AST) -> list[ast.AST]:
    """Nodes of a function without those of functions nested in it."""
    nodes, pending = [], list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        nodes.append(node)
        if not isinstance(node, (*FUNCTIONS, ast.Lambda)):
            pending.extend(ast.iter_child_nodes(node))
    return nodes


def _is_jit(node: ast.AST) -> bool:
    return any("jit" in ast.unparse(d) for d in getattr(node, "decorator_list", []))


def _function_violations(where: str, node: ast.FunctionDef) -> dict[str, int]:
    found, lines = {}, (node.end_lineno or 0) - node.lineno + 1
    limit = KERNEL_LINES if _is_jit(node) else FUNCTION_LINES
    if lines > limit:
        found[f"{where}: function lines"] = lines
    branches = sum(isinstance(n, BRANCHING) for n in _own_nodes(node))
    if branches > BRANCHES and not _is_jit(node):
        found[f"{where}: branches"] = branches
    arguments = [
        a for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs) if a.arg not in ("self", "cls")
    ]
    if len(arguments) > PARAMETERS and not _is_jit(node):
        found[f"{where}: parameters"] = len(arguments)
    return found


def _class_violations(where: str, node: ast.ClassDef) -> dict[str, int]:
    found, lines = {}, (node.end_lineno or 0) - node.lineno + 1
    if lines > CLASS_LINES:
        found[f"{where}: class lines"] = lines
    public = [m for m in node.body if isinstance(m, FUNCTIONS) and not m.name.startswith("_") and not _is_property(m)]
    if len(public) > PUBLIC_METHODS:
        found[f"{where}: public methods"] = len(public)
    fields = [m for m in node.body if isinstance(m, ast.AnnAssign)]
    if len(fields) > FIELDS:
        found[f"{where}: fields"] = len(fields)
    return found


def _is_property(method: ast.AST) -> bool:
    return any(
        ast.unparse(d) in ("property", "cached_property", "functools.cached_property") for d in method.decorator_list
    )


def violations(source: Source) -> dict[str, int]:
    """``{what: measured}`` of everything over a limit in one module."""
    found, lines = {}, source.text.count("\n")
    if lines > (KERNEL_LINES if source.room == "kernels" else FILE_LINES):
        found[f"{source.name}: file lines"] = lines
    for name, node in scopes(source):
        where = f"{source.name}: {name}"
        found |= _class_violations(where, node) if isinstance(node, ast.ClassDef) else _function_violations(where, node)
    return found


def test_nothing_new_is_too_large():
    grown = {what: size for s in sources() for what, size in violations(s).items() if size > ALLOWED.get(what, 0)}
    assert not grown, f"over the limits of the house: {json.dumps(grown, indent=1)}"


def test_allowlist_only_shrinks():
    found = {what: size for s in sources() for what, size in violations(s).items()}
    stale = {what: size for what, size in ALLOWED.items() if found.get(what) != size}
    assert not stale, f"lower or remove these entries of allowlist.json: {stale}"


def test_room_readmes_are_short():
    for room in sorted({s.room for s in sources() if "/" in s.name}):
        readme = Path(__file__).resolve().parents[2] / "headrace" / room / "README.md"
        assert readme.exists(), f"headrace/{room} has no README.md"
        assert readme.read_text().count("\n") <= 80, f"{readme} is longer than 80 lines"
