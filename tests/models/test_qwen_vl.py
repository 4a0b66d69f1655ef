"""Qwen's models for text, images and videos through the engine, against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from media_rig import (
    END_ID,
    IMAGE_ID,
    START_ID,
    VIDEO_ID,
    VOCAB,
    Prompt,
    ask_oracle,
    compare,
    run,
    run_beside,
    save_model,
    start_engine,
    to_tensor,
    tokens_of,
    watch_beside,
)

from headrace.base.messages import EngineRequest, RequestOutput
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.base.step import StepPlan
from headrace.scheduling import encoding
from headrace.service.engine import Engine

PATCH, MERGE = 4, 2
IDS = {
    "image_token_id": IMAGE_ID, "video_token_id": VIDEO_ID, "vision_start_token_id": START_ID,
    "vision_end_token_id": END_ID,
}

SECTIONED_TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}


def make_qwen2(folder: Path) -> transformers.PreTrainedModel:
    vision = {
        "depth": 3, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 3, "hidden_size": 64, "patch_size": PATCH,
    }
    config = transformers.Qwen2VLConfig(text_config=SECTIONED_TEXT, vision_config=vision, **IDS)
    model = transformers.Qwen2VLForConditionalGeneration(config)
    save_model(model, folder)
    return model


def make_qwen2_5(folder: Path) -> transformers.PreTrainedModel:
    vision = {
        "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64,
        "patch_size": PATCH, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2,
    }
    config = transformers.Qwen2_5_VLConfig(text_config=SECTIONED_TEXT, vision_config=vision, **IDS)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    save_model(model, folder)
    return model


def make_qwen3(folder: Path, kind: str = "Qwen3VL", **more: Any) -> transformers.PreTrainedModel:
    text = {
        "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True
        },
        **more,
    }
    vision = {
        "depth": 4, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64,
        "patch_size": PATCH, "num_position_embeddings": 25, "deepstack_visual_indexes": [1, 2],
    }
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision, **IDS)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    save_model(model, folder)
    return model


def make_qwen3_moe(folder: Path) -> transformers.PreTrainedModel:
    """Saved as it is published: experts of a layer in one tensor, inputs before outputs."""
    return make_qwen3(
        folder, "Qwen3VLMoe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40, mlp_only_layers=[1],
        tie_word_embeddings=False,
    )


MAKERS = {
    "qwen2_vl": make_qwen2, "qwen2_5_vl": make_qwen2_5, "qwen3_vl": make_qwen3, "qwen3_vl_moe": make_qwen3_moe
}


@pytest.fixture(scope="module", params=list(MAKERS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    return MAKERS[request.param](folder), folder


def pixels(grid: tuple[int, int, int], seed: int) -> np.ndarray:
    size = 3 * 2 * PATCH**2
    return np.random.default_rng(seed).standard_normal((grid[0] * grid[1] * grid[2], size)).astype(np.float32)


def add_image(prompt: Prompt, grid: tuple[int, int, int], seed: int) -> Prompt:
    count = grid[0] * grid[1] * grid[2] // MERGE**2
    return prompt.text(START_ID).add("image", pixels(grid, seed), count, grid=grid).text(END_ID)


def add_video(
    prompt: Prompt, grid: tuple[int, int, int], seed: int, seconds: float | None = None, *, is_divided: bool = False
) -> Prompt:
    """``is_divided``: each moment has marks and a time stamp of its own. ``seconds`` between moments, of Qwen2.5."""
    count = grid[0] * grid[1] * grid[2] // MERGE**2
    if is_divided:
        moment = [VIDEO_ID] * (count // grid[0])
        runs = [[20 + i, START_ID, *moment, END_ID] for i in range(grid[0])]
        return prompt.add(
            "video", pixels(grid, seed), count, grid=grid, token=VIDEO_ID, name="pixel_values_videos", runs=runs
        )
    numbers = {} if seconds is None else {"second_per_grid_ts": seconds}
    return prompt.text(START_ID).add(
        "video", pixels(grid, seed), count, grid=grid, token=VIDEO_ID, name="pixel_values_videos", **numbers
    ).text(END_ID)


def oracle_inputs(prompt: Prompt) -> dict[str, Any]:
    """What transformers' processor would give beside the ids."""
    ids = torch.tensor([prompt.ids])
    inputs: dict[str, Any] = {"mm_token_type_ids": (ids == IMAGE_ID).int() + 2 * (ids == VIDEO_ID).int()}
    for kind, name, grid in (
        ("image", "pixel_values", "image_grid_thw"), ("video", "pixel_values_videos", "video_grid_thw")
    ):
        items = [item for item in prompt.items if item.place.kind == kind]
        if items:
            inputs[name] = torch.cat([to_tensor(item.arrays[name]) for item in items])
            inputs[grid] = torch.tensor([item.place.grid for item in items])
            if "second_per_grid_ts" in items[0].place.numbers:
                inputs["second_per_grid_ts"] = [item.place.numbers["second_per_grid_ts"] for item in items]
    return inputs


