"""Images in captured steps: the end of a repeated image, and text behind one, take graphs and compute the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from media_rig import compare, run, start_engine
from test_qwen_vl import MAKERS, Prompt, add_image, expect

from headrace.execution.graphs import GraphSizes, MixedGraphPath
from headrace.execution.step import StepFeature
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
