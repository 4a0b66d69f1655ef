"""Image files that are strange, broken or hostile: RGB of the right pixels, or a typed error, within bounds."""

from __future__ import annotations

import io
import struct
import time
import zlib

import numpy as np
import pytest

from headrace.base.errors import MediaError
from headrace.service.media.images import open_image

pillow = pytest.importorskip("PIL.Image")
WHERE = "messages[0].content[0].image_url.url"
MOST = 4_000_000


def encoded(image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def colours(mode: str = "RGB", size: tuple[int, int] = (8, 6)):
    """An image of left red, right blue."""
    image = pillow.new("RGB", size, (255, 0, 0))
    image.paste((0, 0, 255), (size[0] // 2, 0, *size))
    return image.convert(mode)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(width: int, height: int) -> bytes:
    """A PNG that declares so many pixels and holds next to nothing."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def read(data: bytes):
    image = open_image(data, WHERE, MOST)
    assert image.mode == "RGB"
    return np.asarray(image)


def refuse(data: bytes, message: str) -> None:
    began = time.monotonic()
    with pytest.raises(MediaError, match=message) as caught:
        open_image(data, WHERE, MOST)
    assert caught.value.param == WHERE and caught.value.message.startswith(WHERE)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP", "GIF", "JPEG"])
def test_formats(kind):
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95, "subsampling": 0} if kind == "JPEG" else {}
    pixels = read(encoded(colours(), kind, **options))
    assert pixels.shape == (6, 8, 3)
    assert abs(pixels.astype(int) - np.asarray(colours()).astype(int)).max() <= (12 if kind == "JPEG" else 0)


def test_palette_grey_one_bit_and_cmyk():
    assert (read(encoded(colours("P"))) == np.asarray(colours())).all()
    assert (read(encoded(colours("L"))) == np.asarray(colours("L").convert("RGB"))).all()
    assert set(read(encoded(colours("1").point(lambda v: v)))[..., 0].flat) <= {0, 255}
    pixels = read(encoded(colours("CMYK"), "TIFF")).astype(int)
    assert abs(pixels - np.asarray(colours()).astype(int)).max() <= 2
    assert read(encoded(colours("CMYK"), "JPEG")).shape == (6, 8, 3)


def test_sixteen_bits_keep_their_shades():
    """Cut off at 255 nearly all of such an image would be white."""
    shades = np.array([[0, 256, 0x4000], [0x8000, 0xC000, 0xFFFF]], np.uint16)
    image = pillow.fromarray(shades)
    for kind in ("PNG", "TIFF"):
        pixels = read(encoded(image, kind)).astype(int)
        assert pixels[..., 0].tolist() == [[0, 1, 64], [128, 192, 255]]


def test_transparent_parts_are_white():
    image = pillow.new("RGBA", (4, 4), (0, 0, 0, 0))
    image.paste((0, 128, 0, 255), (0, 0, 2, 4))
    pixels = read(encoded(image))
    assert pixels[0, 0].tolist() == [0, 128, 0] and pixels[0, 3].tolist() == [255, 255, 255]
    palette = image.convert("P")
    palette.info["transparency"] = palette.getpixel((3, 0))
    assert read(encoded(palette, "GIF", transparency=palette.getpixel((3, 0))))[0, 3].tolist() == [255, 255, 255]


@pytest.mark.parametrize("turn, place", [(1, (0, 0)), (3, (5, 7)), (6, (0, 5)), (8, (7, 0)), (2, (0, 7)), (77, (0, 0))])
def test_exif_orientation(turn, place):
    """One red pixel in the first corner, where the camera was held otherwise."""
    image = pillow.new("RGB", (8, 6), (0, 0, 0))
    image.putpixel((0, 0), (255, 0, 0))
    exif = pillow.Exif()
    exif[0x112] = turn
    pixels = read(encoded(image, "PNG", exif=exif))
    assert pixels[place].tolist() == [255, 0, 0], np.argwhere(pixels[..., 0] == 255)


def test_broken_exif_spoils_no_image():
    data = encoded(colours(), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff garbage")
    assert read(data).shape == (6, 8, 3)


def test_of_animations_the_first_frame():
    frames = [pillow.new("RGB", (8, 6), (value, 0, 0)) for value in (200, 100, 0)]
    for kind in ("GIF", "PNG", "WEBP"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50, **options)
        assert read(data)[0, 0].tolist() == [200, 0, 0], kind


def test_one_pixel():
    assert read(encoded(pillow.new("RGB", (1, 1), (1, 2, 3)))).tolist() == [[[1, 2, 3]]]


def test_bombs_are_refused_before_they_are_decoded():
    refuse(bomb(100_000, 100_000), "more than 4 million pixels")
    refuse(bomb(2**31 - 1, 2**31 - 1), "pixels|no image|broken")
    refuse(encoded(pillow.new("L", (3000, 3000))), "3000x3000")
    refuse(bomb(100_000, 1), "200 times")
    refuse(bomb(1, 100_000), "200 times")
    refuse(bomb(0, 5), "without pixels|no image")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
def test_truncated_files(kind):
    noise = pillow.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8))
    data = encoded(noise, kind)
    refuse(data[: len(data) // 2], "broken|no image")
    refuse(data[:12], "broken|no image")


@pytest.mark.parametrize("data", [
    b"", b"\x00", b"not an image", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.4", b"GIF89a",
    b"\xff\xd8\xff", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"RIFF\x24\x00\x00\x00WAVEfmt ", bytes(4096),
])
def test_what_is_no_image(data):
    refuse(data, "no image|broken")


def test_no_mutation_of_a_file_is_more_than_a_typed_error():
    """Ten thousand broken bytes: each time pixels or a `MediaError`."""
    random = np.random.default_rng(1)
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"):
        good = bytearray(encoded(colours(size=(32, 24)), kind))
        for _ in range(60):
            data = bytearray(good)
            for place in random.integers(0, len(data), random.integers(1, 30)):
                data[place] = random.integers(0, 256)
            try:
                read(bytes(data))
            except MediaError as error:
                assert error.param == WHERE


def test_without_pillow_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(MediaError, match=r"pip install 'headrace\[vision\]'"):
        open_image(b"x", WHERE, MOST)
