"""`Transcriber`: a clip of any length to text, window by window; arXiv:2212.04356, section 3.8. The next window begins
where the last complete segment ends. Refuses: forms and response formats.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from headrace.base.errors import Conflict, MediaError, QueueFull, RequestError, UnsupportedFeature
from headrace.base.media import MediaArray, MediaItem, MediaPlace, digest_of
from headrace.base.media_facts import SpeechFacts, WindowFrames
from headrace.base.pooling import Alignment, PoolingSpec
from headrace.base.sampling import SamplingParams, SpeechRules, TimestampRules
from headrace.base.step import TokenLogprobs
from headrace.service.client.media import MediaPrompt
from headrace.service.client.outputs import pooled_of
from headrace.service.media.wire import PreparedItem
from headrace.service.tokenization import Tokenizer
from headrace.serving.http.generation.context import AppContext
from headrace.serving.http.generation.run import (
    GenerationRequest,
    collect_generation,
    delta_error,
    open_generation,
)
from headrace.serving.http.generation.spoken_words import Word, find_times, find_words
from headrace.serving.http.protocol.audio import LANGUAGES
from headrace.serving.http.transport.threads import while_connected

T = TypeVar("T")

FRAMES_PER_SECOND, FRAMES_PER_STAMP = 100, 2
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""Tried in turn until a window's text is neither repetitive nor improbable, where the request asks for 0."""
MOST_COMPRESSION, LEAST_LOGPROB, MOST_SILENCE = 2.4, -1.0, 0.6
"""Beyond these a window's text is repetitive, improbable, or nobody speaks; those of the paper, section 4.5."""
ENGLISH = "en"
LEAST_WINDOWS, MOST_WINDOWS = 8, 6
"""Windows in which a clip may be heard: so many, and this many times the windows that it is long. Speech gets on by
most of a window; output that gets on by one time stamp at a time would make 1,500 windows of each."""
RETRY_S = 1.0
"""Seconds until a window is sent again that found the queue full, where the error names none."""


@dataclass(frozen=True)
class SpeechMarks:
    """Special tokens. ``languages``: ids by code. ``first_time``: the first of the time stamps."""

    start: int
    transcribe: int
    translate: int
    plain: int
    previous: int | None
    silence: int | None
    languages: dict[str, int]

    @property
    def first_time(self) -> int:
        """The first time stamp, which is the token behind ``<|notimestamps|>``."""
        return self.plain + 1

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> SpeechMarks:
        """The special tokens of a tokenizer; raises `UnsupportedFeature` if it lacks some."""
        def find(name: str) -> int:
            found = tokenizer.special_id(f"<|{name}|>")
            if found is None:
                raise UnsupportedFeature(f"the tokenizer has no <|{name}|>: is it that of the model?", param="model")
            return found

        silences = (tokenizer.special_id(f"<|{name}|>") for name in ("nospeech", "nocaptions"))
        codes = ((code, tokenizer.special_id(f"<|{code}|>")) for code in LANGUAGES)
        return cls(
            find("startoftranscript"), find("transcribe"), find("translate"), find("notimestamps"),
            tokenizer.special_id("<|startofprev|>"), next((i for i in silences if i is not None), None),
            {code: token_id for code, token_id in codes if token_id is not None},
        )


@dataclass(frozen=True, kw_only=True)
class SpeechTask:
    """What a request wants. ``language``: a code, None to be found. ``has_times``: segments begin and end at time
    stamps; ``has_words``: words have times, too. ``is_final``: text is told as it is written, so that none is tried
    again."""

    request_id: str
    is_translation: bool = False
    language: str | None = None
    prompt: str = ""
    temperature: float = 0.0
    seed: int | None = None
    has_times: bool = False
    has_words: bool = False
    is_final: bool = False
    namespace: str = ""
    priority: int = 0


@dataclass
class WindowText:
    """One try at a window: tokens without the end, and how probable they are."""

    token_ids: list[int]
    text: str
    temperature: float
    avg_logprob: float
    silence: float

    @property
    def compression(self) -> float:
        """How much shorter zlib makes the text, which tells repetition."""
        raw = self.text.encode()
        return len(raw) / len(zlib.compress(raw)) if raw else 0.0

    @property
    def is_silent(self) -> bool:
        """Whether nobody speaks."""
        return self.silence > MOST_SILENCE and self.avg_logprob < LEAST_LOGPROB

    @property
    def is_bad(self) -> bool:
        """Whether another temperature should be tried."""
        return not self.is_silent and (self.compression > MOST_COMPRESSION or self.avg_logprob < LEAST_LOGPROB)


