"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``, for models that write sound down."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence

from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from headrace.base.errors import HeadraceError, UnsupportedFeature
from headrace.serving.http.generation.context import context_of, read_request
from headrace.serving.http.generation.sampling import pick_request_id
from headrace.serving.http.generation.speech import (
    FRAMES_PER_SECOND,
    Segment,
    SpeechMarks,
    SpeechTask,
    Transcriber,
    find_language,
    require_speech,
)
from headrace.serving.http.generation.stream import DONE, HEADERS, SSE, frame
from headrace.serving.http.protocol import audio as wire
from headrace.serving.http.protocol.errors import describe_error
from headrace.serving.http.transport.access import check_form_origin
from headrace.serving.http.transport.endpoint import GENERATION_ERRORS, post
from headrace.serving.http.transport.errors import INTERNAL_ERROR, JsonResponse
from headrace.serving.http.transport.forms import FormBody
from headrace.serving.http.transport.threads import while_connected

logger = logging.getLogger(__name__)

FILES, LISTS = frozenset({"file"}), frozenset({"timestamp_granularities"})
TRANSCRIPTION_BODY = FormBody(wire.TranscriptionRequest, files=FILES, lists=LISTS)
TRANSLATION_BODY = FormBody(wire.TranslationRequest, files=FILES)
TIMED = ("srt", "vtt", "verbose_json")
"""Formats that say when something was said."""


async def transcribe(request: Request) -> Response:
    """Write a clip of sound down, in its language."""
    check_form_origin(request.headers, context_of(request).server)
    _, body = await read_request(request, TRANSCRIPTION_BODY)
    granularities = body.timestamp_granularities or ["segment"]
    if "word" in granularities and context_of(request).client.config.parallel.tensor_parallel_size > 1:
        raise UnsupportedFeature(
            "time stamps of words need a model on one device; ask for those of segments, or serve with "
            "--tensor-parallel-size 1", param="timestamp_granularities"
        )
    if body.timestamp_granularities and body.response_format != "verbose_json":
        raise UnsupportedFeature("timestamp_granularities needs response_format verbose_json", param="response_format")
    if body.stream and body.response_format not in (None, "json", "text"):
        raise UnsupportedFeature("stream needs response_format json or text", param="stream")
    transcriber = await _open(
        request, body, language=body.language, is_final=bool(body.stream), has_words="word" in granularities
    )
    if body.stream:
        return await start_stream(transcriber)
    return await _respond(transcriber, body.response_format or "json", has_segments="segment" in granularities)


async def translate(request: Request) -> Response:
    """Write a clip of sound down in English."""
    check_form_origin(request.headers, context_of(request).server)
    _, body = await read_request(request, TRANSLATION_BODY)
    transcriber = await _open(request, body, is_translation=True)
    return await _respond(transcriber, body.response_format or "json")


async def _open(
    request: Request, body: wire.SpeechRequest, *, language: str | None = None, is_translation: bool = False,
    is_final: bool = False, has_words: bool = False,
) -> Transcriber:
    """Check the request, and prepare its clip while the client waits."""
    context = request.app.state.context
    context.check_request(body.model)
    speech = require_speech(context)
    find_language(language, SpeechMarks.of(context.tokenizer()), speech)  # a wrong one costs no decoding
    work = asyncio.ensure_future(context.media.prepare_clip(
        body.file, "file", context.facts(), salt=body.cache_salt or ""
    ))
    clip = await while_connected(request, work)
    is_long = clip.item.place.grid[0] > context.facts().media.frames.frames
    return Transcriber(request, context, clip, SpeechTask(
        request_id=pick_request_id(body.request_id, request, "transcribe-"), is_translation=is_translation,
        language=language, prompt=body.prompt or "", temperature=body.temperature or 0.0, seed=body.seed,
        has_times=is_long or body.response_format in TIMED, has_words=has_words, is_final=is_final,
        namespace=body.cache_salt or "", priority=body.priority or 0,
    ))


async def _respond(transcriber: Transcriber, form: str, *, has_segments: bool = True) -> Response:
    segments = [segment async for window in transcriber.write() for segment in window]
    text = "".join(segment.text for segment in segments).strip()
    if form == "text":
        return PlainTextResponse(text + "\n")
    if form == "srt":
        return PlainTextResponse(write_srt(segments))
    if form == "vtt":
        return PlainTextResponse(write_vtt(segments), media_type="text/vtt")
    transcript = wire.Transcript(text, _usage(transcriber))
    if form == "verbose_json":
        transcript.task = "translate" if transcriber.task.is_translation else "transcribe"
        transcript.language = wire.LANGUAGES[transcriber.language or "en"]
        transcript.duration = transcriber.num_frames / FRAMES_PER_SECOND
        if has_segments:
            transcript.segments = [_describe(number, segment) for number, segment in enumerate(segments)]
        if transcriber.task.has_words:
            transcript.words = [
                wire.SpeechWord(word.text.strip(), word.start, word.end)
                for segment in segments for word in segment.words
            ]
    return JsonResponse(transcript)


