"""Phi-4-multimodal through the engine, against transformers: images in crops, sound, and both in one prompt."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from media_rig import (
    VOCAB,
    Prompt,
    ask_oracle,
    compare,
    run,
    run_beside,
    run_short_of_pages,
    save_model,
    start_engine,
    to_tensor,
    tokens_of,
)

from headrace.base.errors import ConfigError
from headrace.base.media import mark_beside
from headrace.models.phi4_multimodal import audio
from headrace.models.phi4_multimodal.family import find_arrays, read_config

IMAGE_ID, AUDIO_ID = 100, 101
PATCH, CROP, MELS = 4, 6, 9
"""Patches of a crop's side are no power of two, so that fractions of it are rounded."""
FACTORS = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [1.5, 2.0, 2.5]}


def make_phi4(folder: Path) -> transformers.PreTrainedModel:
    config = transformers.Phi4MultimodalConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, original_max_position_embeddings=512,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, **FACTORS},
        vision_config={
            "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 2,
            "image_size": PATCH * CROP, "crop_size": PATCH * CROP, "patch_size": PATCH, "image_token_id": IMAGE_ID,
        },
        audio_config={
            "hidden_size": 24, "intermediate_size": 36, "num_blocks": 2, "num_attention_heads": 2, "input_size": MELS,
            "nemo_conv_channels": 8, "ext_pw_out_channel": 24, "depthwise_separable_out_channel": 24,
            "bias_max_distance": 11, "audio_token_id": AUDIO_ID,
        },
    )
    # not by torch's fused attention: where an image fills its crops, transformers leaves the mask out, and that makes
    # the attention to patches causal, which it is nowhere else
    config._attn_implementation = "eager"
    model = transformers.Phi4MultimodalForCausalLM(config)
    scales = model.model.embed_tokens_extend.audio_embed.encoder.encoder_embedding
    scales.global_mean.copy_(torch.linspace(-1, 1, MELS))
    scales.global_invstd.copy_(torch.linspace(0.5, 2, MELS))
    save_model(model, folder)
    return model


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("phi4_multimodal")
    return make_phi4(folder), folder


