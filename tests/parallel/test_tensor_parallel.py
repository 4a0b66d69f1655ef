"""Several ranks compute what one does: the same tokens, logprobs alike, for every family, on CPU ranks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parallel.rank_processes import RankProcesses
from service import random_models, tiny_vision, tiny_whisper

from headrace import LLM, SamplingParams
from headrace.base.config import engine_config
from headrace.base.media import MediaArray, MediaItem, MediaPlace, digest_of
from headrace.base.messages import EngineRequest
from headrace.base.pooling import Alignment, PoolingSpec, unpack_floats
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.layers.moe.balancing import ExpertBalancer
from headrace.models.whisper.family import read_config
from headrace.parallel.placement import Placement
from headrace.service import build
from headrace.service.build import build_engine

FAMILIES = (*random_models.DENSE, *random_models.MIXTURES)
COUNTS = ("num_attention_heads", "num_local_experts", "num_experts", "n_routed_experts")
"""Numbers in a config.json that must not be below that of the ranks."""
DEEPSEEK_V4 = {
    "architectures": ["DeepseekV4ForCausalLM"], "vocab_size": 256, "hidden_size": 64, "moe_intermediate_size": 32,
    "num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_attention_heads": 8, "num_key_value_heads": 1,
    "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 32, "o_groups": 4, "o_lora_rank": 16, "sliding_window": 16,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "num_hash_layers": 1, "index_n_heads": 8,
    "index_head_dim": 16, "index_topk": 64, "max_position_embeddings": 1024, "initializer_range": 0.2,
}
PARAMS = [
    SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1, **own)
    for own in (
        {"temperature": 0}, {"temperature": 1.0, "seed": 5}, {"temperature": 0, "repetition_penalty": 1.3},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 7}, {"temperature": 0, "min_tokens": 3},
    )
]

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "kv_pages": 128}
MARK = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    made = RankProcesses(request.param)
    yield made
    made.close()


def draw_config(family: str, size: int) -> dict[str, Any]:
    """A random configuration of a family that ``size`` ranks can divide."""
    for seed in range(10_000):
        config = random_models.draw_config(random.Random(seed))
        counts = [config[name] for name in COUNTS if config.get(name)]
        if config["architectures"] == [family] and min(counts) >= size:
            return config
    raise AssertionError(f"no seed draws {family}")


def generate(options: dict[str, Any], vocab_size: int) -> list[Any]:
    """Tokens and logprobs of a few requests that share a prefix, in two rounds: the second hits the prefix cache."""
    prompts = [[(7 * i * j + 3) % vocab_size for j in range(5 + 9 * i)] for i in range(1, len(PARAMS))]
    prompts.append(prompts[-1] + [1, 2, 3])
    llm = LLM(**options)
    try:
        rounds = [llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS) for _ in range(2)]
    finally:
        llm.close()
    return [output.outputs[0] for outputs in rounds for output in outputs]


def compare(
    ranks: RankProcesses, config: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, **own: Any
) -> None:
    """Generate on one rank and on all."""
    (folder / "config.json").write_text(json.dumps(config))
    options = {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer": True, "dtype": "float32", "device": "cpu",
        "max_model_len": 256, "kv_pages": 64, "max_step_tokens": 24,
    }
    alone = generate(options, config["vocab_size"])
    monkeypatch.setattr(build, "build_executor", ranks.builder({**options, **own}))
    together = generate(options, config["vocab_size"])
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    for one, other in zip(alone, together, strict=True):
        assert [entry.top_ids for entry in other.logprobs] == [entry.top_ids for entry in one.logprobs]
        for entry, expected in zip(other.logprobs, one.logprobs, strict=True):
            assert entry.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-3)


def skip_repeats(ranks: RankProcesses, family: str) -> None:
    """Two ranks serve all families; four are more of the same but for how heads and experts are divided."""
    if ranks.size > 2 and family not in ("LlamaForCausalLM", "Olmo2ForCausalLM", "DeepseekV3ForCausalLM"):
        pytest.skip("four ranks serve three families here")


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_several_ranks_are_those_of_one(
    ranks: RankProcesses, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    skip_repeats(ranks, family)
    compare(ranks, draw_config(family, ranks.size), tmp_path, monkeypatch)


@pytest.mark.parametrize("family", random_models.MIXTURES)
def test_divided_experts_compute_what_those_of_one_rank_do(
    ranks: RankProcesses, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    skip_repeats(ranks, family)
    compare(ranks, draw_config(family, ranks.size), tmp_path, monkeypatch, enable_expert_parallel=True)


@pytest.mark.parametrize(("expert_dtype", "own"), [
    (None, {}), (None, {"enable_expert_parallel": True, "all2all_backend": "all-to-all"}),
    ("fp4", {"enable_expert_parallel": True}),
], ids=str)
def test_deepseek_v4_on_several_ranks(
    ranks: RankProcesses, expert_dtype: str | None, own: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Groups of heads, shared MLPs and experts divided; windows, entries, state and streams are on every rank."""
    if ranks.size > 2:
        pytest.skip("two ranks show what there is to see")
    compare(ranks, {**DEEPSEEK_V4, "expert_dtype": expert_dtype}, tmp_path, monkeypatch, **own)


