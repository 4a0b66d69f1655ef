"""Long texts to ids, a piece at a time: what a tokenizer needs of memory for a text is a hundred times the text.

A text is cut where the tokenizer cuts it itself, which is tried with the letters around; the next piece is then encoded
behind some letters of the one before, whose ids are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

PIECE, AROUND = 1 << 17, 1 << 12
"""Letters that are encoded at once, and those around a cut that are looked at."""
NUM_TRIED, NUM_ALIKE = 8, 64
"""Positions of a kind that are tried for a cut, and ids before it that must not depend on where the encoding begins."""
_WORD_BEGINS, _WORD_ENDS = re.compile(r"(?<=\S)(?=\s)"), re.compile(r"(?<=\w)(?=\W)")

Encode = Callable[[str], list[int]]


def encode_pieces(text: str, encode: Encode, *, size: int = PIECE, around: int = AROUND) -> Iterator[list[int]]:
    """The ids that ``encode`` makes of a text, in pieces of some ``size`` letters. What has no words to be cut between
    comes in larger pieces."""
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
    """``enough`` or more of the last ids that ``encode`` makes of a text, by some ``length`` letters of its end, or
    more where these do not have so many. None where only the whole text shows them."""
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
    """``(position, ids of the letters before it)`` where ids before the position are the same without what comes
    after, and those around it the same wherever the encoding begins."""
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
    """``(ids from letters before begin to end, how many are of letters before)``."""
    ids = encode(text[max(0, begin - around) : end])
    if ids[: len(before)] == before:
        return ids, len(before)
    return encode(text[begin:end]), 0  # what comes after changes all that was before: at least nothing is lost


def _find_cut(text: str, end: int, ids: list[int], encode: Encode, around: int) -> tuple[int, list[int], int] | None:
    """``(position, ids of the letters before it, how many ids of those up to end are after it)`` for ``ids`` up to
    ``end``: ids before the position are the same without what comes after, and those around it as in ``ids``."""
    for position in _positions(text, end - 2 * around, end - around):
        before, both = encode(text[position - around : position]), encode(text[position - around : end])
        num_alike = min(NUM_ALIKE, len(before) // 2)
        seen = both[len(before) - num_alike :]
        if num_alike and both[: len(before)] == before and ids[-len(seen) :] == seen:
            return position, before, len(both) - len(before)
    return None


def _positions(text: str, first: int, last: int) -> list[int]:
    """Positions where a cut may be, the most promising first."""
    kinds = [[found.start() for found in pattern.finditer(text, first, last)] for pattern in (_WORD_BEGINS, _WORD_ENDS)]
    return list(dict.fromkeys(position for kind in kinds for position in reversed(kind[-NUM_TRIED:])))
