"""Kernels compiled before their first launch, in a process whose Triton compiles: the tests' own interprets where
there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

CASES = Path(__file__).parent / "precompile_cases.py"


def test_cases():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-4000:]  # none found is 5
