"""Items as the model's own processor makes them: the same pixels and the same tokens as transformers for whole prompts,
whatever stands beside an item; digests that follow content and settings."""

from __future__ import annotations

import hashlib
import io
import json

import msgspec
import numpy as np
import pytest
from tiny_vision import looked_up, mark_id, write_qwen

from headrace.base.config import ModelConfig
from headrace.base.errors import MediaError, RequestError
from headrace.base.media import LEVELS, MediaArray, MediaItem
from headrace.base.media_config import MediaConfig
from headrace.base.media_facts import check_media
from headrace.base.messages import ModelFacts
from headrace.models.catalog import find_family
from headrace.models.source import resolve_source
from headrace.service.client.media import place_items
from headrace.service.media.pixel_bytes import PixelBytes, to_bytes
from headrace.service.media.preparing import Preparer
from headrace.service.media.wire import Job, Setup
from headrace.service.tokenization import load_tokenizer

pillow = pytest.importorskip("PIL.Image")
PROMPT = "<|im_start|>user\na<|vision_start|><|image_pad|><|vision_end|>b<|vision_start|><|image_pad|><|vision_end|>"


def picture(width: int, height: int, seed: int = 0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    return pillow.fromarray(pixels).resize((width, height), pillow.Resampling.BICUBIC)


def png(image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_qwen(tmp_path_factory.mktemp("qwen"), has_weights=False)


@pytest.fixture(scope="module")
def model(folder) -> ModelConfig:
    return ModelConfig(model=str(folder), load_format="dummy")


@pytest.fixture(scope="module")
def preparer(model) -> Preparer:
    return Preparer(Setup(model, MediaConfig()))


@pytest.fixture(scope="module")
def facts(model) -> ModelFacts:
    source = resolve_source(model)
    media = find_family(source.architecture).media.facts(source.config)
    return ModelFacts(
        model="tiny", architecture=source.architecture, family="tiny", dtype="float32", device="cpu",
        max_model_len=2048, vocab_size=264, eos_ids=[mark_id("<|im_end|>")], num_parameters=1000, page_size=16,
        num_kv_tokens=4096, media=media
    )


def theirs(folder, images, prompt: str):
    from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLProcessor

    class Partial(Qwen2_5_VLProcessor):
        def check_argument_for_proper_class(self, name, argument):
            return None if argument is None else super().check_argument_for_proper_class(name, argument)

    processor = Partial(
        AutoImageProcessor.from_pretrained(folder, backend="pil"), AutoTokenizer.from_pretrained(folder), None
    )
    return processor(images=images, text=[prompt], return_tensors="np")


def job(data: bytes, **options) -> Job:
    return Job("image", data, hashlib.sha256(data).digest(), "here", options)


def test_pixels_and_tokens_are_those_of_the_processor(folder, preparer, model, facts):
    images = [picture(300, 200), picture(57, 91, 1)]
    items = [preparer.prepare(job(png(image))) for image in images]
    expected = theirs(folder, images, PROMPT)
    tokenizer = load_tokenizer(resolve_source(model))
    for prompt in (PROMPT, tokenizer.encode(PROMPT, add_special_tokens=False)):
        placed = place_items(prompt, items, tokenizer, facts, add_special_tokens=False)
        assert placed.token_ids == expected["input_ids"][0].tolist()
        check_media(placed.items, placed.token_ids, facts.media)
        grids = [tuple(grid) for grid in expected["image_grid_thw"].tolist()]
        assert [item.place.grid for item in placed.items] == grids
    assert all(item.item.arrays["pixel_values"].dtype == "uint8" for item in items)
    pixels = np.concatenate([looked_up(item.item.arrays) for item in items])
    assert (pixels == expected["pixel_values"].reshape(-1)).all() and pixels.dtype == np.float32


def test_bytes_come_with_what_they_stand_for(preparer, facts):
    item = preparer.prepare(job(png(picture(120, 80)))).item
    ids = [facts.media.token_ids["image"]] * item.place.num_tokens
    place = msgspec.structs.replace(item.place, runs=[(0, len(ids))])
    pixels, levels = item.arrays["pixel_values"], item.arrays[LEVELS]
    assert levels.shape == (3, 256)
    wrong = [
        {LEVELS: levels}, {"pixel_values": MediaArray("float32", (1,), bytes(4)), LEVELS: levels},
        {"pixel_values": pixels, LEVELS: MediaArray("float32", (3, 255), bytes(3060))},
        {"pixel_values": pixels, LEVELS: MediaArray("float32", (5, 256), bytes(5120))},
        {"pixel_values": pixels, LEVELS: MediaArray("uint8", (3, 256), bytes(768))},
    ]
    check_media([MediaItem(place, item.arrays)], ids, facts.media)
    for arrays in wrong:
        with pytest.raises(RequestError, match="pixel_levels"):
            check_media([MediaItem(place, arrays)], ids, facts.media)


class Processor:
    """An image processor whose values are ``by``(bytes)."""

    def __init__(self, by, **settings):
        self._by = by
        self._settings = {
            "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5, 0.4, 0.3],
            "image_std": [0.2, 0.2, 0.1], **settings,
        }

    def to_dict(self):
        return self._settings

    def __call__(self, images, do_normalize=True, **options):
        values = np.asarray(images[0]).transpose(2, 0, 1)
        return {"pixel_values": [self._by(values) if do_normalize else values]}


def torch_arithmetic(values):
    mean, std = (np.float32(255) * np.asarray(x, np.float32)[:, None, None] for x in ([0.5, 0.4, 0.3], [0.2, 0.2, 0.1]))
    return (values.astype(np.float32) - mean) / std


def refuse(values):
    raise RuntimeError("as torch's functions do")


def test_pixels_travel_as_bytes_only_where_a_table_gives_the_same_values():
    assert PixelBytes.find(Processor(torch_arithmetic)) is not None
    assert PixelBytes.find(Processor(lambda values: torch_arithmetic(values) * np.float32(1.0001))) is None
    assert PixelBytes.find(Processor(lambda values: np.pad(torch_arithmetic(values), ((0, 0), (0, 9), (0, 0))))) is None
    assert PixelBytes.find(Processor(torch_arithmetic, image_std=None)) is None
    assert PixelBytes.find(Processor(torch_arithmetic, do_rescale=False, do_normalize=False)) is None
    assert PixelBytes.find(Processor(refuse)) is None
    assert to_bytes(np.array([1.0, 2.5], np.float32)) is None and to_bytes(np.array([1.0, 255.0])).tolist() == [1, 255]


def test_values_in_memory_are_the_same_items(preparer):
    image = picture(120, 80)
    ours = [
        preparer.prepare(job(png(image))), preparer.prepare_value("image", image, "here"),
        preparer.prepare_value("image", np.asarray(image), "here"),
    ]
    arrays = [each.item.arrays["pixel_values"].data for each in ours]
    assert arrays[0] == arrays[1] == arrays[2]
    assert ours[1].item.place.digest == ours[2].item.place.digest


def test_digests_follow_content_and_settings(preparer, folder, tmp_path):
    data, other = png(picture(120, 80)), png(picture(120, 80, 5))
    digests = {
        preparer.prepare(each).item.place.digest for each in (job(data), job(other), job(data, detail="low"), job(data))
    }
    assert len(digests) == 3
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    settings["size"]["longest_edge"] //= 2
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    smaller = Preparer(Setup(ModelConfig(model=str(tmp_path), load_format="dummy"), MediaConfig()))
    assert smaller.prepare(job(data)).item.place.digest not in digests


def test_low_detail_takes_fewer_tokens(preparer):
    data = png(picture(1400, 1100))
    low = preparer.prepare(job(data, detail="low"))
    assert low.item.place.num_tokens <= preparer.prepare(job(data)).item.place.num_tokens


def test_extreme_sizes(preparer):
    assert preparer.prepare(job(png(pillow.new("RGB", (1, 1))))).item.place.num_tokens == 4
    for size in ((1000, 4), (3, 599)):
        try:
            preparer.prepare(job(png(pillow.new("RGB", size))))
        except MediaError as error:
            assert error.param == "here" and "200" in error.message


@pytest.mark.parametrize("prompt, message", [
    ("none", "0 places"), (PROMPT + "<|image_pad|>", "9 placeholders"),
    (PROMPT + "<|vision_start|><|image_pad|><|vision_end|>", "3 places"),
    (PROMPT + "<|vision_start|><|video_pad|><|vision_end|>", "1 places"),
])
def test_places_and_items_must_agree(preparer, model, facts, prompt, message):
    items = [preparer.prepare(job(png(picture(60, 60, i)))) for i in range(2)]
    tokenizer = load_tokenizer(resolve_source(model))
    for given in (prompt, tokenizer.encode(prompt, add_special_tokens=False)):
        with pytest.raises(RequestError, match=message):
            place_items(given, items, tokenizer, facts)


@pytest.mark.parametrize("value", [
    "text", 3, None, np.zeros((4, 4, 3), np.float32), np.zeros((4, 4, 5), np.uint8), np.zeros((0, 4, 3), np.uint8),
    np.zeros((4, 4, 4, 4), np.uint8),
])
def test_values_that_are_no_images(preparer, value):
    with pytest.raises(MediaError, match="here"):
        preparer.prepare_value("image", value, "here")


def test_a_kind_without_its_libraries_says_what_to_install(preparer, monkeypatch):
    monkeypatch.setattr(preparer._processor, "video_processor", None)
    with pytest.raises(MediaError, match=r"pip install 'headrace\[video\]'") as caught:
        preparer.prepare(Job("video", b"x", bytes(32), "here"))
    assert caught.value.param == "here"


def test_a_video_comes_with_the_times_of_its_frames(preparer, monkeypatch):
    """The video processor itself needs torchvision."""
    given = {}

    class Recorder:
        def __init__(self):
            self.video_processor = object()

        def __call__(self, **options):
            given.update(options)
            raise ValueError("seen")

    monkeypatch.setattr(preparer, "_processor", Recorder())
    for wrong in (picture(64, 48), [], "film", None, np.zeros((4, 4), np.uint8), np.zeros((0, 4, 4, 3), np.uint8)):
        with pytest.raises(MediaError, match="here must be images in a list"):
            preparer.prepare_value("video", wrong, "here")
    with pytest.raises(MediaError, match="seen"):
        preparer.prepare_value("video", [picture(64, 48)] * 4, "here")
    about = given["videos_kwargs"]["video_metadata"][0]
    assert [index / about["fps"] for index in about["frames_indices"]] == [0.0, 0.5, 1.0, 1.5]
