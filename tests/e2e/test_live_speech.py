"""A live server of a tiny model that writes sound down, through OpenAI's client: the text is that of transformers."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from live import running_server

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "service"))
from tiny_whisper import (
    ENGLISH,
    FIRST_TIME,
    GERMAN,
    PLAIN,
    POSITIONS,
    PREVIOUS,
    RATE,
    START,
    TRANSCRIBE,
    TRANSLATE,
    Oracle,
    make_tokenizer,
    text_of,
    write_whisper,
)

from headrace.serving.http.generation.spoken_words import find_words

soundfile = pytest.importorskip("soundfile")
GREEDY = 1e-6
"""A temperature with which no other one is tried."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    options = ("--model", str(folder), "--dtype", "float32", "--kv-pages", "512", "--media-workers", "1")
    with running_server(tmp_path_factory.mktemp("live"), *options) as server:
        yield server


@pytest.fixture(scope="module")
def oracle(folder):
    return Oracle(folder)


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(int(seconds * RATE)) * 0.1).astype(np.float32)


def wav(samples, rate: int = RATE, kind: str = "WAV", subtype: str | None = "FLOAT") -> tuple[str, bytes]:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return "clip.wav", buffer.getvalue()


def test_every_format_says_what_transformers_writes(client, oracle):
    clip = noise(1.5)
    features = oracle.extract(clip)
    plain = text_of(oracle.write(features, 0, [START, ENGLISH, TRANSCRIBE, PLAIN], has_times=False)).strip()
    common = {"file": wav(clip), "model": "default", "language": "en", "temperature": GREEDY}
    assert client.audio.transcriptions.create(**common).text == plain
    assert client.audio.transcriptions.create(**common, chunking_strategy="auto").text == plain
    assert client.audio.transcriptions.create(**common, response_format="text").strip() == plain
    hinted = [PREVIOUS, *make_tokenizer().encode(" mill").ids, START, ENGLISH, TRANSCRIBE, PLAIN]
    found = client.audio.transcriptions.create(**common, prompt="mill").text
    assert found == text_of(oracle.write(features, 0, hinted, has_times=False)).strip()
    translated = client.audio.translations.create(file=wav(clip), model="default", temperature=GREEDY)
    expected = {
        text_of(oracle.write(features, 0, [START, language, TRANSLATE, PLAIN], has_times=False)).strip()
        for language in (ENGLISH, GERMAN)
    }
    assert translated.text in expected


def test_long_clips_go_on_behind_the_last_segment(client, oracle):
    clip = noise(5.0, 1)
    features = oracle.extract(clip)
    common = {"file": wav(clip), "model": "default", "language": "de", "temperature": GREEDY}
    found = client.audio.transcriptions.create(**common, response_format="verbose_json")
    assert (found.language, round(found.duration, 2)) == ("german", 5.0) and found.segments
    assert len({segment.seek for segment in found.segments}) > 1
    for seek in {segment.seek for segment in found.segments}:
        own = [segment for segment in found.segments if segment.seek == seek]
        expected = oracle.write(features, seek, [START, GERMAN, TRANSCRIBE], has_times=True)
        assert " ".join(map(str, own[0].tokens)) in " ".join(map(str, expected))
        for segment in own:
            times = [i - FIRST_TIME for i in segment.tokens if i >= FIRST_TIME]
            assert segment.start == pytest.approx(min(5.0, seek / 100 + times[0] / 50))
            assert segment.end >= segment.start
            assert segment.text == text_of(segment.tokens) and segment.temperature == pytest.approx(GREEDY)
    assert found.text == "".join(segment.text for segment in found.segments).strip()
    subtitles = client.audio.transcriptions.create(**common, response_format="srt")
    assert len(re.findall(r"^\d\d:\d\d:\d\d,\d{3} --> \d\d:\d\d:\d\d,\d{3}$", subtitles, re.M)) == len(found.segments)
    assert client.audio.transcriptions.create(**common, response_format="vtt").startswith("WEBVTT\n\n00:00:0")


