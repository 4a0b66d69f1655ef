"""Text that a grammar forces beside a drafter's drafts, in captured steps on a GPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from headrace import LLM, Grammar, SamplingParams
from headrace.base.step import StepPlan
from headrace.execution.graphs import DecodeGraphPath, MixedGraphPath
from headrace.execution.paths import StepPath
from headrace.execution.runner import Runner

pytestmark = pytest.mark.cuda
pytest.importorskip("llguidance")
draft_checkpoints = pytest.importorskip("draft_checkpoints", reason="needs transformers", exc_type=ImportError)

BASE = {"device": "cuda", "dtype": "float32", "max_model_len": 160, "kv_pages": 240, "max_running_requests": 8}
PROMPTS = [[5, 6, 7], [50, 51, 52, 53], [9, 9, 8], [100, 8, 100, 8], [30, 31]]
FREE = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
FORCED = Grammar.regex("[ab]an interlude that nobody chooses[ab]and another one of some length[cd]")
PARAMS = [
    SamplingParams(max_tokens=80, temperature=0.0, grammar=FORCED), FREE, replace(FREE, temperature=0.7, seed=4),
    SamplingParams(max_tokens=80, temperature=0.9, seed=3, grammar=FORCED), replace(FREE, logprobs=2),
]


def watch_paths(runner: Runner) -> Counter[tuple[str, bool]]:
    """Steps by the path that ran them, and whether a drafter made drafts in them beside rows with forced text."""
    taken: Counter[tuple[str, bool]] = Counter()

    def watch(path: StepPath) -> None:
        prepare = path.prepare

        def prepared(step: Any, upload: Any) -> Any:
            launch = prepare(step, upload)
            plan: StepPlan = step.plan
            taken[type(path).__name__, bool(plan.num_proposals and plan.drafts)] += launch is not None
            return launch

        path.prepare = prepared  # type: ignore[method-assign]

    for path in runner.paths:
        watch(path)
    return taken


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("drafted")
    target = draft_checkpoints.write_target(root / "target", "Llama")
    return root / "target", draft_checkpoints.write_head(root / "head", target, "one file")


@pytest.mark.parametrize("depth", [1, 2])
def test_forced_text_is_verified_beside_a_drafter_in_captured_steps(folders: tuple[Path, Path], depth: int):
    target, head = folders
    found = []
    for config in ({"method": "off"}, {"method": "eagle3", "model": str(head), "num_speculative_tokens": 4}):
        with LLM(str(target), **BASE, overlap_depth=depth, graphs="on", speculative_config=config) as llm:
            llm.generate(prompt_token_ids=PROMPTS[:1], sampling_params=PARAMS[:1])  # compiles the grammar
            taken, before = watch_paths(llm._client._engine.executor._runner), llm.stats().speculation
            found.append([o.outputs[0] for o in llm.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS)])
            after = llm.stats().speculation
            llm.check()
            assert llm.stats().num_used_pages == 0
    assert [o.token_ids for o in found[1]] == [o.token_ids for o in found[0]]
    assert all("an interlude that nobody chooses" in found[1][row].text for row in (0, 3))
    assert {path for path, _ in taken} <= {DecodeGraphPath.__name__, MixedGraphPath.__name__}, "a step ran as written"
    assert taken[DecodeGraphPath.__name__, True] > 2, "forced text and a drafter's drafts in one captured step"
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    assert 20 < accepted < after.num_draft_tokens - before.num_draft_tokens
