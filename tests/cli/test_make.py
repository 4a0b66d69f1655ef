"""``make install`` says in a few lines what it does; what pip writes is shown only when it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOISE = "WARNING: a long complaint of pip"
# Stands for Python: makes an environment whose Python is itself; all but the version check writes noise, and what
# installs `failing` fails.
PYTHON = f"""#!/bin/sh
case "$*" in
  *version_info*) exit 0;;
  "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;
  "-m headrace.kernels.native") echo "compiling: 3 of 3 files"; exit $KERNELS;;
esac
echo "{NOISE}"; echo "{NOISE}" >&2
case "$*" in *"$FAILING"*) exit 3;; esac
exit 0
"""


def make(tmp_path: Path, failing: str, kernels: int = 0) -> subprocess.CompletedProcess[str]:
    """``make install``, in a folder of its own; ``kernels`` is the exit code of compiling them."""
    (tmp_path / "headrace" / "csrc" / "cpu").mkdir(parents=True, exist_ok=True)
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy2(ROOT / name, tmp_path)  # as old as they are
    python = tmp_path / "fake-python"
    python.write_text(PYTHON)
    python.chmod(0o755)
    return subprocess.run(
        ["make", "install", f"PYTHON={python}"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "FAILING": failing, "KERNELS": str(kernels), "MAKEFLAGS": ""}, timeout=100
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_installing_is_quiet(tmp_path: Path):
    done = make(tmp_path, "nothing")
    assert done.returncode == 0, done.stderr
    assert "installing torch" in done.stdout and len(done.stdout.splitlines()) < 10
    assert NOISE not in done.stdout + done.stderr and "pip install" not in done.stdout
    assert make(tmp_path, "nothing").returncode == 0


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("failing", ["-m venv", "constraints.txt -e ."])
def test_a_failed_step_shows_all_it_wrote(tmp_path: Path, failing: str):
    done = make(tmp_path, failing)
    assert done.returncode == 2 and done.stderr.count(NOISE) == 2
    assert not (tmp_path / ".venv" / ".installed").exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_kernels_are_compiled_with_progress_and_again_after_a_change(tmp_path: Path):
    assert "compiling: 3 of 3 files" in make(tmp_path, "nothing").stdout
    assert "compiling" not in make(tmp_path, "nothing").stdout, "nothing has changed"
    (tmp_path / "headrace" / "csrc" / "cpu" / "new.cpp").touch()
    assert "compiling" in make(tmp_path, "nothing").stdout and "compiling" not in make(tmp_path, "nothing").stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_an_installation_without_kernels_succeeds_and_tries_again(tmp_path: Path):
    for _ in range(2):
        done = make(tmp_path, "nothing", kernels=1)
        assert done.returncode == 0 and "compiling" in done.stdout and not done.stderr