@pytest.mark.parametrize("seconds", [1.3, 5.0])
def test_words_have_the_times_of_transformers(client, oracle, seconds):
    clip = noise(seconds, 1)
    features, prompt = oracle.extract(clip), [START, ENGLISH, TRANSCRIBE]
    found = client.audio.transcriptions.create(
        file=wav(clip), model="default", language="en", temperature=GREEDY, response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    expected = []
    for seek in sorted({segment.seek for segment in found.segments}):
        ids = oracle.write(features, seek, prompt, has_times=True)
        positions = min(POSITIONS, (int(seconds * 100) - seek) // 2)
        times = oracle.find_times(features, seek, prompt, ids, positions)
        times.append(times[-1])
        begin = 0
        for segment in (each for each in found.segments if each.seek == seek):
            own = [i for i, token in enumerate(segment.tokens, begin) if token < 256]
            assert ids[begin : begin + len(segment.tokens)] == segment.tokens
            begin += len(segment.tokens)
            ends = [times[i] for i in own] + [times[own[-1] + 1]]
            expected += [
                (word.text.strip(), seek / 100 + word.start, seek / 100 + word.end)
                for word in find_words([ids[i] for i in own], ends, text_of, "en")
            ]
    assert found.words and [word.word for word in found.words] == [text for text, *_ in expected]
    for word, (_, start, end) in zip(found.words, expected, strict=True):
        assert (word.start, word.end) == (pytest.approx(start, abs=0.006), pytest.approx(end, abs=0.006))
    alone = client.audio.transcriptions.create(
        file=wav(clip), model="default", language="en", temperature=GREEDY, response_format="verbose_json",
        timestamp_granularities=["word"],
    )
    assert alone.words == found.words and alone.segments is None


@pytest.mark.parametrize("seconds", [1.0, 4.5])
def test_streams(client, seconds):
    clip = wav(noise(seconds, 2))
    common = {"file": clip, "model": "default", "language": "en", "temperature": GREEDY}
    events = list(client.audio.transcriptions.create(**common, stream=True))
    whole = client.audio.transcriptions.create(**common)
    assert [event.type for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1) and len(events) > 2
    assert events[-1].type == "transcript.text.done" and events[-1].text == whole.text
    assert "".join(event.delta for event in events[:-1]).strip() == whole.text


def test_languages_are_found_and_tries_are_seeded(client):
    common = {"file": wav(noise(1.0, 3)), "model": "default", "response_format": "verbose_json"}
    first, second = (client.audio.transcriptions.create(**common, extra_body={"seed": 3}) for _ in range(2))
    assert first.language in ("english", "german") and first.text == second.text
    if first.segments:  # a random model is sure of nothing: the last temperature was tried
        assert first.segments[0].temperature == 1.0 and 0 <= first.segments[0].no_speech_prob <= 1


HOUR = 3600


@pytest.mark.parametrize("name, clip, words", [
    ("no samples", lambda: wav(np.zeros(0, np.float32)), "zero length"),
    ("not a number", lambda: wav(np.full(RATE, np.nan, np.float32)), "finite"),
    ("cut off", lambda: ("a.flac", wav(noise(1), kind="FLAC", subtype=None)[1][:60]), "file"),
    ("text", lambda: ("a.wav", b"no sound at all"), "file"),
    ("an hour", lambda: wav(np.zeros(HOUR * 1000, np.float32), 1000, "FLAC", None), "lasts"),
    ("empty", lambda: ("a.wav", b""), "empty"),
])
def test_hostile_clips_fail_alone(client, name, clip, words):
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.audio.transcriptions.create(file=clip(), model="default")
    assert caught.value.param == "file"


def test_other_rates_and_channels_are_heard(client):
    many = np.repeat(noise(1.0, 4)[:, None], 8, axis=1)
    assert client.audio.transcriptions.create(file=wav(many, 8000), model="default", language="en").usage.seconds == 2


@pytest.mark.parametrize("fields, param", [
    ({"language": "klingon"}, "language"), ({"timestamp_granularities[]": "letter"}, "timestamp_granularities[0]"),
    ({"timestamp_granularities[]": "word"}, "response_format"), ({"chunking_strategy": "vad"}, "chunking_strategy"),
    ({"response_format": "xml"}, "response_format"), ({"temperature": "2"}, "temperature"),
    ({"stream": "true", "response_format": "srt"}, "stream"), ({"nonsense": "1"}, "nonsense"),
])
def test_wrong_fields_are_named(server, fields, param):
    answer = httpx.post(f"{server.url}/v1/audio/transcriptions", files={"file": wav(noise(0.2))}, data=fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_forms_that_are_none(server):
    url = f"{server.url}/v1/audio/transcriptions"
    assert httpx.post(url, json={"file": "x"}).status_code == 415
    kind = {"content-type": "multipart/form-data; boundary=b"}
    head = b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\n'
    bodies = {
        b"": "form", b"--b\r\n": "truncated", b"--b--\r\n": "file", head + b"x": "truncated",
        b"--b\r\na: b\r\n\r\nx\r\n--b--": "name",
    }
    for body, words in bodies.items():
        answer = httpx.post(url, content=body, headers=kind)
        assert answer.status_code == 400 and words in json.dumps(answer.json()), (body, answer.text)


def test_a_client_that_leaves_a_stream_stops_it(server):
    form = {"language": "en", "stream": "true", "temperature": str(GREEDY)}
    url = f"{server.url}/v1/audio/transcriptions"
    with httpx.stream("POST", url, files={"file": wav(noise(20.0, 5))}, data=form) as answer:
        assert next(answer.iter_lines()).startswith("data: ")
    server.wait_until(lambda: re.search(r"aborted\w*_total\S* [1-9]", server.get("/metrics").text), "aborted")


def test_the_ready_message_names_the_route(server):
    assert re.search(r"curl http://\S+/v1/audio/transcriptions -F file=@clip\.mp3", server.log.read_text())