@pytest.mark.parametrize("all2all_backend", ["all-gather", "all-to-all"])
@pytest.mark.parametrize("family", ["GptOssForCausalLM", "DeepseekV3ForCausalLM"])
def test_tokens_that_travel_to_their_experts_come_back(
    ranks: RankProcesses, family: str, all2all_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    skip_repeats(ranks, family)
    own = {"enable_expert_parallel": True, "all2all_backend": all2all_backend}
    compare(ranks, draw_config(family, ranks.size), tmp_path, monkeypatch, **own)


def test_experts_that_move_compute_what_they_did(
    ranks: RankProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = draw_config("Qwen3MoeForCausalLM", ranks.size)
    copies = -config["num_experts"] % ranks.size + ranks.size
    keys = {"step_interval": 3, "num_redundant_experts": copies}
    own = {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": json.dumps(keys)}
    compare(ranks, config, tmp_path, monkeypatch, **own)


@pytest.mark.parametrize(("expert_dtype", "all2all_backend"), [(None, "replicated"), ("fp4", "all-to-all")])
@pytest.mark.parametrize("speculative_config", [None, '{"method": "mtp", "num_speculative_tokens": 2}'])
def test_experts_of_deepseek_v4_move(
    ranks: RankProcesses, expert_dtype: str | None, all2all_backend: str, speculative_config: str | None,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
):
    """In the middle of requests: those that a table chooses by token, and those of the module that drafts."""
    if ranks.size > 2:
        pytest.skip("two ranks show what there is to see")
    moved = list[int]()

    def move(balancer: ExpertBalancer, layer: int, wanted: Placement) -> None:
        moved.append(layer)
        _move(balancer, layer, wanted)

    _move = ExpertBalancer._move
    monkeypatch.setattr(ExpertBalancer, "_move", move)
    keys = {"step_interval": 3, "window_size": 3, "num_redundant_experts": 2}
    config = {**DEEPSEEK_V4, "expert_dtype": expert_dtype, "num_nextn_predict_layers": 1}
    compare(
        ranks, config, tmp_path, monkeypatch, enable_expert_parallel=True, enable_eplb=True,
        all2all_backend=all2all_backend, eplb_config=json.dumps(keys), speculative_config=speculative_config,
    )
    assert set(moved) == set(range(3 + bool(speculative_config)))


def test_an_encoder_is_divided_as_well(ranks: RankProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compare_embeddings(ranks, "BertModel", tmp_path, monkeypatch)


def test_images_are_encoded_on_every_rank(
    ranks: RankProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compare_images(ranks, tiny_vision.write_qwen(tmp_path / "qwen"), monkeypatch)


def compare_images(ranks: RankProcesses, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Describe images on one rank and on all."""
    pillow = pytest.importorskip("PIL.Image")
    values = np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    images = [pillow.fromarray(values), pillow.fromarray(values[:40, :40])]
    prompts: list[Any] = [{"prompt": f"a{MARK}b{MARK}", "multi_modal_data": {"image": images}}, "text alone"]
    options = {**CPU, "model": str(folder), "max_step_tokens": 16}
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=1)

    def answer() -> list[Any]:
        with LLM(**options) as llm:
            return [each.outputs[0] for each in llm.generate(prompts, params)]

    alone = answer()
    monkeypatch.setattr(build, "build_executor", ranks.builder(options))
    for one, other in zip(alone, answer(), strict=True):
        assert one.token_ids == other.token_ids
        mine, theirs = ([each.logprob for each in output.logprobs or []] for output in (one, other))
        assert mine and mine == pytest.approx(theirs, abs=1e-4)


def test_words_are_aligned_by_heads_of_all_ranks(
    ranks: RankProcesses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """How much tokens of Whisper attend to sound, each rank knows of its heads alone."""
    if ranks.size > 2:
        pytest.skip("two heads")
    folder = tiny_whisper.write_whisper(tmp_path / "whisper")
    window = read_config(json.loads((folder / "config.json").read_text())).num_placeholders
    frames = np.random.default_rng(0).standard_normal((2 * tiny_whisper.POSITIONS, tiny_whisper.MELS))
    sound = MediaArray.of(frames.astype(np.float32))
    place = MediaPlace("audio", digest_of("audio", "", [sound.data]), [(0, window)])
    item = MediaItem(place, {"input_features": sound})
    options = {**CPU, "model": str(folder), "skip_tokenizer": True, "max_step_tokens": window + 5, "kv_pages": 256}

    def align() -> list[float]:
        engine = build_engine(engine_config(**options))
        alignment = Alignment(window + 2, 60, [(0, 1), (1, 0), (1, 1)])
        engine.submit(EngineRequest(
            "words", [tiny_whisper.VOCAB - 1] * window + list(range(20, 32)), SamplingSpec(), StopSpec(0),
            pooling=PoolingSpec(needs_all_tokens=True, alignment=alignment), media=[item],
        ))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        engine.close()
        assert outputs[-1].pooled is not None, outputs[-1].finish
        return list(unpack_floats(outputs[-1].pooled))

    alone = align()
    monkeypatch.setattr(build, "build_executor", ranks.builder(options))
    together = align()
    assert np.std(alone) > 0.1
    assert together == pytest.approx(alone, abs=1e-3)


def compare_embeddings(
    ranks: RankProcesses, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, num_layers: int = 2,
    **own: Any
) -> None:
    """Embed, or classify, on one rank and on all."""
    config = {
        "architectures": [architecture], "model_type": "bert", "vocab_size": 97, "hidden_size": 32,
        "num_hidden_layers": num_layers, "num_attention_heads": 4, "intermediate_size": 40,
        "max_position_embeddings": 64, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"model": str(tmp_path), "load_format": "dummy", "skip_tokenizer": True, "dtype": "float32"}
    prompts = [{"prompt_token_ids": [3 + i] * (5 + i)} for i in range(3)]

    def embed() -> list[list[float]]:
        llm = LLM(**options)
        try:
            if architecture == "BertModel":
                return [list(embedding) for embedding in llm.embed(prompts)]
            return [list(found.values()) for found in llm.classify(prompts)]
        finally:
            llm.close()

    alone = embed()
    monkeypatch.setattr(build, "build_executor", ranks.builder({**options, **own}))
    for one, other in zip(alone, embed(), strict=True):
        assert other == pytest.approx(one, abs=1e-5)
