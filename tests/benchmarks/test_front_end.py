"""The engine that computes nothing goes on with what engines are asked for."""

from __future__ import annotations

import pytest

from benchmarks.front_end import STEPS, build_idle_engine
from headrace.base.config import engine_config
from headrace.base.sampling import SamplingParams
from headrace.service.client.requests import build_requests


def test_an_idle_engine_answers_and_tells_its_counters(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(STEPS, "1,1,0")
    engine = build_idle_engine(engine_config(model="idle", device="cpu"), None)
    params = SamplingParams(max_tokens=3, temperature=0.0, detokenize=False)
    for request in build_requests("r", [5, 6, 7], params, facts=engine.executor.facts, tokenizer=None):
        engine.submit(request)
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
    stats = engine.stats()
    assert len(tokens) == stats.generation_tokens_total == 3 and stats.prompt_tokens_total == 3
    engine.close()
