"""Folders of tiny Whisper models with random weights that hear two seconds at a time: configuration, tokenizer of
bytes, feature extractor and checkpoint, as transformers writes them; and their greedy output by transformers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MARKS = ("endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "startoflm", "startofprev",
         "nospeech", "notimestamps")
END, START, ENGLISH, GERMAN, TRANSLATE, TRANSCRIBE = range(256, 262)
PREVIOUS, SILENCE, PLAIN, FIRST_TIME = 263, 264, 265, 266
SECONDS, RATE, MELS, POSITIONS, TEXT = 2, 16_000, 16, 100, 48
VOCAB = FIRST_TIME + POSITIONS + 2
BANNED, BANNED_FIRST = [3, 10, 77], [END, 32]


@cache
def make_tokenizer() -> Tokenizer:
    """Ids below 256 are bytes; `MARKS` follow."""
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{mark}|>", special=True, normalized=False) for mark in MARKS])
    return tokenizer


def text_of(ids: list[int]) -> str:
    """The text of tokens, without special ones and time stamps."""
    return str(make_tokenizer().decode([i for i in ids if i < END]))


def write_whisper(folder: Path) -> Path:
    """A tiny Whisper."""
    import torch
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    config = WhisperConfig(
        vocab_size=VOCAB, num_mel_bins=MELS, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=POSITIONS,
        max_target_positions=TEXT, decoder_start_token_id=START, bos_token_id=END, eos_token_id=END, pad_token_id=END,
    )
    torch.manual_seed(5)
    model = WhisperForConditionalGeneration(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layer_norm" not in name and not name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({
        "suppress_tokens": BANNED, "begin_suppress_tokens": BANNED_FIRST, "is_multilingual": True, "eos_token_id": END,
        "no_timestamps_token_id": PLAIN, "max_initial_timestamp_index": 50,
    }))
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "WhisperProcessor",
        "feature_size": MELS, "chunk_length": SECONDS, "sampling_rate": RATE, "hop_length": 160, "n_fft": 400,
    }))
    return folder


class Oracle:
    """The same model in transformers."""

    def __init__(self, folder: Path):
        from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

        self._model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
        self._extractor = WhisperFeatureExtractor.from_pretrained(folder)

    def extract(self, samples: np.ndarray) -> Any:
        """Frames [1, mels, frames] of a clip with a window of silence behind it."""
        padded = np.pad(samples, (0, SECONDS * RATE))
        return self._extractor(
            padded, sampling_rate=RATE, padding="do_not_pad", truncation=False, return_tensors="pt"
        )["input_features"]

    def write(self, features: Any, seek: int, prompt: list[int], *, has_times: bool, rules: bool = True) -> list[int]:
        """Greedy tokens of the window from frame ``seek`` on, up to the end or the most that a window has; by the rules
        of generation_config.json, or without any."""
        import torch
        from transformers import GenerationConfig
        from transformers.generation import logits_process as known

        config = GenerationConfig(eos_token_id=END, no_timestamps_token_id=PLAIN)
        config.max_initial_timestamp_index = 50
        processors = [
            known.SuppressTokensLogitsProcessor(BANNED),
            known.SuppressTokensAtBeginLogitsProcessor(BANNED_FIRST, len(prompt)),
            *([known.WhisperTimeStampLogitsProcessor(config, len(prompt))] if has_times else []),
        ]
        processors = processors if rules else []
        ids, window = list(prompt), features[:, :, seek : seek + 2 * POSITIONS]
        with torch.no_grad():
            states = self._model.model.encoder(window)
            while len(ids) < min(TEXT, len(prompt) + TEXT // 2) and END not in ids[len(prompt) :]:
                logits = self._model(encoder_outputs=states, decoder_input_ids=torch.tensor([ids])).logits[:, -1]
                for process in processors:
                    logits = process(torch.tensor([ids]), logits)
                ids.append(int(logits.argmax()))
        return [i for i in ids[len(prompt) :] if i != END]

    def find_times(self, features: Any, seek: int, prompt: list[int], ids: list[int], positions: int) -> list[float]:
        """When each token was said, in seconds of its window, from the heads of the upper half of the layers."""
        import torch
        from transformers.models.whisper.generation_whisper import _dynamic_time_warping, _median_filter

        self._model.set_attn_implementation("eager")
        with torch.no_grad():
            made = self._model(
                features[:, :, seek : seek + 2 * POSITIONS], decoder_input_ids=torch.tensor([prompt + ids]),
                output_attentions=True,
            )
        weights = made.cross_attentions[1][0, :, len(prompt) :, :positions]
        std, mean = weights.std(dim=-2, keepdim=True, unbiased=False), weights.mean(dim=-2, keepdim=True)
        matrix = _median_filter(((weights - mean) / std)[None], 7)[0].mean(dim=0)
        texts, times = _dynamic_time_warping(-matrix.double().numpy())
        jumps = np.pad(np.diff(texts), (1, 0), constant_values=1).astype(bool)
        return [float(time) for time in times[jumps] * 0.02]
