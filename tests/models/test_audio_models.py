"""Models that hear, through the engine, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from media_rig import (
    VOCAB,
    Prompt,
    ask_oracle,
    compare,
    logprobs_of,
    run,
    run_beside,
    run_short_of_pages,
    save_model,
    start_engine,
    to_tensor,
    tokens_of,
)

from headrace.base.config import engine_config
from headrace.base.errors import ConfigError, RequestError
from headrace.base.media_facts import SpeechFacts, WindowFrames
from headrace.base.messages import EngineRequest
from headrace.base.pooling import Alignment, PoolingSpec, unpack_floats
from headrace.base.sampling import LogitRules, SamplingSpec, StopSpec, TimestampRules
from headrace.models.whisper.family import read_config, read_media
from headrace.service.build import build_engine

AUDIO_ID = 100
MELS, POSITIONS = 8, 12
ENCODER = {
    "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 40, "num_mel_bins": MELS,
    "max_source_positions": POSITIONS,
}


def make_listener(folder: Path) -> transformers.PreTrainedModel:
    text = {
        "model_type": "qwen2", "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }
    config = transformers.Qwen2AudioConfig(
        text_config=text, audio_config={"model_type": "qwen2_audio_encoder", **ENCODER}, audio_token_index=AUDIO_ID
    )
    model = transformers.Qwen2AudioForConditionalGeneration(config)
    save_model(model, folder)
    return model


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("qwen2_audio")
    return make_listener(folder), folder


def add_clip(prompt: Prompt, num_frames: int, seed: int) -> Prompt:
    values = np.random.default_rng(seed).standard_normal((1, MELS, 2 * POSITIONS)).astype(np.float32)
    count = (num_frames + 1) // 2 // 2
    return prompt.text(102).add(
        "audio", values, count, grid=(num_frames,), name="input_features", token=AUDIO_ID
    ).text(103)


def expect(model: Any, prompt: Prompt, num_tokens: int = 8) -> tuple[list[int], torch.Tensor]:
    inputs: dict[str, Any] = {}
    if prompt.items:
        lengths = torch.tensor([item.place.grid[0] for item in prompt.items])
        inputs = {
            "input_features": torch.cat([to_tensor(item.arrays["input_features"]) for item in prompt.items]),
            "feature_attention_mask": (torch.arange(2 * POSITIONS) < lengths[:, None]).long(),
        }
    return ask_oracle(model, prompt, num_tokens, attention_mask=torch.ones(1, len(prompt.ids)).long(), **inputs)


@pytest.mark.parametrize("step_tokens", [9, 256])
def test_clips_of_any_length(listener: Any, step_tokens: int):
    model, folder = listener
    engine = start_engine(folder, max_step_tokens=step_tokens, max_running_requests=4)
    two = add_clip(add_clip(Prompt().text(5, 6), 24, 1).text(8), 9, 2).text(10, 11)
    asks = [add_clip(Prompt().text(3), 17, 0).text(4, 5), two, Prompt().text(*range(1, 9))]
    for outputs, prompt in zip(run_beside(engine, Prompt([5]), asks), asks, strict=True):
        compare(outputs, expect(model, prompt))
    engine.close()


def test_hits_and_retractions(listener: Any):
    """The same sound in its place is a hit, another one is none; requests begin again when pages lack."""
    model, folder = listener
    engine = start_engine(folder)
    first, other = (add_clip(Prompt().text(3), 17, seed).text(4, 5) for seed in (0, 1))
    run(engine, [first])
    again, different = run(engine, [first, other])
    compare(again, expect(model, first))
    compare(different, expect(model, other))
    assert again[-1].num_cached_tokens == 8 and different[-1].num_cached_tokens == 0
    engine.close()
    asks = [add_clip(Prompt().text(30 + seed), 17, seed).text(4, 5) for seed in range(6)]
    for outputs, prompt in zip(run_short_of_pages(folder, asks), asks, strict=True):
        assert tokens_of(outputs) == expect(model, prompt, 24)[0]


WINDOW = 64
"""Placeholders of a window of `POSITIONS`."""


def make_writer(folder: Path) -> transformers.PreTrainedModel:
    config = transformers.WhisperConfig(
        **ENCODER, vocab_size=VOCAB, decoder_layers=3, decoder_attention_heads=2, decoder_ffn_dim=40,
        max_target_positions=40, decoder_start_token_id=1, pad_token_id=0, bos_token_id=0, eos_token_id=0,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    save_model(model, folder)
    return model


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("whisper")
    return make_writer(folder), folder


def hear(seed: int, *ids: int) -> Prompt:
    values = np.random.default_rng(seed).standard_normal((2 * POSITIONS, MELS)).astype(np.float32)
    return Prompt().add("audio", values, WINDOW, name="input_features", token=VOCAB - 1).text(*ids)


def write(model: Any, prompt: Prompt, num_tokens: int = 8) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens and logprobs, each by a whole forward pass."""
    features = to_tensor(prompt.items[0].arrays["input_features"]).T[None]
    ids, rows = list(prompt.ids[WINDOW:]), []
    with torch.no_grad():
        for _ in range(num_tokens):
            logits = model(input_features=features, decoder_input_ids=torch.tensor([ids])).logits[0, -1]
            rows.append(logits.log_softmax(-1))
            ids.append(int(logits.argmax()))
    return ids[-num_tokens:], torch.stack(rows)


