"""Structured outputs of a real, tiny, random model through the offline API: valid whatever else is asked of sampling,
and the same however the steps are scheduled."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
from tiny_models import write_tiny_model

from headrace import LLM, Grammar, LoRARequest, SamplingParams
from headrace.base.errors import HeadraceError, RequestError

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "torch_dtype": "float32",
    "initializer_range": 0.2,
}
BASE = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "kv_pages": 256, "page_size": 16, "threads": 1}
PLAIN = {
    "type": "object",
    "properties": {
        "a": {"enum": ["x", "yy"]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "c": {"type": "null"}
    },
    "required": ["a", "b"], "additionalProperties": False,
}
HARDER = {
    "type": "array", "items": {"type": "string", "pattern": "^[a-f]+$", "maxLength": 6}, "minItems": 2, "maxItems": 3
}
NUMBER = {"type": "integer", "minimum": 10, "maximum": 999}
PATTERN = r"[a-f]{3}-[0-9]{2,4}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, CONFIG)
    return folder


@pytest.fixture(scope="module", params=[1, 2])
def llm(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **BASE, overlap_depth=request.param) as llm:
        yield llm
        llm.check()
        assert llm.stats().num_running == llm.stats().num_queued == llm.stats().num_used_pages == 0


def asks() -> list[SamplingParams]:
    """All kinds of grammars and none, with what else sampling can do."""
    def ask(grammar: Grammar | None, **more: object) -> SamplingParams:
        return SamplingParams(**{"grammar": grammar, "max_tokens": 90, "temperature": 1.0, "seed": 7, **more})

    plain, harder, number = map(Grammar.json_schema, (PLAIN, HARDER, NUMBER))
    return [
        ask(plain), ask(plain, temperature=0.0), ask(harder, n=3, logprobs=2),
        ask(number, top_k=3, repetition_penalty=1.3), ask(Grammar.regex(PATTERN), top_p=0.5),
        ask(Grammar.choice(["red", "green"]), n=4), ask(None, max_tokens=25),
        ask(Grammar.ebnf('root ::= "(" root ")" | "x"'), min_p=0.01),
        ask(plain, min_tokens=60, max_tokens=100), ask(number, ignore_eos=True),
        ask(harder, logit_bias={5: 5.0}, presence_penalty=1.0),
        ask(None, max_tokens=12, ignore_eos=True),
    ]


def check(params: SamplingParams, text: str) -> None:
    kind, source = (params.grammar.kind, params.grammar.text) if params.grammar else ("", "")
    if kind == "json_schema":
        jsonschema.validate(json.loads(text), json.loads(source))
    elif kind == "regex":
        assert re.fullmatch(source, text)
    elif kind == "choice":
        assert text in json.loads(source)
    elif kind == "ebnf":
        assert re.fullmatch(r"(\(*)x(\)*)", text) and text.count("(") == text.count(")")


def run(llm: LLM) -> list[list[tuple[str, str]]]:
    prompts = [f"{'give me json ' * (i % 4)}{i}" for i in range(len(asks()))]
    outputs = llm.generate(prompts, asks())
    return [[(c.finish_reason or "", c.text) for c in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[tuple[str, str]]]:
    """One request at a time, nothing cached, nothing overlapped."""
    with LLM(str(folder), **BASE, overlap_depth=1, max_running_requests=1, prefix_cache=False) as llm:
        return run(llm)


def test_outputs_are_what_the_grammar_says(expected: list[list[tuple[str, str]]]):
    ended = [
        (params, text) for params, choices in zip(asks(), expected, strict=True) for reason,
        text in choices if reason == "stop" and params.grammar
    ]
    assert len(ended) >= 14, "most outputs come to their end"
    for params, text in ended:
        check(params, text)


def test_outputs_do_not_depend_on_scheduling(llm: LLM, expected: list[list[tuple[str, str]]]):
    assert run(llm) == expected
    assert run(llm) == expected, "over cached prefixes and compiled grammars"


def test_retracted_requests_go_on_where_they_were(folder: Path, llm: LLM):
    grammars = [Grammar.regex(f"[{letters}]{{90}};[0-9]") for letters in ("abc", "def", "ghi")]
    params = [SamplingParams(grammar=grammars[i % 3], max_tokens=100, temperature=1.0, seed=i) for i in range(9)]
    with LLM(str(folder), **{**BASE, "kv_pages": 20, "page_size": 8}, overlap_depth=2) as small:
        # Short outputs first, so that the engine expects short ones, and admits more requests than fit.
        small.generate(["x"] * 64, SamplingParams(grammar=Grammar.regex("[abc]"), max_tokens=100))
        outputs = small.generate(["x"] * 9, params)
        assert small.stats().retracted_total > 0
        small.check()
    for i, output in enumerate(outputs):
        assert re.fullmatch(params[i].grammar.text, output.outputs[0].text)
    assert [o.outputs[0].token_ids for o in outputs] == [
        o.outputs[0].token_ids for o in llm.generate(["x"] * 9, params)
    ]


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_masks_of_a_failed_step_are_not_taken_for_those_of_a_state(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
):
    # neither ends within three steps, whichever begins first
    params = [
        SamplingParams(grammar=Grammar.json_schema(schema), max_tokens=90, seed=i) for i,
        schema in enumerate((PLAIN, HARDER))
    ]
    with LLM(str(folder), **BASE) as llm:
        model, calls = llm._client._engine.executor._runner._model, iter(range(1, 10**6))

        def fail_once(run: Callable[..., Any]) -> Callable[..., Any]:
            def step(*arguments: Any, **options: Any) -> Any:
                if next(calls) == fails_at:
                    raise RuntimeError("the device hiccuped")
                return run(*arguments, **options)

            return step

        fuse = model.fuse_decode  # decodes in one call, once there are kernels for it
        monkeypatch.setattr(model, "forward", fail_once(model.forward))
        monkeypatch.setattr(
            model, "fuse_decode", lambda: (step := fuse()) and SimpleNamespace(run=fail_once(step.run))
        )
        broken = llm.generate(["x", "y"], params, errors="return")
        assert {choice.error.kind for output in broken for choice in output.outputs if choice.error} == {"step_failed"}
        for _ in range(2):
            for asked, output in zip(params, llm.generate(["x", "y"], params), strict=True):
                check(asked, output.outputs[0].text)


def test_the_end_is_held_back_for_min_tokens_only_where_something_else_is_allowed(llm: LLM):
    params = SamplingParams(grammar=Grammar.regex("a*"), max_tokens=50, min_tokens=30, temperature=1.0, seed=1)
    (held,) = llm.generate(["x"], [params])[0].outputs
    assert len(held.token_ids) >= 30 and set(held.text) == {"a"}
    (forced,) = llm.generate(
        ["x"], [SamplingParams(grammar=Grammar.regex("ab"), max_tokens=50, min_tokens=30)]
    )[0].outputs
    assert (forced.text, forced.finish_reason) == ("ab", "stop")
    (cut,) = llm.generate(["x"], [SamplingParams(grammar=Grammar.regex("a{40}b"), max_tokens=5)])[0].outputs
    assert cut.finish_reason == "length" and set(cut.text) == {"a"}
    (stopped,) = llm.generate(
        ["x"], [SamplingParams(grammar=Grammar.regex("a{9}b{9}"), max_tokens=50, stop=["b"])]
    )[0].outputs
    assert stopped.finish_reason == "stop" and set(stopped.text) == {"a"}


def test_logprobs_are_those_of_the_model(llm: LLM):
    params = SamplingParams(grammar=Grammar.choice(["a"]), max_tokens=2, logprobs=3, temperature=0.0)
    (choice,) = llm.generate(["x"], [params])[0].outputs
    assert choice.logprobs is not None and choice.logprobs[0].token_id == choice.token_ids[0]
    assert choice.logprobs[0].logprob < -1.0 and choice.logprobs[0].rank > 1, "the model would hardly have said so"


def test_rules_and_grammar_may_leave_nothing(llm: LLM):
    free = SamplingParams(max_tokens=3, ignore_eos=True)
    (refused, other) = llm.generate(
        ["x", "y"], [SamplingParams(grammar=Grammar.regex("[0-9]"), allowed_token_ids=[100], max_tokens=3), free],
        errors="return"
    )
    assert (
        "no token" in refused.outputs[0].error.message and other.outputs[0].error is None
        and len(other.outputs[0].token_ids) == 3
    )


def test_a_bad_grammar_fails_alone(llm: LLM):
    bad = SamplingParams(grammar=Grammar.json_schema({"type": "array", "uniqueItems": True}))
    (refused, other) = llm.generate(
        ["x", "y"], [bad, SamplingParams(grammar=Grammar.choice(["yes"]), max_tokens=9)], errors="return"
    )
    assert "uniqueItems" in refused.outputs[0].error.message and other.outputs[0].text == "yes"
    with pytest.raises(RequestError, match="uniqueItems"):
        llm.generate(["x"], [bad])


def test_a_model_without_a_tokenizer_says_so(folder: Path):
    with LLM(str(folder), **BASE, skip_tokenizer=True) as llm, pytest.raises(HeadraceError, match="tokenizer"):
        llm.generate(prompt_token_ids=[[5]], sampling_params=[SamplingParams(grammar=Grammar.json_object())])


def test_grammars_hold_with_adapters(folder: Path, expected: list[list[tuple[str, str]]]):
    """Every other request has one; alone and in one batch they say the same, and most not what the base says."""
    generator, shapes = torch.Generator().manual_seed(4), {"self_attn.q_proj": (32, 32), "mlp.down_proj": (32, 48)}
    tensors = {}
    for layer in range(2):
        for name, (outputs, inputs) in shapes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(4, inputs, generator=generator)
            tensors[f"{module}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"], "bias": "none"}

    def answer(**options: object) -> list[list[tuple[str, str]]]:
        with LLM(str(folder), **BASE, enable_lora=True, **options) as llm:
            llm.load_adapter("own", tensors=tensors, config=config)
            prompts = [f"{'give me json ' * (i % 4)}{i}" for i in range(len(asks()))]
            adapters = [None if i % 2 else LoRARequest("own") for i in range(len(prompts))]
            outputs = llm.generate(prompts, asks(), lora_request=adapters)
            return [[(c.finish_reason or "", c.text) for c in output.outputs] for output in outputs]

    alone = answer(overlap_depth=1, max_running_requests=1, prefix_cache=False)
    assert answer(overlap_depth=2) == alone
    for params, choices in zip(asks(), alone, strict=True):
        for reason, text in choices:
            if reason == "stop" and params.grammar:
                check(params, text)
    assert alone[1::2] == expected[1::2]
    assert sum(own != base for own, base in zip(alone[::2], expected[::2], strict=True)) >= 3
