"""Bytecode of packages that have none: written where Headrace keeps what it may rebuild, and read by the next
process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.service import bytecode

CODE = """
import sys; sys.path.insert(0, sys.argv[1])
from importlib.machinery import SourceFileLoader
from headrace.service.bytecode import keep_bytecode
compiled, compile_source = [], SourceFileLoader.source_to_code
SourceFileLoader.source_to_code = (
    lambda self, data, path, **more: compiled.append(path) or compile_source(self, data, path, **more)
)
with keep_bytecode("package_without"):
    import package_without.part
found = [path for path in compiled if "package_without" in path]
print(package_without.part.VALUE, found, sys.pycache_prefix, sys.dont_write_bytecode)
"""


def start(home: Path, *, writes: bool = False) -> str:
    """What a new process prints that imports the package."""
    told = {name: value for name, value in os.environ.items() if name != "PYTHONPYCACHEPREFIX"}
    environment = {**told, "HEADRACE_CACHE": str(home / "cache"), "PYTHONDONTWRITEBYTECODE": "" if writes else "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(home)], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "package_without").mkdir()
    (tmp_path / "package_without" / "__init__.py").write_text("")
    (tmp_path / "package_without" / "part.py").write_text("VALUE = 1\n")
    return tmp_path


def test_a_second_process_compiles_nothing(home: Path):
    part = home / "package_without" / "part.py"
    sources = [str(part.with_name("__init__.py")), str(part)]
    assert start(home) == f"1 {sources} None True"
    until = time.monotonic() + 60
    while len(list((home / "cache").rglob("package_without/*.pyc"))) < 2:  # written behind
        assert time.monotonic() < until
        time.sleep(0.05)
    assert start(home) == "1 [] None True", "as Python was told to be, once it is done"
    part.write_text("VALUE = 22\n")
    assert start(home) == f"22 {sources[1:]} None True"
    assert not list(home.rglob("package_without/__pycache__"))


def test_python_does_it_where_it_may(home: Path):
    start(home, writes=True)
    assert list(home.glob("package_without/__pycache__/*")) and not (home / "cache").exists()
    start(home)
    assert not (home / "cache").exists(), "there is bytecode beside the sources"


def test_a_place_that_the_user_chose_is_used(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(home))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    assert bytecode._lacks_bytecode("package_without") and not bytecode._lacks_bytecode("no_such_package")
    monkeypatch.setattr(sys, "pycache_prefix", str(home / "chosen"))
    assert not bytecode._lacks_bytecode("package_without")
