"""Video files: frames at even times, within bounds, or typed errors."""

from __future__ import annotations

import io
from fractions import Fraction

import numpy as np
import pytest

from headrace.base.errors import MediaError
from headrace.service.media import video as module
from headrace.service.media.video import open_video

av = pytest.importorskip("av")
pytest.importorskip("PIL.Image")
WHERE = "messages[0].content[0].video_url.url"


def encoded(num_frames: int, *, rate: int = 10, size: tuple[int, int] = (64, 48)) -> bytes:
    """A film that grows lighter from black."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.time_base = Fraction(1, rate)
        for index in range(num_frames):
            shade = round(255 * index / max(num_frames - 1, 1))
            frame = av.VideoFrame.from_ndarray(np.full((size[1], size[0], 3), shade, np.uint8), format="rgb24")
            for packet in stream.encode(frame):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return buffer.getvalue()


def read(data: bytes, *, fps: float = 2.0, max_frames: int = 32, max_pixels: int = 1_000_000):
    return open_video(data, WHERE, fps=fps, max_frames=max_frames, max_pixels=max_pixels)


def test_frames_are_evenly_spaced_and_in_order():
    frames = read(encoded(50))
    assert len(frames.images) == 10 and {image.size for image in frames.images} == {(64, 48)}
    assert np.allclose(frames.times, np.arange(10) * 0.5, atol=0.11)
    shades = [np.asarray(image).mean() for image in frames.images]
    assert shades == sorted(shades) and shades[0] < 20 and shades[-1] > 200


def test_of_long_films_fewer_are_kept():
    frames = read(encoded(100), max_frames=4)
    assert len(frames.images) == 4 and frames.times[0] == 0 and frames.times[-1] > 6


@pytest.mark.parametrize("num_frames, times", [
    (2, [0, 0.1]), (4, [0, 0.1, 0.2, 0.3]), (10, [0, 0.3, 0.5, 0.8]), (20, [0, 0.5, 1.0, 1.5]),
])
def test_of_short_films_more_are_kept(num_frames: int, times: list[float]):
    assert read(encoded(num_frames)).times == pytest.approx(times)


def test_processors_are_told_the_times_of_frames():
    from transformers.video_utils import VideoMetadata

    for frames in (read(encoded(50)), read(encoded(100), max_frames=4)):
        about = VideoMetadata(**frames.describe(2.0))
        assert np.allclose(about.timestamps, frames.times, atol=1e-3)
        assert about.sampled_fps == pytest.approx(1 / np.diff(frames.times).mean(), rel=1e-3)


def test_one_frame():
    frames = read(encoded(1))
    assert len(frames.images) == 1 and frames.describe(2.0)["total_num_frames"] == 500


@pytest.mark.parametrize("data", [b"", b"not a film", bytes(5000), encoded(5)[:200]])
def test_what_is_no_film(data):
    with pytest.raises(MediaError, match="no video") as caught:
        read(data)
    assert caught.value.param == WHERE


def test_bounds(monkeypatch):
    with pytest.raises(MediaError, match="million pixels"):
        read(encoded(3, size=(1280, 960)))
    monkeypatch.setattr(module, "MAX_DECODED", 20)
    with pytest.raises(MediaError, match="longer than"):
        read(encoded(40))


def test_no_mutation_is_more_than_a_typed_error():
    random, good = np.random.default_rng(2), encoded(12)
    for _ in range(60):
        data = bytearray(good)
        for place in random.integers(0, len(data), random.integers(1, 30)):
            data[place] = random.integers(0, 256)
        try:
            read(bytes(data))
        except MediaError as error:
            assert error.param == WHERE
