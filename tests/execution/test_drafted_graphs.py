"""Drafters in captured steps: steps with prefill are captured, too, and make the drafts that steps as written make."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_drafted_output import BASE, DRAFTS, requests
from tiny_checkpoint import write_tiny_checkpoint

from headrace import LLM
from headrace.base.step import StepPlan
from headrace.execution.executor import LocalExecutor
from headrace.execution.graph_sizes import GraphSizes
from headrace.execution.graphs import DecodeGraphPath, MixedGraphPath
from headrace.execution.paths import StepPath
from headrace.execution.runner import Runner
from tests.execution.pretended_graphs import PretendedRecorder, open_attention

HEAD = {"num_hidden_layers": 1, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}


def capture_all(runner: Runner, executor: LocalExecutor) -> Counter[str]:
    """Let every step of the runner run as one that is captured, and count the paths of those that draft."""
    proposer = runner._proposer
    assert proposer is not None
    open_attention(runner, 64)
    runner.draft_with(proposer.draft, hidden_size=32, dtype=torch.float32, max_tokens=64)
    runner.capture(GraphSizes([4, 64], [8, 40, 64]), PretendedRecorder())
    taken: Counter[str] = Counter()

    def watch(path: StepPath) -> None:
        prepare = path.prepare

        def prepared(step: Any, upload: Any) -> Any:
            launch = prepare(step, upload)
            taken[type(path).__name__] += launch is not None and step.plan.num_proposals > 0
            return launch

        path.prepare = prepared  # type: ignore[method-assign]

    for path in runner.paths:
        watch(path)
    return taken


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), 5)


@pytest.fixture(scope="module", params=["own model", "head"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[str]:
    if request.param == "own model":
        named = {"method": "draft_model", "model": str(write_tiny_checkpoint(tmp_path_factory.mktemp("d"), 4))}
    else:
        stated = json.loads((folder / "config.json").read_text())
        path = tmp_path_factory.mktemp("head")
        (path / "config.json").write_text(json.dumps({**stated, **HEAD, "architectures": ["LlamaForCausalLMEagle3"]}))
        named = {"method": "eagle3", "model": str(path), "load_format": "dummy"}
    yield json.dumps({**named, "num_speculative_tokens": DRAFTS})


@pytest.mark.parametrize("options", [
    {"overlap_depth": 1}, {"overlap_depth": 2, "max_step_tokens": 64}, {"overlap_depth": 2, "max_step_tokens": 12}
], ids=str)
def test_captured_steps_make_the_same_drafts(folder: Path, config: str, options: dict[str, Any]):
    """Their number, and how many of them are right by place, are equal: so the drafts are."""
    prompts, params = requests()
    base = {**BASE, "attention_backend": "reference", "max_step_tokens": 64, **options}
    outputs, counters, steps = [], [], []
    for is_captured in (False, True):
        with LLM(str(folder), **base, speculative_config=config) as llm:
            executor = llm._client._engine.executor
            runner = executor._model.runner
            taken = capture_all(runner, executor) if is_captured else None
            plans: list[StepPlan] = []
            execute = runner.execute
            runner.execute = lambda plan, run=execute, seen=plans: seen.append(plan) or run(plan)
            outputs.append([o.outputs[0].token_ids for o in llm.generate(
                prompt_token_ids=prompts, sampling_params=params
            )])
            counters.append(llm.stats().speculation)
            steps.append(sum(plan.num_proposals > 0 for plan in plans))
            llm.check()
    assert outputs[0] == outputs[1]
    assert counters[0] == counters[1] and counters[0].num_accepted_tokens > 0
    assert taken == {MixedGraphPath.__name__: taken[MixedGraphPath.__name__],
                     DecodeGraphPath.__name__: taken[DecodeGraphPath.__name__]}, "no step with drafts ran as written"
    assert taken.total() == steps[1] == steps[0] and taken[MixedGraphPath.__name__] > 1
