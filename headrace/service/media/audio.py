"""Audio files to one channel of float32 samples at the rate a model wants: by soundfile, else by PyAV, which knows more
containers. Bounded before samples are decoded. Everything that can be wrong with a file is a `MediaError`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from headrace.base.errors import MediaError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Samples = NDArray[np.float32]

MAX_SECONDS = 1800.0
MAX_CHANNELS = 64
LOUDEST = 2.0**31
"""Samples are from -1 to 1, or integers of up to 32 bits; the power of far larger ones is no float32."""
RATES = (1_000, 768_000)
MAX_VALUES = 256_000_000
"""Samples of all channels together that are decoded."""
INSTALL = "pip install 'headrace[audio]'"
HALF_WIDTH = 32
"""Zero crossings of the resampling filter on each side."""
ROLLOFF = 0.95
MAX_RATIO = 1000


# What PyAV raises for files that are not what they seem, beside its own errors.
FAILURES = (
    ValueError, EOFError, MemoryError, RuntimeError, AttributeError, LookupError, TypeError, ArithmeticError
)


def open_audio(data: bytes, param: str, rate: int) -> Samples:
    """The samples of an audio file, channels averaged, at ``rate`` per second: float32 of shape ``[samples]``. Raises
    `MediaError` naming ``param``."""
    read = _read_by_soundfile(data, param)
    samples, own_rate = read if read is not None else _read_by_av(data, param)
    if samples.size == 0:
        raise MediaError(f"{param} is an audio clip of zero length", param=param)
    if not is_audible(samples):
        raise MediaError(f"{param} has samples that are not finite numbers up to {LOUDEST:g}", param=param)
    return resample(samples, own_rate, rate)


def is_audible(samples: Samples) -> bool:
    """Whether all samples are finite and at most `LOUDEST`."""
    return bool((abs(samples) <= LOUDEST).all())


def check_clip(param: str, *, rate: int, channels: int, frames: int) -> None:
    """Raise `MediaError` for a clip out of bounds. ``frames``: samples of each channel."""
    if not RATES[0] <= rate <= RATES[1]:
        raise MediaError(
            f"{param} has {rate} samples per second; from {RATES[0]} to {RATES[1]} are possible", param=param
        )
    if not 1 <= channels <= MAX_CHANNELS:
        raise MediaError(f"{param} has {channels} channels; from 1 to {MAX_CHANNELS} are possible", param=param)
    if frames > MAX_SECONDS * rate or frames * channels > MAX_VALUES:
        raise MediaError(
            f"{param} lasts {frames / rate:.0f} seconds; at most {MAX_SECONDS:g} are possible: split it", param=param
        )


def resample(samples: Samples, rate: int, wanted: int) -> Samples:
    """``samples`` at another rate, by a windowed-sinc filter; float32, ``ceil(samples * wanted / rate)`` of them."""
    if rate == wanted:
        return samples
    import numpy as np
    import torch

    # Of rates with few common factors the nearest ratio of small numbers is taken: the filters fill memory.
    down, ratio = rate >= wanted, Fraction(min(rate, wanted), max(rate, wanted)).limit_denominator(MAX_RATIO)
    step, phases = (ratio.denominator, ratio.numerator) if down else (ratio.numerator, ratio.denominator)
    cut = min(step, phases) * ROLLOFF
    width = math.ceil(HALF_WIDTH * step / cut)
    # One filter for each of the `phases` outputs per `step` inputs: sinc at the distance of input and output times.
    at = torch.arange(-width, width + step, dtype=torch.float64)[None] / step
    at = (at - torch.arange(phases, dtype=torch.float64)[:, None] / phases) * cut
    window = torch.cos(at.clamp(-HALF_WIDTH, HALF_WIDTH) * math.pi / HALF_WIDTH / 2) ** 2
    filters = (torch.sinc(at) * window * (cut / step)).float()[:, None]
    padded = torch.nn.functional.pad(torch.from_numpy(np.ascontiguousarray(samples))[None], (width, width + step))
    found = torch.nn.functional.conv1d(padded[:, None], filters, stride=step)
    count = -(-len(samples) * phases // step)
    return found[0].T.reshape(-1)[:count].contiguous().numpy()


def _read_by_soundfile(data: bytes, param: str) -> tuple[Samples, int] | None:
    """Samples and their rate; None for a file that libsndfile does not know."""
    try:
        import soundfile
    except ImportError as error:
        raise MediaError(f"audio needs soundfile, which is not installed here: {INSTALL}", param=param) from error
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except (soundfile.LibsndfileError, TypeError, RuntimeError):
        return None
    with file:
        # The declared number of frames may be wrong, or unknown and huge: reading is bounded by itself.
        check_clip(param, rate=file.samplerate, channels=file.channels, frames=0)
        most = min(int(MAX_SECONDS * file.samplerate), MAX_VALUES // file.channels)
        try:
            samples = file.read(most + 1, dtype="float32", always_2d=True)
        except (soundfile.LibsndfileError, RuntimeError, ValueError, MemoryError) as error:
            raise MediaError(f"{param} is a broken audio file: {str(error)[:120]}", param=param) from None
        check_clip(param, rate=file.samplerate, channels=file.channels, frames=len(samples))
        return samples.mean(axis=1), file.samplerate


def _read_by_av(data: bytes, param: str) -> tuple[Samples, int]:
    import numpy as np

    try:
        import av
    except ImportError as error:
        raise MediaError(
            f"{param} is no WAV, FLAC, Ogg or MP3 file; others need PyAV: {INSTALL}", param=param
        ) from error
    try:
        with av.open(io.BytesIO(data)) as container:
            if not container.streams.audio:
                raise MediaError(f"{param} holds no audio", param=param)
            stream = container.streams.audio[0]
            rate, channels = stream.rate or 0, stream.codec_context.channels
            check_clip(param, rate=rate, channels=channels, frames=0)
            pieces = list(_bounded(container.decode(stream), rate, param))
    except MediaError:
        raise
    except (av.FFmpegError, *FAILURES) as error:
        reason = f" ({type(error).__name__})" if isinstance(error, av.FFmpegError) else ""
        raise MediaError(
            f"{param} is no audio file that can be read{reason}; send WAV, MP3, FLAC, Ogg, M4A or WebM", param=param
        ) from None
    empty: Samples = np.zeros(0, np.float32)
    return np.concatenate([empty, *pieces]), rate


def _bounded(frames: Iterator[Any], rate: int, param: str) -> Iterator[Samples]:
    import av

    to_mono, num_samples = av.AudioResampler(format="flt", layout="mono", rate=rate), 0
    for frame in frames:
        for mono in to_mono.resample(frame):
            num_samples += mono.samples
            check_clip(param, rate=rate, channels=1, frames=num_samples)
            yield mono.to_ndarray().reshape(-1)
