"""Requests of text alone cost on a model for images or sound what they cost on the text model: the same operations, but
for positions behind images, which Qwen's find once a step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from media_rig import Prompt, run, start_engine
from test_audio_models import make_listener
from test_image_families import make_gemma3, make_internvl, make_llava, make_mistral3
from test_qwen_vl import make_qwen2_5, make_qwen3
from torch.utils._python_dispatch import TorchDispatchMode

HAS_POSITIONS = ("qwen2_5_vl", "qwen3_vl")
MOST_A_STEP = 8
"""Operations on the positions of a step's tokens: found, added, bounded, and copied to their places."""
CASES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "qwen2_5_vl": (make_qwen2_5, "Qwen2ForCausalLM"), "qwen3_vl": (make_qwen3, "Qwen3ForCausalLM"),
    "gemma3": (make_gemma3, "Gemma3ForCausalLM"), "llava": (make_llava, "LlamaForCausalLM"),
    "internvl": (make_internvl, "Qwen2ForCausalLM"), "mistral3": (make_mistral3, "MistralForCausalLM"),
    "qwen2_audio": (make_listener, "Qwen2ForCausalLM"),
}


class Count(TorchDispatchMode):
    """Operations by name and shape of what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.found[str(func), tuple(out.shape) if isinstance(out, torch.Tensor) else ()] += 1
        return out


def count(folder: Path, **options: Any) -> tuple[Counter[tuple[str, tuple[int, ...]]], int]:
    """Of two requests, a prompt in chunks and decodes, on an engine that has served others; and the steps it took."""
    engine = start_engine(folder, max_step_tokens=16, **options)
    run(engine, [Prompt().text(*range(50, 60))], 3, logprobs=False)
    before = engine.stats().steps_total
    with Count() as counted:
        run(engine, [Prompt().text(*range(3, 40)), Prompt().text(*range(41, 50))], 8, logprobs=False)
    num_steps = engine.stats().steps_total - before
    engine.close()
    return counted.found, num_steps


@pytest.mark.parametrize("name", CASES)
def test_text_alone_takes_the_operations_of_the_text_model(name: str, tmp_path: Path):
    make, architecture = CASES[name]
    make(tmp_path / "whole")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    text = getattr(transformers, architecture).config_class(**config["text_config"]).to_dict()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text(json.dumps({**text, "architectures": [architecture]}))
    (whole, num_steps), (alone, same) = count(tmp_path / "whole"), count(tmp_path / "text", load_format="dummy")
    assert num_steps == same and sum(alone.values()) > 100 * num_steps
    more = whole - alone
    if name in HAS_POSITIONS:
        assert sum(more.values()) <= MOST_A_STEP * num_steps and all(len(shape) == 1 for _, shape in more), more
    else:
        assert not more, more
