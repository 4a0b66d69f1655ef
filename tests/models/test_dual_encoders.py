"""Models that embed texts and images, through the engine, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from media_rig import Prompt, save_model, start_engine

from headrace.base.messages import EngineRequest
from headrace.base.pooling import PoolingSpec, unpack_floats
from headrace.base.sampling import SamplingSpec, StopSpec

WORDS, POSITIONS, SIDE, PAD = 60, 12, 12, 7
TEXT = dict(
    vocab_size=WORDS, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=3,
    max_position_embeddings=POSITIONS, bos_token_id=0, eos_token_id=2, pad_token_id=PAD,
)
VISION = dict(
    hidden_size=24, intermediate_size=36, num_hidden_layers=3, num_attention_heads=2, image_size=SIDE, patch_size=4
)


def make_clip(folder: Path) -> transformers.PreTrainedModel:
    config = transformers.CLIPConfig(text_config=TEXT, vision_config=VISION, projection_dim=16)
    model = transformers.CLIPModel(config)
    save_model(model, folder)
    return model


def make_siglip(folder: Path) -> transformers.PreTrainedModel:
    model = transformers.SiglipModel(transformers.SiglipConfig(text_config=TEXT, vision_config=VISION))
    save_model(model, folder)
    return model


MAKERS = {"clip": make_clip, "siglip": make_siglip}


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, 3, SIDE, SIDE)).astype(np.float32)


def embed(engine: Any, prompts: list[Prompt]) -> list[torch.Tensor]:
    """Embeddings of requests that come together."""
    for i, prompt in enumerate(prompts):
        spec = PoolingSpec(needs_all_tokens=engine.executor.facts.pooling.needs_all_tokens)
        engine.submit(EngineRequest(
            f"r{i}", list(prompt.ids), SamplingSpec(), StopSpec(1), pooling=spec, media=list(prompt.items)
        ))
    found = {}
    while engine.has_work:
        for output in engine.step():
            assert output.finish is None or output.finish.error is None, output.finish
            if output.pooled is not None:
                found[output.request_id] = torch.tensor(unpack_floats(output.pooled))
        engine.check()
    return [found[f"r{i}"] for i in range(len(prompts))]


def features(found: Any) -> torch.Tensor:
    return torch.nn.functional.normalize(getattr(found, "pooler_output", found)[0], dim=-1)


@torch.no_grad()
def expect(model: transformers.PreTrainedModel, prompt: Prompt, image: np.ndarray | None) -> torch.Tensor:
    if image is not None:
        return features(model.get_image_features(torch.from_numpy(image)))
    ids = prompt.ids
    if model.config.model_type == "siglip":  # as its processor pads
        ids = ids + [PAD] * (POSITIONS - len(ids))
    return features(model.get_text_features(torch.tensor([ids])))


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("step_tokens", [12, 64])
def test_embeddings_of_texts_and_images(kind: str, step_tokens: int, tmp_path: Path):
    model = MAKERS[kind](tmp_path)
    engine = start_engine(tmp_path, max_model_len=None, max_step_tokens=step_tokens)
    facts = engine.executor.facts
    assert facts.media.token_ids == {"image": WORDS} and facts.pooling.width == (16 if kind == "clip" else 24)
    images = [None, pixels(0), None, pixels(1), pixels(0), None]
    prompts = [
        Prompt().text(5, 6, 7, 59), Prompt().add("image", pixels(0), 1, token=WORDS), Prompt().text(*range(40, 52)),
        Prompt().add("image", pixels(1), 1, token=WORDS), Prompt().add("image", pixels(0), 1, token=WORDS),
        Prompt().text(59),
    ]
    for found, prompt, image in zip(embed(engine, prompts), prompts, images, strict=True):
        torch.testing.assert_close(found, expect(model, prompt, image), atol=1e-5, rtol=1e-4)
    engine.close()
