"""Token ids as messages between processes carry them: packed int32. A process reads thousands of them in a microsecond;
as a list of numbers 2,000 take 0.1 ms, each time, of a loop that launches steps.

Refuses: what is no 32-bit integer.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array
"""``array("i")``: a sequence of numbers whose slices and copies are copies of memory."""


def pack_ids(ids: Sequence[int]) -> TokenIds:
    """Token ids as int32; those that are are not copied. Twice as fast as ``array("i", ids)``. Raises `TypeError` for
    what is not a 32-bit integer."""
    if isinstance(ids, array) and ids.typecode == "i":
        return ids
    try:
        return array("i", struct.pack(f"{len(ids)}i", *ids))
    except struct.error as error:
        raise TypeError(str(error)) from error


def to_wire(value: Any) -> bytes:
    """msgspec's ``enc_hook``."""
    if isinstance(value, array) and value.typecode == "i":
        return value.tobytes()
    raise NotImplementedError(f"messages carry no {type(value).__name__}")


def from_wire(kind: type[Any], value: Any) -> Any:
    """msgspec's ``dec_hook``, which it also calls for ``object``."""
    if kind is not array:
        return value
    if not isinstance(value, bytes) or len(value) % 4:
        raise ValueError("token ids come as packed int32")
    return array("i", value)
