"""Images in captured steps: the end of a repeated image, and text behind one, take graphs and compute the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from media_rig import compare, logprobs_of, run, run_beside, start_engine, tokens_of
from pretended_device import DEVICE, PretendedDevice
from test_qwen_vl import MAKERS, Prompt, add_image, expect, make_qwen2_5, oracle_inputs

from headrace.base.config import engine_config
from headrace.execution import warmup
from headrace.execution.graph_sizes import GraphSizes
from headrace.execution.graphs import MixedGraphPath
from headrace.execution.media import StaticMedia
from headrace.execution.step import StepFeature
from headrace.layers.batch import MediaVectors
from headrace.layers.media import CapturedVectors
from headrace.layers.rotary import RotaryTable
from headrace.layers.spec import RopeSpec
from headrace.scheduling import budget
from headrace.service.build import build_engine
from headrace.service.engine import Engine
from tests.execution.pretended_graphs import PretendedRecorder, open_attention


def count_paths(engine: Engine) -> Counter[str]:
    """Let steps be captured, and count which take graphs: of ``text`` alone, or with ``media``."""
    runner = engine.executor._runner
    open_attention(runner, 64)
    runner.capture(GraphSizes([8], [8, 16]), PretendedRecorder())
    taken: Counter[str] = Counter()
    for path in runner.paths:
        kind = type(path).__name__
        if isinstance(path, MixedGraphPath):
            kind = "media" if StepFeature.MEDIA in path.covers else "text"

        def prepare(step: Any, upload: Any, prepare: Any = path.prepare, kind: str = kind) -> Any:
            launch = prepare(step, upload)
            taken[kind] += launch is not None
            return launch

        path.prepare = prepare
    return taken


@pytest.mark.parametrize("kind", MAKERS)
def test_ends_of_images_and_text_behind_them_take_graphs(kind: str, tmp_path: Path):
    model = MAKERS[kind](tmp_path)
    engine = start_engine(tmp_path, page_size=8)
    taken = count_paths(engine)
    first = add_image(Prompt().text(3, 4, 5), (1, 8, 12), 0).text(4, 5, 6)  # 24 placeholders end at 28 of 32
    longer = add_image(Prompt().text(3, 4, 5), (1, 8, 12), 0).text(4, 5, 6, *range(10, 18))
    compare(run(engine, [first])[0], expect(model, first))
    assert taken["PlainPath"] == 1 and not taken["media"]
    compare(run(engine, [first])[0], expect(model, first))
    assert taken["PlainPath"] == 1 and taken["media"] == 1 and not taken["text"]
    # the first page behind the image is cached now: what is left of the longer prompt is text
    compare(run(engine, [longer])[0], expect(model, longer))
    compare(run(engine, [longer])[0], expect(model, longer))
    assert taken["text"] and taken["PlainPath"] == 1
    other = add_image(Prompt().text(9), (1, 4, 6), 1).text(9, 9)
    both = run(engine, [longer, other, first])
    for outputs, prompt in zip(both, (longer, other, first), strict=True):
        compare(outputs, expect(model, prompt))
    engine.close()


@pytest.mark.parametrize("kind", MAKERS)
def test_prompts_beside_a_stream_take_graphs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Chunk by chunk; a whole one would be larger than all that is captured."""
    monkeypatch.setattr(budget, "MEDIA_CHUNK", 16)
    model = MAKERS[kind](tmp_path)
    engine = start_engine(tmp_path, page_size=8)
    taken = count_paths(engine)
    prompt = add_image(Prompt().text(3, 4, 5), (1, 8, 12), 0).text(4, 5, 6)
    found = run_beside(engine, Prompt().text(7, 8, 9), [prompt])
    compare(found[0], expect(model, prompt))
    assert taken["media"] >= 2 and not taken["PlainPath"]
    engine.close()


