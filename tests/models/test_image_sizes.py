"""Models that take images of any size: what is cached of them, and requests that are retracted, against
transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from media_rig import (
    IMAGE_ID,
    Prompt,
    ask_oracle,
    compare,
    run,
    run_short_of_pages,
    start_engine,
    to_tensor,
    tokens_of,
)
from test_image_families import NUM_PATCHES, SCALED, SIZE, make_mistral3, make_pixtral, make_tiled

from headrace.base.media import MediaArray, MediaItem, digest_of
from headrace.base.media_facts import TiledPixels
from headrace.models.llava.family import NEXT, ONEVISION, read_media

PATCHES = {"mistral3": 8, "ministral3": 8, "pixtral": 4}
"""Pixels of a placeholder's side."""
MAKERS: dict[str, Callable[[Path], transformers.PreTrainedModel]] = {
    "mistral3": make_mistral3, "pixtral": make_pixtral,
    "ministral3": lambda folder: make_mistral3(
        folder, "silu", {"model_type": "ministral3", "rope_parameters": SCALED}
    ),
    "llava_next": lambda folder: make_tiled(folder, "llava_next"),
    "llava_onevision": lambda folder: make_tiled(folder, "llava_onevision"),
}


@dataclass
class Sized:
    """A model, prompts with no beginning in common, and what transformers takes beside the ids of each."""

    model: transformers.PreTrainedModel
    folder: Path
    prompts: list[Prompt]
    inputs: list[dict[str, Any]]

    def expect(self, index: int, num_tokens: int = 8) -> tuple[list[int], torch.Tensor]:
        return ask_oracle(self.model, self.prompts[index], num_tokens, **self.inputs[index])


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def make_rows(model: Any, folder: Path, patch: int) -> Sized:
    """One image, two of other sizes, none; a token stands behind each row of placeholders."""
    made = Sized(model, folder, [], [])
    for number, sizes in enumerate([[(16, 24)], [(8, 8), (24, 16)], []]):
        prompt, padded = Prompt().text(30 + number, 4), torch.zeros(len(sizes), 3, 24, 24)
        for index, (height, width) in enumerate(sizes):
            values = draw(7 * number + index, 1, 3, height, width)
            rows = [[*[IMAGE_ID] * (width // patch), 105] for _ in range(height // patch)]
            prompt.add("image", values, height * width // patch**2, grid=(height, width), runs=rows).text(7)
            padded[index, :, :height, :width] = torch.from_numpy(values)[0]
        made.prompts.append(prompt)
        made.inputs.append({"pixel_values": padded, "image_sizes": torch.tensor(sizes)} if sizes else {})
    return made


def make_tiles(model: Any, folder: Path, name: str) -> Sized:
    """Wide, tall and square images in tiles."""
    architecture = NEXT if name == "llava_next" else ONEVISION
    pixels = read_media({**model.config.to_dict(), "architectures": [architecture]}).pixels
    assert isinstance(pixels, TiledPixels)
    made = Sized(model, folder, [], [])
    for number, sizes in enumerate([[(20, 50)], [(50, 21), (40, 40)], [(10, 70)]]):
        prompt, images = Prompt().text(30 + number, 4), []
        for index, (height, width) in enumerate(sizes):
            grid = pixels.find_grid(height, width)
            tiles = draw(7 * number + index, 1 + int(np.prod(grid.tiles)), 3, SIZE, SIZE)
            prompt.add("image", tiles, NUM_PATCHES + grid.num_tokens, grid=(height, width)).text(7)
            images.append(torch.from_numpy(tiles))
        most = max(len(each) for each in images)
        padded = [torch.cat((each, torch.zeros(most - len(each), *each.shape[1:]))) for each in images]
        made.prompts.append(prompt)
        made.inputs.append({"pixel_values": torch.stack(padded), "image_sizes": torch.tensor(sizes)})
    return made


@pytest.fixture(scope="module", params=list(MAKERS))
def sized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sized:
    folder = tmp_path_factory.mktemp(request.param)
    model = MAKERS[request.param](folder)
    if request.param in PATCHES:
        return make_rows(model, folder, PATCHES[request.param])
    return make_tiles(model, folder, request.param)


def test_hits_are_of_the_same_image_only(sized: Sized):
    engine = start_engine(sized.folder, kv_pages=600, max_step_tokens=24)
    for _ in range(2):
        again = run(engine, sized.prompts)
        for index, outputs in enumerate(again):
            compare(outputs, sized.expect(index))
    lengths = [len(prompt.ids) for prompt in sized.prompts]
    assert [outputs[-1].num_cached_tokens for outputs in again] == [(length - 1) // 4 * 4 for length in lengths]
    known = sized.prompts[0]
    values = to_tensor(known.items[0].arrays["pixel_values"]).numpy() + 1
    place = msgspec.structs.replace(known.items[0].place, digest=digest_of("image", "", [values.tobytes()]))
    other = Prompt(known.ids, [MediaItem(place, {"pixel_values": MediaArray.of(values)})])
    changed = sized.inputs[0]["pixel_values"].clone()
    changed[..., : values.shape[-2], : values.shape[-1]] = torch.from_numpy(values)
    (different,) = run(engine, [other])
    compare(different, ask_oracle(sized.model, other, **{**sized.inputs[0], "pixel_values": changed}))
    assert different[-1].num_cached_tokens < 4
    engine.close()


def test_retractions_change_nothing(sized: Sized):
    for index, outputs in enumerate(run_short_of_pages(sized.folder, sized.prompts)):
        assert tokens_of(outputs) == sized.expect(index, 24)[0]
