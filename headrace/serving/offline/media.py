"""Media of `LLM` and `AsyncLLM`: images, arrays, paths and addresses, prepared in the caller's process. What comes by
address is bounded as in the server; what is already in memory is the caller's own.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from headrace.base.config import EngineConfig
from headrace.base.errors import MediaError, RequestError
from headrace.base.media import MediaKind
from headrace.base.media_config import KINDS
from headrace.base.messages import ModelFacts
from headrace.base.registry import load_target
from headrace.service.media.wire import PREPARER, PreparedItem, Preparing, Setup
from headrace.serving.media.intake import MediaRef, check_media
from headrace.serving.media.sources import MediaReader

T = TypeVar("T")

SCHEMES = ("data:", "http:", "https:", "file:")
PART_FIELDS: dict[str, MediaKind] = {
    "image_url": "image", "image": "image", "image_pil": "image", "input_audio": "audio", "audio_url": "audio",
    "audio": "audio", "video_url": "video", "video": "video",
}
"""Types of parts that hold media, and their kinds; the value is in the field of the same name."""


@dataclass(frozen=True)
class MediaValue:
    """An item as the caller gave it; ``param`` says where. A bare ``str`` is an address if ``is_address``, else an
    address or a path."""

    kind: MediaKind
    value: Any
    param: str
    is_address: bool = False
    detail: str | None = None


@dataclass(frozen=True)
class WithMedia:
    """A prompt and the media that stand at its placeholders, not yet prepared."""

    plain: str | list[int]
    values: list[MediaValue]


def read_media(given: Any) -> list[MediaValue]:
    """The values of ``multi_modal_data``: for each kind one, or a list. Raises `RequestError`."""
    if not isinstance(given, Mapping) or not given.keys() <= set(KINDS):
        raise RequestError(
            f"multi_modal_data is an object with {', '.join(KINDS)}, got {given!r:.80}", param="multi_modal_data"
        )
    values = []
    for kind, each in given.items():
        several = each if isinstance(each, list) else [] if each is None else [each]
        where = f"multi_modal_data[{kind!r}]"
        values += [
            MediaValue(kind, value, f"{where}[{i}]" if isinstance(each, list) else where)
            for i, value in enumerate(several)
        ]
    return values


def split_messages(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[MediaValue]]:
    """A conversation with bare parts (``{"type": "image"}``) where media stood, and the media in order."""
    shown, values = [], []
    for i, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            shown.append(message)
            continue
        parts: list[Any] = []
        for j, part in enumerate(content):
            found = _value(part, f"messages[{i}].content[{j}]") if isinstance(part, dict) else None
            parts.append(part if found is None else {"type": found.kind})
            values += [] if found is None else [found]
        shown.append({**message, "content": parts})
    return shown, values


def _value(part: dict[str, Any], where: str) -> MediaValue | None:
    name = part.get("type")
    kind = PART_FIELDS.get(name) if isinstance(name, str) else None
    if kind is None or name is None:
        return None
    value: Any = part.get(name)
    param, detail = f"{where}.{name}", None
    if value is None:
        raise RequestError(f"{param} is required", param=param)
    if isinstance(value, dict) and name == "input_audio":
        return MediaValue(kind, f"data:;base64,{value.get('data', '')}", f"{param}.data", True)
    if isinstance(value, dict) and name.endswith("_url"):
        value, param, detail = value.get("url"), f"{param}.url", value.get("detail")
    is_address = name.endswith("_url")
    if is_address and not isinstance(value, str):
        raise RequestError(f"{param} must be an address; a value in memory goes into {kind!r}", param=param)
    return MediaValue(kind, value, param, is_address, detail)


class OfflineMedia:
    """Prepares the media of one `LLM`; its threads take turns. The processor is loaded with the first item."""

    def __init__(self, config: EngineConfig):
        self._config = config
        self._preparer: Preparing | None = None
        self._turn = threading.Lock()

    def prepare(self, values: Sequence[MediaValue], facts: ModelFacts) -> list[PreparedItem]:
        """The items, in order. Raises `UnsupportedFeature`, `RequestError` or `MediaError` that names the value."""
        check_media([MediaRef(each.kind, "", each.param) for each in values], facts, self._config)
        with self._turn:
            if self._preparer is None:
                setup = Setup(self._config.model, self._config.media)
                self._preparer = load_target(PREPARER)(setup)
            return [self._prepare_one(self._preparer, each) for each in values]

    def _prepare_one(self, preparer: Preparing, given: MediaValue) -> PreparedItem:
        value = given.value
        options = {"detail": "low"} if given.detail == "low" else {}
        if isinstance(value, str) and (given.is_address or value.lower().startswith(SCHEMES)):
            found = _run(MediaReader(self._config.media).read_url(value, given.param))
            return preparer.prepare(found.job(given.kind, options).decoded())
        if isinstance(value, str | os.PathLike):
            value = _read_path(Path(value), given.param, self._config.media.max_bytes)
        if isinstance(value, bytes | bytearray | memoryview):
            found = _run(MediaReader(self._config.media).take(bytes(value), given.param))
            return preparer.prepare(found.job(given.kind, options))
        return preparer.prepare_value(given.kind, value, given.param)


def _read_path(path: Path, param: str, most: int) -> bytes:
    try:
        if path.stat().st_size > most:
            raise MediaError(f"{param}: {path} is larger than {most >> 20} MiB (media_max_mib)", param=param)
        return path.read_bytes()
    except OSError as error:
        raise MediaError(f"{param}: cannot read {path}: {error.strerror or error}", param=param) from None


def _run(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine, wherever the caller is: a thread with a running event loop cannot run another."""
    with ThreadPoolExecutor(1, "media") as thread:
        return thread.submit(asyncio.run, work).result()
