"""What an answer says, whatever route it came from and however it was cut into events; and how two runs compare."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.serving.replay.folder import Record

TEXTS = frozenset(
    {"text", "content", "reasoning_content", "thinking", "response", "arguments", "partial_json", "delta", "name"}
)
"""Fields whose text is what a model said. Pieces of a stream are joined, field by field."""

NUMBERS = frozenset({"score", "relevance_score", "embedding", "probs", "data"})
DIGITS = 3
"""Of numbers that are compared: half precision and other batches move the rest."""

TOKENS = ("completion_tokens", "output_tokens", "eval_count")

Said = dict[tuple[str, str], str]
"""By the index of the choice or item, and the field."""


def said_in(answer: str) -> Said | None:
    """What an answer says; None when it cannot be told."""
    said: defaultdict[tuple[str, str], str] = defaultdict(str)
    for document in _documents(answer):
        is_whole = isinstance(document, dict) and "meta_info" in document  # such a frame has all text so far
        _gather(document, said, index="0", replaces=is_whole)
    return dict(said) or None


def count_tokens(answer: str) -> int:
    """Output tokens, as the answer tells them; 0 when it does not."""
    return max((n for document in _documents(answer) for n in _find_tokens(document)), default=0)


def _documents(answer: str) -> Iterator[Any]:
    """The JSON of an answer: all of it, or each event or line of a stream."""
    whole = _parse(answer)
    if whole is not None:
        yield whole
        return
    for line in answer.splitlines():
        document = _parse(line.removeprefix("data:").strip())
        if document is not None:
            yield document


def _parse(text: str) -> Any:
    try:
        parsed = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict | list) else None


def _gather(
    value: Any, said: dict[tuple[str, str], str], *, index: str, replaces: bool = False, name: str = ""
) -> None:
    if isinstance(value, dict):
        own = value.get("index", value.get("output_index"))
        index = f"{index}/{own}" if isinstance(own, int) else index
        for key, item in value.items():
            _gather(item, said, index=index, replaces=replaces, name=key)
    elif isinstance(value, list):
        if name in NUMBERS and all(isinstance(x, int | float) for x in value):
            said[index, name] += str([round(x, DIGITS) for x in value])
        else:
            for item in value:
                _gather(item, said, index=index, replaces=replaces, name=name)
    elif isinstance(value, str) and name in TEXTS:
        said[index, name] = value if replaces else said[index, name] + value
    elif isinstance(value, float) and name in NUMBERS:
        said[index, name] += str(round(value, DIGITS))


def _find_tokens(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        yield from (n for name in TOKENS if isinstance(n := value.get(name), int))
        for item in value.values():
            yield from _find_tokens(item)
    elif isinstance(value, list):
        for item in value:
            yield from _find_tokens(item)


def is_random(record: Record) -> bool:
    """Whether a request drew at random and named no seed: its answer may differ each time."""
    body = msgspec.json.decode(record.body)
    if not isinstance(body, dict):
        return False
    params = body.get("sampling_params") if isinstance(body.get("sampling_params"), dict) else body.get("options")
    fields = {**body, **(params if isinstance(params, dict) else {})}
    return fields.get("temperature") != 0 and fields.get("seed") is None and fields.get("sampling_seed") is None


@dataclass
class Comparison:
    """Counts of a replay against its recording. ``differing`` has the ids of answers that say something else, without
    those that were drawn at random."""

    num_sent: int = 0
    num_unreachable: int = 0
    same_status: int = 0
    same_answer: int = 0
    different_answer: int = 0
    different_random: int = 0
    not_comparable: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    differing: list[str] = field(default_factory=list)


def compare(pairs: Sequence[tuple[Record, Record]]) -> Comparison:
    """Of ``(recorded, replayed)`` requests. A replayed status of 0 means that no answer came."""
    result = Comparison(num_sent=len(pairs))
    for before, after in pairs:
        if not after.status:
            result.num_unreachable += 1
            continue
        if before.status != after.status:
            result.statuses[f"{before.status} -> {after.status}"] += 1
            continue
        result.same_status += 1
        _compare_answers(before, after, result)
    return result


def _compare_answers(before: Record, after: Record, result: Comparison) -> None:
    whole = before.is_complete and after.is_complete and not before.is_answer_cut and not after.is_answer_cut
    first, second = (said_in(record.answer) if whole and record.status == 200 else None for record in (before, after))
    if first is None or second is None:
        result.not_comparable += 1
    elif first == second:
        result.same_answer += 1
    elif is_random(before):
        result.different_random += 1
    else:
        result.different_answer += 1
        result.differing.append(before.request_id)
