"""Answers in Ollama's words: `OllamaWriter` for both ways to ask, `OllamaEvents` for their streams, a line each."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from headrace.base.errors import HeadraceError
from headrace.service.client.outputs import ChoiceDelta, CompletionOutput
from headrace.service.parsing.events import CallArguments, CallEnd, CallStart, TextDelta
from headrace.serving.http.answering import AnswerPlan
from headrace.serving.http.dialects.reading import AnswerReader
from headrace.serving.http.generation import Generation
from headrace.serving.http.logprobs import TokenNames, chat_logprobs
from headrace.serving.http.protocol.chat import ContentLogprob
from headrace.serving.http.protocol.ollama import (
    AskedCall,
    AskedFunction,
    OllamaAnswer,
    OllamaAnswerMessage,
    OllamaChatAnswer,
    OllamaGenerateAnswer,
    describe_ollama_error,
)
from headrace.serving.http.stream import Events

SECOND = 1_000_000_000


def tell_time(seconds: float | None = None) -> str:
    """A moment as RFC 3339; now by default."""
    return (datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)).isoformat()


class OllamaWriter:
    """Words what comes of one answer. Calls are told when they are whole; one that is cut short is left out."""

    def __init__(self, model: str, plan: AnswerPlan | None, names: TokenNames, *, is_chat: bool):
        self._model, self._names = model, names
        self._logprobs: list[ContentLogprob] = []
        self._reader = AnswerReader(plan) if plan is not None else None
        self._is_chat = is_chat
        self._call = AskedCall("", AskedFunction(0, "", msgspec.Raw(b"{}")))
        self._arguments: list[str] = []

    def write(self, news: ChoiceDelta | CompletionOutput) -> OllamaAnswer | None:
        """A line with what ``news`` tell; None when that is nothing yet."""
        content, thinking, calls = self._read(news)
        return self._answer(content, thinking, calls) if content or thinking or calls else None

    def end(self, news: CompletionOutput | None, reason: str | None, generation: Generation | None) -> OllamaAnswer:
        """The last line, with all of the answer if it is told at once, and its counts when something was generated."""
        answer = self._answer(*self._read(news)) if news is not None else self._answer("", "", [])
        answer.done, answer.done_reason = True, reason or "stop"
        if generation is None:
            return answer
        usage, timer = generation.usage(), generation.timers[0]
        total, first = int(timer.elapsed_s * SECOND), int(timer.first_token_s * SECOND)
        answer.total_duration, answer.load_duration = total, 0
        answer.prompt_eval_count, answer.prompt_eval_duration = usage.prompt_tokens, first
        answer.eval_count, answer.eval_duration = usage.completion_tokens, total - first
        return answer

    def _read(self, news: ChoiceDelta | CompletionOutput) -> tuple[str, str, list[AskedCall]]:
        """``(content, thinking, calls)`` of the news."""
        texts: dict[bool, str] = {False: "", True: ""}
        if news.logprobs is not None:
            self._logprobs += chat_logprobs(news.logprobs, self._names).content
        calls = []
        for event in self._reader.read(news) if self._reader is not None else ():
            match event:
                case TextDelta(text, is_reasoning):
                    texts[is_reasoning] += text
                case CallStart(index, call_id, name):
                    self._call, self._arguments = AskedCall(call_id, AskedFunction(index, name, msgspec.Raw(b"{}"))), []
                case CallArguments(_, text):
                    self._arguments.append(text)
                case CallEnd(_, True):
                    self._call.function.arguments = msgspec.Raw("".join(self._arguments).encode() or b"{}")
                    calls.append(self._call)
        return texts[False], texts[True], calls

    def _answer(self, content: str, thinking: str, calls: list[AskedCall]) -> OllamaAnswer:
        shown, logprobs = thinking or msgspec.UNSET, self._logprobs or msgspec.UNSET
        self._logprobs = []
        if not self._is_chat:
            return OllamaGenerateAnswer(
                model=self._model, created_at=tell_time(), done=False, response=content, thinking=shown,
                logprobs=logprobs
            )
        message = OllamaAnswerMessage(content, thinking=shown, tool_calls=calls or msgspec.UNSET)
        return OllamaChatAnswer(
            model=self._model, created_at=tell_time(), done=False, message=message, logprobs=logprobs
        )


def _line(answer: object) -> bytes:
    return msgspec.json.encode(answer) + b"\n"


class OllamaEvents(Events):
    """The wording of a stream: news line by line, then a line that is ``done``."""

    media_type = b"application/x-ndjson"
    done = b""

    def __init__(self, writer: OllamaWriter, generation: Generation):
        self._writer = writer
        self._generation = generation
        self._reason: str | None = None

    def render(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        """The line of one delta; nothing when its text must wait."""
        self._reason = delta.finish_reason or self._reason
        answer = self._writer.write(delta)
        return b"" if answer is None else _line(answer)

    def end(self) -> bytes:
        """The last line."""
        return _line(self._writer.end(None, self._reason, self._generation))

    def fail(self, error: HeadraceError) -> bytes:
        """A line with the error."""
        return _line(describe_ollama_error(error))
