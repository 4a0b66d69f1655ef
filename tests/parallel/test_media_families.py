"""Every family that takes images or sound, on two ranks: the tokens and log probabilities of one rank, or its
embeddings, which the tests of `models` compare with transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel.rank_processes import RankProcesses

from headrace.models.catalog import ARCHITECTURES, BESIDE_TEXT
from headrace.service import build
from headrace.service.engine import Engine

sys.path.append(str(Path(__file__).parents[1] / "models"))

import test_audio_models as audio
import test_dual_encoders as dual
import test_image_families as images
import test_phi4_multimodal as phi4
import test_qwen_vl as qwen
from media_rig import Prompt, logprobs_of, run, start_engine, tokens_of

TEXT = Prompt([*range(1, 20)])
Ask = Callable[[Engine], list[Prompt]]
Made = tuple[Any, Ask]
"""transformers' model, which was written, and what to ask of it."""


def of_images(name: str) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        model, count = images.MAKERS[name](folder)
        return model, lambda _: images.prompts(count)

    return make


def of_tiles(name: str) -> Callable[[Path], Made]:
    return lambda folder: (
        images.make_tiled(folder, name), lambda engine: [images.of_tiles(engine, 0, (20, 50), (40, 40)), TEXT]
    )


def of_qwen(name: str) -> Callable[[Path], Made]:
    return lambda folder: (
        qwen.MAKERS[name](folder), lambda _: [qwen.add_image(Prompt().text(3, 4), (1, 4, 6), 0).text(5, 6), TEXT]
    )


MAKERS: dict[str, Callable[[Path], Made]] = {
    **{name: of_images(name) for name in images.MAKERS},
    **{name: of_tiles(name) for name in ("llava_next", "llava_onevision")},
    **{name: of_qwen(name) for name in qwen.MAKERS},
    "mistral3": lambda folder: (
        images.make_mistral3(folder), lambda _: [images.with_breaks(1, [(8, 8), (24, 16)]), TEXT]
    ),
    "phi4": lambda folder: (
        phi4.make_phi4(folder),
        lambda _: [phi4.placed(phi4.add_clip(phi4.add_image(Prompt().text(3), 1, 5, 12), 2, 40)), TEXT],
    ),
    "qwen2_audio": lambda folder: (
        audio.make_listener(folder), lambda _: [audio.add_clip(Prompt().text(3), 17, 0).text(4, 5), TEXT]
    ),
    "whisper": lambda folder: (audio.make_writer(folder), lambda _: [audio.hear(1, 1, 5, 9), audio.hear(2, 1, 7)]),
}
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "skip_tokenizer": True, "attention_backend": "reference", "page_size": 4,
    "kv_pages": 200, "max_running_requests": 8, "max_model_len": None, "max_step_tokens": 256,
}
"""As `start_engine` has them, and in time for the windows of sound."""


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["tensor", "stages"])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankProcesses]:
    made = RankProcesses(*request.param)
    yield made
    made.close()


def divide(ranks: RankProcesses, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """The engine on all ranks."""
    monkeypatch.setattr(build, "build_executor", ranks.builder({**OPTIONS, "model": str(folder)}))
    return start_engine(folder, max_model_len=None, max_step_tokens=256)


@pytest.mark.parametrize("name", MAKERS)
def test_two_ranks_say_what_one_says(
    ranks: RankProcesses, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if name == "whisper" and ranks.ranks.layout.pipeline > 1:
        pytest.skip("it has no stages")
    _, ask = MAKERS[name](tmp_path)
    engine = start_engine(tmp_path, max_model_len=None, max_step_tokens=256)
    alone = run(engine, ask(engine))
    engine.close()
    engine = divide(ranks, tmp_path, monkeypatch)
    for one, two in zip(alone, run(engine, ask(engine)), strict=True):
        assert tokens_of(two) == tokens_of(one)
        torch.testing.assert_close(logprobs_of(two), logprobs_of(one), atol=1e-3, rtol=1e-3)
    engine.close()


@pytest.mark.parametrize("kind", dual.MAKERS)
def test_embeddings_of_texts_and_images(
    ranks: RankProcesses, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if ranks.ranks.layout.pipeline > 1:
        pytest.skip("they have no stages")
    model = dual.MAKERS[kind](tmp_path)
    engine = divide(ranks, tmp_path, monkeypatch)
    values = [None, dual.pixels(0), None, dual.pixels(1)]
    prompts = [
        Prompt().text(5, 6, 7, 59) if each is None else Prompt().add("image", each, 1, token=dual.WORDS)
        for each in values
    ]
    for found, prompt, image in zip(dual.embed(engine, prompts), prompts, values, strict=True):
        torch.testing.assert_close(found, dual.expect(model, prompt, image), atol=1e-5, rtol=1e-4)
    engine.close()


def test_every_family_is_here(tmp_path: Path):
    made = set()
    for name, make in MAKERS.items():
        (tmp_path / name).mkdir()
        made.add(type(make(tmp_path / name)[0]).__name__)
    assert {name for name in ARCHITECTURES if BESIDE_TEXT.fullmatch(name)} == made