def make_image(seed: int, rows: int, columns: int) -> dict[str, Any]:
    """What the processor makes of an image of so many patches."""
    down, across = -(-rows // CROP), -(-columns // CROP)
    pixels = np.random.default_rng(seed).standard_normal((1, 1 + down * across, 3, PATCH * CROP, PATCH * CROP))
    canvas = np.zeros((down * CROP, across * CROP), np.float32)
    canvas[:rows, :columns] = 1
    crops = canvas.reshape(down, CROP, across, CROP).swapaxes(1, 2).reshape(-1, CROP, CROP)
    mask = np.concatenate((np.ones((1, CROP, CROP), np.float32), crops))[None]
    size = [[down * CROP * PATCH, across * CROP * PATCH]]
    return {
        "input_ids": [[]], "image_pixel_values": torch.from_numpy(pixels.astype(np.float32)),
        "image_attention_mask": torch.from_numpy(mask), "image_sizes": torch.tensor(size),
    }


def add_image(prompt: Prompt, seed: int, rows: int, columns: int) -> Prompt:
    found = find_arrays(make_image(seed, rows, columns))
    pixels, grid = found["pixel_values"].numpy(), found["image_sizes"][0]
    count = -(-rows // 2) * (-(-columns // 2) + 1) + 1 + CROP // 2 * (CROP // 2 + 1)
    return prompt.add("image", pixels, count, grid=grid, token=IMAGE_ID).text(7)


def add_clip(prompt: Prompt, seed: int, num_frames: int) -> Prompt:
    frames = np.random.default_rng(seed).standard_normal((1, num_frames, MELS)).astype(np.float32)
    found, count = find_arrays({"input_ids": [[]], "audio_input_features": frames}), -(-num_frames // 8)
    return prompt.add(
        "audio", frames, count, grid=found["image_sizes"][0], name="input_features", token=AUDIO_ID
    ).text(8)


def placed(prompt: Prompt) -> Prompt:
    """As prompts are sent: with what stands beside each other in them."""
    places = mark_beside([item.place for item in prompt.items], {"audio": "image"})
    items = [msgspec.structs.replace(item, place=place) for item, place in zip(prompt.items, places, strict=True)]
    return Prompt(prompt.ids, items)


def expect(model: Any, prompt: Prompt, images: list[tuple[int, int, int]], num_tokens: int = 8) -> Any:
    inputs: dict[str, Any] = {}
    if images:
        made = [make_image(*image) for image in images]
        most = max(each["image_pixel_values"].shape[1] for each in made)
        inputs["image_sizes"] = torch.cat([each["image_sizes"] for each in made])
        for name, filler in (("image_pixel_values", 0.0), ("image_attention_mask", 1.0)):
            padded = [
                torch.cat((each[name], torch.full((1, most - each[name].shape[1], *each[name].shape[2:]), filler)), 1)
                for each in made
            ]
            inputs[name] = torch.cat(padded)
    clips = [item for item in prompt.items if item.place.kind == "audio"]
    if clips:
        inputs["audio_input_features"] = torch.cat([to_tensor(item.arrays["input_features"]) for item in clips])
        inputs["audio_embed_sizes"] = torch.tensor([item.place.num_tokens for item in clips])
    return ask_oracle(model, prompt, num_tokens, **inputs)


IMAGES = [[(0, 6, 6)], [(1, 5, 12), (2, 9, 3)], [], [(3, 13, 7)], [(4, 1, 1), (0, 6, 6)]]
"""Seed, rows and columns: whole crops, odd numbers of patches, a row of crops with one patch."""


def asks() -> list[Prompt]:
    """Prompts of `IMAGES`, the last three with sound."""
    found = []
    for number, images in enumerate(IMAGES):
        prompt = Prompt().text(3, 4 + number)
        for image in images:
            add_image(prompt, *image)
        found.append(prompt)
    add_clip(add_clip(found[2], 5, 33), 6, 33)
    add_clip(found[3], 5, 33)
    add_clip(found[4], 7, 8)
    return [placed(prompt) for prompt in found]


@pytest.mark.parametrize("step_tokens", [11, 512])
def test_images_and_sound(served: Any, step_tokens: int):
    model, folder = served
    engine = start_engine(folder, max_step_tokens=step_tokens, max_running_requests=8, kv_pages=400)
    for prompt, outputs, images in zip(asks(), run(engine, asks()), IMAGES, strict=True):
        compare(outputs, expect(model, prompt, images))
    engine.close()


def test_layers_beside_streams(served: Any):
    model, folder = served
    engine = start_engine(folder, max_step_tokens=64, max_running_requests=8, kv_pages=400)
    for prompt, outputs, images in zip(asks(), run_beside(engine, Prompt([5]), asks()), IMAGES, strict=True):
        compare(outputs, expect(model, prompt, images))
    engine.close()


def test_hits_and_sound_beside_images(served: Any):
    """The same image is a hit; the same sound beside an image is encoded otherwise, and is none."""
    model, folder = served
    engine = start_engine(folder, kv_pages=400)
    first = placed(add_image(Prompt().text(3), 0, 6, 6).text(5))
    run(engine, [first])
    longer = placed(add_clip(add_image(Prompt().text(3), 0, 6, 6).text(5), 5, 80))
    (outputs,) = run(engine, [longer])
    compare(outputs, expect(model, longer, [(0, 6, 6)]))
    assert outputs[-1].num_cached_tokens >= 20
    alone = placed(add_clip(Prompt().text(3), 5, 80))
    (outputs,) = run(engine, [alone])
    compare(outputs, expect(model, alone, []))
    beside = placed(add_image(add_clip(Prompt().text(3), 5, 80), 0, 6, 6))
    (outputs,) = run(engine, [beside])
    compare(outputs, expect(model, beside, [(0, 6, 6)]))
    assert outputs[-1].num_cached_tokens < 4
    engine.close()


def test_retractions_change_nothing(served: Any):
    model, folder = served
    prompts = [Prompt([30 + number, *prompt.ids[1:]], prompt.items) for number, prompt in enumerate(asks())]
    found = run_short_of_pages(folder, prompts)
    for prompt, outputs, images in zip(prompts, found, IMAGES, strict=True):
        assert tokens_of(outputs) == expect(model, prompt, images, 24)[0]


def test_long_sound_is_cut(served: Any):
    """Beyond 500 positions pieces know nothing of one another; the convolutions over frames see over the cut."""
    model, folder = served
    engine = start_engine(
        folder, max_model_len=700, max_step_tokens=700, kv_pages=400, prefix_cache=False, max_encoder_tokens=2048
    )
    prompt = add_clip(Prompt().text(3), 9, 8 * (audio.MOST_POSITIONS + 37) - 3)
    (outputs,) = run(engine, [prompt], 3)
    compare(outputs, expect(model, prompt, [], 3))
    engine.close()


@pytest.mark.parametrize("part, name, value", [
    ("audio_config", "time_reduction", 4), ("audio_config", "chunk_size", 18), ("vision_config", "crop_size", 450),
    ("vision_config", "feature_layer", 28),
])
def test_configs_that_are_not_served(part: str, name: str, value: int):
    with pytest.raises(ConfigError, match=name):
        read_config({part: {name: value}})


def test_weights_for_images_are_an_adapter(served: Any, tmp_path: Path):
    """As published: a file of PEFT whose targets are a pattern, which the encoders' layers do not match."""
    model, folder = served
    peft = pytest.importorskip("peft")
    pattern = r".*model\.layers.*((self_attn\.(qkv_proj|o_proj))|(mlp\.(gate_up|down)_proj))"
    adapted = peft.get_peft_model(
        copy.deepcopy(model), peft.LoraConfig(r=3, lora_alpha=6, lora_dropout=0.05, target_modules=pattern)
    ).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    adapted.save_pretrained(str(tmp_path))
    engine = start_engine(folder, enable_lora=True, lora_modules=f"vision={tmp_path}", kv_pages=400)
    prompt = placed(add_clip(add_image(Prompt().text(3), 1, 5, 12), 6, 33))
    for name, oracle in (("vision", adapted), ("", model)):
        (outputs,) = run(engine, [prompt], adapter=name)
        compare(outputs, expect(oracle, prompt, [(1, 5, 12)]))
    engine.close()
