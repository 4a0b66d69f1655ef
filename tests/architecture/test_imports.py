"""Sub-packages do not import one another in circles, modules are worth a file, and retired words stay retired."""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from sources import PACKAGE, ROOT, sources

ALLOWLIST = json.loads((Path(__file__).parent / "allowlist.json").read_text())
LEAST_LINES = 40

RETIRED = (
    "drawn", "likeliest", "rehearsal", "rehearse", "upkeep", "residence", "tell_news", "news", "roster", "vacate",
    "read_out", "ReadOut", "plain_dim", "latent_dim", "query_latent_dim", "after_norm", "narrows", "joins_layers",
    "join_decodes", "CacheReader", "CACHE_READERS", "is_foreign", "PageCopy",
)
"""Private words that the field has other names for. DESIGN's vocabulary says which."""


def _modules() -> dict[str, str]:
    """``{dotted module: dotted folder it lies in}`` of the package."""
    found = {}
    for source in sources():
        parts = ("headrace", *source.name.removesuffix(".py").split("/"))
        is_package = parts[-1] == "__init__"
        found[".".join(parts[:-1] if is_package else parts)] = ".".join(parts[:-1])
    return found


def _imported(tree: ast.AST, modules: Mapping[str, str]) -> Iterator[str]:
    """Modules that a tree imports anywhere: at the top, in functions, for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in whole]
        else:
            continue
        yield from (name for name in names if name in modules)


def _import_graph() -> dict[str, set[str]]:
    """``{sub-package: sub-packages that its modules import}``."""
    modules, graph = _modules(), defaultdict(set)
    for source in sources():
        dotted = ".".join(("headrace", *source.name.removesuffix(".py").split("/"))).removesuffix(".__init__")
        for name in _imported(source.tree, modules):
            if modules[name] != modules[dotted]:
                graph[modules[dotted]].add(modules[name])
    return graph


def find_cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan 1972), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node):]
            del stack[stack.index(node):]
            if len(component) > 1:
                cycles.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return cycles


def test_cycles_are_found():
    assert find_cycles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [["b", "c"]]
    assert find_cycles({"a": {"b", "c"}, "b": {"c"}}) == []


def test_sub_packages_have_no_import_cycles():
    """Lazy imports and those for type checkers count: a cycle that starts late is a cycle."""
    graph = _import_graph()
    assert len(graph) > 20, "the graph was not read"
    assert find_cycles(graph) == []


def test_modules_are_worth_a_file():
    """A module of under 40 lines has a reason to stand alone. Families are exempt, as are ``__init__`` modules."""
    small = {
        s.name for s in sources()
        if s.text.count("\n") < LEAST_LINES and not s.name.endswith(("__init__.py", "__main__.py", "/family.py"))
    }
    reasons = ALLOWLIST["small_modules"]
    assert not small - set(reasons), "merge them into their callers, or give a reason in allowlist.json"
    assert not set(reasons) - small, "these are no longer small: remove them from allowlist.json"
    assert all(len(reason) > 10 for reason in reasons.values())


def _texts() -> Iterator[tuple[str, str]]:
    for top in ("headrace", "tests", "docs", "benchmarks", "README.md"):
        for path in [ROOT / top] if (ROOT / top).is_file() else sorted((ROOT / top).rglob("*")):
            if path.suffix in (".py", ".md", ".h", ".cpp", ".cu", ".cuh") and path != Path(__file__):
                yield path.relative_to(ROOT).as_posix(), path.read_text()


def test_retired_words_are_not_used():
    """In code, comments, docstrings and docs, as words or as parts of snake_case names."""
    pattern = re.compile(rf"(?<![A-Za-z])({'|'.join(RETIRED)})(?![a-z])", re.MULTILINE)
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}"
        for name, text in _texts() for match in pattern.finditer(text)
    ]
    assert not found, "DESIGN's vocabulary has the words that the field uses"


def test_package_is_where_it_is_looked_for():
    assert PACKAGE.is_dir() and any(name == "README.md" for name, _ in _texts())
