"""Random traffic over a real tiny model, with steps that fail inside it: accounts are proven after every step, every
request ends exactly once, and what it said until then is what it says alone."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.base.config import engine_config
from headrace.base.messages import EngineRequest, Finish, RequestOutput
from headrace.base.sampling import LogitRules, Penalties, SamplingSpec, StopSpec
from headrace.service.build import build_engine
from headrace.service.engine import Engine

EOS, MAX_MODEL_LEN = 2, 64
SHAPE = {
    "vocab_size": 199, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128, "initializer_range": 0.3, "eos_token_id": EOS,
}
FULL = {**SHAPE, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
WINDOWED = {
    **SHAPE, "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 2, "sliding_window": 9,
    "query_pre_attn_scalar": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}


class Boom(RuntimeError):
    """What a broken kernel raises."""


class Traffic:
    """Submits, aborts and breaks at random; remembers what was asked and what came."""

    def __init__(self, engine: Engine, seed: int):
        self.engine, self.draw = engine, random.Random(seed)
        self.asked: dict[str, EngineRequest] = {}
        self.live: dict[str, list[int]] = {}
        self.ended: dict[str, tuple[Finish, list[int]]] = {}
        self.shared = [[self.draw.randrange(3, 199) for _ in range(40)] for _ in range(2)]
        self.is_breaking = False
        model = engine.executor._runner._model
        self._forward, model.forward = model.forward, self._forward_or_break

    def _forward_or_break(self, batch: Any) -> Any:
        if self.is_breaking:
            self.is_breaking = False
            raise Boom
        return self._forward(batch)

    def act(self) -> None:
        draw = self.draw
        for _ in range(draw.choice((0, 0, 1, 1, 3))):
            prompt = (
                draw.choice(self.shared)[: draw.choice((0, 8, 16, 33, 40))]
                + [draw.randrange(3, 199) for _ in range(draw.choice((1, 1, 3, 12)))]
            )
            sampling = SamplingSpec(
                temperature=draw.choice((0.0, 0.0, 1.0)), seed=draw.randrange(9), top_k=draw.choice((0, 10)),
                num_prompt_logprobs=draw.choice((-1, -1, 0)),
                penalties=draw.choice((None, Penalties(1.3, 0.2, 0.1))),
                rules=draw.choice((None, LogitRules(bias={5: 2.0}, min_tokens=3, held_ids=[EOS]))),
            )
            stop = StopSpec(min(draw.choice((1, 3, 10, 40)), MAX_MODEL_LEN - len(prompt)), 0, [EOS])
            request = EngineRequest(
                f"r{len(self.asked)}", prompt, sampling, stop, draw.choice(("", "", "other")), draw.randrange(3)
            )
            self.asked[request.request_id], self.live[request.request_id] = request, []
            self.engine.submit(request)
        if self.live and draw.random() < 0.1:
            self.engine.abort(draw.choice(list(self.live)))
        if draw.random() < 0.03:
            self.engine.abort("nobody")
            self.engine.reset_prefix_cache()
        self.is_breaking |= draw.random() < 0.04

    def step(self) -> None:
        for output in self.engine.step():
            self.take(output)
        self.engine.check()

    def take(self, output: RequestOutput) -> None:
        self.live[output.request_id] += output.token_ids
        if output.finish is not None:
            self.ended[output.request_id] = (output.finish, self.live.pop(output.request_id))


def build(folder: Path, **options: Any) -> Engine:
    usual = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "threads": 1, "max_model_len": MAX_MODEL_LEN}
    return build_engine(engine_config(model=str(folder), **{**usual, **options}))


def say_alone(engine: Engine, request: EngineRequest) -> list[int]:
    alone = msgspec.structs.replace(
        request, sampling=msgspec.structs.replace(request.sampling, num_prompt_logprobs=-1), namespace=""
    )
    engine.submit(alone)
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.token_ids]
    return tokens


@pytest.mark.parametrize(("seed", "config", "options"), [
    (1, FULL, {"page_size": 1, "kv_pages": 70, "overlap_depth": 2, "max_step_tokens": 11}),
    (
        2, FULL,
        {
            "page_size": 4, "kv_pages": 20, "overlap_depth": 1, "max_running_requests": 5, "policy": "priority",
            "starvation_steps": 4
        }
    ),
    (
        3, WINDOWED,
        {"page_size": 4, "kv_pages": 40, "overlap_depth": 2, "max_step_tokens": 32, "policy": "longest-prefix"}
    ),
    (4, WINDOWED, {"page_size": 16, "kv_pages": 9, "overlap_depth": 2, "max_queued": 8, "max_step_tokens": 8}),
])
def test_random_traffic(seed: int, config: dict[str, Any], options: dict[str, Any], tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    traffic = Traffic(build(tmp_path, **options), seed)
    for _ in range(80):
        traffic.act()
        traffic.step()
    while traffic.engine.has_work:
        traffic.step()
    stats = traffic.engine.stats()
    assert not traffic.live and traffic.ended.keys() == traffic.asked.keys()
    assert stats.num_used_pages == stats.num_running == stats.num_queued == 0 and stats.failed_steps_total > 0
    assert traffic.engine.reset_prefix_cache() and traffic.engine.stats().num_evictable_pages == 0
    errors = {finish.error.kind for finish, _ in traffic.ended.values() if finish.error}
    assert "step_failed" in errors and errors <= {"step_failed", "queue_full"}
    reference = build(tmp_path, page_size=8, kv_pages=100, prefix_cache=False, overlap_depth=1, max_step_tokens=256)
    for request_id in random.Random(seed).sample(sorted(traffic.ended), 25):
        finish, tokens = traffic.ended[request_id]
        expected = say_alone(reference, traffic.asked[request_id])
        assert expected[: len(tokens)] == tokens
        assert finish.reason in ("abort", "error") or expected == tokens
