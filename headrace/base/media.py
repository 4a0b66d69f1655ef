"""Images, videos and audio of a prompt: `MediaItem` as a processor made it, and the `key_ids` under which prompts with
media share prefixes. Torch-free.

In a prompt an item stands as *placeholders*: positions whose embedding is not the token's but the encoder's output.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol

import msgspec

from headrace.base.errors import RequestError

MediaKind = Literal["image", "video", "audio"]

DIGEST_BYTES = 32
ARRAYS = {"image": "pixel_values", "video": "pixel_values_videos", "audio": "input_features"}
"""The names that processors give the arrays of pixels, and of frames."""
LEVELS, NUM_LEVELS = "pixel_levels", 256
"""The name of what bytes of pixels stand for, float32 [channels, 256]; the channels divide dim 1 of the pixels."""
BESIDE = "beside"
"""One of `MediaPlace.numbers`."""
MOST_NUMBER = 1e6
"""Of `MediaPlace.numbers`, which positions are computed from."""
MOST_SIDE = 1 << 16
"""Pixels of an image's side."""
DATA = "data:;base64,"
"""The head of a data URI that names no type."""
DTYPES = {"float32": 4, "float16": 2, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
"""Of arrays, with the bytes of an element; processors compute in float32."""


class Base64Text(str):
    """Base64 of a large body, bare or of a data URI, that stays bytes: as a `str` it is only what stands before it, the
    head of the URI. ``data``, a `memoryview`, is the base64 itself, which whoever decodes it checks. As text it would
    be copied three times with the GIL held, for tens of milliseconds."""

    data: Any  # a memoryview, which goes where bytes do

    @classmethod
    def of(cls, head: str, data: memoryview) -> Base64Text:
        """Base64 behind the head of a data URI, which ends in a comma, or behind nothing."""
        text = cls(head)
        text.data = data
        return text


def as_data_uri(text: str) -> str:
    """A data URI of bare base64."""
    return Base64Text.of(DATA, text.data) if isinstance(text, Base64Text) and not text else DATA + text


class Array(Protocol):
    """What is used of numpy's arrays."""

    @property
    def dtype(self) -> NamedType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def tobytes(self) -> bytes:
        """The elements in C order."""


class NamedType(Protocol):
    """What is used of numpy's dtypes."""

    @property
    def name(self) -> str: ...


class MediaArray(msgspec.Struct, frozen=True, array_like=True):
    """An array as bytes: C order, little-endian; ``dtype`` is numpy's name, one of `DTYPES`. Received ``data`` are a
    `memoryview` of what they were read into."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, values: Array) -> MediaArray:
        """Copy an array of numpy."""
        assert values.dtype.name in DTYPES, f"no media array has dtype {values.dtype.name}"
        return cls(values.dtype.name, tuple(values.shape), values.tobytes())

    def check(self) -> None:
        """Raise `RequestError` where bytes, dtype and shape do not belong together."""
        size = DTYPES.get(self.dtype)
        if size is None or any(length < 0 for length in self.shape) or math.prod(self.shape) * size != len(self.data):
            raise RequestError(
                f"a media array of {len(self.data)} bytes cannot have dtype {self.dtype!r} and shape {self.shape}",
                param="media",
            )


class MediaPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where an item stands in a prompt, and what positions depend on. ``runs``: ``(offset, count)`` of consecutive
    placeholders, ascending; there are several where a format puts other tokens between them (rows of an image, time
    stamps of a video). The i-th placeholder takes row i of the encoder's output.

    ``digest``: `DIGEST_BYTES` that differ whenever the content or the settings of its processor do. ``grid``: patches
    as (time, height, width) before merging, for families that have it (``image_grid_thw``, ``video_grid_thw``), else
    the item's size as the family says. ``numbers``: further values by name, such as ``second_per_grid_ts``."""

    kind: MediaKind
    digest: bytes
    runs: list[tuple[int, int]]
    grid: tuple[int, ...] = ()
    numbers: dict[str, float] = {}

    @property
    def num_tokens(self) -> int:
        """Placeholders, which is how many vectors the encoder makes."""
        return sum(count for _, count in self.runs)

    @property
    def is_beside_other(self) -> bool:
        """Whether the prompt has media of the kind that ``MediaFacts.beside`` names."""
        return BESIDE in self.numbers

    @property
    def offset(self) -> int:
        """The first placeholder's position in the prompt."""
        return self.runs[0][0]

    @property
    def end(self) -> int:
        """The position behind the last placeholder."""
        return self.runs[-1][0] + self.runs[-1][1]


class MediaItem(msgspec.Struct, frozen=True, array_like=True):
    """One item of a request's prompt: its place, and its ``arrays`` by the names that the processor gives them
    (``pixel_values``, ``pixel_values_videos``, ``input_features``), of this item alone. ``num_followers``: how many
    requests follow that have the item without its arrays."""

    place: MediaPlace
    arrays: dict[str, MediaArray]
    num_followers: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays."""
        return sum(len(each.data) for each in self.arrays.values())


def take_data(items: Sequence[MediaItem]) -> tuple[list[MediaItem], list[bytes]]:
    """The items without the data of their arrays, and these apart: messages carry them behind, as they are."""
    data = [each.data for item in items for each in item.arrays.values()]
    return give_data(items, [b""] * len(data)), data


def give_data(items: Sequence[MediaItem], data: Iterable[bytes]) -> list[MediaItem]:
    """The items with the data that `take_data` took."""
    replace, left = msgspec.structs.replace, iter(data)
    return [
        replace(item, arrays={name: replace(each, data=next(left)) for name, each in item.arrays.items()})
        for item in items
    ]


def digest_of(kind: str, settings: str, parts: Iterable[bytes]) -> bytes:
    """The digest of an item's content; ``settings`` names the processor and all that changes what it makes."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in (kind.encode(), settings.encode(), *parts):
        digest.update(len(part).to_bytes(8, "little"))  # or two lists of parts could be the same bytes
        digest.update(part)
    return digest.digest()


def mark_beside(places: Sequence[MediaPlace], beside: dict[str, str]) -> list[MediaPlace]:
    """The places of a prompt, of which those that are encoded otherwise beside others say so, also by their digests."""
    kinds, found = {place.kind for place in places}, []
    for place in places:
        if beside.get(place.kind) in kinds:
            place = msgspec.structs.replace(
                place, digest=digest_of(place.kind, BESIDE, [place.digest]),
                numbers={**place.numbers, BESIDE: 1.0},
            )
        found.append(place)
    return found


def find_runs(token_ids: Sequence[int], token_id: int, counts: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The runs of each item, given how many placeholders each has, in order; raises `RequestError` where the prompt
    has more or fewer."""
    places = [at for at, token in enumerate(token_ids) if token == token_id]
    if len(places) != sum(counts):
        raise RequestError(
            f"the prompt has {len(places)} placeholders of media (token {token_id}), its items need {sum(counts)}",
            param="prompt",
        )
    found: list[list[tuple[int, int]]] = []
    end = 0
    for count in counts:
        runs: list[tuple[int, int]] = []
        for at in places[end : end + count]:
            if runs and sum(runs[-1]) == at:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((at, 1))
        found.append(runs)
        end += count
    return found


def key_ids(tokens: array[int], begin: int, end: int, media: Sequence[MediaPlace]) -> array[int]:
    """What the prefix tree is keyed by: tokens ``[begin, end)`` (int32), with words of the digest, as negative numbers,
    in place of placeholders. Equal prompts with other images never share keys from the eighth placeholder on, and
    before it with the probability of 31 equal bits each."""
    keys = tokens[begin:end]
    for place in media:
        if place.offset >= end or place.end <= begin:
            continue
        words = _words(place.digest)
        number = 0
        for offset, count in place.runs:
            for at in range(max(begin, offset), min(end, offset + count)):
                keys[at - begin] = words[(number + at - offset) % len(words)]
            number += count
    return keys


def _words(digest: bytes) -> list[int]:
    """The digest as negative int32."""
    return [word | -(2**31) for word in array("i", digest)]
