"""Forms, and clips that are written down window by window: what is asked of the engine, and what becomes of answers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from types import SimpleNamespace

import pytest
from fake_apps import httpx
from fake_client import FakeClient
from starlette.requests import Request

from headrace.base.config import EngineConfig, SchedulerConfig
from headrace.base.errors import Conflict, EngineUnavailable, MediaError, QueueFull, RequestError
from headrace.base.media import MediaArray, MediaItem, MediaPlace
from headrace.base.media_facts import MediaFacts, SpeechFacts, WindowFrames
from headrace.base.messages import ErrorInfo
from headrace.base.sampling import SamplingParams
from headrace.base.server_config import ServerConfig
from headrace.base.step import TokenLogprobs
from headrace.service.client.outputs import ChoiceDelta
from headrace.service.media.wire import PreparedItem
from headrace.serving.http.app import create_app
from headrace.serving.http.generation import speech
from headrace.serving.http.generation.run import GenerationRequest, open_generation
from headrace.serving.http.generation.speech import SpeechTask, Transcriber
from headrace.serving.http.transport.forms import split_form
from headrace.serving.media.intake import MediaIntake

MARKS = ["startoftranscript", "en", "transcribe", "translate", "startoflm", "notimestamps"]
END, START, FIRST_TIME, MELS, FRAMES = 256, 257, 263, 2, 10
FACTS = SimpleNamespace(eos_ids=[END], media=MediaFacts(
    {"audio": 261}, {"audio": "<|startoflm|>"}, 8, frames=WindowFrames(MELS, FRAMES, 4), speech=SpeechFacts(40)
))


class Bytes:
    """A tokenizer of bytes."""

    def special_id(self, text: str) -> int | None:
        name = text.strip("<|>")
        return START + MARKS.index(name) if name in MARKS else None

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def make_clip(frames: int) -> PreparedItem:
    """A clip with a window of silence behind it."""
    shape = (frames + FRAMES, MELS)
    array = MediaArray("float32", shape, bytes(4 * shape[0] * MELS))
    return PreparedItem(MediaItem(MediaPlace("audio", bytes(32), [(0, 4)], (frames,)), {"input_features": array}), [])


@pytest.fixture
def intake() -> MediaIntake:
    return MediaIntake(EngineConfig(scheduler=SchedulerConfig(max_queued_media_mib=1)))


class Scribe:
    """Answers to each window in turn, and what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, intake: MediaIntake, answers: list[ChoiceDelta]):
        self.asked, self._answers, self._intake = [], iter(answers), intake
        monkeypatch.setattr(speech, "open_generation", self._open)

    async def _open(self, request: object, asked: speech.GenerationRequest) -> object:
        self.asked.append(asked)

        async def deltas():
            yield 0, next(self._answers)

        @contextlib.asynccontextmanager
        async def generation():
            yield SimpleNamespace(deltas=deltas, is_disconnected=False)

        return generation()

    async def write(self, frames: int, told: list[str] | None = None) -> str:
        task = SpeechTask(
            request_id="transcribe-a", language="en", temperature=0.5, has_times=True, is_final=told is not None
        )
        context = SimpleNamespace(facts=lambda: FACTS, tokenizer=Bytes, media=self._intake)
        client = SimpleNamespace(receive=asyncio.Event().wait)
        transcriber = Transcriber(client, context, make_clip(frames), task)
        tell = None if told is None else told.append
        return "".join([segment.text async for window in transcriber.write(tell) for segment in window])


def said(*parts: int | str, reason: str = "stop") -> ChoiceDelta:
    """A window's tokens; a number is a time stamp."""
    ids = [i for part in parts for i in ([FIRST_TIME + part] if isinstance(part, int) else part.encode())]
    return ChoiceDelta(0, "", ids, [TokenLogprobs(i, -0.1, 1, [], [], []) for i in ids], finish_reason=reason)


async def test_windows_of_a_request_have_its_id(monkeypatch, intake):
    scribe = Scribe(monkeypatch, intake, [said(0, "a", 5), said(0, "b", 5)])
    assert await scribe.write(2 * FRAMES) == "ab"
    assert [each.request_id for each in scribe.asked] == ["transcribe-a"] * 2  # what `/abort_request` looks for
    assert [each.ids() for each in scribe.asked] == [["transcribe-a-1"], ["transcribe-a-2"]]
    assert [each.is_continued for each in scribe.asked] == [False, True]