@pytest.mark.parametrize("step_tokens", [9, 70, 512])
def test_sound_is_written_down(writer: Any, step_tokens: int):
    """Windows that come together, in chunks that end inside of them; text may have the token that stands for sound."""
    model, folder = writer
    engine = start_engine(folder, max_model_len=None, max_step_tokens=step_tokens, max_running_requests=4)
    asks = [hear(0, 1, 5, 6), hear(1, 1), hear(2, *range(1, 20)), hear(3, 1, VOCAB - 1, 7)]
    for outputs, prompt in zip(run_beside(engine, hear(4, 1), asks), asks, strict=True):
        compare(outputs, write(model, prompt))
    engine.close()


def test_a_window_is_heard_once(writer: Any):
    """Another prompt over the same sound finds keys and values of attention to it in the prefix cache."""
    model, folder = writer
    engine = start_engine(folder, max_model_len=None, max_running_requests=4)
    for ids, cached in (((1, 5), 0), ((1, 6, 7), WINDOW), ((2,), WINDOW)):
        (outputs,) = run(engine, [hear(0, *ids)])
        compare(outputs, write(model, hear(0, *ids)))
        assert max(output.num_cached_tokens for output in outputs) == cached
    (outputs,) = run(engine, [hear(1, 1, 5)])
    compare(outputs, write(model, hear(1, 1, 5)))
    engine.close()


def test_retracted_texts_are_those_of_whole_passes(writer: Any):
    model, folder = writer
    asks = [hear(seed, 1, 5 + seed) for seed in range(5)]
    for outputs, prompt in zip(run_short_of_pages(folder, asks), asks, strict=True):
        assert tokens_of(outputs) == write(model, prompt, 24)[0]


@pytest.mark.parametrize("ask", [
    Prompt().text(1, 2), Prompt().text(1).add("audio", np.zeros((2 * POSITIONS, MELS), np.float32), WINDOW,
                                              name="input_features", token=VOCAB - 1),
    Prompt().add("audio", np.zeros((2, MELS), np.float32), WINDOW, name="input_features", token=VOCAB - 1).text(1),
])
def test_prompts_without_a_window_are_refused(writer: Any, ask: Prompt):
    engine = start_engine(writer[1], max_model_len=None)
    (outputs,) = run(engine, [ask])
    assert outputs[-1].finish is not None and outputs[-1].finish.error is not None
    assert outputs[-1].finish.error.kind == RequestError.kind
    engine.close()


