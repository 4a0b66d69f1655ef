"""Answers in Anthropic's words: `whole_message`, and `MessageEvents` for streams."""

from __future__ import annotations

from msgspec import Raw

from headrace.base.errors import HeadraceError
from headrace.service.client.outputs import ChoiceDelta, CompletionOutput
from headrace.service.parsing.events import CallArguments, CallEnd, CallStart, Event, TextDelta
from headrace.serving.http.chatting import Chat
from headrace.serving.http.dialects.reading import AnswerReader
from headrace.serving.http.generation import Generation
from headrace.serving.http.protocol.answers import Usage
from headrace.serving.http.protocol.messages import (
    BlockDelta,
    BlockPiece,
    BlockStart,
    BlockStop,
    Ending,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessagesUsage,
    Ping,
    ShownBlock,
    ShownText,
    ShownThinking,
    ShownToolUse,
    StreamEvent,
    describe_messages_error,
)
from headrace.serving.http.stream import Events, named_frame


def _ending(choice: ChoiceDelta | CompletionOutput, chat: Chat, *, has_calls: bool) -> Ending:
    if isinstance(choice.stop_reason, str):
        return Ending("stop_sequence", choice.stop_reason)
    if choice.finish_reason == "stop":
        return Ending("tool_use" if has_calls else "end_turn", None)
    if chat.is_capped and choice.finish_reason == "length":
        return Ending("model_context_window_exceeded", None)
    return Ending("max_tokens", None)  # cut short, whoever did it


def _usage(usage: Usage) -> MessagesUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessagesUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _opening(event: Event) -> ShownBlock:
    """The block that an event begins, empty."""
    if isinstance(event, CallStart):
        return ShownToolUse(event.call_id, event.name, Raw(b"{}"))
    return ShownThinking("") if isinstance(event, TextDelta) and event.is_reasoning else ShownText("")


def whole_message(model: str, choice: CompletionOutput, chat: Chat, usage: Usage) -> Message:
    """One finished answer. A call that was cut short is left out: it has no input to act upon."""
    reader, content = AnswerReader(chat.plan), []
    block: ShownBlock = ShownText("")
    arguments: list[str] = []
    for event in reader.read(choice):
        match event:
            case TextDelta(text, is_reasoning):
                content.append(ShownThinking(text) if is_reasoning else ShownText(text))
            case CallStart():
                block, arguments = _opening(event), []
            case CallArguments(_, text):
                arguments.append(text)
            case CallEnd(_, is_complete) if is_complete and isinstance(block, ShownToolUse):
                content.append(ShownToolUse(block.id, block.name, Raw("".join(arguments).encode() or b"{}")))
    ending = _ending(choice, chat, has_calls=reader.has_calls)
    return Message(
        chat.ask.request_id, model, content, _usage(usage), stop_reason=ending.stop_reason,
        stop_sequence=ending.stop_sequence
    )


def _frame(event: StreamEvent) -> bytes:
    return named_frame(str(type(event).__struct_config__.tag), event)


class BlockWriter:
    """Events as blocks that begin, grow and stop, one at a time."""

    def __init__(self) -> None:
        self._index = -1
        self._block: ShownBlock | None = None

    def write(self, event: Event) -> bytes:
        """The frames of one event."""
        match event:
            case TextDelta(text, True):
                return self._turn_to(event) + self._grow(BlockPiece("thinking_delta", thinking=text))
            case TextDelta(text):
                return self._turn_to(event) + self._grow(BlockPiece("text_delta", text=text))
            case CallArguments(_, text):
                return self._grow(BlockPiece("input_json_delta", partial_json=text))
            case CallEnd():
                return self.stop()
        return self._turn_to(event)

    def _turn_to(self, event: Event) -> bytes:
        """Stop the block before and begin one for the event, unless it goes on with the same."""
        block = _opening(event)
        if type(block) is type(self._block) and not isinstance(block, ShownToolUse):
            return b""
        stopped = self.stop()
        self._block, self._index = block, self._index + 1
        return stopped + _frame(BlockStart(self._index, block))

    def _grow(self, piece: BlockPiece) -> bytes:
        return _frame(BlockDelta(self._index, piece))

    def stop(self) -> bytes:
        """End the block that is open, if one is."""
        if self._block is None:
            return b""
        self._block = None
        return _frame(BlockStop(self._index))


class MessageEvents(Events):
    """The wording of a stream: the message's start, its blocks, its end."""

    done = b""

    def __init__(self, generation: Generation, chat: Chat, model: str):
        self._generation = generation
        self._chat = chat
        self._model = model
        self._reader = AnswerReader(chat.plan)
        self._writer = BlockWriter()
        self._has_begun = False
        self._ending = Ending(None, None)

    def render(self, prompt_index: int, delta: ChoiceDelta) -> bytes:
        """Frames of one delta."""
        opening = b"" if self._has_begun else self._begin()
        frames = b"".join(map(self._writer.write, self._reader.read(delta)))
        if delta.finish_reason is not None:
            self._ending = _ending(delta, self._chat, has_calls=self._reader.has_calls)
        return opening + frames

    def _begin(self) -> bytes:
        self._has_begun = True
        usage = _usage(self._generation.usage())
        usage.output_tokens = 0
        return _frame(MessageStart(Message(self._generation.ask.request_id, self._model, [], usage))) + _frame(Ping())

    def end(self) -> bytes:
        """What stopped it, and the usage."""
        return (
            self._writer.stop() + _frame(MessageDelta(self._ending, _usage(self._generation.usage())))
            + _frame(MessageStop())
        )

    def fail(self, error: HeadraceError) -> bytes:
        """An error event; nothing follows it."""
        return _frame(describe_messages_error(error))