@pytest.mark.parametrize("kind", MAKERS)
def test_small_images_are_encoded_before_the_first(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Products of some rows have kernels of their own, which would be compiled while a request waits."""
    MAKERS[kind](tmp_path)
    monkeypatch.setattr(warmup, "precompile", lambda run, about, device: run())
    finish, sizes = warmup.finish, []

    def note(pieces: Any) -> Any:
        found = finish(pieces)
        sizes.append(sum(map(len, found)))
        return found

    monkeypatch.setattr(warmup, "finish", note)
    start_engine(tmp_path, max_encoder_tokens=50).close()
    assert sizes == [4, 9, 16, 25, 36]


def test_no_position_is_outside_of_the_table(tmp_path: Path):
    """Text behind an image is rotated by less than its position; those of the prompt before it, which nobody is rotated
    by, stay as padding of captured steps."""
    make_qwen2_5(tmp_path)
    engine = start_engine(tmp_path, page_size=8)
    image = add_image(Prompt().text(3), (1, 8, 12), 0).text(4)
    run(engine, [image])
    runner = engine.executor._runner
    assert runner._media.offsets.min() == -18
    static, most = runner._inputs.static.rope_positions, engine.executor._model._loaded.model.media.rope_length
    assert static.min() >= 0 and static.max() == len(image.ids) + 7 - 1 - 18
    found = runner._media.find_positions(torch.zeros(2, dtype=torch.int64), torch.tensor([0, most + 18]))
    assert found.tolist() == [0, most - 1]
    engine.close()


def test_what_is_captured_neither_waits_nor_mixes_devices():
    """Vectors in their places, parts behind layers, and rotations by three axes, on a device that is not there."""
    table = RotaryTable(RopeSpec(1e4, 12, sections=(2, 2, 2)), length=16, device=DEVICE)
    with PretendedDevice() as device:
        static = StaticMedia(8, CapturedVectors(8, torch.float32), DEVICE)
        indices, found = torch.tensor([1, 2], device=DEVICE), torch.ones(2, 8, device=DEVICE)
        static.write(4, indices, [found])
        media = MediaVectors(None, static.vectors[:4], mask=static.mask[:4])
        x = media.replace_embeddings(torch.zeros(4, 4, device=DEVICE))
        media.add_part(1, x)
        device.adopt([table.cos_sin, table.axes])
        rotations = table.combine(static.axes[:, :4])
        assert rotations.device == DEVICE
    assert not device.mixed and not device.waits
    assert x.sum(dim=1).tolist() == [0.0, 8.0, 8.0, 0.0] and tuple(rotations.shape) == (4, 12)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", MAKERS)
def test_images_through_graphs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a GPU, in half precision: fresh images and repeated ones, of which graphs compute the ends, text after them,
    and an image that is encoded in pieces beside a stream, and whose prompt is computed in chunks there."""
    monkeypatch.setattr(budget, "MEDIA_CHUNK", 16)
    model = MAKERS[kind](tmp_path)
    engine = build_engine(engine_config(
        model=str(tmp_path), device="cuda", dtype="float16", skip_tokenizer=True, max_running_requests=8, kv_pages=100,
        graphs="on",
    ))
    first = add_image(Prompt().text(3, 4, 5), (1, 8, 12), 0).text(4, 5, 6)
    longer = add_image(Prompt().text(3, 4, 5), (1, 8, 12), 0).text(4, 5, 6, *range(10, 30))
    other = add_image(Prompt().text(3, 4, 5), (1, 8, 8), 5).text(4, 5, 6)
    for asks in ([first], [first], [longer], [longer, first], [Prompt([5, 6, 7])], [other]):
        outputs_of_all = run_beside(engine, Prompt([5]), asks) if asks == [other] else run(engine, asks)
        for outputs, prompt in zip(outputs_of_all, asks, strict=True):
            found, tokens = logprobs_of(outputs), tokens_of(outputs)
            ids = torch.tensor([[*prompt.ids, *tokens]])
            inputs = oracle_inputs(Prompt(ids[0].tolist(), prompt.items))
            with torch.no_grad():
                logits = model(input_ids=ids, **inputs).logits[0, -1 - len(tokens) : -1]
            torch.testing.assert_close(found, logits.log_softmax(-1), atol=0.05, rtol=0.02)
    engine.close()
