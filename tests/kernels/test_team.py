"""`Team` of csrc/cpu/team.h under random delays: no wake-up is lost, a member that throws holds nobody up."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from headrace.kernels.native.sources import FOLDER
from headrace.kernels.native.toolchain import find_compiler

COMPILER = find_compiler()
STRESS_SECONDS = 2.0
HUNG = 3
"""Exit status of the program when nothing has moved for five seconds."""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of team_stress.cpp, compiled like the operators."""
    program = tmp_path_factory.mktemp("team") / "team_stress"
    source = Path(__file__).with_name("team_stress.cpp")
    options = ["-std=c++20", "-O1", "-Wall", "-pthread", "-I", str(FOLDER)]
    done = subprocess.run([COMPILER.path, *options, str(source), "-o", str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


def run_stress(
    program: Path, mode: str, members: int, seconds: float = STRESS_SECONDS
) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, mode, str(members), str(seconds)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("members", [2, 3, 8])
def test_members_wait_for_one_another_and_none_sleeps_for_ever(stress: Path, members: int):
    done = run_stress(stress, "phases", members)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("members", [2, 5])
def test_fewer_threads_than_members(stress: Path, members: int):
    done = run_stress(stress, "fewer", members)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("members", [2, 4])
def test_an_exception_of_a_member_ends_the_team(stress: Path, members: int):
    done = run_stress(stress, "throw", members)
    assert done.returncode == 0, done.stdout


def test_the_delays_find_a_barrier_that_loses_wake_ups(stress: Path):
    """The barrier used before, with its legal but unlucky order of memory: phase and sleepers in two words."""
    done = run_stress(stress, "two-words", 2, 30.0)
    assert done.returncode == HUNG, done.stdout