def expect(model: transformers.PreTrainedModel, prompt: Prompt, num_tokens: int = 8) -> tuple[list[int], torch.Tensor]:
    return ask_oracle(model, prompt, num_tokens, **oracle_inputs(prompt))


def prompts() -> list[Prompt]:
    """Mixed sizes, several images, text alone."""
    two = add_image(add_image(Prompt().text(5, 6, 7), (1, 4, 6), 1).text(8, 9), (1, 10, 6), 2).text(10, 11, 12)
    return [
        add_image(Prompt().text(3), (1, 8, 12), 0).text(4, 5, 6, 7), two, Prompt().text(*range(1, 20)),
        add_image(Prompt(), (1, 2, 2), 4).text(9),
    ]


@pytest.mark.parametrize("step_tokens", [8, 13, 256])
def test_images_in_chunks_of_any_size(served: Any, step_tokens: int):
    model, folder = served
    engine = start_engine(folder, max_step_tokens=step_tokens)
    for outputs, prompt in zip(run(engine, prompts()), prompts(), strict=True):
        compare(outputs, expect(model, prompt))
    engine.close()


def test_images_are_encoded_in_pieces_beside_streams(served: Any):
    model, folder = served
    engine = start_engine(folder, max_step_tokens=64)
    for outputs, prompt in zip(run_beside(engine, Prompt([5]), prompts()), prompts(), strict=True):
        compare(outputs, expect(model, prompt))
    engine.close()


def begin_image(engine: Engine, prompt: Prompt, name: str = "image", namespace: str = "") -> list[RequestOutput]:
    """Submit a request beside a stream and step until two pieces of its image were planned; outputs meanwhile."""
    pieces, execute, outputs = [0], engine.executor.execute, list[RequestOutput]()

    def watch(plan: StepPlan) -> Any:
        pieces[0] += plan.media.num_pieces
        return execute(plan)

    engine.submit(EngineRequest("stream", [5], SamplingSpec(), StopSpec(60)))
    while not any(output.token_ids for output in outputs):
        outputs += engine.step()
    engine.executor.execute = watch
    engine.submit(ask_image(prompt, name, namespace))
    while pieces[0] < 2:
        outputs += engine.step()
    engine.executor.execute = execute
    return outputs


def ask_image(prompt: Prompt, name: str, namespace: str = "") -> EngineRequest:
    sampling = SamplingSpec(num_logprobs=VOCAB)
    return EngineRequest(name, list(prompt.ids), sampling, StopSpec(8), namespace=namespace, media=list(prompt.items))


def finish_all(engine: Engine, outputs: list[RequestOutput]) -> dict[str, list[RequestOutput]]:
    """The outputs by request, when all have ended."""
    while engine.has_work:
        outputs += engine.step()
    engine.check()
    return {name: [each for each in outputs if each.request_id == name] for name in {o.request_id for o in outputs}}


@pytest.fixture
def one_layer_a_step(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encoding, "BESIDE_TOKENS", 1)


@pytest.mark.usefixtures("one_layer_a_step")
def test_an_image_that_was_aborted_amid_its_layers_leaves_nothing(served: Any):
    model, folder = served
    first, other = (add_image(Prompt().text(3), (1, 8, 8), seed).text(4, 5) for seed in (0, 1))
    engine = start_engine(folder)
    outputs = begin_image(engine, first)
    engine.abort("image")
    engine.submit(ask_image(other, "other"))
    engine.submit(ask_image(first, "again"))
    found = finish_all(engine, outputs)
    compare(found["other"], expect(model, other))
    compare(found["again"], expect(model, first))
    assert found["image"][-1].finish.reason == "abort" and len(tokens_of(found["stream"])) == 60
    engine.close()


@pytest.mark.usefixtures("one_layer_a_step")
def test_the_same_image_of_another_salt_amid_its_layers(served: Any):
    model, folder = served
    prompt = add_image(Prompt().text(3), (1, 8, 8), 0).text(4, 5)
    engine = start_engine(folder)
    outputs = begin_image(engine, prompt)
    engine.submit(ask_image(prompt, "same"))
    engine.submit(ask_image(prompt, "salted", "salt"))
    found = finish_all(engine, outputs)
    for name in ("image", "same", "salted"):
        compare(found[name], expect(model, prompt))
    assert engine._scheduler._running.encoders.num_encoded == 2, "once for each salt"
    engine.close()


