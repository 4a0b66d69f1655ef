"""Encodes long texts a piece at a time: the ``tokenizers`` library needs about a hundred times the text's memory.

The ids must equal those of the whole text, and merges cross arbitrary positions. So a cut is made only at a word
boundary where a token boundary was verified: the ids of the characters before it are the same with and without what
follows, and the same wherever encoding begins. The next piece is encoded together with ``around`` characters before the
cut as left context, whose ids are then dropped. Lengths and positions are in characters (Unicode code points).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

PIECE, AROUND = 1 << 17, 1 << 12
"""Characters encoded at once, and characters of context that are encoded to verify a cut."""
NUM_TRIED, NUM_ALIKE = 8, 64
"""Candidates tried per kind of boundary, and ids before a cut that must not depend on where the encoding begins."""
_WORD_BEGINS, _WORD_ENDS = re.compile(r"(?<=\S)(?=\s)"), re.compile(r"(?<=\w)(?=\W)")

Encode = Callable[[str], list[int]]


def encode_pieces(text: str, encode: Encode, *, size: int = PIECE, around: int = AROUND) -> Iterator[list[int]]:
    """The ids that ``encode`` gives for the text, in pieces of about ``size`` characters. Where no cut can be verified
    (no words, or merges that depend on distant text) the piece is doubled."""
    # ``before``: ids of the ``around`` characters before ``begin``, encoded alone.
    begin, before, length = 0, list[int](), size
    while len(text) - begin > length + around:
        end = begin + length
        ids, num_before = _encode_behind(text, begin, end, before, encode, around)
        cut = _find_cut(text, end, ids, encode, around)
        if cut is None:
            length *= 2
            continue
        begin, before, num_after = cut
        length = size
        yield ids[num_before : len(ids) - num_after]
    ids, num_before = _encode_behind(text, begin, len(text), before, encode, around)
    yield ids[num_before:]


def encode_end(
    text: str, enough: int, encode: Encode, *, length: int, size: int = PIECE, around: int = AROUND
) -> list[int] | None:
    """At least ``enough`` of the last ids that ``encode`` gives for the text. Encodes about ``length`` characters of
    its end, doubled until they have that many. None when only the whole text would do."""
    while length + 2 * around < len(text):
        found = _find_begin(text, len(text) - length, encode, around)
        if found is not None:
            begin, before = found
            ids = [
                i for piece in encode_pieces(text[begin - around :], encode, size=size, around=around) for i in piece
            ]
            if ids[: len(before)] == before and len(ids) - len(before) >= enough:
                return ids[len(before) :]
        length *= 2
    return None


def _find_begin(text: str, latest: int, encode: Encode, around: int) -> tuple[int, list[int]] | None:
    """``(position, ids of the characters before it)`` of a verified token boundary at or before ``latest``; None when
    no candidate holds. The left context is encoded with ``around`` and twice as many characters to see whether the ids
    depend on where encoding begins."""
    for position in _positions(text, latest - around, latest):
        before, more, both = (
            encode(text[position - back : position + ahead]) for back,
            ahead in ((around, 0), (2 * around, 0), (around, around))
        )
        num_alike = min(NUM_ALIKE, len(before) // 2)
        if num_alike and both[: len(before)] == before and more[-num_alike:] == before[-num_alike:]:
            return position, before
    return None


def _encode_behind(
    text: str, begin: int, end: int, before: list[int], encode: Encode, around: int
) -> tuple[list[int], int]:
    """Ids of ``text[begin:end]`` with its left context, and how many of them belong to the context."""
    ids = encode(text[max(0, begin - around) : end])
    if ids[: len(before)] == before:
        return ids, len(before)
    # The verified boundary does not hold with this much text behind it. Without context the ids at the seam may differ
    # from those of the whole text, but they still decode to it.
    return encode(text[begin:end]), 0


def _find_cut(text: str, end: int, ids: list[int], encode: Encode, around: int) -> tuple[int, list[int], int] | None:
    """A verified token boundary before ``end``, where ``ids`` are the ids up to ``end``: ``(position, ids of the
    characters before it, number of the last ids in ids that lie behind it)``. None when no candidate holds."""
    # At least ``around`` characters stay behind the cut: the last ids before ``end`` may change with what follows.
    for position in _positions(text, end - 2 * around, end - around):
        before, both = encode(text[position - around : position]), encode(text[position - around : end])
        num_alike = min(NUM_ALIKE, len(before) // 2)
        seen = both[len(before) - num_alike :]
        if num_alike and both[: len(before)] == before and ids[-len(seen) :] == seen:
            return position, before, len(both) - len(before)
    return None


def _positions(text: str, first: int, last: int) -> list[int]:
    """Candidates for a cut: before white space first, then at other word ends; the last ones of each kind first."""
    kinds = [[found.start() for found in pattern.finditer(text, first, last)] for pattern in (_WORD_BEGINS, _WORD_ENDS)]
    return list(dict.fromkeys(position for kind in kinds for position in reversed(kind[-NUM_TRIED:])))
