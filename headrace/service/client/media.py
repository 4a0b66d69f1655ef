"""`MediaPrompt`: a prompt whose placeholders have become the tokens of its media. Torch-free.

Refuses: fetching and decoding; items come prepared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from headrace.base.errors import RequestError
from headrace.base.media import MediaItem, find_runs, mark_beside
from headrace.base.media_facts import MediaFacts, check_media
from headrace.base.messages import EngineRequest, ModelFacts
from headrace.service.client.prompts import encode_prompt, require_tokenizer
from headrace.service.media.wire import PreparedItem
from headrace.service.tokenization import Tokenizer

T = TypeVar("T", str, int)


@dataclass(frozen=True)
class MediaPrompt:
    """Token ids, and the items with their places among them; ``text`` is what was encoded, if it was text."""

    token_ids: list[int]
    items: list[MediaItem]
    text: str | None = None

    def __len__(self) -> int:
        """Tokens, those of media included."""
        return len(self.token_ids)


def place_items(
    prompt: str | Sequence[int], items: Sequence[PreparedItem], tokenizer: Tokenizer | None, facts: ModelFacts, *,
    add_special_tokens: bool = True, param: str = "prompt",
) -> MediaPrompt:
    """Put items in the places of their placeholders, each kind in its own order. Raises `RequestError` where there are
    more or fewer placeholders than items, and `ContextLengthExceeded` for a text that is far too long."""
    assert facts.media is not None, "checked before the items were prepared"
    if facts.media.is_alone:
        return _place_alone(prompt, items, param)
    known, media = require_tokenizer(tokenizer), facts.media
    if media.speech is not None:  # its prompts are made of special tokens alone, and begin with the clip
        add_special_tokens, mark = False, media.texts["audio"]
        prompt = mark + prompt if items and isinstance(prompt, str) and mark not in prompt else prompt
    if isinstance(prompt, str) and all(item.text is not None for item in items):
        # As processors do it: tokens may reach from an item's text into that around it.
        whole = "".join(_fill(_split(prompt, media), items, media, lambda item: [item.text or ""], param))
        ids = encode_prompt(whole, known, add_special_tokens=add_special_tokens, most=facts.max_model_len)
    else:
        given = encode_prompt(prompt, known, add_special_tokens=add_special_tokens, most=facts.max_model_len)
        marks = {kind: known.encode(text, add_special_tokens=False) for kind, text in media.texts.items()}
        ids = list(_fill(_split_ids(given, marks), items, media, lambda item: item.token_ids, param))
    placed: list[MediaItem] = []
    for kind, token_id in media.token_ids.items():
        own = [item.item for item in items if item.item.place.kind == kind]
        runs = find_runs(ids, token_id, [each.place.num_tokens for each in own])
        placed += [
            msgspec.structs.replace(each, place=msgspec.structs.replace(each.place, runs=places))
            for each, places in zip(own, runs, strict=True)
        ]
    placed.sort(key=lambda item: item.place.offset)
    places = mark_beside([item.place for item in placed], media.beside)
    placed = [msgspec.structs.replace(item, place=place) for item, place in zip(placed, places, strict=True)]
    return MediaPrompt(ids, placed, prompt if isinstance(prompt, str) else None)


def _place_alone(prompt: str | Sequence[int], items: Sequence[PreparedItem], param: str) -> MediaPrompt:
    """The prompt of an image that is embedded by itself."""
    if len(items) != 1 or len(prompt):
        raise RequestError(
            "this model embeds a text or an image at a time: send one image without text, and texts by themselves",
            param=param,
        )
    return MediaPrompt(items[0].token_ids, [items[0].item])


def with_media(requests: list[EngineRequest], items: list[MediaItem], facts: ModelFacts) -> list[EngineRequest]:
    """Requests with the media of their common prompt; only the first carries their arrays, and the engine gives them to
    the others, which follow it. Raises `RequestError` for placeholders without an item."""
    if facts.media is not None or items:
        check_media(items, requests[0].prompt_token_ids, facts.media)
    if not items:
        return requests
    replace = msgspec.structs.replace
    first = [replace(item, num_followers=len(requests) - 1) for item in items]
    bare = [replace(item, arrays={}) for item in items]
    return [replace(request, media=bare if number else first) for number, request in enumerate(requests)]


def _split(prompt: str, media: MediaFacts) -> Iterator[tuple[str | None, Sequence[str]]]:
    """Pieces of a text, and the kinds of media whose marks stand between them."""
    kinds = {text: kind for kind, text in media.texts.items()}
    for piece in re.split("(" + "|".join(map(re.escape, kinds)) + ")", prompt):
        yield kinds.get(piece), [piece]


def _split_ids(ids: list[int], marks: dict[str, list[int]]) -> Iterator[tuple[str | None, Sequence[int]]]:
    """Runs of ids, and the kinds of media whose marks stand between them."""
    firsts = {mark[0] for mark in marks.values()}
    begin = done = 0
    while begin < len(ids):
        kind = None
        if ids[begin] in firsts:
            kind = next((kind for kind, mark in marks.items() if ids[begin : begin + len(mark)] == mark), None)
        if kind is None:
            begin += 1
            continue
        yield None, ids[done:begin]
        yield kind, ()
        begin = done = begin + len(marks[kind])
    yield None, ids[done:]


def _fill(
    pieces: Iterable[tuple[str | None, Sequence[T]]], items: Sequence[PreparedItem], media: MediaFacts,
    spell: Callable[[PreparedItem], Sequence[T]], param: str,
) -> Iterator[T]:
    """The pieces with each item in the place of a mark of its kind. Raises `RequestError` unless there are as many."""
    waiting = {kind: [item for item in items if item.item.place.kind == kind] for kind in media.kinds}
    counts = dict.fromkeys(media.kinds, 0)
    for kind, piece in pieces:
        if kind is None:
            yield from piece
            continue
        if counts[kind] < len(waiting[kind]):
            yield from spell(waiting[kind][counts[kind]])
        counts[kind] += 1
    for kind, count in counts.items():
        _check_count(count, len(waiting[kind]), kind, media, param)


def _check_count(num_places: int, num_items: int, kind: str, media: MediaFacts, param: str) -> None:
    if num_places == num_items:
        return
    text = media.texts[kind]
    raise RequestError(
        f"the {param} has {num_places} places for media of the kind {kind} ({text!r}), and there are {num_items} of "
        f"them: write {text!r} once for each, and nowhere else", param=param
    )
