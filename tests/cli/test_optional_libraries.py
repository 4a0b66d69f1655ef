"""What ``check`` says of optional libraries agrees with the extras of the package."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from headrace.execution.structured.library import GRAMMAR_LIBRARIES
from headrace.serving.cli import check as libraries

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_they_are_the_extras():
    ours = {(library.extra, library.package, library.lowest) for library in libraries.LIBRARIES}
    theirs = {
        (extra, *re.match(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", line).groups()) for extra,
        lines in EXTRAS.items() if extra != "test" for line in lines
    }
    assert ours == theirs


def test_what_any_request_may_need_is_no_extra():
    """JSON mode and forced tool calls are answered after a plain installation."""
    core = {re.match(r"[\w-]+", line)[0] for line in PROJECT["dependencies"]}
    assert {entry.target.partition(":")[0].rpartition(".")[2] for entry in GRAMMAR_LIBRARIES} <= core
    assert "structured" not in EXTRAS


@pytest.mark.parametrize(("installed", "status", "says"), [
    (None, "unavailable", "pip install 'headrace[otel]'"), ("1.27.9", "broken", "older than 1.28"),
    ("0.9", "broken", "older"),
    ("1.28", "ok", "1.28: traces"), ("1.100.2rc1", "ok", "1.100.2rc1: traces"), ("2.0+local", "ok", "traces"),
])
def test_versions(monkeypatch, installed, status, says):
    def version(package: str) -> str:
        if installed is None:
            raise PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(libraries, "version", version)
    found = {finding.name: finding for finding in libraries.find_libraries()}["opentelemetry-sdk"]
    assert found.status == status and says in found.detail
