"""Models with an image encoder and a projector through the engine, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from media_rig import (
    IMAGE_ID,
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
from headrace.base.media_facts import TiledPixels
from headrace.models.llava.family import NEXT, read_media
from headrace.service.engine import Engine

TEXT = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}
VISION = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 24,
    "patch_size": 4,
}
SIZE, NUM_PATCHES = 24, 36


def make_llava(folder: Path, *, vision: str = "clip_vision_model", text: str = "llama") -> Any:
    is_clip = vision == "clip_vision_model"
    config = transformers.LlavaConfig(
        text_config={"model_type": text, **TEXT}, vision_config={"model_type": vision, **VISION},
        image_token_index=IMAGE_ID, vision_feature_select_strategy="default" if is_clip else "full",
        image_seq_length=NUM_PATCHES,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    save_model(model, folder)
    return model, NUM_PATCHES


def make_llava_with_siglip(folder: Path) -> Any:
    return make_llava(folder, vision="siglip_vision_model", text="qwen2")


def make_internvl(folder: Path, *, text: str = "qwen2", has_head: bool = False, **vision: Any) -> Any:
    own = {**VISION, "image_size": [24, 24], "patch_size": [4, 4], "layer_scale_init_value": 0.7, **vision}
    config = transformers.InternVLConfig(
        text_config={"model_type": text, **TEXT, "head_dim": 12}, vision_config=own, image_token_id=IMAGE_ID,
        image_seq_length=9,
    )
    model = transformers.InternVLForConditionalGeneration(config)
    if has_head:  # whatever config.json says of it
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    save_model(model, folder)
    assert config.tie_word_embeddings
    return model, 9


def make_internvl_with_norms(folder: Path) -> Any:
    return make_internvl(
        folder, text="qwen3", has_head=True, use_qk_norm=True, norm_type="rms_norm", attention_bias=True,
        use_mean_pooling=False,
    )


def make_gemma3(folder: Path) -> Any:
    text = {
        **TEXT, "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 7, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config={"model_type": "siglip_vision_model", **VISION}, mm_tokens_per_image=9,
        image_token_index=IMAGE_ID, boi_token_index=102, eoi_token_index=103,
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    save_model(model, folder)
    return model, 9


MAKERS = {
    "llava": make_llava, "llava_siglip": make_llava_with_siglip, "gemma3": make_gemma3,
    "internvl": make_internvl, "internvl_norms": make_internvl_with_norms,
}


SCALED = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 4,
    "llama_4_scaling_beta": 0.7
}


def make_mistral3(
    folder: Path, activation: str = "gelu", decoder: dict[str, Any] | None = None
) -> transformers.PreTrainedModel:
    vision = {"model_type": "pixtral", **VISION, "head_dim": 16, "hidden_act": activation}
    config = transformers.Mistral3Config(
        text_config={**(decoder or {"model_type": "mistral"}), **TEXT, "head_dim": 12}, vision_config=vision,
        image_token_index=IMAGE_ID,
    )
    model = transformers.Mistral3ForConditionalGeneration(config)
    save_model(model, folder)
    return model


def with_breaks(seed: int, sizes: list[tuple[int, int]]) -> Prompt:
    """Images of these sizes, with a token behind each row of patches."""
    prompt = Prompt().text(3, 4 + seed)
    for height, width in sizes:
        values = np.random.default_rng(seed).standard_normal((1, 3, height, width)).astype(np.float32)
        rows = [[*[IMAGE_ID] * (width // 8), 105] for _ in range(height // 8)]
        prompt.add("image", values, height * width // 64, grid=(height, width), runs=rows).text(7)
    return prompt


@pytest.mark.parametrize(
    ("activation", "decoder"),
    [("gelu", {"model_type": "mistral"}), ("silu", {"model_type": "ministral3", "rope_parameters": SCALED})]
)
def test_images_of_any_size_with_breaks_between_rows(tmp_path: Path, activation: str, decoder: dict):
    """Also where queries are scaled by their positions."""
    model = make_mistral3(tmp_path, activation, decoder)
    engine = start_engine(tmp_path, max_step_tokens=9)
    sizes = [[(16, 24)], [(8, 8), (24, 16)], []]
    asks = [with_breaks(seed, own) for seed, own in enumerate(sizes)]
    for outputs, prompt, own in zip(run_beside(engine, Prompt([5]), asks), asks, sizes, strict=True):
        inputs: dict[str, Any] = {}
        if own:
            padded = torch.zeros(len(own), 3, 24, 24)
            for image, item, (height, width) in zip(padded, prompt.items, own, strict=True):
                image[:, :height, :width] = to_tensor(item.arrays["pixel_values"])[0]
            inputs = {"pixel_values": padded, "image_sizes": torch.tensor(own)}
        compare(outputs, ask_oracle(model, prompt, **inputs))
    engine.close()


def make_pixtral(folder: Path) -> transformers.PreTrainedModel:
    vision = {"model_type": "pixtral", **VISION, "head_dim": 16}
    config = transformers.LlavaConfig(
        text_config={"model_type": "mistral", **TEXT, "head_dim": 12, "sliding_window": None}, vision_config=vision,
        image_token_index=IMAGE_ID, vision_feature_layer=-1, vision_feature_select_strategy="full",
    )
    model = transformers.LlavaForConditionalGeneration(config)
    save_model(model, folder)
    return model


def test_pixtral_in_llava(tmp_path: Path):
    """One vector a patch, and no merging."""
    model = make_pixtral(tmp_path)
    engine, values = start_engine(tmp_path, max_step_tokens=9), np.random.default_rng(0)
    pixels = values.standard_normal((1, 3, 12, 20)).astype(np.float32)
    rows = [[*[IMAGE_ID] * 5, 105]] * 3
    prompt = Prompt().text(3, 4).add("image", pixels, 15, grid=(12, 20), runs=rows).text(7)
    outputs = run_beside(engine, Prompt([5]), [prompt])[0]
    inputs = {"pixel_values": torch.from_numpy(pixels), "image_sizes": torch.tensor([[12, 20]])}
    compare(outputs, ask_oracle(model, prompt, **inputs))
    engine.close()


RESOLUTIONS = [[24, 24], [24, 48], [48, 24], [48, 48], [24, 72]]


def make_tiled(folder: Path, name: str) -> transformers.PreTrainedModel:
    is_next = name == "llava_next"
    kind = "clip_vision_model" if is_next else "siglip_vision_model"
    options: dict[str, Any] = {} if is_next else {"vision_aspect_ratio": "anyres_max_2"}
    config = (transformers.LlavaNextConfig if is_next else transformers.LlavaOnevisionConfig)(
        text_config={"model_type": "llama" if is_next else "qwen2", **TEXT},
        vision_config={"model_type": kind, **VISION}, image_token_index=IMAGE_ID, image_grid_pinpoints=RESOLUTIONS,
        **options,
    )
    kinds = transformers.LlavaNextForConditionalGeneration, transformers.LlavaOnevisionForConditionalGeneration
    model = kinds[not is_next](config)
    save_model(model, folder)
    return model


def of_tiles(engine: Engine, seed: int, *sizes: tuple[int, int]) -> Prompt:
    """Images of these sizes in the tiles that the engine's model has for them."""
    facts, prompt = engine.executor.facts.media, Prompt().text(3, 4 + seed)
    assert facts is not None and isinstance(facts.pixels, TiledPixels)
    for height, width in sizes:
        grid = facts.pixels.find_grid(height, width)
        tiles = np.random.default_rng(seed).standard_normal((1 + np.prod(grid.tiles), 3, SIZE, SIZE))
        count = NUM_PATCHES + grid.num_tokens
        prompt.add("image", tiles.astype(np.float32), count, grid=(height, width)).text(7)
    return prompt


