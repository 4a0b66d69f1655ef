"""`PlainTokens`: tokens that leave a matcher where it is. Nothing need be computed for them: the next mask is the last
one.

Inside a string of any content, or text until a tag, one more piece of plain text changes nothing that a grammar could
tell. `read_breaks` says of which grammars that is known; `find_plain` which tokens they are. Where all of them are
allowed, an output is in such a place: names and choices, of which a grammar has a limited number, cannot allow so many.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from headrace.base.grammar import Grammar, Vocabulary
from headrace.execution.structured.structural_tag import modernise

MIN_TOKENS = 4096
"""Of which none begins another: more than there are names of properties, values of an enumeration, or tags, in a
grammar."""

ENOUGH_TOKENS = 4 * MIN_TOKENS
"""Among which so many are sought first."""

_FIRST = {"integer": "number", **{name: name for name in ("string", "object", "array", "number", "boolean", "null")}}


@dataclass(frozen=True, slots=True)
class PlainTokens:
    """``is_plain`` [V] bool, and the same as the ``words`` [W] int32 of a mask. ``needs_root``: a mask stays as it is
    only if the token before it was plain, too (else a tag may have begun). ``probe``: a word with some."""

    is_plain: np.ndarray
    words: np.ndarray
    needs_root: bool
    probe: int

    def are_allowed(self, mask: np.ndarray) -> bool:
        """Whether a mask [W] allows them all. Most that do not lack the first one."""
        first = self.words[self.probe]
        return bool(mask[self.probe] & first == first) and bool(((mask & self.words) == self.words).all())


def find_plain(vocabulary: Vocabulary, vocab_size: int, breaks: bytes) -> PlainTokens | None:
    """The tokens of whole characters, none of them special in JSON or among ``breaks``; None if there are few."""
    tokens = vocabulary.tokens[:vocab_size]
    text = np.frombuffer(b"".join(tokens), dtype=np.uint8)
    ends = np.cumsum(np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens)))

    def count(kind: np.ndarray) -> np.ndarray:
        """Bytes of a kind [256] bool in each token."""
        return np.diff(np.concatenate(([0], np.cumsum(kind[text])))[ends], prepend=0)

    is_special = np.zeros(256, dtype=np.bool_)
    is_special[[*range(0x20), *b'"\\\x7f', *breaks]] = True
    is_plain = np.zeros(-(-vocab_size // 32) * 32, dtype=np.bool_)
    is_plain[: len(tokens)] = (count(is_special) == 0) & (np.diff(ends, prepend=0) > 0)
    is_plain[[i for i in vocabulary.special_ids if i < vocab_size]] = False
    beyond_ascii = np.flatnonzero(is_plain[: len(tokens)] & (count(np.arange(256) > 127) > 0))
    is_plain[beyond_ascii[_find_broken([tokens[i] for i in beyond_ascii])]] = False
    chosen = [tokens[i] for i in np.flatnonzero(is_plain)]
    if not _has_many(chosen[:ENOUGH_TOKENS]) and not _has_many(chosen):
        return None
    words = np.packbits(is_plain, bitorder="little").view("<i4").astype(np.int32)
    return PlainTokens(is_plain[:vocab_size], words, bool(breaks), int(np.argmax(words != 0)))


def read_breaks(grammar: Grammar) -> bytes | None:
    """For a grammar of the exact part: the bytes with which a tag may begin or end within text, none for JSON; None
    when what may follow a text could depend on it."""
    if grammar.kind == "json_object":
        return b""
    if grammar.kind == "json_schema":
        return b"" if _tells_by_first(msgspec.json.decode(grammar.text)) else None
    if grammar.kind == "structural_tag":
        tag = msgspec.json.decode(grammar.text)
        breaks = set(_find_breaks(modernise(tag)["format"]))
        return None if None in breaks else bytes(sorted(byte for byte in breaks if byte is not None))
    return None


def _find_broken(tokens: list[bytes]) -> np.ndarray:
    """Places of the tokens that are not whole characters; all are without line breaks."""
    decoded = b"\n".join(tokens).decode("utf-8", "surrogateescape").encode("utf-32-le", "surrogatepass")
    characters = np.frombuffer(decoded, dtype="<u4")
    return np.unique(np.cumsum(characters == ord("\n"))[(characters >= 0xD800) & (characters < 0xE000)])


def _has_many(tokens: list[bytes]) -> bool:
    return sum(not after.startswith(before) for before, after in pairwise(sorted(tokens))) >= MIN_TOKENS


def _tells_by_first(schema: Any) -> bool:
    """Whether the first character of a value always tells which branch of an ``anyOf`` it is in."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if not isinstance(node, dict):
            continue
        branches = node.get("anyOf", [])
        firsts = [first for branch in branches for first in _firsts_of(branch, schema)]
        if len(set(firsts)) < len(firsts):
            return False
        pending += branches
        pending += [
            node.get("items"), node.get("additionalProperties"),
            *(child for place in ("properties", "$defs", "definitions") for child in node.get(place, {}).values())
        ]
    return True


def _firsts_of(schema: Any, root: Any, depth: int = 0) -> list[str]:
    """What a value of a schema may begin with; one thing twice where that is not known."""
    unknown = ["string", "string"]
    if not isinstance(schema, dict) or depth > 8:
        return unknown
    if isinstance(schema.get("$ref"), str):
        _, place, name = schema["$ref"].split("/", 2)
        return _firsts_of(root.get(place, {}).get(name), root, depth + 1)
    if isinstance(schema.get("anyOf"), list):
        return [first for branch in schema["anyOf"] for first in _firsts_of(branch, root, depth + 1)]
    if "enum" in schema or "const" in schema:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        return sorted(
            {"string" if isinstance(value, str) else "null" if value is None else "boolean" for value in values}
        )
    first = _FIRST.get(schema.get("type", ""))
    return unknown if first is None else [first]


def _find_breaks(node: Any) -> Iterator[int | None]:
    """First bytes of what ends text in a format; None for a format that is not known to be told by them."""
    match node.get("type", "tag"):
        case "any_text" | "const_string":
            return
        case "json_schema":
            if not _tells_by_first(node["json_schema"]):
                yield None
        case "sequence":
            for child in node["elements"]:
                yield from _find_breaks(child)
        case "tag":
            ends = node["end"] if isinstance(node["end"], list) else [node["end"]]
            yield from (end.encode()[0] for end in ends if end)
            yield from _find_breaks(node["content"])
        case "triggered_tags":
            yield from (trigger.encode()[0] for trigger in node["triggers"])
            begins = sorted(tag["begin"] for tag in node["tags"])
            if any(after.startswith(before) for before, after in pairwise(begins)):
                yield None
            for tag in node["tags"]:
                yield from _find_breaks(tag)
        case _:
            yield None
