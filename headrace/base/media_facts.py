"""`MediaFacts`: what media a model takes, what their arrays look like, and `check_media`, which refuses others.
Torch-free."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from headrace.base.errors import RequestError
from headrace.base.media import (
    ARRAYS,
    DIGEST_BYTES,
    LEVELS,
    MOST_NUMBER,
    MOST_SIDE,
    NUM_LEVELS,
    MediaArray,
    MediaItem,
    MediaPlace,
)


class PatchPixels(msgspec.Struct, frozen=True, tag="patches"):
    """Pixels [time * height * width, input_size], where ``grid`` is (time, height, width) and ``merge`` x ``merge``
    patches have one placeholder. A run holds whole frames."""

    input_size: int
    merge: int

    def fits(self, place: MediaPlace, shape: tuple[int, ...]) -> bool:
        """Whether placeholders, grid and the pixels' shape belong together."""
        if len(place.grid) != 3 or min(place.grid) < 1 or any(size % self.merge for size in place.grid[1:]):
            return False
        num_patches, frame = math.prod(place.grid), math.prod(place.grid[1:]) // self.merge**2
        is_divided = place.num_tokens * self.merge**2 == num_patches and all(n % frame == 0 for _, n in place.runs)
        return is_divided and shape == (num_patches, self.input_size)


class ImagePixels(msgspec.Struct, frozen=True, tag="images"):
    """Pixels [crops, channels, side, side]; every crop has ``num_tokens`` placeholders."""

    channels: int
    side: int
    num_tokens: int

    def fits(self, place: MediaPlace, shape: tuple[int, ...]) -> bool:
        """See `PatchPixels`."""
        is_square = len(shape) == 4 and shape[0] > 0 and shape[1:] == (self.channels, self.side, self.side)
        return is_square and place.num_tokens == shape[0] * self.num_tokens


