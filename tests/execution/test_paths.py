"""The runner takes the first path that covers a step's features and has room for its shape."""

from __future__ import annotations

from driver import Driver
from toy import toy_runner

from headrace.base.sampling import SamplingSpec
from headrace.execution.graphs import DecodeGraphPath, MixedGraphPath, with_adapters
from headrace.execution.paths import FusedPath, Launch, PlainPath, StepPath
from headrace.execution.runner import Runner
from headrace.execution.step import Step, StepFeature
from headrace.execution.upload import Upload

EVERY = [*StepFeature]


class FakePath:
    """Computes as the plain path does, for steps of up to ``room`` tokens."""

    is_greedy_sampler = False

    def __init__(self, covers: StepFeature, plain: StepPath, room: int = 100):
        self.covers, self.room, self._plain = covers, room, plain
        self.taken: list[StepFeature] = []

    def prepare(self, step: Step, upload: Upload) -> Launch | None:
        if step.shape.num_tokens > self.room:
            return None
        self.taken.append(step.features)
        return self._plain.prepare(step, upload)


def runner_with(*covers: StepFeature, room: int = 100) -> tuple[Runner, list[FakePath]]:
    """A runner whose fastest paths are fakes."""
    runner = toy_runner()
    fakes = [FakePath(each, runner.paths[-1], room) for each in covers]
    runner.paths[:0] = fakes
    return runner, fakes


def test_the_plain_path_covers_everything():
    assert all(feature in PlainPath.covers for feature in EVERY)
    assert isinstance(toy_runner().paths[-1], PlainPath)


def test_paths_of_decodes_cover_no_prefill():
    sampled = StepFeature.SAMPLING | StepFeature.GRAMMAR
    assert FusedPath.covers == sampled | StepFeature.ADAPTERS
    assert DecodeGraphPath.covers == sampled | StepFeature.DRAFTING | StepFeature.ROPE_OFFSETS


def test_graphs_of_mixed_steps_know_one_text_a_row_and_no_adapters_or_placeholders():
    left = [feature for feature in EVERY if feature not in MixedGraphPath.covers]
    assert left == [
        StepFeature.TEXT_PAIRS, StepFeature.ADAPTERS, StepFeature.ADAPTER_EXTRAS, StepFeature.MEDIA
    ]


def test_graphs_of_steps_with_adapters_leave_extras_and_drafters_to_the_plain_path():
    left = [feature for feature in EVERY if feature not in with_adapters(MixedGraphPath.covers)]
    assert left == [
        StepFeature.DRAFTING, StepFeature.TEXT_PAIRS, StepFeature.ADAPTER_EXTRAS, StepFeature.MEDIA
    ]


def test_the_first_that_covers_the_features_wins():
    runner, (decodes, sampling, everything) = runner_with(StepFeature(0), StepFeature.SAMPLING, PlainPath.covers)
    driver = Driver(runner)
    driver.start(0, [1, 2, 3], SamplingSpec())
    driver.step({0: 3})
    driver.step({})
    driver.start(1, [4, 5], SamplingSpec(temperature=0.5, num_prompt_logprobs=0))
    driver.step({1: 2})
    driver.step({})
    assert decodes.taken == [StepFeature(0)]
    assert sampling.taken == [StepFeature.SAMPLING]
    assert everything.taken == [
        StepFeature.PREFILL, StepFeature.PREFILL | StepFeature.SAMPLING | StepFeature.PROMPT_LOGPROBS
    ]


def test_a_path_without_room_is_passed_over():
    runner, (small,) = runner_with(PlainPath.covers, room=2)
    driver = Driver(runner)
    driver.start(0, [1, 2, 3, 4, 5], SamplingSpec())
    driver.step({0: 3})
    driver.step({0: 2})
    assert len(small.taken) == 1
