"""Old locks go, young ones and other files stay, and nothing that cannot be read stops the sweep."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from headrace.service.build import sweep_stale_locks


def touch(path: Path, age_minutes: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    then = time.time() - 60 * age_minutes
    os.utime(path, (then, then))
    return path


def test_only_old_locks_are_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    old = [touch(tmp_path / "py311_cu130" / "ext" / "lock", 31), touch(tmp_path / ".ninja_lock", 600)]
    kept = [
        touch(tmp_path / "other" / "lock", 29), touch(tmp_path / "ext" / "lock.cpp", 90),
        touch(tmp_path / "build.ninja", 90)
    ]
    with caplog.at_level(logging.WARNING):
        assert sweep_stale_locks(tmp_path) == 2
    assert not any(path.exists() for path in old) and all(path.exists() for path in kept)
    assert "removed 2 stale locks" in caplog.text
    assert sweep_stale_locks(tmp_path) == 0


@pytest.mark.parametrize("age", [0, -1])
def test_no_age_removes_nothing(tmp_path: Path, age: float):
    lock = touch(tmp_path / "lock", 600)
    assert sweep_stale_locks(tmp_path, max_age_s=age) == 0 and lock.exists()


def test_what_cannot_be_read_or_removed_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert sweep_stale_locks(tmp_path / "missing") == 0
    stubborn, other, closed = (
        touch(tmp_path / "a" / "lock", 60), touch(tmp_path / "b" / "lock", 60), tmp_path / "closed"
    )
    touch(closed / "lock", 60)
    listing, unlink = os.scandir, Path.unlink

    def refuse_listing(path: str) -> object:
        if os.fspath(path) == str(closed):
            raise PermissionError(path)
        return listing(path)

    def refuse_removal(self: Path, missing_ok: bool = False) -> None:
        if self == stubborn:
            raise PermissionError(str(self))
        unlink(self, missing_ok)

    monkeypatch.setattr(os, "scandir", refuse_listing)
    monkeypatch.setattr(Path, "unlink", refuse_removal)
    assert sweep_stale_locks(tmp_path) == 1
    assert stubborn.exists() and not other.exists() and (closed / "lock").exists()
