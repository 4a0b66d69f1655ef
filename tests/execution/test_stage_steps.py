"""Two pipeline stages in one process, as written and in captured steps; which layers a stage gets; what is refused."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import write_tiny_checkpoint

from headrace import LLM, SamplingParams
from headrace.base.cache import CacheGroup, CacheSpec
from headrace.base.config import CacheConfig, engine_config
from headrace.base.errors import ConfigError
from headrace.base.step import StepPlan
from headrace.execution.building import build_executor
from headrace.execution.executor import LocalExecutor
from headrace.execution.graph_sizes import GraphSizes
from headrace.execution.inputs import InputBuilder
from headrace.execution.loading import choose_stage
from headrace.execution.paths import PlainPath
from headrace.execution.runner import Runner
from headrace.memory.plan import CacheDemand, plan_cache
from headrace.models.catalog import find_family
from headrace.models.checkpoint import weigh_layers
from headrace.models.finding import find_safetensors
from headrace.models.source import resolve_source
from headrace.parallel.layout import Layout, Stage
from headrace.parallel.links import StageLinks
from headrace.parallel.ranks import Ranks
from headrace.service import build
from tests.execution.pretended_graphs import OpenAttention, PretendedRecorder

CPU = torch.device("cpu")
BASE = {"device": "cpu", "dtype": "float32", "kv_pages": 64, "page_size": 4, "threads": 1, "max_step_tokens": 40}


class QueueLinks(StageLinks):
    """To a stage in the same process."""

    def __init__(self, queue: deque[torch.Tensor], *, is_sender: bool):
        self.has_previous, self.has_next = not is_sender, is_sender
        self._queue, self._is_muted = queue, False

    def receive(self, out: torch.Tensor) -> None:
        if not self._is_muted:
            sent = self._queue.popleft()
            assert sent.shape == out.shape and sent.dtype == out.dtype
            out.copy_(sent)

    def send(self, x: torch.Tensor) -> None:
        if not self._is_muted:
            self._queue.append(x)

    @contextmanager
    def muted(self) -> Iterator[None]:
        self._is_muted = True
        yield
        self._is_muted = False


def capture_all(runner: Runner) -> Counter[str]:
    """Let every step run as one that is captured, and count the paths."""
    handover = runner._inputs.handover
    runner._backends = [OpenAttention(backend.geometry, CPU) for backend in runner._backends]
    inputs = runner._inputs = InputBuilder(
        runner.layout, runner._rows, runner._tables, runner._backends, 64, runner._media
    )
    inputs.handover = handover
    runner.paths[-1] = PlainPath(runner._model, inputs)
    runner.capture(GraphSizes([4, 64], [8, 40]), PretendedRecorder())
    taken: Counter[str] = Counter()
    for path in runner.paths:
        def prepared(step: Any, upload: Any, path: Any = path, prepare: Any = path.prepare) -> Any:
            found = prepare(step, upload)
            taken[type(path).__name__] += found is not None
            return found

        path.prepare = prepared  # type: ignore[method-assign]
    return taken


def build_stages(folder: Path, **options: Any) -> tuple[LocalExecutor, LocalExecutor]:
    """The executors of both stages; the second one's plans go through the first."""
    queue: deque[torch.Tensor] = deque()
    config = engine_config(model=str(folder), pipeline_parallel_size=2, **options)
    first, last = (
        build_executor(config, ranks=Ranks(Layout(rank, 1, 2), links=QueueLinks(queue, is_sender=rank == 1)))
        for rank in (1, 0)
    )
    execute = last.execute

    def execute_both(plan: StepPlan) -> Any:
        first.execute(plan)
        return execute(plan)

    last.execute = execute_both  # type: ignore[method-assign]
    return first, last