@dataclass(frozen=True)
class Segment:
    """Tokens between two time stamps, in frames from the clip's begin; ``window`` is the try they are from."""

    seek: int
    start: float
    end: float
    token_ids: list[int]
    text: str
    window: WindowText
    words: tuple[Word, ...] = ()


@dataclass
class Transcriber:
    """Writes one clip down; ``language`` is known once the first window has begun."""

    request: Request
    context: AppContext
    clip: PreparedItem
    task: SpeechTask
    language: str = field(init=False, default="")

    def __post_init__(self) -> None:
        facts = self.context.facts()
        assert facts.media is not None and facts.media.speech is not None, "checked before the clip was prepared"
        assert isinstance(facts.media.frames, WindowFrames)
        self._facts, self._window = facts.media.speech, facts.media.frames
        self._token_id, self._ends = facts.media.token_ids["audio"], facts.eos_ids
        self._tokenizer = self.context.tokenizer()
        self._marks = SpeechMarks.of(self._tokenizer)
        self._first_mark = min([self._marks.start, *self._ends])  # text has the ids below
        self.language = find_language(self.task.language, self._marks, self._facts)
        self._num_asked, self._told = 0, ""

    @property
    def num_frames(self) -> int:
        """Frames of the clip."""
        return self.clip.item.place.grid[0]

    async def write(self, tell: Callable[[str], None] | None = None) -> AsyncGenerator[list[Segment], None]:
        """The segments of each window, in order; ``tell`` is given text as it is written, of a task that is final.
        Raises typed errors, and `ClientDisconnect`."""
        seek, left = 0, LEAST_WINDOWS + MOST_WINDOWS * -(-self.num_frames // self._window.frames)
        with self.context.media.hold(self.clip):
            while seek < self.num_frames:
                left -= 1
                if left < 0:
                    raise MediaError(
                        "the time stamps that the model writes hardly get on, so that the clip would be heard in too "
                        "many windows; send it in parts of at most 30 seconds with response_format json or text, "
                        "which need no time stamps", param="file",
                    )
                size, item = min(self._window.frames, self.num_frames - seek), self._cut(seek)
                silence = await self._listen(item)
                found = await self._try(item, silence, tell)
                if found.is_silent and not self.task.is_final:
                    seek += size
                    continue
                segments, advance = self._divide(found, seek, size)
                if self.task.has_words and found.token_ids:
                    segments = await self._with_words(item, found, segments, size)
                if tell is not None:
                    self._tell(tell, "".join(segment.text for segment in segments))  # what is incomplete stays so
                yield [segment for segment in segments if segment.text.strip()]
                seek += advance

    def _cut(self, seek: int) -> MediaItem:
        """The window from a frame on; behind the clip there are frames of silence."""
        whole = self.clip.item.arrays["input_features"]
        frame = len(whole.data) // whole.shape[0]
        data = whole.data[seek * frame : (seek + self._window.frames) * frame]
        digest = digest_of("audio", str(seek), [self.clip.item.place.digest])
        place = MediaPlace("audio", digest, [(0, self._window.num_tokens)])
        features = MediaArray(whole.dtype, (self._window.frames, self._window.mels), data)
        return MediaItem(place, {"input_features": features})

    async def _listen(self, item: MediaItem) -> float:
        """The probability that nobody speaks; also finds the language, if it is not known."""
        marks = self._marks
        wants_language = self._facts.is_multilingual and not self.language
        if not wants_language and marks.silence is None:
            return 0.0
        params = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0,
            logprob_token_ids=None if marks.silence is None else [marks.silence],
            allowed_token_ids=list(marks.languages.values()) if wants_language else None,
        )
        token_ids, logprobs = await self._ask(item, [marks.start], params, None)
        if wants_language:
            self.language = next((code for code, i in marks.languages.items() if i in token_ids), ENGLISH)
        return math.exp(logprobs[0].id_logprobs[0]) if marks.silence is not None and logprobs else 0.0

    async def _try(self, item: MediaItem, silence: float, tell: Callable[[str], None] | None) -> WindowText:
        """The first try that is not bad, else the last."""
        own, self._told = self.task.temperature, ""
        temperatures = TEMPERATURES if own == 0.0 and not self.task.is_final else (own,)
        for temperature in temperatures:
            token_ids, logprobs = await self._ask(item, self._prompt(), self._params(temperature), tell)
            total = sum(each.logprob for each in logprobs)
            written = [i for i in token_ids if i not in self._ends]
            text = self._decode(written)
            found = WindowText(written, text, temperature, total / max(1, len(logprobs)), silence)
            if not found.is_bad:
                break
        return found

    async def _with_words(
        self, item: MediaItem, found: WindowText, segments: list[Segment], size: int
    ) -> list[Segment]:
        """The segments of a window with their words; what the model wrote is read again, to see what it attends to."""
        prompt, ids = self._prompt(), found.token_ids
        alignment = Alignment(
            self._window.num_tokens + len(prompt), max(1, size // FRAMES_PER_STAMP), self._facts.alignment_heads
        )
        spec = PoolingSpec(needs_all_tokens=True, alignment=alignment)
        packed = await self._repeat(lambda: self._align(item, [*prompt, *ids], spec))
        times = await asyncio.to_thread(find_times, packed, len(ids))
        times.append(times[-1])
        done, begin = [], 0
        for segment in segments:  # they are runs of the window's tokens, from its first on
            own = [i for i, token in enumerate(segment.token_ids, begin) if token < self._first_mark]
            begin += len(segment.token_ids)
            if own:
                ends = [times[i] for i in own] + [times[own[-1] + 1]]
                own_ids = [ids[i] for i in own]
                words = await asyncio.to_thread(find_words, own_ids, ends, self._decode, self.language)
                offset = segment.seek / FRAMES_PER_SECOND
                segment = replace(segment, words=tuple(
                    Word(word.text, round(offset + word.start, 2), round(offset + word.end, 2)) for word in words
                ))
            done.append(segment)
        return done

    async def _align(self, item: MediaItem, ids: list[int], spec: PoolingSpec) -> bytes:
        _, outputs = await collect_generation(self.request, self._request(item, ids, spec))
        return pooled_of(outputs[0])

    def _prompt(self) -> list[int]:
        marks, ids = self._marks, list[int]()
        if self.task.prompt.strip() and marks.previous is not None:
            most = self._facts.num_positions // 2 - 1
            known = self._tokenizer.encode(" " + self.task.prompt.strip(), add_special_tokens=False)
            ids += [marks.previous, *[i for i in known if i < self._first_mark][-most:]]
        ids.append(marks.start)
        if self._facts.is_multilingual:
            ids += [marks.languages[self.language], marks.translate if self.task.is_translation else marks.transcribe]
        return ids if self.task.has_times else [*ids, marks.plain]

    def _params(self, temperature: float) -> SamplingParams:
        facts, marks = self._facts, self._marks
        room = facts.num_positions - len(self._prompt())
        times = TimestampRules(marks.first_time, self._ends[0], facts.most_at_first)
        return SamplingParams(
            max_tokens=max(1, min(room, facts.num_positions // 2)), temperature=temperature, seed=self.task.seed,
            logprobs=0,
            speech=SpeechRules(facts.banned_ids, facts.banned_first_ids, times if self.task.has_times else None),
        )

    async def _ask(
        self, item: MediaItem, ids: Sequence[int], params: SamplingParams, tell: Callable[[str], None] | None
    ) -> tuple[list[int], list[TokenLogprobs]]:
        """Tokens behind a window and a prompt, and their logprobs."""
        return await self._repeat(lambda: self._ask_once(item, ids, params, tell))

    async def _repeat(self, ask: Callable[[], Awaitable[T]]) -> T:
        """The engine's answer. A clip that has begun waits while the queue is full: else its earlier windows would be
        lost."""
        while True:
            try:
                return await ask()
            except QueueFull as error:
                if self._num_asked == 1:
                    raise
                pause = asyncio.ensure_future(asyncio.sleep(error.retry_after or RETRY_S))
                await while_connected(self.request, pause)

    async def _ask_once(
        self, item: MediaItem, ids: Sequence[int], params: SamplingParams, tell: Callable[[str], None] | None
    ) -> tuple[list[int], list[TokenLogprobs]]:
        token_ids, logprobs, reason = list[int](), list[TokenLogprobs](), None
        async with await open_generation(self.request, self._request(item, ids, params)) as generation:
            async for _, delta in generation.deltas():
                error = delta_error(delta)
                if error is not None:
                    raise error
                token_ids += delta.token_ids
                reason = delta.finish_reason or reason
                logprobs += delta.logprobs or []
                if tell is not None:
                    sure = self._decode(token_ids[: self._find_sure(token_ids)])
                    self._tell(tell, sure.rstrip("\N{REPLACEMENT CHARACTER}"))  # a character's other bytes may follow
            if generation.is_disconnected:
                raise ClientDisconnect
        if reason == "abort":  # a part of the text would look like the whole
            raise Conflict("the request was aborted before its clip was written down")
        return token_ids, logprobs

    def _request(
        self, item: MediaItem, ids: Sequence[int], params: SamplingParams | PoolingSpec
    ) -> GenerationRequest:
        """The next request of this clip: about tokens behind a window."""
        prompt = MediaPrompt([*[self._token_id] * self._window.num_tokens, *ids], [item])
        self._num_asked += 1
        return GenerationRequest(
            request_id=self.task.request_id, stream_ids=[f"{self.task.request_id}-{self._num_asked}"],
            prompts=[prompt], params=[params],
            namespace=self.task.namespace, priority=self.task.priority, field_names={"prompt": "file"},
            is_continued=self._num_asked > 1,
        )

    def _find_sure(self, token_ids: Sequence[int]) -> int:
        """How many tokens of a window stay: with time stamps those of complete segments, as the next window begins
        behind these."""
        if not self.task.has_times:
            return len(token_ids)
        first = self._marks.first_time
        return max((i for i in range(1, len(token_ids)) if min(token_ids[i - 1 : i + 1]) >= first), default=0)

    def _tell(self, tell: Callable[[str], None], text: str) -> None:
        """Tell what the window's text has more than was told. It has few tokens, so all of them are decoded again."""
        if len(text) > len(self._told):
            tell(text[len(self._told) :])
            self._told = text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode([i for i in token_ids if i < self._first_mark])

    def _divide(self, found: WindowText, seek: int, size: int) -> tuple[list[Segment], int]:
        """The segments of a window, and how many frames on the next one begins."""
        first, ids = self._marks.first_time, found.token_ids
        is_time = [self.task.has_times and i >= first for i in ids]
        cuts = [i for i in range(1, len(ids)) if is_time[i] and is_time[i - 1]]
        is_complete = is_time[-2:] == [False, True]  # nothing was said behind the last stamp
        segments, begin = [], 0
        for end in [*cuts, *([len(ids)] if cuts and is_complete else [])]:
            own = ids[begin:end]
            segments.append(self._segment(found, seek, own, own[0] - first, own[-1] - first))
            begin = end
        if cuts and not is_complete:
            advance = (ids[begin - 1] - first) * FRAMES_PER_STAMP
            return segments, advance if 0 < advance <= size else size
        if not cuts:
            times = [i - first for i, is_own in zip(ids, is_time, strict=True) if is_own]
            last = times[-1] if times and times[-1] > 0 else size / FRAMES_PER_STAMP
            segments.append(self._segment(found, seek, ids, 0, last))
        return segments, size

    def _segment(self, found: WindowText, seek: int, ids: list[int], start: float, end: float) -> Segment:
        frames = (min(seek + at * FRAMES_PER_STAMP, self.num_frames) for at in (start, end))
        begin_s, end_s = (frame / FRAMES_PER_SECOND for frame in frames)
        return Segment(seek, begin_s, end_s, ids, self._decode(ids), found)


def find_language(stated: str | None, marks: SpeechMarks, facts: SpeechFacts) -> str:
    """The code of a language by code or name; empty where it is to be found. Raises `RequestError`."""
    if not facts.is_multilingual:
        if stated is not None and stated.lower() not in (ENGLISH, LANGUAGES[ENGLISH]):
            raise RequestError("this model knows English alone; leave language out", param="language")
        return ENGLISH
    if stated is None:
        return ""
    names = {name: code for code, name in LANGUAGES.items()}
    code = names.get(stated.lower(), stated.lower())
    if code not in marks.languages:
        raise RequestError(
            f"language must be one of {', '.join(marks.languages)}, got {stated!r}", param="language"
        )
    return code


def require_speech(context: AppContext) -> SpeechFacts:
    """The facts of a model that writes sound down; raises `UnsupportedFeature` for another one."""
    facts = context.facts()
    if facts.media is None or facts.media.speech is None:
        raise UnsupportedFeature(
            f"{facts.model} does not write sound down; serve one that does (docs/multimodal.md lists them)",
            param="model"
        )
    return facts.media.speech
