"""Output with drafts is output without them: every method, with all that acts on sampling, whatever is in flight."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoint import write_tiny_checkpoint

from headrace import LLM, SamplingParams
from headrace.base.errors import HeadraceError

BASE = {
    "device": "cpu", "dtype": "float32", "max_model_len": 160, "kv_pages": 200, "skip_tokenizer": True,
    "page_size": 4,
}
DRAFTS = 4
VOCAB = 199


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), 3)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that often disagrees."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("other"), 4, num_hidden_layers=1)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    chance = random.Random(5)
    prompts = [[chance.randrange(3, VOCAB) for _ in range(chance.randint(1, 40))] for _ in range(9)]
    prompts[1] = [5, 6, 7, 8] * 10
    greedy = {"temperature": 0.0, "ignore_eos": True}
    return prompts, [
        SamplingParams(max_tokens=60, **greedy),
        SamplingParams(max_tokens=50, **greedy),
        SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=11, ignore_eos=True),
        SamplingParams(max_tokens=40, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.1, **greedy),
        SamplingParams(max_tokens=30, logprobs=3, **greedy),
        SamplingParams(max_tokens=30, min_tokens=12, temperature=0.6, seed=3, stop_token_ids=list(range(3, 60))),
        SamplingParams(max_tokens=40, logit_bias={17: 4.0, 30: 3.5}, **greedy),
        SamplingParams(max_tokens=1, **greedy),
        SamplingParams(max_tokens=60, temperature=0.3, min_p=0.05, seed=8, ignore_eos=True),
    ]


def generate(folder: Path, config: dict[str, Any], **options: Any) -> tuple[list[Any], Any]:
    prompts, params = requests()
    with LLM(str(folder), **{**BASE, **options}, speculative_config=json.dumps(config)) as llm:
        outputs = [output.outputs[0] for output in llm.generate(prompt_token_ids=prompts, sampling_params=params)]
        llm.check()
        return outputs, (llm.stats().steps_total, llm.stats().speculation)


def methods(folder: Path, other: Path) -> dict[str, dict[str, Any]]:
    fixed = {"num_speculative_tokens": DRAFTS}
    return {
        "ngram": {"method": "ngram", **fixed}, "suffix": {"method": "suffix", **fixed}, "auto": {"method": "auto"},
        "same model": {"method": "draft_model", "model": str(folder), **fixed},
        "other model": {"method": "draft_model", "model": str(other), **fixed},
        "adaptive model": {"method": "auto", "model": str(other)},
    }


@pytest.mark.parametrize("options", [
    {"overlap_depth": 2, "max_step_tokens": 16}, {"overlap_depth": 2, "kv_pages": 45},
    {"overlap_depth": 1, "prefix_cache": False},
], ids=str)
def test_output_is_that_of_no_drafts(folder: Path, other: Path, options: dict[str, Any]):
    plain, (steps, _) = generate(folder, {"method": "off"}, **options)
    for name, config in methods(folder, other).items():
        drafted, (fewer, counters) = generate(folder, config, **options)
        assert [o.token_ids for o in drafted] == [o.token_ids for o in plain], name
        assert [o.finish_reason for o in drafted] == [o.finish_reason for o in plain], name
        mine, its = drafted[4].logprobs, plain[4].logprobs
        assert [(e.token_id, e.rank, e.top_ids) for e in mine] == [(e.token_id, e.rank, e.top_ids) for e in its], name
        assert [e.logprob for e in mine] == pytest.approx([e.logprob for e in its], abs=1e-4), name
        assert 0 <= counters.num_accepted_tokens <= counters.num_draft_tokens, name
        # the counters also know drafts behind the end of a request
        assert 0 <= counters.num_accepted_tokens - sum(o.num_accepted_tokens for o in drafted) <= len(drafted) * DRAFTS
        assert all(o.num_accepted_tokens <= o.num_draft_tokens for o in drafted), name
        assert counters.num_accepted_tokens or "num_speculative_tokens" not in config, name
        assert counters.num_accepted_tokens == sum(counters.num_accepted_tokens_per_position), name
        if name == "same model":
            assert fewer < 0.95 * steps, "greedy rows agree with themselves"


def test_a_model_that_drafts_for_itself_is_right(folder: Path):
    prompts, _ = requests()
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": DRAFTS}
    with LLM(str(folder), **BASE, speculative_config=json.dumps(config)) as llm:
        params = SamplingParams(max_tokens=61, temperature=0.0, ignore_eos=True)
        llm.generate(prompt_token_ids=prompts[:1], sampling_params=params)
        counters = llm.stats().speculation
        assert counters.num_accepted_tokens == counters.num_draft_tokens
        assert llm.stats().steps_total <= 2 + 60 // (DRAFTS + 1)
        # a prefix hit brings the drafter's keys as well
        text = prompts[0] * 2
        for prompt in (text, [*text, 9]):
            llm.generate(prompt_token_ids=[prompt], sampling_params=params)
        counters = llm.stats().speculation
        assert counters.num_accepted_tokens >= 0.97 * counters.num_draft_tokens


def test_an_abort_with_drafts_in_flight_leaves_nothing_behind(folder: Path):
    prompts, params = requests()
    config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": DRAFTS}
    with LLM(str(folder), **BASE, overlap_depth=2, speculative_config=json.dumps(config)) as llm:
        whole = llm.generate(prompt_token_ids=prompts, sampling_params=params)
        short = [SamplingParams(max_tokens=n + 1, temperature=0.0, ignore_eos=True) for n in range(9)]
        for output, longer in zip(llm.generate(prompt_token_ids=[prompts[0]] * 9, sampling_params=short),
                                  range(1, 10), strict=True):
            assert output.outputs[0].token_ids == whole[0].outputs[0].token_ids[:longer]
        llm.check()
        assert llm.stats().num_used_pages == 0


@pytest.mark.parametrize(("config", "message"), [
    ({"method": "draft_model", "model": "/nowhere"}, "nowhere"),
    ({"method": "eagle3"}, "needs model"), ({"method": "mtp"}, "multi-token prediction"),
    ({"method": "ngram", "drafts": 3}, "drafts"),
], ids=str)
def test_what_cannot_be_is_refused_at_the_start(folder: Path, config: dict[str, Any], message: str):
    with pytest.raises(HeadraceError, match=message):
        LLM(str(folder), **BASE, speculative_config=json.dumps(config))
