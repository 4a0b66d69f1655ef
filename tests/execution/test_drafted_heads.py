"""EAGLE-3 heads and prediction modules through the whole engine: output with them is output without, whatever else is
asked for and whatever is in flight, while some of their drafts are right and others wrong."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from draft_checkpoints import TARGETS, VOCAB, write_head, write_target

from headrace import LLM, Grammar, SamplingParams
from headrace.base.config import engine_config, resolve_for_device
from headrace.execution.building import build_executor
from headrace.execution.executor import LocalExecutor

BASE = {"device": "cpu", "dtype": "float32", "max_model_len": 160, "kv_pages": 240, "page_size": 4, "threads": 1}
DRAFTS = 4
SCHEMA = {
    "type": "object", "properties": {"name": {"enum": ["abacus", "absent"]}, "b": {"type": "array", "maxItems": 3,
    "items": {"type": "boolean"}}}, "required": ["name", "b"], "additionalProperties": False,
}
DRAFTERS = {
    "eagle3, one file": ("Llama", "one file"), "eagle3, speculators": ("Llama", "speculators"),
    "mtp, DeepSeek-V3": ("DeepseekV3", ""), "mtp, GLM-4.5": ("Glm4Moe", ""),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "one plan in flight": {"overlap_depth": 1},
    "two plans": {"overlap_depth": 2},
    "chunks": {"overlap_depth": 2, "max_step_tokens": 16},
    "retraction": {"overlap_depth": 2, "kv_pages": 43},
    "retraction of chunks, nothing kept": {
        "overlap_depth": 1, "kv_pages": 43, "max_step_tokens": 12, "prefix_cache": False
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Targets by kind, and heads of the Llama by form."""
    root = tmp_path_factory.mktemp("drafted")
    made = {kind: write_target(root / kind, kind, has_module=kind != "Llama") for kind in TARGETS}
    heads = {form: write_head(root / form, made["Llama"], form) for form in ("one file", "speculators")}
    return {**heads, **{kind: root / kind for kind in TARGETS}}


def config_of(name: str, folders: dict[str, Path], count: int | None = DRAFTS) -> dict[str, Any]:
    """What is asked for; without a count: as many as the head says, or the default."""
    _, form = DRAFTERS[name]
    method = {"method": "eagle3", "model": str(folders[form])} if form else {"method": "mtp"}
    return method if count is None else {**method, "num_speculative_tokens": count}


def build(folder: Path, **options: Any) -> LocalExecutor:
    return build_executor(resolve_for_device(engine_config(model=str(folder), **{**BASE, **options}), "cpu"))


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    chance = random.Random(7)
    prompts = [[chance.randrange(3, VOCAB) for _ in range(chance.randint(1, 40))] for _ in range(12)]
    prompts[2] = [*prompts[0], 9, 8]  # a prefix that another one has
    greedy = {"temperature": 0.0, "ignore_eos": True}
    return prompts, [
        SamplingParams(max_tokens=60, **greedy),
        SamplingParams(max_tokens=40, temperature=0.7, top_p=0.9, seed=11, ignore_eos=True),
        SamplingParams(max_tokens=40, repetition_penalty=1.05, presence_penalty=0.4, frequency_penalty=0.1, **greedy),
        SamplingParams(max_tokens=30, logprobs=3, **greedy),
        SamplingParams(max_tokens=30, min_tokens=12, temperature=0.6, seed=3, stop_token_ids=list(range(3, 60))),
        SamplingParams(max_tokens=40, logit_bias={17: 4.0, 30: 3.5}, **greedy),
        SamplingParams(max_tokens=60, temperature=0.0, grammar=Grammar.json_schema(SCHEMA)),
        SamplingParams(max_tokens=30, temperature=0.8, seed=5, grammar=Grammar.regex("[ab]{3,9}c{12}"), logprobs=2),
        SamplingParams(max_tokens=1, **greedy),
        SamplingParams(max_tokens=40, n=3, temperature=0.5, top_k=20, seed=9, ignore_eos=True),
        SamplingParams(max_tokens=40, temperature=0.0, prompt_logprobs=1, bad_words=["b", "cd"], ignore_eos=True),
        SamplingParams(max_tokens=None, temperature=0.4, min_p=0.05, seed=8, ignore_eos=True),  # to the context's end
    ]


