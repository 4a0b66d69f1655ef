"""Image files to RGB, by Pillow, bounded before a pixel is decoded. Everything that can be wrong with a file is a
`MediaError`. Refuses: fetching, and resizing for a model.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from headrace.base.errors import MediaError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_ASPECT = 200
"""A model resizes by the shorter side; with more than this the longer one would grow out of bounds."""
MAX_SIDE = 1 << 16
INSTALL = "pip install 'headrace[vision]'"


def open_image(data: bytes, param: str, max_pixels: int) -> Image:
    """The first frame of an image file as it is to be looked at: upright by its EXIF orientation, transparent parts
    white, 8 bits for each of red, green and blue. Raises `MediaError` naming ``param``."""
    pillow = import_pillow()
    pillow.MAX_IMAGE_PIXELS = None  # the size is checked below, before anything is decoded
    try:
        image = pillow.open(io.BytesIO(data), formats=FORMATS)
    except (pillow.UnidentifiedImageError, *_FAILURES):
        raise MediaError(
            f"{param} is no image that can be read; send PNG, JPEG, WebP, GIF, BMP or TIFF", param=param
        ) from None
    return as_seen(image, param, max_pixels)


def as_seen(image: Image, param: str, max_pixels: int) -> Image:
    """An image of Pillow as `open_image` returns it; its file may not have been read yet."""
    check_size(image.size, param, max_pixels)
    try:
        image.load()  # the first frame; others are never decoded
        return to_rgb(upright(image), param)
    except MediaError:
        raise
    except _FAILURES as error:
        kind = image.format or image.mode
        raise MediaError(f"{param} is a broken {kind} image: {_describe(error)}", param=param) from None


def import_pillow() -> Any:
    """The module ``PIL.Image`` with the readers of `FORMATS`; raises `MediaError` with what to install."""
    try:
        import PIL.BmpImagePlugin
        import PIL.GifImagePlugin
        import PIL.Image
        import PIL.JpegImagePlugin
        import PIL.PngImagePlugin
        import PIL.TiffImagePlugin
        import PIL.WebPImagePlugin
    except ImportError as error:
        raise MediaError(f"images need Pillow, which is not installed here: {INSTALL}") from error
    return PIL.Image


def check_size(size: tuple[int, int], param: str, max_pixels: int) -> None:
    """Raise `MediaError` for an image that is too large or too narrow. ``size``: width and height."""
    width, height = size
    if width < 1 or height < 1:
        raise MediaError(f"{param} is an image without pixels", param=param)
    if width * height > max_pixels:
        raise MediaError(
            f"{param} is {width}x{height}: more than {max_pixels // 1_000_000} million pixels "
            "(--media-max-megapixels); shrink it", param=param
        )
    if max(width, height) > MAX_ASPECT * min(width, height) or max(width, height) > MAX_SIDE:
        raise MediaError(
            f"{param} is {width}x{height}: one side may be at most {MAX_ASPECT} times the other, and at most "
            f"{MAX_SIDE}; crop it", param=param
        )


def upright(image: Image) -> Image:
    """The image turned as its EXIF orientation says; as it is where that cannot be read."""
    from PIL import ImageOps

    try:
        return ImageOps.exif_transpose(image)
    except _FAILURES:  # the orientation is a courtesy of the camera: a broken one spoils no image
        return image


def to_rgb(image: Image, param: str) -> Image:
    """An image of any mode as 8-bit RGB."""
    if image.mode == "RGB":
        return image
    if image.mode == "F":
        raise MediaError(f"{param} has floating-point pixels; send 8 or 16 bits", param=param)
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow would cut off at 255
        import_pillow()
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        ground = import_pillow().new("RGBA", layer.size, (255, 255, 255, 255))
        return ground_over(ground, layer)
    return image.convert("RGB")


def ground_over(ground: Image, layer: Image) -> Image:
    """A layer on an opaque ground."""
    ground.alpha_composite(layer)
    return ground.convert("RGB")


# What Pillow's readers raise for files that are not what they seem.
_FAILURES = (
    OSError, ValueError, TypeError, SyntaxError, LookupError, AttributeError, ArithmeticError, EOFError, MemoryError,
    RuntimeError, NotImplementedError
)


def _describe(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text[:120]