@pytest.mark.usefixtures("one_layer_a_step")
def test_an_engine_that_forgets_the_device_amid_the_layers_of_an_image(served: Any):
    """As before it sleeps, and when weights are replaced."""
    model, folder = served
    prompt = add_image(Prompt().text(3), (1, 8, 8), 0).text(4, 5)
    engine = start_engine(folder)
    outputs = begin_image(engine, prompt)
    engine.drain(retracts=True)
    assert engine.executor._runner._media._batch is None
    found = finish_all(engine, outputs)
    compare(found["image"], expect(model, prompt))
    assert len(tokens_of(found["stream"])) == 60
    engine.close()


@pytest.mark.usefixtures("one_layer_a_step")
def test_an_image_that_no_encoder_can_compute_fails_once(served: Any, monkeypatch: pytest.MonkeyPatch):
    """Those in the step fail with it, and nobody after them."""
    model, folder = served
    prompt = add_image(Prompt().text(3), (1, 8, 8), 0).text(4, 5)
    engine = start_engine(folder)
    outputs = begin_image(engine, prompt)
    media = engine.executor._runner._media
    with monkeypatch.context() as patch:
        patch.setattr(media._batch, "advance", lambda num_pieces: 1 // 0)
        while not any(output.finish for output in outputs):
            outputs += engine.step()
    found = finish_all(engine, outputs)
    assert {name for name, each in found.items() if each[-1].finish.error} == {"image", "stream"}
    compare(run(engine, [prompt])[0], expect(model, prompt))
    engine.close()


def test_a_target_between_tokens_changes_no_output(served: Any):
    model, folder = served
    engine = start_engine(folder, max_step_tokens=64, inter_token_target_ms=0.1)
    found, pieces = watch_beside(engine, Prompt([5]), prompts())
    for outputs, prompt in zip(found, prompts(), strict=True):
        compare(outputs, expect(model, prompt))
    assert sum(pieces) > 0, "how many at a time is up to the measured times of steps"
    engine.close()


def test_video(served: Any):
    model, folder = served
    kind = model.config.model_type
    prompt, seconds = add_image(Prompt().text(3), (1, 4, 4), 0).text(4), 1.5 if kind == "qwen2_5_vl" else None
    prompt = add_video(prompt, (3, 4, 6), 7, seconds, is_divided=kind.startswith("qwen3")).text(5, 6)
    engine = start_engine(folder, max_step_tokens=16)
    compare(run(engine, [prompt])[0], expect(model, prompt))
    engine.close()


def test_chunks_of_nothing_but_text_between_moments(tmp_path: Path):
    model, grid = make_qwen3(tmp_path), (3, 4, 6)
    runs = [[*range(20, 40), START_ID, *[VIDEO_ID] * 6, END_ID] for _ in range(grid[0])]
    prompt = Prompt().text(3).add(
        "video", pixels(grid, 7), 18, grid=grid, token=VIDEO_ID, name="pixel_values_videos", runs=runs
    ).text(5)
    engine = start_engine(tmp_path, max_step_tokens=8)
    compare(run(engine, [prompt])[0], expect(model, prompt))
    engine.close()


def test_hits_are_of_the_same_image_only(served: Any):
    model, folder = served
    first, other = (add_image(Prompt().text(3), (1, 8, 8), seed).text(4, 5, 6, 7, 8) for seed in (0, 1))
    engine = start_engine(folder)
    run(engine, [first])
    again, different = run(engine, [first, other])
    compare(again, expect(model, first))
    compare(different, expect(model, other))
    assert again[-1].num_cached_tokens >= 16
    assert different[-1].num_cached_tokens == 0
    engine.close()


def test_an_item_whose_grid_is_not_that_of_its_pixels_fails_alone(served: Any):
    model, folder = served
    engine = start_engine(folder)
    good, wrong = (add_image(Prompt().text(3), (1, 8, 8), seed) for seed in (0, 1))
    place = msgspec.structs.replace(wrong.items[0].place, grid=(1, 4, 8))
    wrong.items[0] = msgspec.structs.replace(wrong.items[0], place=place)
    served_alone, refused = run(engine, [good, wrong])
    compare(served_alone, expect(model, good))
    finish = refused[-1].finish
    assert finish is not None and finish.error is not None
    assert "grid [1, 4, 8] and 16 placeholders" in finish.error.message
    engine.close()


def test_retractions_change_nothing(served: Any):
    model, folder = served
    asks = [add_image(Prompt().text(3 + i), (1, 8, 8), i % 3).text(4, 5) for i in range(6)]
    engine = start_engine(folder, kv_pages=26, max_model_len=96, max_step_tokens=24)
    engine._scheduler._admission.forecast.share = 0.05  # too many are let in
    outputs = run(engine, asks, 24, logprobs=False)
    assert engine.stats().retracted_total > 0
    for found, prompt in zip(outputs, asks, strict=True):
        assert tokens_of(found) == expect(model, prompt, 24)[0]
    engine.close()