def _usage(transcriber: Transcriber) -> wire.SoundUsage:
    return wire.SoundUsage(math.ceil(transcriber.num_frames / FRAMES_PER_SECOND))


def _describe(number: int, segment: Segment) -> wire.SpeechSegment:
    window = segment.window
    return wire.SpeechSegment(
        number, segment.seek, segment.start, segment.end, segment.text, segment.token_ids, window.temperature,
        window.avg_logprob, window.compression, window.silence,
    )


def write_srt(segments: Sequence[Segment]) -> str:
    """Subtitles of SubRip."""
    return "".join(
        f"{number}\n{_clock(each.start, ',')} --> {_clock(each.end, ',')}\n{_in_lines(each)}\n\n"
        for number, each in enumerate(segments, 1)
    )


def write_vtt(segments: Sequence[Segment]) -> str:
    """Subtitles of WebVTT (W3C)."""
    cues = (f"{_clock(each.start, '.')} --> {_clock(each.end, '.')}\n{_in_lines(each)}\n\n" for each in segments)
    return "WEBVTT\n\n" + "".join(cues)


def _in_lines(segment: Segment) -> str:
    # an arrow in a text would begin another cue
    return segment.text.strip().replace("-->", "->")


def _clock(seconds: float, point: str) -> str:
    whole, thousandths = divmod(round(seconds * 1000), 1000)
    return f"{whole // 3600:02}:{whole // 60 % 60:02}:{whole % 60:02}{point}{thousandths:03}"


class SpeechStream(Response):
    """ASGI response that streams text. ``pieces``: further text, None at its end, or the error that ends it; ``first``
    was already taken. Owns the task that writes."""

    def __init__(
        self, usage: wire.SoundUsage, writing: asyncio.Task[None], pieces: Pieces, first: str | None
    ):
        super().__init__()
        self._usage, self._writing, self._pieces, self._first = usage, writing, pieces, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        piece: str | BaseException | None = self._first
        text = ""
        try:
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", SSE), *HEADERS]}
            )
            while isinstance(piece, str):
                text += piece
                await self._send(send, wire.TranscriptDelta(piece))
                piece = await self._pieces.get()
            if piece is None:
                await self._send(send, wire.TranscriptDone(text.strip(), self._usage))
            elif isinstance(piece, HeadraceError):
                await self._send(send, describe_error(piece))
            elif not isinstance(piece, ClientDisconnect):
                logger.error("a stream failed", exc_info=piece)
                await self._send(send, describe_error(HeadraceError(INTERNAL_ERROR)))
            await send({"type": "http.response.body", "body": DONE, "more_body": False})
        finally:
            await _stop(self._writing)

    async def _send(self, send: Send, event: object) -> None:
        await send({"type": "http.response.body", "body": frame(event), "more_body": True})


Pieces = asyncio.Queue[str | BaseException | None]


async def start_stream(transcriber: Transcriber) -> SpeechStream:
    """Begin to write, and wait for the first text; an error until then is raised and gets its own status."""
    pieces: Pieces = asyncio.Queue()

    async def write() -> None:
        async for _ in transcriber.write(pieces.put_nowait):
            pass

    writing = asyncio.create_task(write())
    writing.add_done_callback(lambda task: pieces.put_nowait(None if task.cancelled() else task.exception()))
    try:
        first = await pieces.get()
    except asyncio.CancelledError:
        await _stop(writing)
        raise
    if isinstance(first, BaseException):
        raise first
    return SpeechStream(_usage(transcriber), writing, pieces, first)


async def _stop(writing: asyncio.Task[None]) -> None:
    writing.cancel()
    await asyncio.wait([writing])  # what it raised was told, or nobody is left to be told


ENDPOINTS = (
    post(
        "/v1/audio/transcriptions", transcribe, "openai", wire.Transcript, body=TRANSCRIPTION_BODY,
        event=wire.TranscriptEvent, errors=(403, 409, *GENERATION_ERRORS)
    ),
    post(
        "/v1/audio/translations", translate, "openai", wire.Transcript, body=TRANSLATION_BODY,
        errors=(403, 409, *GENERATION_ERRORS)
    ),
)
