"""Rooms import only what they may; torch stays out of the rooms that must start fast."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from sources import ROOT, sources

TORCH_FREE = ("base", "scheduling", "serving")
TORCH_FREE_MODULES = (
    "service/balancing.py", "service/client", "service/tokenization", "models/source.py", "models/catalog.py",
    "models/family.py",
)
ENTRY_POINTS = (
    "headrace", "headrace.scheduling.scheduler", "headrace.service.client.client", "headrace.serving.http.app",
    "headrace.serving.cli.main"
)


def test_import_contracts():
    # In a process of its own: the linter configures logging, and with it silences every logger there is.
    code = (
        "import sys; from importlinter.cli import lint_imports; "
        f"sys.exit(lint_imports(config_filename={str(ROOT / '.importlinter')!r}, no_cache=True))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr


def test_torch_is_not_imported_in_torch_free_rooms():
    importing = []
    for source in sources():
        if not (
            source.room in TORCH_FREE or source.name.startswith(TORCH_FREE_MODULES)
            or source.name.endswith("/family.py")
        ):
            continue
        for node in source.walk():
            names = (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                if isinstance(node, ast.ImportFrom) else []
            )
            importing += [
                f"{source.name}:{node.lineno}" for name in names if name.split(".")[0] in ("torch", "transformers")
            ]
    assert not importing


@pytest.mark.parametrize("module", ENTRY_POINTS)
def test_edges_start_without_torch(module: str):
    code = f"import sys, {module}; sys.exit(1 if 'torch' in sys.modules or 'transformers' in sys.modules else 0)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr or f"importing {module} pulls in torch"
