"""The media of conversations: which parts of messages they are, and their items, prepared while the client waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.requests import Request

from headrace.base.errors import RequestError
from headrace.base.media import MediaKind, as_data_uri
from headrace.service.client.media import place_items
from headrace.service.media.wire import PreparedItem
from headrace.serving.http.generation.context import AppContext, compute
from headrace.serving.http.generation.run import PlainPrompt, Prompt
from headrace.serving.http.protocol.media import (
    AudioPart,
    AudioUrlPart,
    ContentPart,
    ImagePart,
    ImageUrl,
    InputAudio,
    MediaData,
    MediaFields,
    MediaPart,
    MediaUrl,
    PlacedImage,
    RefusalPart,
    TextPart,
    VideoPart,
)
from headrace.serving.http.protocol.openai import ChatMessage, CompletionRequest
from headrace.serving.http.transport.threads import while_connected
from headrace.serving.media.intake import MediaRef

MEDIA: dict[type, tuple[MediaKind, str]] = {
    ImagePart: ("image", "image_url"), PlacedImage: ("image", "image_url"), AudioPart: ("audio", "input_audio"),
    AudioUrlPart: ("audio", "audio_url"), VideoPart: ("video", "video_url"),
}
"""The kind of each part that holds media, and the field that holds it."""


def template_content(content: str | list[ContentPart] | None) -> str | list[dict[str, str]]:
    """A message's content for chat templates: texts joined by newlines, or with media a list of parts."""
    if not isinstance(content, list):
        return content or ""
    if not any(type(part) in MEDIA for part in content):
        return "\n".join(part.text for part in content if isinstance(part, TextPart | RefusalPart))
    return [
        {"type": "text", "text": part.text} if isinstance(part, TextPart | RefusalPart)
        else {"type": MEDIA[type(part)][0]}
        for part in content
    ]


def media_of(messages: Sequence[ChatMessage]) -> list[MediaRef]:
    """The media of a conversation, in order."""
    return [
        _ref(part, f"messages[{i}].content[{j}]")
        for i, message in enumerate(messages) if isinstance(message.content, list)
        for j, part in enumerate(message.content) if not isinstance(part, TextPart | RefusalPart)
    ]


def _ref(part: MediaPart, where: str) -> MediaRef:
    kind, field = MEDIA[type(part)]
    given: InputAudio | ImageUrl | MediaUrl | str = getattr(part, field)
    where = f"{where}.{field}"
    if isinstance(given, InputAudio):
        return MediaRef(kind, _address(given.data), f"{where}.data")
    url, param = (given, where) if isinstance(given, str) else (given.url, f"{where}.url")
    detail = given.detail if isinstance(given, ImageUrl) else None
    return MediaRef(kind, url, part.param if isinstance(part, PlacedImage) else param, detail)


def read_fields(fields: MediaFields | CompletionRequest, num_prompts: int, *, is_batch: bool) -> list[list[MediaRef]]:
    """The media of each plain prompt. Raises `RequestError` for a batch with another number of entries."""
    found: list[list[MediaRef]] = [[] for _ in range(num_prompts)]
    stated: dict[MediaKind, MediaData | None] = {
        "image": fields.image_data, "audio": fields.audio_data, "video": fields.video_data
    }
    for kind, given in stated.items():
        if given is None:
            continue
        name = f"{kind}_data"
        entries: list[str | list[str] | None] = given if is_batch and isinstance(given, list) else [_flat(given, name)]
        if len(entries) != num_prompts:
            raise RequestError(f"{name} must have an entry for each of the {num_prompts} prompts", param=name)
        for index, entry in enumerate(entries):
            where = f"{name}[{index}]" if is_batch else name
            if isinstance(entry, str):
                found[index].append(MediaRef(kind, _address(entry), where))
            else:
                found[index] += [MediaRef(kind, _address(e), f"{where}[{j}]") for j, e in enumerate(entry or ())]
    return found


def _flat(given: MediaData, name: str) -> str | list[str]:
    if isinstance(given, str):
        return given
    flat = [entry for entry in given if isinstance(entry, str)]
    if len(flat) < len(given):
        raise RequestError(f"{name} must be a list of addresses or base64 for a single prompt", param=name)
    return flat


def _address(text: str) -> str:
    return text if text[:5].lower() == "data:" or "://" in text[:16] else as_data_uri(text)


async def place_fields(
    request: Request, context: AppContext, prompts: Sequence[PlainPrompt], refs: Sequence[Sequence[MediaRef]], *,
    salt: str, add_special_tokens: bool = True,
) -> list[Prompt]:
    """The prompts, with their media in the places of the placeholders."""
    items = await prepare_media(request, context, [ref for each in refs for ref in each], salt=salt)
    if not items:
        return list(prompts)
    waiting, facts, tokenizer = iter(items), context.facts(), context.client.tokenizer

    def place(prompt: PlainPrompt, own: list[PreparedItem]) -> Prompt:
        if not own:
            return prompt
        return place_items(prompt, own, tokenizer, facts, add_special_tokens=add_special_tokens)

    own = [[next(waiting) for _ in each] for each in refs]
    size = sum(len(prompt) for prompt in prompts)
    return await compute(
        request, lambda: [place(prompt, each) for prompt, each in zip(prompts, own, strict=True)], size=size
    )


async def prepare_media(
    request: Request, context: AppContext, refs: Sequence[MediaRef], *, salt: str = ""
) -> list[PreparedItem]:
    """The items of a request's media; nothing without any. Dropped when the client disconnects. Raises typed errors
    that name the part."""
    if not refs:
        return []
    work = asyncio.ensure_future(context.media.prepare(refs, context.facts(), salt=salt))
    return await while_connected(request, work)
