"""`LLM` with sound: greedy tokens as transformers computes them."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
from tiny_vision import byte_tokenizer
from tiny_whisper import ENGLISH, MELS, PLAIN, POSITIONS, RATE, SECONDS, START, TRANSCRIBE, Oracle, write_whisper
from tokenizers import AddedToken, Tokenizer

from headrace import LLM, SamplingParams
from headrace.base.errors import MediaError, RequestError

soundfile = pytest.importorskip("soundfile")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
OPTIONS = {"device": "cpu", "dtype": "float32", "threads": 1, "kv_pages": 256}
MARK = "<|AUDIO|>"
TEMPLATE = """{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}\
{% else %}{% for part in message.content %}{% if part.type == 'audio' %}<|AUDIO|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}
{% endfor %}assistant: """


def noise(seconds: float, seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(int(seconds * RATE)) * 0.1).astype(np.float32)


def wav(samples: np.ndarray, rate: int = RATE) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format="WAV", subtype="FLOAT")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    import torch
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    folder = tmp_path_factory.mktemp("qwen2_audio")
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken(MARK, special=True, normalized=False)])
    token_id = tokenizer.token_to_id(MARK)
    config = Qwen2AudioConfig(
        text_config={
            "model_type": "qwen2", "vocab_size": token_id + 1, "hidden_size": 48, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        },
        audio_config={
            "model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2,
            "encoder_ffn_dim": 40, "num_mel_bins": MELS, "max_source_positions": POSITIONS,
        },
        audio_token_index=token_id,
    )
    torch.manual_seed(2)
    Qwen2AudioForConditionalGeneration(config).float().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
    }))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "Qwen2AudioProcessor",
        "feature_size": MELS, "chunk_length": SECONDS, "sampling_rate": RATE, "hop_length": 160, "n_fft": 400,
        "return_attention_mask": True,
    }))
    return folder


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(folder):
    """Greedy tokens of transformers for a prompt and its clips."""
    import torch
    from transformers import (
        AutoFeatureExtractor,
        AutoTokenizer,
        Qwen2AudioForConditionalGeneration,
        Qwen2AudioProcessor,
    )

    processor = Qwen2AudioProcessor(AutoFeatureExtractor.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    model = Qwen2AudioForConditionalGeneration.from_pretrained(folder).eval()

    def generate(prompt: str, clips: list[np.ndarray]) -> list[int]:
        inputs = processor(text=[prompt], audio=clips, sampling_rate=RATE, return_tensors="pt")
        with torch.no_grad():
            made = model.generate(**inputs, do_sample=False, max_new_tokens=6, min_new_tokens=6)
        return made[0, inputs["input_ids"].shape[1] :].tolist()

    return generate


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_clips_in_prompts_and_chats(llm, reference):
    a, b = noise(1.3, 0), noise(0.71, 1)
    cases = [(f"hear {MARK} now", [a]), (f"{MARK}x{MARK}y", [b, a])]
    prompts = [{"prompt": text, "multi_modal_data": {"audio": clips}} for text, clips in cases]
    assert tokens(llm.generate(prompts, GREEDY)) == [reference(*case) for case in cases]
    data = base64.b64encode(wav(a)).decode()
    parts = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}, {"type": "text", "text": "what?"}]
    found = llm.chat([{"role": "user", "content": parts}], GREEDY)
    assert tokens(found) == [reference(f"user: {MARK}what?assistant: ", [a])]
    llm.check()


def test_a_clip_that_is_longer_than_the_model_hears(llm):
    with pytest.raises(MediaError, match=r"lasts 2\.5 seconds; this model hears 2 at a time"):
        llm.generate({"prompt": MARK, "multi_modal_data": {"audio": noise(2.5, 0)}}, GREEDY)


def test_sound_before_a_prompt_of_marks(tmp_path):
    """Whisper without a route: as vLLM's users ask it."""
    folder, clip = write_whisper(tmp_path), noise(1.0, 3)
    oracle = Oracle(folder)
    marks = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"
    with LLM(str(folder), **OPTIONS) as llm:
        found = llm.generate({"prompt": marks, "multi_modal_data": {"audio": (clip, RATE)}}, GREEDY)
        prompt = [START, ENGLISH, TRANSCRIBE, PLAIN]
        expected = oracle.write(oracle.extract(clip), 0, prompt, has_times=False, rules=False)
        assert tokens(found) == [expected[:6]]
        with pytest.raises(RequestError, match="begins with an audio clip"):
            llm.generate(marks, GREEDY)