async def test_what_has_begun_goes_on_while_the_server_drains():
    app = create_app(FakeClient(), ServerConfig())
    app.state.context.is_draining = True
    request = Request({"type": "http", "app": app, "headers": [], "state": {}}, receive=asyncio.Event().wait)
    asked = GenerationRequest(request_id="a", prompts=["b"], params=[SamplingParams(max_tokens=2)])
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await open_generation(request, asked)
    async with await open_generation(request, dataclasses.replace(asked, is_continued=True)) as generation:
        assert len((await generation.collect())[0].outputs[0].token_ids) == 2


async def test_a_clip_whose_time_stamps_hardly_get_on_ends(monkeypatch, intake):
    most = speech.LEAST_WINDOWS + 4 * speech.MOST_WINDOWS
    scribe = Scribe(monkeypatch, intake, [said(0, "a", 1, 1, "b")] * (most + 1))
    monkeypatch.setattr(speech, "FRAMES_PER_STAMP", 1)
    with pytest.raises(MediaError, match="too many windows") as caught:
        await scribe.write(4 * FRAMES)
    assert caught.value.param == "file" and len(scribe.asked) == most
    assert not intake._held_bytes


async def test_an_aborted_window_is_no_end(monkeypatch, intake):
    scribe = Scribe(monkeypatch, intake, [said(0, "a", 5), said(0, "b", reason="abort"), said(0, "c", 5)])
    with pytest.raises(Conflict, match="aborted"):
        await scribe.write(3 * FRAMES)
    assert len(scribe.asked) == 2


async def test_what_has_begun_waits_while_the_queue_is_full(monkeypatch, intake):
    full = ChoiceDelta(0, "", [], finish_reason="error", error=ErrorInfo.of(QueueFull("full", retry_after=0.01)))
    scribe = Scribe(monkeypatch, intake, [said(0, "a", 5), full, full, said(0, "b", 5)])
    assert await scribe.write(2 * FRAMES) == "ab"
    with pytest.raises(QueueFull):
        await Scribe(monkeypatch, intake, [full]).write(FRAMES)


async def test_streams_keep_what_follows_an_empty_segment(monkeypatch, intake):
    told: list[str] = []
    scribe = Scribe(monkeypatch, intake, [said(0, "a", 1, 1, " ", 2, 2, "b", 3, 3, "c", 5)])
    await scribe.write(FRAMES, told)
    assert "".join(told) == "a bc"


async def test_clips_that_are_written_down_are_bounded(monkeypatch, intake):
    mib = (1 << 20) // (4 * MELS)
    first, second = make_clip(mib // 2), make_clip(mib // 2)
    with intake.hold(first), intake.hold(first):
        with pytest.raises(QueueFull, match="max_queued_media_mib") as caught, intake.hold(second):
            pass
        assert caught.value.retry_after
    with intake.hold(second):
        scribe = Scribe(monkeypatch, intake, [])
        with pytest.raises(QueueFull):
            await scribe.write(mib // 2)
        assert not scribe.asked
    with pytest.raises(MediaError, match="--max-queued-media-mib"):
        await scribe.write(mib)


@pytest.mark.parametrize("header", [
    'Content-Disposition: form-data; name="file"; filename="a.wav"', "content-disposition: form-data; name=file",
    'Content-Type: audio/wav; name="clip.wav"\r\nContent-Disposition: form-data; filename="a"; name="file"',
])
def test_names_of_parts(header: str):
    body = b"--b\r\n" + header.encode() + b"\r\n\r\nsound\r\n--b--\r\n"
    assert list(split_form(body, b"b")) == [("file", b"sound")]


def test_a_part_without_a_name():
    with pytest.raises(RequestError, match="no name"):
        list(split_form(b'--b\r\nContent-Type: a/b; name="c"\r\n\r\nx\r\n--b--', b"b"))


def test_an_abandoned_clip_is_released(intake):
    async def leave() -> None:
        with intake.hold(make_clip(1)):
            await asyncio.sleep(60)

    async def run() -> None:
        task = asyncio.create_task(leave())
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert not intake._held and not intake._held_bytes

    asyncio.run(run())


@pytest.mark.parametrize("origin, options, status", [
    (None, {}, 400), ("http://server", {}, 400), ("http://evil.example", {}, 403), ("null", {}, 403),
    ("http://page.example", {"cors_origins": "http://page.example"}, 400),
])
async def test_forms_of_other_sites_pages_are_refused(origin, options, status):
    """Nothing is served here that writes sound down: what passes is a 400."""
    app = create_app(FakeClient(), ServerConfig(**options))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as http:
        headers = {} if origin is None else {"origin": origin}
        for name in ("transcriptions", "translations"):
            answer = await http.post(f"/v1/audio/{name}", files={"file": ("a.wav", b"x")}, headers=headers)
            assert answer.status_code == status, answer.text