@pytest.mark.parametrize("is_captured", [False, True])
def test_captured_steps_of_stages_compute_what_one_rank_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_captured: bool
):
    folder = write_tiny_checkpoint(tmp_path, 3)
    options = {**BASE, "attention_backend": "reference"}
    prompts = [{"prompt_token_ids": [(3 * i * j + 1) % 60 for j in range(4 + 9 * i)]} for i in range(1, 6)]
    params = [
        SamplingParams(max_tokens=9, ignore_eos=True, **own)
        for own in (
            {"temperature": 0.0}, {"temperature": 0.0, "logprobs": 1}, {"temperature": 0.9, "seed": 4},
            {"temperature": 0.0, "prompt_logprobs": 1}, {"temperature": 0.0, "repetition_penalty": 1.2},
        )
    ]
    with LLM(str(folder), **options) as llm:
        alone = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    taken: list[Counter[str]] = []

    def build_both(*_: object) -> LocalExecutor:
        stages = build_stages(folder, **options)
        if is_captured:
            taken.extend(capture_all(stage._model.runner) for stage in stages)
        return stages[1]

    monkeypatch.setattr(build, "build_executor", build_both)
    with LLM(str(folder), **options) as llm:
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert together == alone
    if is_captured:
        assert all(count["DecodeGraphPath"] and count["MixedGraphPath"] for count in taken), taken
        assert taken[0].total() == taken[1].total()


def choose(folder: Path, number: int, stages: int, **options: Any) -> Stage:
    config = engine_config(model=str(folder), pipeline_parallel_size=stages, **options)
    source = resolve_source(config.model)
    family = find_family(source.architecture)
    layout = Layout(stages - 1 - number, 1, stages)
    return choose_stage(source, family, family.read_config(source.config), config, layout)


def test_layers_are_divided_by_the_bytes_of_the_checkpoint(tmp_path: Path):
    """The head is as large as many layers here, so the last stage gets one layer alone."""
    folder = write_tiny_checkpoint(tmp_path, 1, num_hidden_layers=6, vocab_size=4000)
    source = resolve_source(engine_config(model=str(folder)).model)
    family = find_family(source.architecture)
    weights, head = weigh_layers(source, family, 6)
    assert len(set(weights)) == 1 and head > 5 * weights[0]
    assert sum(weights) < sum(path.stat().st_size for path in find_safetensors(folder))
    assert (choose(folder, 0, 2), choose(folder, 1, 2)) == (Stage(0, 5), Stage(5))
    assert choose(folder, 0, 2, load_format="dummy") == Stage(0, 3), "nothing is known of weights that are not there"
    assert choose(folder, 1, 3, pipeline_layers="1,3,2") == Stage(1, 4)


@pytest.mark.parametrize(("options", "param"), [
    ({"pipeline_parallel_size": 3}, "pipeline_parallel_size"),
    ({"pipeline_parallel_size": 2, "pipeline_layers": "1,2"}, "pipeline_layers"),
    ({"pipeline_parallel_size": 2, "pipeline_layers": "2"}, "pipeline_layers"),
])
def test_what_cannot_be_divided_is_refused(tmp_path: Path, options: dict[str, Any], param: str):
    folder = write_tiny_checkpoint(tmp_path, 1, num_hidden_layers=2)
    with pytest.raises(ConfigError) as caught:
        config = engine_config(model=str(folder), **BASE, **options)
        build_executor(config, ranks=Ranks(Layout(0, 1, config.parallel.pipeline_parallel_size)))
    assert caught.value.param == param


def test_a_drafter_on_the_device_needs_one_stage(tmp_path: Path):
    folder = write_tiny_checkpoint(tmp_path, 1, num_hidden_layers=2)
    method = json.dumps({"method": "draft_model", "model": str(folder), "num_speculative_tokens": 2})
    with pytest.raises(ConfigError, match="use method ngram or suffix") as caught:
        build_stages(folder, **BASE, speculative_config=method)
    assert caught.value.param == "speculative_config"


def test_groups_without_layers_take_no_bytes():
    """The base group is in another stage: there are as many pages as those of the window allow."""
    full, window = (CacheSpec(kind, 1, 8, 8, "float32", window=w) for kind, w in (("full", 0), ("sliding_window", 8)))
    groups = [CacheGroup(full, []), CacheGroup(window, [0, 1])]
    demand = CacheDemand(groups, 4, 64, is_len_fixed=True, max_step_tokens=16, max_rows=4)
    plan = plan_cache(demand, CacheConfig(), 1 << 20)
    assert plan.max_model_len == 64 and min(group.num_pages for group in plan.groups) > 1
    alone = CacheDemand([CacheGroup(full, [])], 4, 64, is_len_fixed=True, max_step_tokens=16, max_rows=4)
    assert plan_cache(alone, CacheConfig(), 1 << 10).groups[0].num_pages > 17, "no bytes, no bound"
