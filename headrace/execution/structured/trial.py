"""`find_fault`: writes a few trial outputs of a compiled grammar, to find the places that exceed the library's limits
of work before a request begins to stream.

The libraries' limits hold per token, and a grammar within the limits of its source may exceed them where it leaves very
many ways to go on. Refuses: proving that no such place exists; an output can still end with an error there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import llguidance
import numpy as np

MAX_TOKENS = 96
"""Tokens of one trial output."""
BUDGET_S = 0.5
"""Seconds after which no further token is tried. Wide places take longest, and are found first."""

GOES_ON, ENDS = b'":{[,', b'":}]{['
"""Bytes that trial outputs prefer, the first most: one writes what else an object or array may have, one ends them as
early as it can. After these, digits and letters."""
_FILLERS = b"01truefalsenull abcdefghijklmnopqrstuvwxyz"


def find_fault(origin: llguidance.LLMatcher, texts: Sequence[bytes]) -> str | None:
    """The library's message where a trial output cannot go on although the grammar does; None if all can. ``texts``:
    bytes of the tokens by id. ``origin`` is not advanced."""
    id_of_byte = {text[0]: token for token, text in reversed(list(enumerate(texts))) if len(text) == 1}
    until, generator = time.monotonic() + BUDGET_S, np.random.default_rng(0)
    orders = [_order(GOES_ON + _FILLERS, id_of_byte), _order(ENDS + _FILLERS, id_of_byte)]
    for order in (*orders, None):
        matcher = origin.deep_copy()
        for _ in range(MAX_TOKENS):
            bitmask = matcher.compute_bitmask()  # without the interpreter lock
            if matcher.is_error() or time.monotonic() > until:
                break
            allowed = np.unpackbits(np.frombuffer(bitmask, dtype=np.uint8), bitorder="little")
            ranked = orders[0][generator.permutation(len(orders[0]))] if order is None else order
            usable = ranked[allowed[ranked] != 0]
            if not len(usable):  # the end of the output, or no text but special tokens
                break
            matcher.consume_tokens([int(usable[0])])
        if matcher.is_error():
            return matcher.get_error()
    return None


def _order(preferred: bytes, id_of_byte: dict[int, int]) -> np.ndarray:
    """Ids of single bytes, [up to 256] int64: the preferred ones first, then the others."""
    return np.array([id_of_byte[byte] for byte in dict.fromkeys([*preferred, *range(256)]) if byte in id_of_byte])