@pytest.mark.cuda
def test_sound_through_graphs(writer: Any):
    """On a GPU, in half precision: what text attends to there is read in captured steps."""
    model, folder = writer
    engine = build_engine(engine_config(
        model=str(folder), device="cuda", dtype="float16", skip_tokenizer=True, max_running_requests=8, kv_pages=100,
        graphs="on",
    ))
    asks = [hear(0, 1, 5, 6), hear(1, 1), hear(2, *range(1, 20)), hear(3, 1, 7), hear(0, 1, 5)]
    for outputs, prompt in zip(run(engine, asks), asks, strict=True):
        found, tokens = logprobs_of(outputs), tokens_of(outputs)
        ids = [*prompt.ids[WINDOW:], *tokens]
        features = to_tensor(prompt.items[0].arrays["input_features"]).T[None]
        with torch.no_grad():
            logits = model(input_features=features, decoder_input_ids=torch.tensor([ids])).logits[0]
        expected = logits[-1 - len(tokens) : -1].log_softmax(-1)
        torch.testing.assert_close(found, expected, atol=0.05, rtol=0.02)
    engine.close()


FIRST_TIME, END = 90, 80


def write_by_rules(model: Any, prompt: Prompt, num_tokens: int, *, banned: list[int], banned_first: list[int]) -> Any:
    """Greedy tokens under transformers' own rules."""
    from transformers.generation.logits_process import (
        SuppressTokensAtBeginLogitsProcessor,
        SuppressTokensLogitsProcessor,
        WhisperTimeStampLogitsProcessor,
    )

    config = transformers.GenerationConfig(eos_token_id=END, no_timestamps_token_id=FIRST_TIME - 1)
    config.max_initial_timestamp_index = 5
    ids, begin = list(prompt.ids[WINDOW:]), len(prompt.ids) - WINDOW
    rules = [
        SuppressTokensLogitsProcessor(banned), SuppressTokensAtBeginLogitsProcessor(banned_first, begin),
        WhisperTimeStampLogitsProcessor(config, begin),
    ]
    features = to_tensor(prompt.items[0].arrays["input_features"]).T[None]
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = model(input_features=features, decoder_input_ids=torch.tensor([ids])).logits[:, -1]
        for rule in rules:
            logits = rule(torch.tensor([ids]), logits)
        ids.append(int(logits.argmax()))
    return ids[begin:]


def test_time_stamps_follow_rules(writer: Any):
    """As transformers' processors, beside a request without rules."""
    model, folder = writer
    engine = start_engine(folder, max_model_len=None, max_running_requests=8)
    banned, first = [3, 4, 5, 7, 11], [END, 6]
    spec = SamplingSpec(rules=LogitRules(
        bad_words=[[i] for i in banned], min_tokens=1, held_ids=first, timestamps=TimestampRules(FIRST_TIME, END, 5)
    ))
    asks = [hear(seed, 1, 2 + seed) for seed in range(5)]
    found: dict[str, list[int]] = {}
    for i, prompt in enumerate(asks):
        for name, own in ((f"timed{i}", spec), (f"plain{i}", SamplingSpec())):
            found[name] = []
            engine.submit(EngineRequest(name, list(prompt.ids), own, StopSpec(20), media=list(prompt.items)))
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
    for i, prompt in enumerate(asks):
        expected = write_by_rules(model, prompt, 20, banned=banned, banned_first=first)
        assert found[f"timed{i}"] == expected
        assert expected[0] in range(FIRST_TIME, FIRST_TIME + 6) and not {*banned} & {*expected}
        assert found[f"plain{i}"] == write(model, prompt, 20)[0]
    engine.close()


@pytest.mark.parametrize("vocab_size, token_id, mels, is_multilingual", [
    (51866, 50361, 128, True), (51865, 50360, 80, True), (51864, 50359, 80, False),
])
def test_published_shapes(vocab_size: int, token_id: int, mels: int, is_multilingual: bool):
    """Of large-v3, of those before it and of models for English alone: `<|startoflm|>` stands for sound."""
    config = {
        "d_model": 1280, "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
        "decoder_attention_heads": 20, "encoder_ffn_dim": 5120, "decoder_ffn_dim": 5120, "vocab_size": vocab_size,
        "num_mel_bins": mels, "max_source_positions": 1500, "max_target_positions": 448,
        "begin_suppress_tokens": [220, 50257], "suppress_tokens": [1, 2, 7, -1],
    }
    facts = read_media(config)
    assert facts.token_ids == {"audio": token_id} and facts.frames == WindowFrames(mels, 3000, 1536)
    upper_half = [(layer, head) for layer in range(16, 32) for head in range(20)]
    assert facts.speech == SpeechFacts(448, [1, 2, 7], [220, 50257], 50, is_multilingual, upper_half[-64:])
    stated = read_media({**config, "alignment_heads": [[7, 0], [10, 17]]}).speech
    assert stated is not None and stated.alignment_heads == [(7, 0), (10, 17)]
    for wrong in ([[32, 0]], [[0, 20]], [[1]], [], "all", [[0, 1.5]]):
        with pytest.raises(ConfigError, match="alignment_heads must be pairs"):
            read_media({**config, "alignment_heads": wrong})
    assert read_config(config).max_model_len == 1536 + 448
    with pytest.raises(ConfigError, match="decoder_attention_heads"):
        read_config({**config, "decoder_attention_heads": 7})
    with pytest.raises(ConfigError, match="suppress_tokens must be a list"):
        read_media({**config, "suppress_tokens": 5})


