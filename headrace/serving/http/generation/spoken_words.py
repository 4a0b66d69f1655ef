"""When words of a window were said: from how much tokens attend to sound to times, and from tokens to words.

The times are those of dynamic time warping, as in Whisper (arXiv:2212.04356); words end where their script says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

SECONDS_PER_POSITION = 0.02
WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages whose words are not told apart by spaces: every character is one."""
OPENING, CLOSING = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、"
"""Marks that belong to the word behind them, and before them."""
PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
HALF_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Word:
    """A word with its spaces and marks, and when it was said, in seconds."""

    text: str
    start: float
    end: float


def find_times(packed: bytes, num_tokens: int) -> list[float]:
    """When each token begins, in seconds of its window; ``packed`` is a matrix [num_tokens, positions]. Dynamic time
    warping: the path from the first token and position to the last of both along which tokens attend most. Some 20 ms
    for a long window."""
    import numpy as np

    matrix = -np.frombuffer(packed, dtype="<f4").astype(np.float64).reshape(num_tokens, -1)
    rows, columns = matrix.shape
    cost = np.full((rows + 1, columns + 1), np.inf, dtype=np.float32)
    step = np.zeros((rows + 1, columns + 1), dtype=np.int8)  # from where: 0 both, 1 the token before, 2 the position
    cost[0, 0], step[0, :], step[:, 0] = 0, 2, 1
    for diagonal in range(2, rows + columns + 1):  # whose cells depend on those of the two before alone
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        both, above, left = cost[i - 1, j - 1], cost[i - 1, j], cost[i, j - 1]
        chosen = np.where((both < above) & (both < left), 0, np.where((above < both) & (above < left), 1, 2))
        step[i, j] = chosen
        cost[i, j] = matrix[i - 1, j - 1] + np.choose(chosen, (both, above, left))
    times, token, position = [0.0] * rows, rows, columns
    while token > 0 and position > 0:
        times[token - 1] = (position - 1) * SECONDS_PER_POSITION  # a token's first position is met last
        origin = int(step[token, position])
        token, position = token - (origin != 2), position - (origin != 1)
    return times


def find_words(
    token_ids: Sequence[int], times: Sequence[float], decode: Callable[[list[int]], str], language: str
) -> list[Word]:
    """The words of tokens of text. ``times``: when each begins, and behind them when the last one ends."""
    groups = _split_characters(token_ids, decode)
    if language not in WITHOUT_SPACES:
        groups = _join_at_spaces(groups)
    return [Word(text, times[own[0]], times[own[-1] + 1]) for text, own in _join_marks(groups)]


Group = tuple[str, list[int]]
"""A text, and the indices of its tokens."""


def _split_characters(token_ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[Group]:
    """The shortest runs of tokens that are whole characters."""
    whole, done, found, begin = decode(list(token_ids)), 0, list[Group](), 0
    for end in range(1, len(token_ids) + 1):
        text = decode(list(token_ids[begin:end]))
        broken = text.find(HALF_CHARACTER)
        # a mark that the whole text has, too, is no half character
        if broken < 0 or done + broken >= len(whole) or whole[done + broken] == HALF_CHARACTER:
            found.append((text, list(range(begin, end))))
            done, begin = done + len(text), end
    return found


def _join_at_spaces(groups: list[Group]) -> list[Group]:
    found: list[Group] = []
    for text, own in groups:
        if not found or text.startswith(" ") or text.strip() in PUNCTUATION:
            found.append((text, own))
        else:
            found[-1] = (found[-1][0] + text, found[-1][1] + own)
    return found


def _join_marks(groups: list[Group]) -> list[Group]:
    """Opening marks join the word behind them, closing ones that before."""
    opened: list[Group] = []
    for text, own in reversed(groups):
        if opened and text.startswith(" ") and text.strip() in OPENING:
            opened[-1] = (text + opened[-1][0], own + opened[-1][1])
        else:
            opened.append((text, own))
    found: list[Group] = []
    for text, own in reversed(opened):
        if found and not found[-1][0].endswith(" ") and text in CLOSING:
            found[-1] = (found[-1][0] + text, found[-1][1] + own)
        else:
            found.append((text, own))
    return found
