"""Grammars on a GPU: launches do not wait for the device, and neither overlap nor captured graphs change what is
sampled."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tiny_models import write_tiny_model

from headrace import LLM, Grammar, SamplingParams

pytestmark = pytest.mark.cuda
pytest.importorskip("llguidance")

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 256,
    "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "torch_dtype": "bfloat16",
    "initializer_range": 0.2,
}
RECORD = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yy"]}, "b": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
    "required": ["a", "b"], "additionalProperties": False,
}
PATTERN = r"[a-f]{3}-[0-9]{2,4}"
CHOICES = ["red", "green"]


@pytest.fixture(
    scope="module", params=[(1, "off"), (2, "off"), (1, "on"), (2, "on")], ids=lambda p: f"depth{p[0]}-{p[1]}"
)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder, CONFIG)
    depth, graphs = request.param
    with LLM(
        str(folder), load_format="dummy", device="cuda", kv_pages=256, page_size=16, overlap_depth=depth, graphs=graphs,
        seed=3
    ) as llm:
        executor = llm._client._engine.executor
        execute = executor.execute

        def execute_without_waiting(plan: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return execute(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        # compiles kernels
        llm.generate(["x"] * 3, SamplingParams(grammar=Grammar.json_object(), max_tokens=4, temperature=1.0))
        executor.execute = execute_without_waiting
        executor._runner._grammars._forces = False
        yield llm


def ask(grammar: Grammar | None, **more: Any) -> SamplingParams:
    return SamplingParams(**{"grammar": grammar, "max_tokens": 80, "temperature": 1.0, "seed": 7, **more})


def check(grammar: Grammar, text: str) -> None:
    if grammar.kind == "json_schema":
        value = json.loads(text)
        assert (
            value.keys() == {"a", "b"} and value["a"] in ("x", "yy") and len(value["b"]) <= 3
            and all(type(b) is bool for b in value["b"])
        )
    elif grammar.kind == "regex":
        assert re.fullmatch(grammar.text, text)
    else:
        assert text in CHOICES


def test_outputs_are_what_the_grammar_says(llm: LLM):
    record = Grammar.json_schema(RECORD)
    asks = [
        ask(record), ask(record, temperature=0.0), ask(Grammar.regex(PATTERN), top_p=0.6),
        ask(Grammar.choice(CHOICES), n=3), ask(None), ask(record, logprobs=2),
        ask(record, presence_penalty=0.5), ask(Grammar.regex(PATTERN), temperature=0.0), ask(None, temperature=0.0),
    ]
    ended = [
        (params.grammar, choice.text) for params,
        output in zip(asks, llm.generate(["give me json"] * len(asks), asks), strict=True)
        for choice in output.outputs if params.grammar is not None and choice.finish_reason == "stop"
    ]
    assert len(ended) >= 6, "most outputs come to their end"
    for grammar, text in ended:
        check(grammar, text)


OUTPUTS: dict[bool, list[list[int]]] = {}
"""By whether steps were captured: what the first engine drew."""


def test_overlap_changes_nothing(llm: LLM, request: pytest.FixtureRequest):
    """None of the outputs ends early, so that all engines compute the same batches: sums depend on those in the last
    bits."""
    many, any_json = (Grammar.json_schema({"type": "array", "minItems": 60, "items": items}) for items in (RECORD, {}))
    letters = Grammar.regex("[a-f]{200}")
    asks = [
        ask(many), ask(many, temperature=0.0), ask(letters), ask(letters, temperature=0.0), ask(None, ignore_eos=True),
        ask(many, logprobs=2, top_p=0.9),
        ask(many, presence_penalty=0.5), ask(any_json, temperature=0.0), ask(any_json, top_k=20),
        ask(None, temperature=0.0, ignore_eos=True),
    ]
    prompts = [f"give me json {i}" for i in range(len(asks))]
    # compiles the grammars: after that nobody waits for one
    llm.generate(prompts, [replace(params, max_tokens=1) for params in asks])
    tokens = [list(output.outputs[0].token_ids) for output in llm.generate(prompts, asks)]
    assert all(len(ids) == 80 for ids in tokens)
    assert OUTPUTS.setdefault(request.node.callspec.id.endswith("on"), tokens) == tokens