@pytest.mark.parametrize("step_tokens", [24, 256])
def test_which_sound_tokens_attend_to(writer: Any, step_tokens: int):
    """The matrices that transformers makes time stamps of words from, also where a text comes in chunks."""
    from transformers.models.whisper.generation_whisper import _median_filter

    model, folder = writer
    eager = type(model).from_pretrained(folder, attn_implementation="eager").eval()
    engine = start_engine(folder, max_model_len=None, max_running_requests=8, max_step_tokens=step_tokens)
    heads, begin, asks = [(0, 1), (1, 0), (1, 1)], 3, [hear(0, *range(1, 12)), hear(1, 1, 2, 9, 8, VOCAB - 1, 5)]
    for i, prompt in enumerate(asks):
        spec = PoolingSpec(
            needs_all_tokens=True, alignment=Alignment(WINDOW + begin, POSITIONS - i, [tuple(h) for h in heads])
        )
        engine.submit(EngineRequest(
            f"r{i}", list(prompt.ids), SamplingSpec(), StopSpec(0), pooling=spec, media=list(prompt.items)
        ))
    engine.submit(EngineRequest(  # a decode beside them
        "other", list(hear(2, 4).ids), SamplingSpec(), StopSpec(6), media=list(hear(2, 4).items)
    ))
    found = {}
    while engine.has_work:
        for output in engine.step():
            assert output.finish is None or output.finish.error is None, output.finish
            if output.pooled is not None:
                found[output.request_id] = torch.tensor(unpack_floats(output.pooled))
    for i, prompt in enumerate(asks):
        features = to_tensor(prompt.items[0].arrays["input_features"]).T[None]
        with torch.no_grad():
            made = eager(
                input_features=features, decoder_input_ids=torch.tensor([prompt.ids[WINDOW:]]), output_attentions=True
            )
        weights = torch.stack([made.cross_attentions[layer][0, head] for layer, head in heads])
        weights = weights[:, begin:, : POSITIONS - i]
        std, mean = weights.std(dim=-2, keepdim=True, unbiased=False), weights.mean(dim=-2, keepdim=True)
        expected = _median_filter(((weights - mean) / std)[None], 7)[0].mean(dim=0)
        torch.testing.assert_close(found[f"r{i}"].view_as(expected), expected, atol=1e-3, rtol=1e-3)
    engine.close()


def test_what_an_aborted_text_attended_to_is_given_back(writer: Any):
    engine = start_engine(writer[1], max_model_len=None, max_running_requests=8, max_step_tokens=24)
    words, other = hear(0, *range(1, 12)), hear(2, 4)
    spec = PoolingSpec(needs_all_tokens=True, alignment=Alignment(WINDOW + 3, POSITIONS, [(0, 1)]))
    engine.submit(EngineRequest("other", list(other.ids), SamplingSpec(), StopSpec(30), media=list(other.items)))
    engine.submit(EngineRequest(
        "words", list(words.ids), SamplingSpec(), StopSpec(0), pooling=spec, media=list(words.items)
    ))
    kept = engine.executor._runner._pooler._weights
    while not kept:
        assert engine.has_work
        engine.step()
    engine.abort("words")
    while engine.has_work:
        engine.step()
    assert not engine.executor._runner._pooler._weights
    engine.close()
