"""`Counters`: what happened since start; `EngineStats` is made from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since start, in tokens, requests or steps as named."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    generation_tokens: int = 0
    aborted: int = 0
    retracted: int = 0
    failed_steps: int = 0
    steps: int = 0
