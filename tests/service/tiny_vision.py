"""Folders of tiny vision-language models with random weights: configuration, tokenizer of bytes, image processor, chat
template and checkpoint, as transformers writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace.base.media import MediaArray, MediaPlace
from headrace.layers.media import EncoderInput

MARKS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
    "<|video_pad|>",
)
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>\
{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>\
{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}


def looked_up(arrays: Mapping[str, MediaArray]) -> np.ndarray:
    """The pixels of an image, flat, as an encoder in float32 takes them."""
    place = MediaPlace("image", b"", [(0, 1)])
    tensors = {
        name: torch.from_numpy(np.frombuffer(each.data, each.dtype).reshape(each.shape).copy())
        for name, each in arrays.items()
    }
    return EncoderInput(place, tensors).pixels(torch.float32).numpy().reshape(-1)


@cache
def byte_tokenizer() -> Tokenizer:
    """Ids below 256 are bytes; `MARKS` follow."""
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return tokenizer


def mark_id(mark: str) -> int:
    """The id of one of `MARKS`."""
    found = byte_tokenizer().token_to_id(mark)
    assert found is not None
    return found


def write_processor(folder: Path, **image_processor: object) -> None:
    """Tokenizer, chat template and image processor."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
    }))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor", "patch_size": 14,
        "temporal_patch_size": 2, "merge_size": 2, "size": PIXELS, **image_processor,
    }))


def write_qwen(folder: Path, *, has_weights: bool = True) -> Path:
    """A tiny Qwen2.5-VL."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": mark_id("<|endoftext|>"), "eos_token_id": mark_id("<|im_end|>"),
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56, "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
        },
        image_token_id=mark_id("<|image_pad|>"), video_token_id=mark_id("<|video_pad|>"),
        vision_start_token_id=mark_id("<|vision_start|>"), vision_end_token_id=mark_id("<|vision_end|>"),
        bos_token_id=mark_id("<|endoftext|>"), eos_token_id=mark_id("<|im_end|>"), tie_word_embeddings=False,
    )
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    if has_weights:
        import torch

        torch.manual_seed(0)
        Qwen2_5_VLForConditionalGeneration(config).float().save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    write_processor(folder)
    return folder


def write_qwen3(folder: Path, num_layers: int) -> Path:
    """A tiny Qwen3-VL, of whose vectors parts are added behind the first two layers."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": 264, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": num_layers,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True
            },
            "bos_token_id": mark_id("<|endoftext|>"), "eos_token_id": mark_id("<|im_end|>"), "initializer_range": 0.15,
        },
        vision_config={
            "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14,
            "out_hidden_size": 64, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1],
            "initializer_range": 0.15,
        },
        image_token_id=mark_id("<|image_pad|>"), video_token_id=mark_id("<|video_pad|>"),
        vision_start_token_id=mark_id("<|vision_start|>"), vision_end_token_id=mark_id("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    config.architectures = ["Qwen3VLForConditionalGeneration"]
    torch.manual_seed(0)
    Qwen3VLForConditionalGeneration(config).float().save_pretrained(folder)
    write_processor(folder)
    return folder
