"""When work is recorded, and which size is taken; on a recorder that notes what it is asked."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from headrace.execution.captures import Buckets, Capture, NoRecorder, Records
from headrace.execution.graph_sizes import GraphSizes
from headrace.execution.graphs import CapturedSteps
from headrace.parallel.links import Handover
from tests.execution.pretended_graphs import NO_MEDIA


class Recorder:
    """Its graphs say that they were replayed."""

    def __init__(self, *, refuses: bool = False):
        self.refuses = refuses

    def record(self, work: Callable[[], str]) -> Callable[[], str] | None:
        return None if self.refuses else lambda: f"replayed {work()}"


class FailingRecorder:
    """Its device has no memory for the work."""

    num_asked = 0

    def record(self, work: Callable[[], str]) -> None:
        self.num_asked += 1
        raise MemoryError("too much")


class Work:
    """A bucket."""

    def __init__(self, size: int, log: list[str]):
        self.size, self.is_recorded, self._log = size, False, log
        log.append(f"made {size}")

    def record(self) -> None:
        self.is_recorded = True
        self._log.append(f"recorded {self.size}")


@pytest.fixture
def log() -> list[str]:
    return []


@pytest.fixture
def captured(log: list[str]) -> CapturedSteps:
    """Steps whose buckets keep a log."""
    inputs = SimpleNamespace(handover=Handover(), adapters=None, media=NO_MEDIA, backends=[])
    steps = CapturedSteps(GraphSizes([], []), None, inputs, None)
    steps._kinds = tuple(Buckets(sizes, lambda size: Work(size, log)) for sizes in ([1, 2, 4], [64, 32]))
    return steps


def test_the_first_run_is_recorded_and_all_are_replayed():
    capture = Capture(lambda: "work", Recorder())
    assert not capture.is_recorded
    assert [capture.run() for _ in range(3)] == ["replayed work"] * 3
    assert capture.is_recorded


@pytest.mark.parametrize("recorder", [Recorder(refuses=True), NoRecorder()])
def test_what_is_not_recorded_runs_as_written_for_good(recorder: Records):
    capture = Capture(lambda: "work", recorder)
    assert [capture.run() for _ in range(3)] == ["work"] * 3
    assert capture.is_recorded


def test_work_that_failed_once_is_never_recorded():
    recorder = FailingRecorder()
    capture = Capture(lambda: "work", recorder)
    with pytest.raises(MemoryError):
        capture.run()
    assert [capture.run(), capture.run()] == ["work", "work"] and recorder.num_asked == 1


def test_the_smallest_bucket_that_holds_the_step_is_made_when_it_is_wanted(log: list[str]):
    buckets = Buckets([8, 1, 4], lambda size: Work(size, log))
    assert log == [] and buckets.find(9) is None
    found = [buckets.find(count) for count in (1, 2, 4, 5, 3)]
    assert [bucket.size for bucket in found] == [1, 4, 4, 8, 4] and found[1] is found[2] is found[4]
    assert log == ["made 1", "made 4", "made 8"]


def test_all_are_recorded_largest_first(captured: CapturedSteps, log: list[str]):
    captured.record_all(lambda: log.append("-"))
    assert log == [entry for size in (4, 2, 1, 64, 32) for entry in (f"made {size}", f"recorded {size}", "-")]


def test_lazily_the_largest_come_first_and_idle_moments_take_one_each(captured: CapturedSteps, log: list[str]):
    captured.record_largest()
    assert log == ["made 4", "recorded 4", "made 64", "recorded 64"]
    captured._kinds[0].find(1).record()  # as a step does that needs it
    log.clear()
    moments = []
    while captured.record_next():
        moments.append(log[-1])
    assert moments == ["recorded 2", "recorded 32"]
    assert not captured.record_next()
