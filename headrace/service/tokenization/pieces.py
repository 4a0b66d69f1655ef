"""Encodes long texts a piece at a time: the ``tokenizers`` library needs about a hundred times the text's memory.

The ids must equal those of the whole text, and merges cross arbitrary positions. So a cut is made only at a word
boundary, or within a long word at a boundary of tokens, that was verified: the ids of the characters before it are the
same with and without what follows, and the same wherever encoding begins. The next piece is encoded together with
``around`` characters before the cut as left context, whose ids are then dropped. Where no cut can be verified the piece
grows, to `MOST` characters: then it is cut anyway, which bounds memory and time; the ids still decode to the text, but
for a space that some vocabularies put before whatever they encode.
Lengths and positions are in characters (Unicode code points).
"""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
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
    cut, length, last_id = _Cut(0, 0, []), size, -1
    while len(text) - cut.position > length + around:
        check_interrupt()
        span, ids = _encode_behind(text, cut, cut.position + length, encoder)
        found = _find_cut(text, span, ids, encoder, around)
        if found is None and 2 * length <= most:
            length *= 2
            continue
        num_before = len(cut.before) if span[0] < cut.position else 0
        kept = ids[num_before : len(ids) - (found.num_after if found is not None else 0)]
        yield kept[_is_fused(last_id, kept, encoder):]
        last_id = kept[-1] if found is None and kept else -1
        cut, length = found or _Cut(span[1], 0, []), size
    check_interrupt()
    span, ids = _encode_behind(text, cut, len(text), encoder)
    kept = ids[len(cut.before) if span[0] < cut.position else 0 :]
    yield kept[_is_fused(last_id, kept, encoder):]


@dataclass(frozen=True)
class _Cut:
    """A place to cut at: ``before`` are the ids of the ``back`` characters before it, encoded alone; the piece that it
    ends has ``num_after`` ids behind it."""

    position: int
    back: int
    before: list[int]
    num_after: int = 0


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
    encode = encoder.encode
    first = latest - around
    for position, _ in _positions(text, first, latest, lambda: _starts(text, first, latest, encoder)):
        before = encode(text[position - around : position])
        more = encode(text[position - 2 * around - 1 : position])
        num_alike = min(NUM_ALIKE, len(before) // 2)
        if (
            num_alike and more[-num_alike:] == before[-num_alike:]
            and _begins(text, position - around, position + around, before, encode)
        ):
            return position, before
    return None


def _begins(text: str, begin: int, end: int, before: list[int], encode: Encode) -> bool:
    """Whether these are the first ids of the text from ``begin`` on, wherever it ends: in a run of one character with
    tokens of several, a remainder may be first or last."""
    return all(encode(text[begin:other])[: len(before)] == before for other in (end, end - 1))


def _encode_behind(text: str, cut: _Cut, end: int, encoder: Encoder) -> tuple[tuple[int, int], list[int]]:
    """``(span, its ids)`` of the text from a cut to ``end``, with the left context."""
    span = cut.position - cut.back, end
    ids = encoder.encode(text[slice(*span)])
    if ids[: len(cut.before)] == cut.before:
        return span, ids
    # The verified boundary does not hold with this much text behind it. Without context the ids at the seam may differ
    # from those of the whole text, but they still decode to it.
    return (cut.position, end), encoder.encode(text[cut.position : end])


def _find_cut(text: str, span: tuple[int, int], ids: list[int], encoder: Encoder, around: int) -> _Cut | None:
    """A verified token boundary in a span of the text, whose ids are ``ids``; None when no candidate holds."""
    # At least ``around`` characters stay behind the cut: the last ids before the end may change with what follows.
    encode, end = encoder.encode, span[1]
    for position, back in _positions(
        text, end - 2 * around, end - around, lambda: _starts_near_end(text, span, ids, encoder, around)
    ):
        before, both = encode(text[position - back : position]), encode(text[position - back : end])
        num_alike = min(NUM_ALIKE, len(before) // 2)
        seen = both[len(before) - num_alike :]
        if (
            num_alike and both[: len(before)] == before and ids[-len(seen) :] == seen
            and _begins(text, position - back, end - 1, before, encode)
        ):
            return _Cut(position, back, before, len(both) - len(before))
    return None


def _starts(text: str, begin: int, end: int, encoder: Encoder) -> list[int]:
    return [begin + start for start in encoder.starts(text[begin:end])]


def _starts_near_end(text: str, span: tuple[int, int], ids: list[int], encoder: Encoder, around: int) -> list[int]:
    """Positions at which tokens of a span begin, near its end: those of a short part of it whose ids are the last of
    the span's, if one is found, else of all."""
    for shift in range(NUM_TRIED):
        begin = span[1] - 4 * around + shift
        if begin <= span[0]:
            break
        local = encoder.encode(text[begin : span[1]])
        last = local[min(NUM_ALIKE, len(local) // 8):]
        if last and ids[-len(last) :] == last:
            starts = [start for start in _starts(text, begin, span[1], encoder) if start >= begin + around // 2]
            if starts and starts[0] <= span[1] - 3 * around:  # else contexts of candidates may begin before all of them
                return starts
    return _starts(text, *span, encoder)


def _positions(text: str, first: int, last: int, find_starts: Callable[[], list[int]]) -> Iterator[tuple[int, int]]:
    """Candidates for a cut, each with the length of the left context to verify it with: before white space first, then
    at other word ends, then between tokens; the last ones of each kind first. Contexts within a long word begin at a
    token, too."""
    around, seen = last - first, set[int]()
    for pattern in (_WORD_BEGINS, _WORD_ENDS):
        found = [match.start() for match in pattern.finditer(text, first, last)][-NUM_TRIED:]
        yield from ((position, around) for position in reversed(found) if position not in seen)
        seen.update(found)
    starts = find_starts()
    for position in [start for start in reversed(starts) if first < start <= last and start not in seen][:NUM_TRIED]:
        index = bisect_right(starts, position - around)
        yield position, position - starts[index - 1] if index else around
