"""What callers of `LLM` and `AsyncLLM` may give as prompts and conversations, checked. Refuses: rendering, encoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

from headrace.base.errors import RequestError
from headrace.serving.offline.media import WithMedia, read_media

Prompt = str | list[int] | dict[str, Any]
"""Text, token ids, or ``{"prompt": text}`` / ``{"prompt_token_ids": ids}``, in which ``multi_modal_data`` may hold
images, audio and video: for each kind a value or a list."""

Plain = str | list[int] | WithMedia
Message = dict[str, Any]


def read_prompt(prompt: Prompt | WithMedia) -> Plain:
    if isinstance(prompt, WithMedia):
        return prompt
    if isinstance(prompt, dict):
        values = read_media(prompt["multi_modal_data"]) if prompt.get("multi_modal_data") else []
        named = {name: given for name, given in prompt.items() if name != "multi_modal_data"}
        if len(named) != 1 or not named.keys() <= {"prompt_token_ids", "prompt"}:
            raise RequestError(
                "a prompt dict takes prompt or prompt_token_ids, and multi_modal_data, and nothing else, got "
                f"{sorted(map(str, prompt))}", param="prompts"
            )
        (plain,) = (read_prompt(given) for given in named.values())
        return WithMedia(plain, values) if values and isinstance(plain, (str, list)) else plain
    if isinstance(prompt, (str, list)):
        return prompt
    if isinstance(prompt, tuple):
        return list(prompt)
    raise RequestError(f"a prompt is text or a list of token ids, got {type(prompt).__name__}", param="prompts")


def read_prompts(prompts: Prompt | Sequence[Prompt] | None, token_ids: Sequence[list[int]] | None) -> list[Plain]:
    """The prompts as a list of texts and lists of token ids, from whichever argument was given. Raises
    `RequestError` if both or none were given, or for another type."""
    if (prompts is None) == (token_ids is None):
        raise RequestError("give either prompts or prompt_token_ids", param="prompts")
    given: Any = prompts if token_ids is None else token_ids  # checked below: callers may pass anything
    if isinstance(given, (str, dict, WithMedia)):
        items: list[Any] = [given]
    elif not isinstance(given, Iterable) or isinstance(given, (bytes, bytearray, Set)):
        raise RequestError(
            f"prompts are text, token ids, or a list of either, got {type(given).__name__}", param="prompts"
        )
    else:
        items = list(given)
        # a flat list of ids is one prompt
        items = [items] if items and isinstance(items[0], int) else items
    plain = [read_prompt(prompt) for prompt in items]
    if token_ids is not None and any(isinstance(prompt, str) for prompt in plain):
        raise RequestError(
            "prompt_token_ids takes lists of token ids; text goes into prompts", param="prompt_token_ids"
        )
    return plain


def read_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """A list of conversations, from one conversation or several. Raises `RequestError` for another type."""
    if not isinstance(messages, (list, tuple)):
        raise RequestError(
            f"messages is a conversation or a list of them, got {type(messages).__name__}", param="messages"
        )
    conversations = [messages] if messages and isinstance(messages[0], dict) else list(messages)
    for conversation in conversations:
        if (
            not isinstance(conversation, (list, tuple))
            or not all(isinstance(message, dict) for message in conversation)
        ):
            raise RequestError(
                "a conversation is a list of messages, and a message an object with role and content", param="messages"
            )
    return conversations