class SizedPixels(msgspec.Struct, frozen=True, tag="sized"):
    """Pixels [1, channels, H, W] of which ``grid`` (height, width) are the image, in patches of ``patch`` x ``patch``;
    ``merge`` x ``merge`` of them have one placeholder."""

    channels: int
    patch: int
    merge: int

    def fits(self, place: MediaPlace, shape: tuple[int, ...]) -> bool:
        """See `PatchPixels`."""
        if len(place.grid) != 2 or len(shape) != 4 or shape[:2] != (1, self.channels):
            return False
        is_inside = all(0 < size <= length for size, length in zip(place.grid, shape[2:], strict=True))
        return is_inside and place.num_tokens == math.prod(size // self.patch // self.merge for size in place.grid)


class TileGrid(msgspec.Struct, frozen=True):
    """What becomes of an image that is cut into ``tiles`` (rows, columns): of the ``features`` (rows, columns) of all
    tiles together those in a frame of ``padding`` (rows, columns) are dropped, as they are of padding; what is left is
    resampled to ``resized``, if there is too much of it."""

    tiles: tuple[int, int]
    features: tuple[int, int]
    padding: tuple[int, int]
    resized: tuple[int, int]

    @property
    def num_tokens(self) -> int:
        """Vectors, one behind each row of them included."""
        return self.resized[0] * (self.resized[1] + 1)


class TiledPixels(msgspec.Struct, frozen=True, tag="tiled"):
    """Pixels [tiles, channels, side, side] of an image of size ``grid`` (height, width): the whole of it, small, then
    the tiles of the best of ``resolutions`` (height, width), row by row. A tile makes ``features`` x ``features``
    vectors. From ``most_tiles`` (0: any number) the vectors are resampled. An image may also come whole alone."""

    channels: int
    side: int
    features: int
    resolutions: list[tuple[int, int]]
    most_tiles: int = 0

    def find_grid(self, height: int, width: int) -> TileGrid:
        """How an image of that size is cut; LLaVA-NeXT and LLaVA-OneVision, arXiv:2408.03326, section 3.1."""

        def rate(resolution: tuple[int, int]) -> tuple[int, int]:
            scale = min(resolution[1] / width, resolution[0] / height)
            used = min(int(width * scale) * int(height * scale), height * width)
            return used, used - resolution[0] * resolution[1]

        best = max(self.resolutions, key=rate)
        rows, columns = best[0] // self.side, best[1] // self.side
        high, wide = rows * self.features, columns * self.features
        top = left = 0
        if width / height > wide / high:
            top = (high - int(round(height * (wide / width), 7))) // 2
        else:
            left = (wide - int(round(width * (high / height), 7))) // 2
        kept_high, kept_wide = high - 2 * top, wide - 2 * left
        resized = kept_high, kept_wide
        if self.most_tiles:
            ratio = math.sqrt(kept_high * kept_wide / (self.most_tiles * self.features**2))
            if ratio > 1.1:
                resized = int(kept_high // ratio), int(kept_wide // ratio)
        return TileGrid((rows, columns), (high, wide), (top, left), resized)

    def fits(self, place: MediaPlace, shape: tuple[int, ...]) -> bool:
        """See `PatchPixels`."""
        if len(shape) != 4 or shape[1:] != (self.channels, self.side, self.side) or len(place.grid) != 2:
            return False
        if not all(0 < size <= MOST_SIDE for size in place.grid):
            return False
        if shape[0] == 1:
            return place.num_tokens == self.features**2 + 1
        grid = self.find_grid(*place.grid)
        return shape[0] == 1 + math.prod(grid.tiles) and place.num_tokens == self.features**2 + grid.num_tokens


class CroppedPixels(msgspec.Struct, frozen=True, tag="cropped"):
    """Pixels [1 + crops, channels, side, side]: the whole of an image, small, then its crops, row by row, of
    ``patches`` x ``patches`` patches each. ``grid`` is (rows, columns, rows of crops, columns of crops): of all patches
    of the crops the first rows and columns are the image. 2 x 2 patches have one placeholder, and so do the end of each
    row of them and the end of the crops."""

    channels: int
    side: int
    patches: int

    def fits(self, place: MediaPlace, shape: tuple[int, ...]) -> bool:
        """See `PatchPixels`."""
        if len(place.grid) != 4 or min(place.grid) < 1 or max(place.grid) > MOST_SIDE:
            return False
        rows, columns, down, across = place.grid
        is_inside = rows <= down * self.patches and columns <= across * self.patches
        half = self.patches // 2
        count = (rows + 1) // 2 * ((columns + 1) // 2 + 1) + 1 + half * (half + 1)
        is_cut = shape == (1 + down * across, self.channels, self.side, self.side)
        return is_inside and is_cut and place.num_tokens == count


PixelLayout = PatchPixels | ImagePixels | SizedPixels | TiledPixels | CroppedPixels


class ClipFrames(msgspec.Struct, frozen=True, tag="clip"):
    """Features [1, mels, frames] of a window, of which ``grid`` (frames,) are the clip and the others silence;
    ``stride`` frames have one placeholder."""

    mels: int
    frames: int
    stride: int

    def fits(self, place: MediaPlace, shape: tuple[int, ...]) -> bool:
        """See `PatchPixels`."""
        if len(place.grid) != 1 or not 1 <= place.grid[0] <= self.frames or shape != (1, self.mels, self.frames):
            return False
        return place.num_tokens == (place.grid[0] + 1) // 2 // (self.stride // 2)


class WindowFrames(msgspec.Struct, frozen=True, tag="window"):
    """Features [frames, mels] of a window, silence included, for decoders that attend to a window beside their text. It
    stands at the beginning of the prompt, with ``num_tokens`` placeholders."""

    mels: int
    frames: int
    num_tokens: int

    def fits(self, place: MediaPlace, shape: tuple[int, ...]) -> bool:
        """See `PatchPixels`."""
        return place.runs == [(0, self.num_tokens)] and shape == (self.frames, self.mels)


class OpenFrames(msgspec.Struct, frozen=True, tag="open"):
    """Features [1, ``grid`` (frames,), mels] of a clip of at most ``frames``; ``stride`` frames have one
    placeholder."""

    mels: int
    frames: int
    stride: int

    def fits(self, place: MediaPlace, shape: tuple[int, ...]) -> bool:
        """See `PatchPixels`."""
        if len(place.grid) != 1 or not 1 <= place.grid[0] <= self.frames or shape != (1, place.grid[0], self.mels):
            return False
        return place.num_tokens == -(-place.grid[0] // self.stride)


FrameLayout = ClipFrames | WindowFrames | OpenFrames


class SpeechFacts(msgspec.Struct, frozen=True):
    """What a model that writes sound down is asked with. ``num_positions``: tokens of text, prompt and output.
    ``banned_ids`` are never written, output does not begin with ``banned_first_ids``. ``most_at_first``: the latest
    time stamp that it begins with, in steps of 20 ms. ``is_multilingual``: prompts name language and task.
    ``alignment_heads``: pairs of layer and head whose attention follows what is said."""

    num_positions: int
    banned_ids: list[int] = []
    banned_first_ids: list[int] = []
    most_at_first: int = 50
    is_multilingual: bool = True
    alignment_heads: list[tuple[int, int]] = []


class MediaFacts(msgspec.Struct, frozen=True):
    """What media a model takes. By kind: ``token_ids``, the token that is repeated as placeholder; ``texts``, what
    stands for one item in a prompt before the processor expands it. ``vector_size``: elements of an encoder's output
    per placeholder, of ``element_bytes`` each. ``is_whole``: the tokens of an item attend to one another in both
    directions, so that a step must compute all of them together. ``pixels``: what its images and videos look like; an
    item that looks otherwise would fail the whole step that encodes it. ``frames``: the same of audio. ``speech``: of a
    model that writes sound down, whose prompts all begin with an item. ``is_alone``: an item is a prompt of its own, of
    one placeholder, and the encoder's output its embedding. ``beside``: kinds of which an item is encoded otherwise
    where the prompt also has one of another kind, with that kind. ``num_pieces``: in so many encoding can be divided,
    with steps of text between them; the model says how many."""

    token_ids: dict[str, int]
    texts: dict[str, str]
    vector_size: int
    is_whole: bool = False
    element_bytes: int = 4
    pixels: PixelLayout | None = None
    frames: FrameLayout | None = None
    speech: SpeechFacts | None = None
    is_alone: bool = False
    beside: dict[str, str] = {}
    num_pieces: int = 1

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of media, in a fixed order."""
        return tuple(self.token_ids)


def make_silence(facts: MediaFacts) -> MediaItem:
    """A window without sound, of a model whose prompts all begin with one."""
    frames = facts.frames
    assert isinstance(frames, WindowFrames)
    shape = (frames.frames, frames.mels)
    place = MediaPlace("audio", bytes(DIGEST_BYTES), [(0, frames.num_tokens)])
    return MediaItem(place, {"input_features": MediaArray("float32", shape, bytes(4 * math.prod(shape)))})


def check_media(items: Sequence[MediaItem], token_ids: Sequence[int], facts: MediaFacts | None) -> None:
    """Raise `RequestError` unless each item stands in the prompt where it says, and no placeholder is left over. Behind
    a window of sound any token may stand: the model itself may have written it, and its text is read again."""
    if facts is None:
        if items:
            raise RequestError("this model takes text alone; serve a model that takes images", param="media")
        return
    if facts.speech is not None and (not items or items[0].place.offset):
        raise RequestError(
            "every prompt of this model begins with an audio clip; send it to /v1/audio/transcriptions or "
            "/v1/audio/translations", param="prompt",
        )
    covered: dict[int, int] = dict.fromkeys(facts.token_ids.values(), 0)
    end = 0
    for item in items:
        token_id = facts.token_ids.get(item.place.kind)
        if token_id is None:
            raise RequestError(
                f"this model takes no {item.place.kind}; it takes {', '.join(facts.kinds)}", param="media"
            )
        _check_item(item, facts)
        end = _check_place(item.place, token_id, token_ids, end)
        covered[token_id] += item.place.num_tokens
    if facts.speech is None:
        _check_others(covered, token_ids)


def _check_place(place: MediaPlace, token_id: int, token_ids: Sequence[int], begin: int) -> int:
    """Raise `RequestError` unless the placeholders of an item stand in the prompt, from ``begin`` on; returns where
    they end."""
    for offset, count in place.runs:
        if count < 1 or offset < begin or offset + count > len(token_ids):
            raise RequestError("placeholders of media overlap or lie outside of the prompt", param="media")
        if any(token != token_id for token in token_ids[offset : offset + count]):
            raise RequestError(f"the prompt has no placeholders at {offset}", param="media")
        begin = offset + count
    return begin


def _check_others(covered: dict[int, int], token_ids: Sequence[int]) -> None:
    """Raise `RequestError` for placeholders without an item."""
    for token_id, count in covered.items():
        found = token_ids.count(token_id)
        if found != count:
            raise RequestError(
                f"the prompt has {found} placeholders of media (token {token_id}), its items have {count}; send the "
                "items with it, or remove the token from the text", param="prompt",
            )


def _check_item(item: MediaItem, facts: MediaFacts) -> None:
    """Raise `RequestError` unless an item has what the model takes of its kind."""
    place, name = item.place, ARRAYS[item.place.kind]
    if len(place.digest) != DIGEST_BYTES or not place.runs:
        raise RequestError("an item has no digest or no placeholders", param="media")
    for values in item.arrays.values():
        values.check()
    layout = facts.frames if place.kind == "audio" else facts.pixels
    if not all(0 <= number <= MOST_NUMBER for number in place.numbers.values()):  # neither is a NaN
        raise RequestError(f"numbers of media are from 0 to {MOST_NUMBER:g}, got {place.numbers}", param="media")
    pixels, levels = item.arrays.get(name), item.arrays.get(LEVELS)
    if levels is not None and (pixels is None or not _are_levels(levels, pixels)):
        raise RequestError(
            f"{LEVELS} are float32 of shape [channels, {NUM_LEVELS}], of pixels as bytes", param="media"
        )
    if layout is None:
        return
    if pixels is None or not layout.fits(place, pixels.shape):
        raise RequestError(
            f"this model cannot take a {place.kind} with {name} of shape {pixels and list(pixels.shape)}, grid "
            f"{list(place.grid)} and {place.num_tokens} placeholders; do preprocessor_config.json and config.json "
            "belong to the same checkpoint?", param="media",
        )


def _are_levels(levels: MediaArray, pixels: MediaArray) -> bool:
    if (pixels.dtype, levels.dtype) != ("uint8", "float32") or min(len(pixels.shape), len(levels.shape)) < 2:
        return False
    if levels.shape[1:] != (NUM_LEVELS,):
        return False
    return levels.shape[0] > 0 and pixels.shape[1] % levels.shape[0] == 0
