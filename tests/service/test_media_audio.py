"""Audio files: mono at the wanted rate, or typed errors."""

from __future__ import annotations

import io

import numpy as np
import pytest

from headrace.base.errors import MediaError
from headrace.service.media.audio import open_audio, resample

soundfile = pytest.importorskip("soundfile")
WHERE = "messages[0].content[0].input_audio.data"
RATE = 16_000


def tone(rate: int, seconds: float = 0.5, channels: int = 1, hertz: float = 440.0):
    at = np.arange(round(rate * seconds)) / rate
    wave = (0.5 * np.sin(2 * np.pi * hertz * at)).astype(np.float32)
    return np.repeat(wave[:, None], channels, axis=1)


def encoded(samples, rate: int, kind: str = "WAV", subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


def refuse(data: bytes, message: str) -> None:
    with pytest.raises(MediaError, match=message) as caught:
        open_audio(data, WHERE, RATE)
    assert caught.value.param == WHERE


@pytest.mark.parametrize("rate", [8000, 11_025, 16_000, 22_050, 44_100, 48_000, 44_101, 96_000, 1000])
def test_every_rate_keeps_pitch_and_loudness(rate):
    samples = open_audio(encoded(tone(rate, hertz=200.0), rate), WHERE, RATE)
    assert samples.dtype == np.float32 and abs(len(samples) - RATE // 2) <= 2
    middle = slice(RATE // 8, -RATE // 8)  # the ends ring
    expected = tone(RATE, hertz=200.0)[: len(samples), 0]
    assert abs(samples[middle] - expected[middle]).max() < 5e-3


def test_what_the_lower_rate_cannot_hold_is_filtered_out():
    samples = resample(tone(48_000, hertz=11_000.0)[:, 0], 48_000, RATE)
    assert abs(samples[2000:-2000]).max() < 0.01


@pytest.mark.parametrize("kind, subtype", [
    ("WAV", "PCM_16"), ("WAV", "PCM_U8"), ("WAV", "FLOAT"), ("WAV", "ULAW"), ("FLAC", None), ("OGG", None),
    ("MP3", None),
])
def test_formats(kind, subtype):
    samples = open_audio(encoded(tone(RATE), RATE, kind, subtype), WHERE, RATE)
    assert abs(np.sqrt((samples**2).mean()) - 0.5 / 2**0.5) < 0.03


def test_channels_are_averaged():
    two = np.stack([np.full(RATE, 0.5, np.float32), np.full(RATE, -0.25, np.float32)], axis=1)
    assert abs(open_audio(encoded(two, RATE, subtype="FLOAT"), WHERE, RATE) - 0.125).max() < 1e-6
    assert len(open_audio(encoded(tone(RATE, channels=8), RATE), WHERE, RATE)) == RATE // 2


def test_what_is_refused():
    refuse(encoded(tone(RATE)[:0], RATE), "zero length")
    refuse(encoded(tone(RATE, channels=65), RATE), "65 channels")
    refuse(encoded(tone(RATE), 500), "500 samples per second")
    refuse(encoded(np.array([0, np.nan, np.inf], np.float32), RATE, subtype="FLOAT"), "not finite")
    refuse(encoded(np.full(RATE, 3e38, np.float32), RATE, subtype="FLOAT"), "finite numbers up to 2.147")
    wide = encoded(tone(RATE), RATE)
    refuse(wide[:34] + bytes(2) + wide[36:], r"no audio file that can be read; send")
    without_rate = encoded(np.zeros((40_000, 1), np.int16), 1000).replace(b"\xe8\x03\x00\x00", bytes(4), 1)
    refuse(without_rate, "samples per second|no audio file")
    for data in (b"", b"RIFF", b"not audio at all" * 9, encoded(tone(RATE), RATE)[:20], bytes(5000)):
        refuse(data, "no audio file|broken|zero length|no WAV")


def test_a_clip_that_is_too_long():
    refuse(encoded(np.zeros(1_900_000, np.int16), 1000), "lasts|at most 1800 seconds")


def test_no_mutation_is_more_than_a_typed_error():
    random = np.random.default_rng(3)
    for kind in ("WAV", "FLAC", "OGG", "MP3"):
        good = encoded(tone(RATE, 0.1), RATE, kind)
        for _ in range(40):
            data = bytearray(good)
            for place in random.integers(0, len(data), random.integers(1, 20)):
                data[place] = random.integers(0, 256)
            try:
                assert np.isfinite(open_audio(bytes(data), WHERE, RATE)).all()
            except MediaError as error:
                assert error.param == WHERE
