"""What the documents promise a newcomer exists: links, files, flags, routes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace.serving.cli.commands import COMMANDS
from headrace.serving.cli.flags import command_options
from headrace.serving.http.app import ENDPOINTS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "headrace").rglob("README.md"))
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path):
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text())
    assert not [link for link in links if not (document.parent / link).exists()]


@pytest.mark.parametrize("name", ["README.md", "docs/serving.md"])
def test_flags_named_in_documents_exist(name: str):
    known = {
        flag for c in COMMANDS.values() for info in command_options(c)
        for flag in (info.flag, info.flag.replace("--", "--no-", 1))
    } | {"--help"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", (ROOT / name).read_text()))
    assert named <= known, named - known


def test_routes_are_documented():
    text = (ROOT / "docs" / "serving.md").read_text()
    missing = [
        e.path for e in ENDPOINTS
        if not any(form in text for form in (e.path, e.path.replace(":path", ""), e.path.replace("/get_", "/")))
    ]
    assert not missing
