"""Processors of several kinds: items that are prepared one by one give the tokens and pixels of the whole prompt at
once, whatever a format writes around its placeholders."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_vision import byte_tokenizer, looked_up
from tokenizers import AddedToken, Tokenizer

from headrace.base.config import ModelConfig
from headrace.base.errors import MediaError, ModelError
from headrace.base.media_config import MediaConfig
from headrace.base.media_facts import MediaFacts, TiledPixels, check_media
from headrace.base.messages import ModelFacts
from headrace.models.family import FamilyMedia
from headrace.models.source import ModelSource
from headrace.service.client.media import place_items
from headrace.service.media import preparing as module
from headrace.service.media.preparing import Preparer, load_processor
from headrace.service.media.wire import Job, Setup
from headrace.service.tokenization import load_tokenizer

pillow = pytest.importorskip("PIL.Image")


@dataclass(frozen=True)
class Case:
    """A format: its processor, and what stands for an image before (``mark``) and after (``token``) it is expanded."""

    processor: str
    image_processor: dict[str, Any]
    mark: str
    token: str
    options: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


SQUARE = {"height": 28, "width": 28}
CASES = {
    "rows": Case(
        "PixtralProcessor", {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64},
                             "patch_size": 16},
        "[IMG]", "[IMG]", {"patch_size": 16, "spatial_merge_size": 2},
    ),
    "lines around": Case(
        "Gemma3Processor", {"image_processor_type": "Gemma3ImageProcessor", "size": SQUARE}, "<start_of_image>",
        "<image_soft_token>", {"image_seq_length": 4},
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    ),
    "bare": Case(
        "LlavaProcessor", {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28},
                           "crop_size": SQUARE},
        "<image>", "<image>",
        {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "tiles": Case(
        "LlavaOnevisionProcessor", {"image_processor_type": "LlavaOnevisionImageProcessor", "size": SQUARE,
                                    "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56]]},
        "<image>", "<image>", {"num_image_tokens": 4, "vision_feature_select_strategy": "full"},
    ),
    "patches": Case(
        "InternVLProcessor", {"image_processor_type": "GotOcr2ImageProcessor", "size": SQUARE, "crop_to_patches": True,
                              "min_patches": 1, "max_patches": 4},
        "<IMG_CONTEXT>", "<IMG_CONTEXT>", {"image_seq_length": 4},
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
         "video_token": "<video>"},
    ),
}
SPECIAL = (
    "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<start_of_image>", "<image_soft_token>", "<end_of_image>", "<image>",
    "<video>", "<img>", "</img>", "<IMG_CONTEXT>", "<|image|>", "<|audio|>",
)


def write(folder, case: Case) -> ModelSource:
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>",
        "extra_special_tokens": case.names, **case.names,
    }))
    (folder / "preprocessor_config.json").write_text(json.dumps(case.image_processor))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": case.processor, **case.options}))
    return ModelSource("test", "folder", folder, {"architectures": ["Any"], "model_type": "any"})


def picture(width: int, height: int, seed: int):
    return pillow.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def job(image) -> Job:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return Job("image", buffer.getvalue(), hashlib.sha256(buffer.getvalue()).digest(), "here")


@pytest.mark.parametrize("name", CASES)
def test_items_one_by_one_are_the_whole_prompt(name, tmp_path, monkeypatch):
    case = CASES[name]
    source = write(tmp_path, case)
    tokenizer = load_tokenizer(source)
    (token_id,) = tokenizer.encode(case.token, add_special_tokens=False)
    media = MediaFacts({"image": token_id}, {"image": case.mark}, vector_size=64)
    monkeypatch.setattr(module, "resolve_source", lambda config: source)
    monkeypatch.setattr(module, "find_family", lambda architecture: SimpleNamespace(
        media=FamilyMedia(lambda config: media)
    ))
    if name == "rows" and not find_spec("torchvision"):
        with pytest.raises(ModelError, match=r"needs torchvision.*pip install 'headrace\[video\]'"):
            load_processor(source)
        return
    preparer = Preparer(Setup(ModelConfig(), MediaConfig()))
    images = [picture(90, 40, 0), picture(33, 70, 1)]
    prompt = f"a\n{case.mark}\nwhat?{case.mark}"
    # In a list of their own several images would have no tiles: how many there are must not change any of them.
    given = images if name == "tiles" else [images]
    expected = load_processor(source)(images=given, text=[prompt], text_kwargs={"add_special_tokens": False})
    facts = ModelFacts(
        model="tiny", architecture="Any", family="any", dtype="float32", device="cpu", max_model_len=2048,
        vocab_size=tokenizer.vocab_size, eos_ids=[0], num_parameters=1, page_size=16, num_kv_tokens=4096, media=media
    )
    items = [preparer.prepare(job(image)) for image in images]
    placed = place_items(prompt, items, tokenizer, facts, add_special_tokens=False)
    assert placed.token_ids == [int(i) for i in expected["input_ids"][0]]
    check_media(placed.items, placed.token_ids, media)
    whole = [np.asarray(each) for each in expected["pixel_values"]]
    ours = [looked_up(item.arrays) for item in placed.items]
    assert all(item.arrays["pixel_values"].dtype == "uint8" for item in placed.items)
    if name == "tiles":
        layout = TiledPixels(3, 28, 2, [(28, 28), (28, 56), (56, 28), (56, 56)], most_tiles=9)
        assert all(layout.fits(i.place, i.arrays["pixel_values"].shape) for i in placed.items)
    if whole[0].ndim == len(items[0].item.arrays["pixel_values"].shape):  # one entry for each image
        for one, mine in zip(whole, ours, strict=True):
            assert mine.size == one.size and (mine.reshape(one.shape) == one).all()
    else:  # entries of all images together; those of one size are padded to the other's
        joined = np.concatenate(ours)
        flat = np.stack(whole).reshape(-1)
        assert joined.size <= flat.size and (joined.size < flat.size or (joined == flat).all())


def test_a_processor_with_words_of_its_own(tmp_path, monkeypatch):
    """Phi-4-multimodal's: its sound under the names of all families, and beside an image another item."""
    from transformers import Phi4MultimodalFeatureExtractor

    marks = {"image_token": "<|image|>", "audio_token": "<|audio|>"}
    own = {"feature_extractor_type": "Phi4MultimodalFeatureExtractor"}
    case = Case("Phi4MultimodalProcessor", own, "", "", {}, marks)
    source = write(tmp_path, case)
    tokenizer = load_tokenizer(source)
    ids = {name: tokenizer.encode(mark, add_special_tokens=False)[0] for name, mark in marks.items()}
    config = {
        "architectures": ["Phi4MultimodalForCausalLM"], "model_type": "phi4_multimodal",
        "vision_config": {"image_token_id": ids["image_token"]}, "audio_config": {"audio_token_id": ids["audio_token"]},
    }
    source = replace(source, config=config)
    load = module._load_part  # the image processor needs torchvision
    monkeypatch.setattr(module, "_load_part", lambda library, name, folder: (
        None if name == "image_processor" else load(library, name, folder)
    ))
    monkeypatch.setattr(module, "resolve_source", lambda config: source)
    preparer = Preparer(Setup(ModelConfig(), MediaConfig()))
    samples = np.sin(np.arange(16_077, dtype=np.float32) / 9)
    sound = preparer.prepare_value("audio", samples, "here")
    expected = Phi4MultimodalFeatureExtractor()(samples, sampling_rate=16000)
    values = sound.item.arrays["input_features"]
    assert values.data == np.asarray(expected["audio_input_features"]).tobytes()
    assert sound.item.place.num_tokens == int(expected["audio_embed_sizes"][0]) == 13
    for wrong in ((samples, 0), (samples, -5), (samples, "x"), (samples, float("nan")), (samples, 1e12), (), "x", None,
                  samples[None], samples[:0], samples * np.nan, samples * 1e30, (samples, 16000, 1), [[1.0],
                  [1.0, 2.0]], object()):
        with pytest.raises(MediaError, match="here"):
            preparer.prepare_value("audio", wrong, "here")
    made = {
        "input_ids": [[ids["image_token"]] * 545], "image_pixel_values": np.zeros((1, 2, 3, 448, 448), np.float32),
        "image_attention_mask": np.ones((1, 2, 32, 32)), "image_sizes": [[448, 448]],
    }
    image = preparer._item("image", preparer._rename(made), made["input_ids"][0], bytes(32), "here")
    facts = SimpleNamespace(media=preparer._facts, max_model_len=4096)
    alone = place_items("<|audio|>?", [sound], tokenizer, facts, add_special_tokens=False)
    both = place_items("<|image|><|audio|>?", [sound, image], tokenizer, facts, add_special_tokens=False)
    for placed in (alone, both):
        check_media(placed.items, placed.token_ids, preparer._facts)
    seen, heard = both.items
    assert seen.place.digest == image.item.place.digest and not seen.place.is_beside_other
    assert heard.place.is_beside_other and not alone.items[0].place.is_beside_other
    assert heard.place.digest != alone.items[0].place.digest == sound.item.place.digest
