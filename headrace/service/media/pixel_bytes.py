"""`PixelBytes`: pixels as the bytes that they were before an image processor rescaled and normalised them, a quarter of
the memory, with a table of what each byte stands for. Encoders look bytes up on the device: the same float32 values,
bit for bit.

Refuses: processors whose values are not a table of bytes; each one is tried on images of noise.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.base.media import NUM_LEVELS
from headrace.service.media.images import import_pillow

logger = logging.getLogger(__name__)

RAW = {"do_rescale": False, "do_normalize": False}
"""Options of an image processor that leave bytes as they are."""
SIZES = ((96, 64), (40, 90))
"""Width and height of the images it is tried on: a wide and a high one, which are resized, cut and padded."""

Floats = NDArray[np.float32]


class PixelBytes:
    """What bytes stand for in one image processor. ``levels``: float32 of shape [channels, 256]."""

    def __init__(self, levels: Floats):
        self.levels = levels

    @classmethod
    def find(cls, processor: Any) -> PixelBytes | None:
        """Of an image processor of transformers; None for one that computes anything else."""
        settings = processor.to_dict()
        if not settings.get("do_rescale") and not settings.get("do_normalize"):
            return None
        try:
            tried = [(_run(processor, image), _run(processor, image, **RAW)) for image in map(_noise, SIZES)]
            for levels in _find_candidates(settings):
                if all(_is_table(levels, made, raw) for made, raw in tried):
                    return cls(levels)
        except (ValueError, TypeError, KeyError, ArithmeticError, IndexError, AttributeError, RuntimeError) as error:
            logger.info("pixels travel as floats: %s", error)
            return None
        logger.info("pixels travel as floats: %s makes them otherwise than from bytes", type(processor).__name__)
        return None


def to_bytes(values: np.ndarray) -> NDArray[np.uint8] | None:
    """Values of a processor run with `RAW` as bytes; None where some are none, as of images resized as floats."""
    found = values.astype(np.uint8)
    return found if values.dtype == np.uint8 or np.array_equal(found, values) else None


def _noise(size: tuple[int, int]) -> Any:
    values = np.random.default_rng(sum(size)).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return import_pillow().fromarray(values)


def _run(processor: Any, image: Any, **options: Any) -> list[np.ndarray]:
    """Pixels by entry, each [entries, ...], whatever lists they come in."""
    found = processor(images=[image], **options)["pixel_values"]
    return [np.asarray(each) for each in found]


def _find_candidates(settings: dict[str, Any]) -> list[Floats]:
    """Tables by the arithmetic of the image processors on numpy, and of those on torch."""
    scale = float(settings["rescale_factor"]) if settings.get("do_rescale") else 1.0
    mean, std = (np.asarray(settings[name], np.float32).reshape(-1, 1) for name in ("image_mean", "image_std"))
    if not settings.get("do_normalize"):
        mean, std = np.zeros((3, 1), np.float32), np.ones((3, 1), np.float32)
    steps = np.arange(NUM_LEVELS)
    by_numpy = ((steps * scale).astype(np.float32) - mean) / std
    inverse = np.float32(1.0 / scale)
    by_torch = (steps.astype(np.float32) - mean * inverse) / (std * inverse)
    return [np.ascontiguousarray(by_numpy), np.ascontiguousarray(by_torch)]


def _is_table(levels: Floats, made: list[np.ndarray], raw: list[np.ndarray]) -> bool:
    """Whether values are what the table says of bytes. Channels come second, or first where an entry is an image, or
    divide a flat patch."""
    for values, given in zip(made, raw, strict=True):
        found = to_bytes(given)
        if found is None or values.shape != found.shape or values.dtype != np.float32:
            return False
        entries = 1 if found.ndim in (1, 3) else len(found)
        parts = found.reshape(entries, len(levels), -1)
        looked_up = np.stack([table[parts[:, channel]] for channel, table in enumerate(levels)], axis=1)
        if not np.array_equal(looked_up.reshape(values.shape), values):
            return False
    return True