@pytest.mark.parametrize("name", ["llava_next", "llava_onevision"])
def test_tiles_of_images_of_any_size(tmp_path: Path, name: str):
    """Wide, tall and square ones, with padding of tiles taken away; of two tiles and more resampled."""
    model = make_tiled(tmp_path, name)
    engine = start_engine(tmp_path, max_step_tokens=50)
    asks = [of_tiles(engine, seed, *own) for seed, own in enumerate([[(20, 50)], [(50, 21), (40, 40)], [(10, 70)]])]
    for outputs, prompt in zip(run_beside(engine, Prompt([5]), asks), asks, strict=True):
        tiles = [to_tensor(item.arrays["pixel_values"]) for item in prompt.items]
        most = max(len(each) for each in tiles)
        padded = torch.stack([torch.cat((each, torch.zeros(most - len(each), *each.shape[1:]))) for each in tiles])
        sizes = torch.tensor([item.place.grid for item in prompt.items])
        compare(outputs, ask_oracle(model, prompt, pixel_values=padded, image_sizes=sizes))
    engine.close()


@pytest.fixture(scope="module", params=list(MAKERS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    model, count = MAKERS[request.param](folder)
    return model, folder, count


def add_image(prompt: Prompt, count: int, seed: int) -> Prompt:
    values = np.random.default_rng(seed).standard_normal((1, 3, SIZE, SIZE)).astype(np.float32)
    return prompt.text(102).add("image", values, count).text(103)


def expect(model: Any, prompt: Prompt, num_tokens: int = 8) -> tuple[list[int], torch.Tensor]:
    inputs: dict[str, Any] = {}
    if prompt.items:
        inputs["pixel_values"] = torch.cat([to_tensor(item.arrays["pixel_values"]) for item in prompt.items])
    if model.config.model_type == "gemma3":
        inputs["token_type_ids"] = (torch.tensor([prompt.ids]) == IMAGE_ID).long()
    return ask_oracle(model, prompt, num_tokens, **inputs)


def prompts(count: int) -> list[Prompt]:
    two = add_image(add_image(Prompt().text(5, 6, 7), count, 1).text(8, 9), count, 2).text(10, 11, 12)
    return [add_image(Prompt().text(3), count, 0).text(4, 5, 6, 7), two, Prompt().text(*range(1, 20))]


@pytest.mark.parametrize("given", [5, [[336]], [336], {"336": 672}, [[336, "672"]], [[336, 400]]])
def test_resolutions_that_are_none(given: Any):
    with pytest.raises(ConfigError, match="image_grid_pinpoints"):
        read_media({"architectures": [NEXT], "vision_config": {}, "text_config": {}, "image_grid_pinpoints": given})


@pytest.mark.parametrize("step_tokens", [17, 256])
def test_images_in_chunks(served: Any, step_tokens: int):
    model, folder, count = served
    engine = start_engine(folder, max_step_tokens=step_tokens, max_running_requests=4)
    for outputs, prompt in zip(run(engine, prompts(count)), prompts(count), strict=True):
        compare(outputs, expect(model, prompt))
    engine.close()


def test_images_are_encoded_in_pieces_beside_streams(served: Any):
    model, folder, count = served
    engine = start_engine(folder, max_step_tokens=64, max_running_requests=4)
    for outputs, prompt in zip(run_beside(engine, Prompt([5]), prompts(count)), prompts(count), strict=True):
        compare(outputs, expect(model, prompt))
    engine.close()


def test_whole_images_go_on_with_smaller_steps(served: Any):
    """After the device had no memory, an image that must be computed in one step may be larger than the step."""
    model, folder, count = served
    engine = start_engine(folder, max_step_tokens=64, max_running_requests=4)
    engine._scheduler._limit.tokens = 6
    for outputs, prompt in zip(run(engine, prompts(count)), prompts(count), strict=True):
        compare(outputs, expect(model, prompt))
    engine.close()


def test_hits_within_images(served: Any):
    model, folder, count = served
    first = add_image(Prompt().text(3, 4), count, 0)
    engine = start_engine(folder)
    run(engine, [first])
    longer = add_image(Prompt().text(3, 4), count, 0).text(7, 8, 9)
    again = run(engine, [longer])[0]
    compare(again, expect(model, longer))
    assert again[-1].num_cached_tokens >= 8
    other = add_image(Prompt().text(3, 4), count, 5).text(7)
    different = run(engine, [other])[0]
    assert tokens_of(different) == expect(model, other)[0]
    assert different[-1].num_cached_tokens < 4
    engine.close()


def test_retractions_change_nothing(served: Any):
    model, folder, count = served
    asks = [add_image(Prompt().text(30 + i), count, i % 3).text(4, 5) for i in range(5)]
    for outputs, prompt in zip(run_short_of_pages(folder, asks), asks, strict=True):
        assert tokens_of(outputs) == expect(model, prompt, 24)[0]


def test_choices_and_bounds_on_what_waits(tmp_path: Path):
    """Two choices of an image whose pixels only the first carries; another image beyond the bytes for them."""
    model, count = make_llava(tmp_path)
    engine = start_engine(tmp_path, max_queued_media_mib=1)
    first, other = add_image(Prompt().text(3), count, 0), add_image(Prompt().text(4), count, 1)
    bare = Prompt(first.ids, [msgspec.structs.replace(item, arrays={}) for item in first.items])
    engine._scheduler._running.media.most_bytes = first.items[0].num_bytes
    outputs = run(engine, [first, bare, other])
    for each in outputs[:2]:
        compare(each, expect(model, first))
    assert outputs[2][-1].finish is not None and outputs[2][-1].finish.error is not None
    assert outputs[2][-1].finish.error.kind == "queue_full"
    assert engine._scheduler._running.media.num_bytes == 0
    engine.close()
