"""Video files to a few RGB frames, by PyAV, bounded in length, size and number. What can be wrong with a file is a
`MediaError`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.base.errors import MediaError
from headrace.service.media.audio import FAILURES
from headrace.service.media.images import check_size

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_SECONDS = 3600.0
MAX_DECODED = 20_000
"""Frames of a file that are decoded to find those that are kept."""
MAX_FRAMES = 768
LEAST_FRAMES = 4
"""Of a video that has as many: processors of transformers sample no fewer, and some take no single one."""
TICKS = 1000.0
"""Of a second, in which processors are told the times of frames."""
MAX_TOTAL_PIXELS = 400_000_000
"""Pixels of all frames that are kept."""
INSTALL = "pip install 'headrace[video]'"


@dataclass(frozen=True)
class Frames:
    """Frames of a video, and the time of each from the first one, in seconds."""

    images: list[Image]
    times: list[float]

    def describe(self, fps: float) -> dict[str, Any]:
        """The fields of transformers' ``VideoMetadata``, from which processors find the time of each frame and how far
        apart they are: as of a video with a frame each millisecond, of which these are kept. ``fps`` is that of a
        single frame."""
        count = len(self.times)
        gap = (self.times[-1] - self.times[0]) / (count - 1) if count > 1 else 1 / fps
        return {
            "fps": TICKS, "frames_indices": [round(at * TICKS) for at in self.times],
            "total_num_frames": max(1, round(count * gap * TICKS)), "duration": count * gap,
        }


def open_video(data: bytes, param: str, *, fps: float, max_frames: int, max_pixels: int) -> Frames:
    """Frames of a video file, ``fps`` for each second, `LEAST_FRAMES` at least and ``max_frames`` at most, evenly
    spaced. Raises `MediaError` naming ``param``."""
    try:
        import av
    except ImportError as error:
        raise MediaError(f"video needs PyAV, which is not installed here: {INSTALL}", param=param) from error
    try:
        with av.open(io.BytesIO(data)) as container:
            if not container.streams.video:
                raise MediaError(f"{param} holds no video", param=param)
            stream = container.streams.video[0]
            check_size((stream.codec_context.width, stream.codec_context.height), param, max_pixels)
            most = min(max_frames, MAX_FRAMES)
            # Of a long video fewer are kept from the start, of a short one more, as far as its length is known.
            seconds = max(0, container.duration or 0) / av.time_base
            gap = max(1 / fps, seconds / most)
            gap = min(gap, seconds / LEAST_FRAMES) if seconds else gap
            return _thin_out(list(_sample(container.decode(stream), param, gap, max_pixels)), most)
    except MediaError:
        raise
    except (av.FFmpegError, *FAILURES) as error:
        raise MediaError(
            f"{param} is no video file that can be read ({type(error).__name__}); send MP4, WebM or MKV", param=param
        ) from None


def _sample(frames: Iterator[Any], param: str, gap: float, max_pixels: int) -> Iterator[tuple[float, Image]]:
    """The first frame of every ``gap`` seconds."""
    begin: float | None = None
    due, num_pixels = 0.0, 0
    for index, frame in enumerate(frames):
        begin = (frame.time or 0.0) if begin is None else begin
        at = (frame.time or 0.0) - begin if frame.time is not None else index / 30
        if at > MAX_SECONDS or index >= MAX_DECODED:
            raise MediaError(
                f"{param} is longer than {MAX_SECONDS:g} seconds or {MAX_DECODED} frames; cut it", param=param
            )
        if at + 1e-6 < due:
            continue
        due += gap
        check_size((frame.width, frame.height), param, max_pixels)  # it may change within a stream
        num_pixels += frame.width * frame.height
        if num_pixels > MAX_TOTAL_PIXELS:
            raise MediaError(f"{param} has more than {MAX_TOTAL_PIXELS} pixels in its frames; shrink it", param=param)
        yield at, frame.to_image()


def _thin_out(kept: list[tuple[float, Image]], most: int) -> Frames:
    if len(kept) > most:
        kept = [kept[round(i * (len(kept) - 1) / max(most - 1, 1))] for i in range(most)]
    return Frames([image for _, image in kept], [at for at, _ in kept])
