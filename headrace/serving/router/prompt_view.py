"""`PromptView`: what routing needs of a request's body, whatever its route: the prompt as it is written, the model,
what names a conversation. Refuses: validation; the server behind does that."""

from __future__ import annotations

from array import array

import msgspec

HINT_BYTES = 1 << 18
BYTES_PER_TOKEN = 4
"""Bytes of a hint that stand for one token: about as many as a token of JSON text has."""


class PromptView(msgspec.Struct):
    """Fields of any route, as they are in the body; absent ones are empty. The first eight hold the prompt, in the
    order of chat templates."""

    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    input_ids: msgspec.Raw = msgspec.Raw()
    model: msgspec.Raw = msgspec.Raw()
    cache_salt: msgspec.Raw = msgspec.Raw()
    prompt_cache_key: msgspec.Raw = msgspec.Raw()
    previous_response_id: msgspec.Raw = msgspec.Raw()
    deadline_s: msgspec.Raw = msgspec.Raw()

    @property
    def has_deadline(self) -> bool:
        """Whether the request may take only so long."""
        return bytes(self.deadline_s) not in (b"", b"null")

    @property
    def hint(self) -> bytes:
        """The prompt as the body has it: prompts that begin alike have hints that begin alike, whatever other fields
        there are. At most `HINT_BYTES`."""
        fields = (
            self.tools, self.system, self.instructions, self.messages, self.prompt, self.input, self.text,
            self.input_ids
        )
        return b"".join(map(bytes, fields))[:HINT_BYTES]


EMPTY = PromptView()
_decode = msgspec.json.Decoder(PromptView).decode
_decode_text = msgspec.json.Decoder(str).decode


def view_prompt(body: bytes) -> PromptView:
    """The fields of a body; none if it is no object."""
    if not body:
        return EMPTY
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return EMPTY


def text_of(field: msgspec.Raw) -> str:
    """A field that holds a string; empty for anything else."""
    raw = bytes(field)
    if not raw.startswith(b'"'):
        return ""
    try:
        return _decode_text(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def pack_hint(hint: bytes) -> array[int]:
    """A hint as integers that stand for tokens, equal where hints begin alike."""
    return array("I", hint[: len(hint) // BYTES_PER_TOKEN * BYTES_PER_TOKEN])
