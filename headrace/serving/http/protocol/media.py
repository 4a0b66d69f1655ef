"""Parts of messages: texts, images, audio and video, in OpenAI's form and in vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

STAYS_BYTES = "stays_bytes"
"""In what `Meta` says beside bounds: base64 of large bodies becomes `Base64Text`, of data URIs ("uri") or also bare
("bare"). Only for fields that nobody writes into another message."""
Detail = Literal["low", "high", "auto", "original"]
Url = Annotated[str, Meta(min_length=1, extra={STAYS_BYTES: "uri"})]
Base64 = Annotated[str, Meta(min_length=1, extra={STAYS_BYTES: "bare"})]
"""Base64, a data URI or another address."""


class TextPart(Struct, kw_only=True, tag_field="type", tag="text"):
    """A text part of a message. ``cache_control`` is accepted without effect: every prefix is cached."""

    text: str
    cache_control: dict[str, Any] | None = None


class InputTextPart(TextPart, kw_only=True, tag="input_text"):
    """The same under the name that the responses API has for it, as vLLM takes it."""


class OutputTextPart(TextPart, kw_only=True, tag="output_text"):
    """The same of an earlier answer."""


class RefusalPart(Struct, kw_only=True, tag_field="type", tag="refusal"):
    """A refusal that another server returned; treated as text."""

    refusal: str

    @property
    def text(self) -> str:
        """The refusal."""
        return self.refusal


class ImageUrl(Struct, kw_only=True):
    """``url``: http, https, a data URI, or a file that the server may read. ``detail`` "low" shrinks the image to 512
    pixels first."""

    url: Url
    detail: Detail | None = None


class MediaUrl(Struct, kw_only=True):
    """http, https, a data URI, or a file that the server may read."""

    url: Url


class InputAudio(Struct, kw_only=True):
    """A clip as base64. ``format`` is ignored: the content tells."""

    data: Base64
    format: str | None = None


class ImagePart(Struct, kw_only=True, tag_field="type", tag="image_url"):
    """An image."""

    image_url: ImageUrl | Url
    cache_control: dict[str, Any] | None = None


class AudioPart(Struct, kw_only=True, tag_field="type", tag="input_audio"):
    """A clip of audio inside the request."""

    input_audio: InputAudio


class AudioUrlPart(Struct, kw_only=True, tag_field="type", tag="audio_url"):
    """A clip of audio by its address (vLLM's form)."""

    audio_url: MediaUrl | Url


class VideoPart(Struct, kw_only=True, tag_field="type", tag="video_url"):
    """A video (vLLM's form)."""

    video_url: MediaUrl | Url


MediaData = Base64 | Annotated[list[Base64 | list[Base64] | None], Meta(min_length=1)]
"""SGLang's form: an address or base64, a list of them, or for a batch one or a list for each prompt."""


class MediaFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """Media of plain prompts, which hold the model's placeholder once for each item."""

    image_data: MediaData | None = None
    audio_data: MediaData | None = None
    video_data: MediaData | None = None


ContentPart = TextPart | InputTextPart | OutputTextPart | RefusalPart | ImagePart | AudioPart | AudioUrlPart | VideoPart
MediaPart = ImagePart | AudioPart | AudioUrlPart | VideoPart


class PlacedImage(ImagePart, kw_only=True):
    """An image of another API, as part of a `ChatRequest`. ``param`` is its place in that API's request."""

    param: str