def generate(llm: LLM) -> list[list[Any]]:
    prompts, params = requests()
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    llm.check()
    assert llm.stats().num_used_pages == llm.stats().num_running == 0
    return [output.outputs for output in outputs]


def assert_equal(drafted: list[list[Any]], plain: list[list[Any]], name: str) -> None:
    for index, (ours, theirs) in enumerate(zip(drafted, plain, strict=True)):
        for mine, its in zip(ours, theirs, strict=True):
            assert mine.token_ids == its.token_ids, (name, index)
            assert (mine.finish_reason, mine.stop_reason) == (its.finish_reason, its.stop_reason), (name, index)
            assert mine.text == its.text, (name, index)
            assert [(e.token_id, e.rank, e.top_ids) for e in mine.logprobs or []] == [
                (e.token_id, e.rank, e.top_ids) for e in its.logprobs or []
            ], (name, index)
            assert [e.logprob for e in mine.logprobs or []] == pytest.approx(
                [e.logprob for e in its.logprobs or []], abs=1e-4
            ), (name, index)


def assert_right_and_wrong(counters: Any, name: str) -> None:
    """A drafter that is always wrong, or whose drafts never reach the target, shows here."""
    share = counters.num_accepted_tokens / max(1, counters.num_draft_tokens)
    assert counters.num_drafts > 50 and 0.05 < share < 0.95, (name, counters)
    positions = counters.num_accepted_tokens_per_position
    assert len(positions) == DRAFTS and all(positions), "chains are right to their end now and then"


@pytest.fixture(scope="module")
def plain_outputs(folders: dict[str, Path]) -> Callable[[str], list[list[Any]]]:
    """What a kind of target says without drafts, one plan in flight and room for all: whatever else is asked for, that
    is what is said."""

    @functools.cache
    def find(kind: str) -> list[list[Any]]:
        with LLM(str(folders[kind]), **BASE, overlap_depth=1) as llm:
            return generate(llm)

    return find


@pytest.mark.parametrize(("name", "options"), [
    *(("eagle3, one file", options) for options in OPTIONS),
    ("eagle3, speculators", "two plans"),  # the same head in other files
    *((name, options) for name in DRAFTERS if name.startswith("mtp") for options in ("chunks", "retraction")),
])
def test_output_is_that_of_no_drafts(
    name: str, options: str, folders: dict[str, Path], plain_outputs: Callable[[str], list[list[Any]]]
):
    kind, stated = DRAFTERS[name][0], {**BASE, **OPTIONS[options]}
    plain = plain_outputs(kind)
    with LLM(str(folders[kind]), **stated, speculative_config=config_of(name, folders)) as llm:
        assert_equal(generate(llm), plain, name)
        assert_right_and_wrong(llm.stats().speculation, name)
        again = generate(llm)
        hits = llm.stats().cached_tokens_total if stated.get("prefix_cache", True) else 1
    assert hits, "the second time, prompts are found"
    assert_equal(again, plain, f"{name}, from stored prefixes")


def test_requests_are_retracted_where_that_is_what_is_tried(folders: dict[str, Path]):
    """Else the cases above would say nothing about retraction."""
    config = config_of("eagle3, one file", folders)
    with LLM(str(folders["Llama"]), **BASE | OPTIONS["retraction"], speculative_config=config) as llm:
        generate(llm)
        assert llm.stats().retracted_total > 0


