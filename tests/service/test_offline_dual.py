"""`LLM.embed` of texts and images with a CLIP, from values in memory: transformers' embeddings."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tiny_vision import byte_tokenizer, mark_id

from headrace import LLM
from headrace.base.errors import RequestError

pillow = pytest.importorskip("PIL.Image")
transformers = pytest.importorskip("transformers")
SIDE = 16


def picture(width: int, height: int, seed: int):
    return pillow.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clip")
    size = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    end = mark_id("<|im_end|>")
    config = transformers.CLIPConfig(
        text_config={
            **size, "vocab_size": 264, "max_position_embeddings": 32, "eos_token_id": end, "bos_token_id": 256,
            "pad_token_id": 0,
        },
        vision_config={**size, "image_size": SIDE, "patch_size": 4}, projection_dim=12,
    )
    config.architectures = ["CLIPModel"]
    torch.manual_seed(0)
    transformers.CLIPModel(config).save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
    }))
    (folder / "preprocessor_config.json").write_text(json.dumps({
        "image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": SIDE},
        "crop_size": {"height": SIDE, "width": SIDE},
    }))
    return folder


@torch.no_grad()
def expect(folder, value) -> list[float]:
    model = transformers.CLIPModel.from_pretrained(folder).eval()
    if isinstance(value, str):
        ids = byte_tokenizer().encode(value, add_special_tokens=False).ids
        found = model.get_text_features(torch.tensor([ids]))
    else:
        pixels = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")(value, return_tensors="pt")
        found = model.get_image_features(**pixels)
    return torch.nn.functional.normalize(found.pooler_output[0], dim=-1).tolist()


def test_texts_and_images_beside_each_other(folder):
    images, end = [picture(40, 25, 0), picture(16, 16, 1)], "<|im_end|>"
    values = [f"a cat{end}", images[0], f"a longer text{end}", images[1], images[0]]
    with LLM(str(folder), device="cpu", dtype="float32", threads=1) as llm:
        assert llm.facts.pooling.width == 12 and llm.facts.media.kinds == ("image",)
        found = llm.embed([
            value if isinstance(value, str) else {"prompt": "", "multi_modal_data": {"image": value}}
            for value in values
        ])
        for own, value in zip(found, values, strict=True):
            assert own == pytest.approx(expect(folder, value), abs=1e-5)
        with pytest.raises(RequestError, match="a text or an image at a time"):
            llm.embed({"prompt": "a cat", "multi_modal_data": {"image": images[0]}})
        with pytest.raises(RequestError):
            llm.embed([[264]])  # the placeholder alone
