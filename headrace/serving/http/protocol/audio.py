"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from headrace.serving.http.protocol.fields import ModelName, Priority, RequestId, Salt

Temperature = Annotated[float, Meta(ge=0, le=1)]
Format = Literal["json", "text", "srt", "verbose_json", "vtt"]

LANGUAGES = {
    "en": "english", "zh": "chinese", "de": "german", "es": "spanish", "ru": "russian", "ko": "korean",
    "fr": "french", "ja": "japanese", "pt": "portuguese", "tr": "turkish", "pl": "polish", "ca": "catalan",
    "nl": "dutch", "ar": "arabic", "sv": "swedish", "it": "italian", "id": "indonesian", "hi": "hindi",
    "fi": "finnish", "vi": "vietnamese", "he": "hebrew", "uk": "ukrainian", "el": "greek", "ms": "malay",
    "cs": "czech", "ro": "romanian", "da": "danish", "hu": "hungarian", "ta": "tamil", "no": "norwegian",
    "th": "thai", "ur": "urdu", "hr": "croatian", "bg": "bulgarian", "lt": "lithuanian", "la": "latin", "mi": "maori",
    "ml": "malayalam", "cy": "welsh", "sk": "slovak", "te": "telugu", "fa": "persian", "lv": "latvian",
    "bn": "bengali", "sr": "serbian", "az": "azerbaijani", "sl": "slovenian", "kn": "kannada", "et": "estonian",
    "mk": "macedonian", "br": "breton", "eu": "basque", "is": "icelandic", "hy": "armenian", "ne": "nepali",
    "mn": "mongolian", "bs": "bosnian", "kk": "kazakh", "sq": "albanian", "sw": "swahili", "gl": "galician",
    "mr": "marathi", "pa": "punjabi", "si": "sinhala", "km": "khmer", "sn": "shona", "yo": "yoruba", "so": "somali",
    "af": "afrikaans", "oc": "occitan", "ka": "georgian", "be": "belarusian", "tg": "tajik", "sd": "sindhi",
    "gu": "gujarati", "am": "amharic", "yi": "yiddish", "lo": "lao", "uz": "uzbek", "fo": "faroese",
    "ht": "haitian creole", "ps": "pashto", "tk": "turkmen", "nn": "nynorsk", "mt": "maltese", "sa": "sanskrit",
    "lb": "luxembourgish", "my": "myanmar", "bo": "tibetan", "tl": "tagalog", "mg": "malagasy", "as": "assamese",
    "tt": "tatar", "haw": "hawaiian", "ln": "lingala", "ha": "hausa", "ba": "bashkir", "jw": "javanese",
    "su": "sundanese", "yue": "cantonese",
}
"""Languages by code, in the order of Whisper's vocabulary."""


class SpeechRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of both routes, parts of a form. ``user`` has no effect."""

    file: bytes
    model: ModelName | None = None
    prompt: Annotated[str, Meta(max_length=8192)] | None = None
    response_format: Format | None = None
    temperature: Temperature | None = None
    seed: int | None = None
    user: str | None = None
    request_id: RequestId | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None


class TranslationRequest(SpeechRequest, kw_only=True, forbid_unknown_fields=True):
    """A clip to be written down in English."""


class TranscriptionRequest(SpeechRequest, kw_only=True, forbid_unknown_fields=True):
    """A clip to be written down in its language. ``language``: its code, as ISO 639-1 has it.
    ``chunking_strategy`` has no effect."""

    language: Annotated[str, Meta(max_length=32)] | None = None
    stream: bool | None = None
    timestamp_granularities: list[Literal["segment", "word"]] | None = None
    chunking_strategy: Literal["auto"] | None = None


class SoundUsage(Struct):
    """Seconds of sound, rounded up."""

    seconds: int
    type: Literal["duration"] = "duration"


class SpeechSegment(Struct):
    """A sentence or so; ``start`` and ``end`` in seconds. ``seek``: the window's first frame, in steps of 10 ms.
    Of its window: ``temperature``, ``avg_logprob`` of tokens, ``compression_ratio`` of the text by zlib, and
    ``no_speech_prob``, the probability that nobody speaks."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class SpeechWord(Struct):
    """A word with the marks around it; ``start`` and ``end`` in seconds."""

    word: str
    start: float
    end: float


class Transcript(Struct):
    """What was said. The fields from ``task`` on come with ``verbose_json``; ``duration`` in seconds. ``segments`` or
    ``words``, or both, as ``timestamp_granularities`` says."""

    text: str
    usage: SoundUsage
    task: Literal["transcribe", "translate"] | UnsetType = UNSET
    language: str | UnsetType = UNSET
    duration: float | UnsetType = UNSET
    segments: list[SpeechSegment] | UnsetType = UNSET
    words: list[SpeechWord] | UnsetType = UNSET


class TranscriptDelta(Struct, tag="transcript.text.delta"):
    """Further text."""

    delta: str


class TranscriptDone(Struct, tag="transcript.text.done"):
    """The whole text."""

    text: str
    usage: SoundUsage


TranscriptEvent = TranscriptDelta | TranscriptDone
