"""The requests of a benchmark: prompts, output lengths and, for traces, times. Everything is determined by the seed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeGuard

from headrace.base.errors import ConfigError
from headrace.serving.bench.options import TrafficOptions, parse_range

FIRST_TOKEN_ID = 1000
"""Smallest random id; special tokens of most vocabularies are below it or at the end."""
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place "
    "case week company system program question work government number night point home water room mother area money "
    "story fact month "
    "lot right study book eye job word business issue side kind head house service friend father power hour game line "
    "end member law car"
)
WORDS = tuple(_TEXT.split())
"""Common English words, one token each in most vocabularies after a space."""


Prompt = str | list[int] | list[dict[str, Any]]


@dataclass(frozen=True)
class TrafficRequest:
    """One request: ``prompt`` is text, token ids or chat messages; ``at_s``: seconds after the start, if timed."""

    prompt: Prompt
    max_tokens: int
    at_s: float | None = None


def make_traffic(
    options: TrafficOptions, num_requests: int, seed: int, *, as_text: bool = False
) -> list[TrafficRequest]:
    """``num_requests`` requests of the workload, or fewer if the trace is shorter; raises `ConfigError`. ``as_text``:
    random words, whatever the options say."""
    if options.workload == "trace":
        return read_trace(Path(options.trace or ""), num_requests, parse_range("output_len", options.output_len))
    random = Random(seed)
    source = _RandomText(random, None if as_text or options.random_words else options.max_token_id)
    lengths, output_lens = parse_range("input_len", options.input_len), parse_range("output_len", options.output_len)
    # All prefixes are sampled before the prompts, so the same seed gives the same prefixes for any number of requests.
    prefixes = (
        [source.sample(options.prefix_len) for _ in range(options.num_prefixes)] if options.workload == "shared-prefix"
        else [source.sample(0)]
    )
    return [
        TrafficRequest(
            source.join(prefixes[i % len(prefixes)], source.sample(random.randint(*lengths))),
            random.randint(*output_lens)
        )
        for i in range(num_requests)
    ]


@dataclass(frozen=True)
class _RandomText:
    """Source of random prompts: lists of token ids, or texts of random words if ``max_token_id`` is None."""

    random: Random
    max_token_id: int | None

    def sample(self, length: int) -> Any:
        if self.max_token_id is None:
            return " ".join(self.random.choice(WORDS) for _ in range(length))
        return [self.random.randint(FIRST_TOKEN_ID, self.max_token_id) for _ in range(length)]

    def join(self, prefix: Any, rest: Any) -> Any:
        return " ".join(filter(None, (prefix, rest))) if isinstance(prefix, str) else prefix + rest


def read_trace(path: Path, limit: int, default_lens: tuple[int, int]) -> list[TrafficRequest]:
    """Requests from JSON lines; ``max_tokens`` defaults to the upper end of ``default_lens``. Raises `ConfigError` with
    the line's number. Times count from the first one."""
    requests: list[TrafficRequest] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if len(requests) == limit:
                    break
                if line.strip():
                    requests.append(_read_request(line, f"{path}:{number}", default_lens[1]))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the trace {path}: {error}", param="trace") from error
    if not requests:
        raise ConfigError(f"the trace {path} holds no requests", param="trace")
    times = [request.at_s for request in requests]
    # A trace where any time is missing is sent without times.
    if None in times:
        return [TrafficRequest(request.prompt, request.max_tokens) for request in requests]
    first = min(time for time in times if time is not None)
    return [TrafficRequest(request.prompt, request.max_tokens, (request.at_s or 0.0) - first) for request in requests]


def _read_request(line: str, where: str, default_len: int) -> TrafficRequest:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}", param="trace") from error
    prompt = entry.get("prompt", entry.get("messages")) if isinstance(entry, dict) else None
    if not _is_prompt(prompt):
        raise ConfigError(f'{where} needs a "prompt" (text or token ids) or "messages"', param="trace")
    length, time = entry.get("max_tokens", default_len), entry.get("timestamp")
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ConfigError(f"{where}: max_tokens must be a number of tokens, got {length!r}", param="trace")
    if time is not None and (isinstance(time, bool) or not isinstance(time, (int, float))):
        raise ConfigError(f"{where}: timestamp must be seconds, got {time!r}", param="trace")
    return TrafficRequest(prompt, length, time)


def _is_prompt(value: Any) -> TypeGuard[Prompt]:
    if isinstance(value, str):
        return True
    return (
        isinstance(value, list) and bool(value)
        and (all(type(i) is int for i in value) or all(isinstance(m, dict) for m in value))
    )
