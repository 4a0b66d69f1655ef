"""Encodes long texts a piece at a time: the ``tokenizers`` library needs about a hundred times the text's memory.

The ids must equal those of the whole text, and merges cross arbitrary positions. So a cut is made only at a word
boundary, or within a long word at a boundary of tokens, that was verified: the ids of the characters before it are the
same with and without what follows, and the same wherever encoding begins. The next piece is encoded together with
``around`` characters before the cut as left context, whose ids are then dropped. Where no cut can be verified the piece
grows, to `MOST` characters: then it is cut anyway, which bounds memory and time; the ids still decode to the text.
Lengths and positions are in characters (Unicode code points).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

PIECE, AROUND, MOST = 1 << 17, 1 << 12, 1 << 19
"""Characters encoded at once, characters of context that are encoded to verify a cut, and the most characters encoded
at once where no cut can be verified."""
NUM_TRIED, NUM_ALIKE = 8, 64
"""Candidates tried per kind of boundary, and ids before a cut that must not depend on where the encoding begins."""
_WORD_BEGINS, _WORD_ENDS = re.compile(r"(?<=\S)(?=\s)"), re.compile(r"(?<=\w)(?=\W)")

Encode = Callable[[str], list[int]]


class Interrupted(Exception):
    """Nobody waits for the result any more."""


_INTERRUPT: ContextVar[threading.Event | None] = ContextVar("interrupt", default=None)


@contextmanager
def interruptible(event: threading.Event) -> Iterator[None]:
    """Encoding within the block, in this thread, raises `Interrupted` between two pieces once the event is set."""
    token = _INTERRUPT.set(event)
    try:
        yield
    finally:
        _INTERRUPT.reset(token)


def check_interrupt() -> None:
    """Raise `Interrupted` if the work around is to stop."""
    event = _INTERRUPT.get()
    if event is not None and event.is_set():
        raise Interrupted


@dataclass(frozen=True)
class Encoder:
    """What encodes a piece. ``starts`` gives the positions at which the tokens of a short text begin. ``fused_id`` is
    the id of a run of unknown text, which must not become two where it is cut."""

    encode: Encode
    starts: Callable[[str], list[int]] = lambda text: []
    fused_id: int | None = None


def encode_pieces(
    text: str, encoder: Encoder, *, size: int = PIECE, around: int = AROUND, most: int = MOST
) -> Iterator[list[int]]:
    """The ids that the encoder gives for the text, in pieces of about ``size`` characters. Where no cut can be verified
    (merges that depend on distant text) a piece is doubled, up to ``most`` characters."""
    # ``before``: ids of the ``around`` characters before ``begin``, encoded alone.
    begin, before, length, last_id = 0, list[int](), size, -1
    while len(text) - begin > length + around:
        check_interrupt()
        end = begin + length
        ids, num_before = _encode_behind(text, begin, end, before, encoder, around)
        cut = _find_cut(text, end, ids, encoder, around)
        if cut is None and 2 * length <= most:
            length *= 2
            continue
        begin, before, num_after = cut or (end, [], 0)
        length = size
        kept = ids[num_before : len(ids) - num_after]
        yield kept[_is_fused(last_id, kept, encoder):]
        last_id = kept[-1] if cut is None and kept else -1
    check_interrupt()
    ids, num_before = _encode_behind(text, begin, len(text), before, encoder, around)
    yield ids[num_before + _is_fused(last_id, ids[num_before:], encoder):]


def _is_fused(last_id: int, ids: list[int], encoder: Encoder) -> bool:
    """Whether the first of the ids continues a run of unknown text that an unverified cut has split."""
    return bool(ids) and last_id == encoder.fused_id == ids[0]


def encode_end(
    text: str, enough: int, encoder: Encoder, *, length: int, size: int = PIECE, around: int = AROUND
) -> list[int] | None:
    """At least ``enough`` of the last ids that the encoder gives for the text. Encodes about ``length`` characters of
    its end, doubled until they have that many. None when only the whole text would do. With more than `MOST` characters
    an unverified beginning will do."""
    while length + 2 * around + 1 < len(text):
        check_interrupt()
        found = _find_begin(text, len(text) - length, encoder, around)
        if found is None and length > MOST:
            found = len(text) - length, encoder.encode(text[len(text) - length - around : len(text) - length])
        if found is not None:
            begin, before = found
            ids = [
                i for piece in encode_pieces(text[begin - around :], encoder, size=size, around=around) for i in piece
            ]
            is_whole = ids[: len(before)] == before or length > MOST
            if is_whole and len(ids) - len(before) >= enough:
                return ids[len(before) :]
        length *= 2
    return None


def _find_begin(text: str, latest: int, encoder: Encoder, around: int) -> tuple[int, list[int]] | None:
    """``(position, ids of the characters before it)`` of a verified token boundary at or before ``latest``; None when
    no candidate holds. The left context is encoded with ``around`` and over twice as many characters to see whether the
    ids depend on where encoding begins; not just twice as many, as the tokens of a run repeat."""
    for position in _positions(text, latest - around, latest, encoder):
        before, more, both = (
            encoder.encode(text[position - back : position + ahead]) for back,
            ahead in ((around, 0), (2 * around + 1, 0), (around, around))
        )
        num_alike = min(NUM_ALIKE, len(before) // 2)
        if num_alike and both[: len(before)] == before and more[-num_alike:] == before[-num_alike:]:
            return position, before
    return None


def _encode_behind(
    text: str, begin: int, end: int, before: list[int], encoder: Encoder, around: int
) -> tuple[list[int], int]:
    """Ids of ``text[begin:end]`` with its left context, and how many of them belong to the context."""
    ids = encoder.encode(text[max(0, begin - around) : end]) if before or not begin else []
    if ids[: len(before)] == before and (before or not begin):
        return ids, len(before)
    # The verified boundary does not hold with this much text behind it. Without context the ids at the seam may differ
    # from those of the whole text, but they still decode to it.
    return encoder.encode(text[begin:end]), 0


def _find_cut(
    text: str, end: int, ids: list[int], encoder: Encoder, around: int
) -> tuple[int, list[int], int] | None:
    """A verified token boundary before ``end``, where ``ids`` are the ids up to ``end``: ``(position, ids of the
    characters before it, number of the last ids in ids that lie behind it)``. None when no candidate holds."""
    # At least ``around`` characters stay behind the cut: the last ids before ``end`` may change with what follows.
    encode = encoder.encode
    for position in _positions(text, end - 2 * around, end - around, encoder):
        before, both = encode(text[position - around : position]), encode(text[position - around : end])
        num_alike = min(NUM_ALIKE, len(before) // 2)
        seen = both[len(before) - num_alike :]
        if num_alike and both[: len(before)] == before and ids[-len(seen) :] == seen:
            return position, before, len(both) - len(before)
    return None


def _positions(text: str, first: int, last: int, encoder: Encoder) -> Iterator[int]:
    """Candidates for a cut: before white space first, then at other word ends, then between any tokens; the last ones
    of each kind first."""
    seen = set[int]()
    for pattern in (_WORD_BEGINS, _WORD_ENDS):
        found = [match.start() for match in pattern.finditer(text, first, last)][-NUM_TRIED:]
        yield from (position for position in reversed(found) if position not in seen)
        seen.update(found)
    found = [first + start for start in encoder.starts(text[first:last]) if start > 0][-NUM_TRIED:]
    yield from (position for position in reversed(found) if position not in seen)
