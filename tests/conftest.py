"""Shared by all tests: GPU tests skip without a device; one thread per process, since several run side by side."""

from __future__ import annotations

import gc
import importlib.util
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch

from headrace.kernels import cuda_source

gc.disable()  # until all is collected: a quarter of that time went into looking for garbage among what stays

# The same examples every time, so that a change is not refused for what it did not do; --examples 10 draws others, ten
# times as many.
# No deadlines: the first example compiles, imports and maps files, and other work takes its share of the machine.
UNTIMED = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("settled", derandomize=True, database=None, **UNTIMED)
hypothesis.settings.load_profile("settled")

TESTS = Path(__file__).parent
WAITING = ("on_ray", "e2e", "parallel", "service")
"""Folders of tests that start processes, those with the longest first."""
LONG = (
    "test_schema.py", "test_cpu_attention_rows.py", "test_cpu_attention.py", "test_disaggregated.py",
    "test_deepseek_v4_served.py", "test_ranks.py", "test_tiers_served.py", "test_transfer_agents.py",
    "test_disaggregation_phases.py", "test_cuda_sources.py",
)
"""Files of a minute and more, or half of one in folders that are begun late."""
HAS_GPU = torch.cuda.is_available()

_told: set[str] = set()
"""Of what fell back, what a test has failed for."""

if not HAS_GPU:  # before any test module imports a kernel: Triton decides at the import
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def no_kernel_falls_back() -> Iterator[None]:
    """On a GPU a test fails if an own kernel could not be compiled or loaded in it, or in what it uses: what runs
    instead has the same values, so that nothing else would tell."""
    yield
    new = set(cuda_source.fallen_back()) - _told if HAS_GPU else set()
    _told.update(new)
    assert not new, f"fell back: {sorted(new)}"


@pytest.fixture
def breaks_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which kernels cannot be compiled or loaded on purpose."""
    monkeypatch.setattr(cuda_source, "_fallen_back", {})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests that take minutes")
    parser.addoption(
        "--examples", type=int, default=0, metavar="TIMES",
        help="run so many times the examples of each property test, and others in each run: to look for faults"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "interpreted: runs a kernel in Triton's interpreter; skipped where a GPU runs it"
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before several processes begin: compile what CPU kernels are not there yet. Compilers run at a low priority, and
    beside all these processes for longer than a test may take that waits for them."""
    if session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput"):
        subprocess.run(
            [sys.executable, "-c", "from headrace.kernels import native; native.build()"], cwd=session.config.rootpath,
            check=False
        )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests and what their modules import stay to the end. Closing an engine collects garbage, which takes twenty times
    as long where it looks at all of them."""
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def _settle_interpreted(items: list[pytest.Item]) -> None:
    interpreted = [item for item in items if item.get_closest_marker("interpreted")]
    if interpreted and not HAS_GPU and importlib.util.find_spec("triton"):
        import triton_interpreter

        triton_interpreter.mend()
    for item in interpreted if HAS_GPU else ():
        item.add_marker(pytest.mark.skip(reason="the GPU runs the same test"))


def _order(items: list[pytest.Item]) -> None:
    """Files whose tests wait for processes evenly among those that compute, so that workers seldom all do the same,
    and the longest are not left to the end."""
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = [path for folder in WAITING for path in files if (TESTS / folder) in path.parents]
    computing = [path for path in files if path not in waiting]
    for paths in (waiting, computing):
        paths.sort(key=lambda path: path.name not in LONG)  # those first, the others as they were
    place = {path: number / len(paths) for paths in (waiting, computing) for number, path in enumerate(paths)}
    items[:] = [item for path in sorted(files, key=lambda path: place[path]) for item in files[path]]


def _explore(items: list[pytest.Item], times: int) -> None:
    """Let property tests draw so many times their examples, at random. Hypothesis has no public way to change the
    settings that a test was decorated with."""
    for item in items:
        owner = getattr(item, "cls", None)
        places = [(getattr(item.obj, "__func__", item.obj), "_hypothesis_internal_use_settings"), (owner, "settings")]
        for place, name in places:  # of a function, and of a state machine
            known = getattr(place, name, None)
            if isinstance(known, hypothesis.settings) and known.derandomize:
                examples = known.max_examples * times
                setattr(place, name, hypothesis.settings(known, max_examples=examples, derandomize=False))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _order(items)
    if config.getoption("examples"):
        _explore(items, config.getoption("examples"))
    _settle_interpreted(items)
    for item in items:
        if item.get_closest_marker("slow") and not item.config.getoption("slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; runs with --slow"))
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return
    if not HAS_GPU:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