@pytest.mark.parametrize("name", DRAFTERS)
def test_aborts_with_drafts_in_flight_disturb_nobody(
    name: str, folders: dict[str, Path], plain_outputs: Callable[[str], list[list[Any]]], monkeypatch: Any
):
    (prompts, params), (kind, _) = requests(), DRAFTERS[name]
    plain = plain_outputs(kind)
    with LLM(str(folders[kind]), **BASE, overlap_depth=2, speculative_config=config_of(name, folders)) as llm:
        engine, step, done = llm._client._engine, llm._client._step, []

        def step_and_abort() -> list[Any]:
            outputs = step()
            done.append(sum(len(output.token_ids) for output in outputs))
            if len(done) in (6, 9):  # with two plans in flight, each with drafts
                engine.abort(str(len(done) // 3 - 2))
            return outputs

        monkeypatch.setattr(llm._client, "_step", step_and_abort)
        outputs = [o.outputs for o in llm.generate(prompt_token_ids=prompts, sampling_params=params)]
        llm.check()
        assert llm.stats().aborted_total == 2 and llm.stats().num_used_pages == 0
        for index in (0, 1):
            (ended,), (whole,) = outputs[index], plain[index]
            assert ended.finish_reason == "abort" and 0 < len(ended.token_ids) < len(whole.token_ids)
            assert ended.token_ids == whole.token_ids[: len(ended.token_ids)]
        assert_equal(outputs[2:], plain[2:], name)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_automatic_choice_finds_the_drafter(name: str, folders: dict[str, Path]):
    kind, form = DRAFTERS[name]
    config = {"method": "auto", **({"model": str(folders[form])} if form else {})}
    executor = build(folders[kind], speculative_config=config)
    assert executor.speculation.method == name.partition(",")[0]
    assert executor.speculation.device_drafts == 3, "as the head says, or the default"


@pytest.mark.parametrize("name", ["eagle3, one file", "mtp, GLM-4.5"])
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"kv_dtype": "int8"}, {"dtype": "bfloat16"}], ids=str)
def test_drafters_follow_how_the_target_is_stored(name: str, options: dict[str, Any], folders: dict[str, Path]):
    """Their caches have the target's dtype and pages, and their drafts are still right now and then."""
    stated = {**BASE, **options, "speculative_config": config_of(name, folders)}
    with LLM(str(folders[DRAFTERS[name][0]]), **stated) as llm:
        generate(llm)
        assert_right_and_wrong(llm.stats().speculation, name)
    groups = build(folders[DRAFTERS[name][0]], **stated).layout.groups
    assert {group.spec.dtype for group in groups} == {options.get("kv_dtype", options.get("dtype", "float32"))}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_text_that_a_grammar_forces_is_drafted_beside_a_drafter(name: str, depth: int, folders: dict[str, Path]):
    """The grammar's own guesses are verified in place of the drafter's, and the drafter goes on in other rows."""
    prompts = [[5, 6, 7], [50, 51, 52, 53], [9, 9, 8]]
    free = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    forced = Grammar.regex("[ab]an interlude that nobody chooses[ab]and another one of some length[cd]")
    params = [SamplingParams(max_tokens=80, temperature=0.0, grammar=forced), free, free]
    found = []
    for config in ({"method": "off"}, config_of(name, folders)):
        stated = {**BASE, "overlap_depth": depth, "speculative_config": config}
        with LLM(str(folders[DRAFTERS[name][0]]), **stated) as llm:
            (alone,) = llm.generate(prompt_token_ids=prompts[:1], sampling_params=params[:1])
            counters = llm.stats().speculation
            found.append([alone.outputs] + [
                output.outputs for output in llm.generate(prompt_token_ids=prompts, sampling_params=params)
            ])
            llm.check()
    assert_equal(found[1], found[0], name)
    assert found[0][0][0].text[1:].startswith("an interlude")
    assert counters.num_accepted_tokens > 40, "of 64 tokens without a choice"
