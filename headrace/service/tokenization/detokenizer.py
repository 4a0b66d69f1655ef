"""Incremental detokenization with stop strings. All deltas together equal the decoded output, cut at the first stop
string. A delta never ends in part of a character, nor in text that may still become part of a stop string.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.service.tokenization.stop_patterns import StopPatterns, compile_stops
from headrace.service.tokenization.text_decoder import TextDecoder
from headrace.service.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends a text: strings and patterns (`StopPatterns`); ``is_included``: the text ends with it."""

    strings: Sequence[str] = ()
    patterns: Sequence[str] = ()
    is_included: bool = False


NO_STOPS = Stops()


class StopScanner:
    """Searches a text that comes in parts for stop strings. The match that ends first wins (of two that end together,
    the longer), however the text is divided.

    ``tail`` is the longest suffix of the text so far that is a proper prefix of a stop string: it is held back.
    """

    def __init__(self, stops: list[str]):
        self._stops = stops
        self._find_start = re.compile("[" + re.escape("".join({s[0] for s in stops})) + "]").search
        self.tail = ""

    def scan(self, text: str) -> tuple[str, int, int] | None:
        """Take the next part. Returns ``(stop string, start, end)`` of the first match, as offsets into the old
        ``tail`` plus ``text``, or None; ``tail`` is then the new one."""
        if not self.tail and self._find_start(text) is None:  # no stop string can begin here: nearly every token
            return None
        window = self.tail + text
        found: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = window.find(stop)
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        if found is not None:
            return found[2], found[1], found[0]
        self.tail = window[len(window) - self._open_length(window):]
        return None

    def _open_length(self, window: str) -> int:
        """Length of the longest suffix of the window that begins a stop string."""
        longest = 0
        for stop in self._stops:
            start = window.find(stop[0], max(0, len(window) - len(stop) + 1))
            while start >= 0 and len(window) - start > longest:
                if stop.startswith(window[start:]):
                    longest = len(window) - start
                    break
                start = window.find(stop[0], start + 1)
        return longest


class Scanner(Protocol):
    """Searches a text that comes in parts; see `StopScanner`."""

    tail: str

    def scan(self, text: str) -> tuple[str, int, int] | None:
        """Take the next part; the first match."""


class BothScanners:
    """Strings and patterns at once: the match that ends first wins, of two that end together the longer."""

    def __init__(self, scanners: Sequence[Scanner]):
        self._scanners = scanners
        self.tail = ""

    def scan(self, text: str) -> tuple[str, int, int] | None:
        """See `StopScanner`."""
        matches = []
        for scanner in self._scanners:
            shift = len(self.tail) - len(scanner.tail)  # offsets into the longest tail
            found = scanner.scan(text)
            if found is not None:
                matches.append((found[2] + shift, found[1] + shift, found[0]))
        if matches:
            end, start, stop = min(matches)
            return stop, start, end
        self.tail = max((scanner.tail for scanner in self._scanners), key=len)
        return None


def _new_scanner(strings: Sequence[str], patterns: Sequence[str]) -> Scanner | None:
    scanners: list[Scanner] = [StopScanner(list(strings))] if strings else []
    if patterns:
        scanners.append(StopPatterns(compile_stops(tuple(patterns))))
    return BothScanners(scanners) if len(scanners) > 1 else scanners[0] if scanners else None


class Detokenizer:
    """Incremental decoding of one output, as the continuation of its prompt. A few hundred nanoseconds per token.

    The first output token is not decoded as the first of a text, unless the prompt shows none. If the prompt ends
    inside a UTF-8 character, its bytes are output if the first token continues it. ``num_tokens_kept`` counts the
    tokens pushed, up to and including the one that completed a stop string. Text of the first ``min_tokens`` tokens is
    not searched for stop strings. ``spaces_between_special_tokens``: if false, the space that some decoders put between
    words is left out between two special tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, prompt_ids: Sequence[int] = (), stops: Stops = NO_STOPS,
        skip_special_tokens: bool = True, keep_special_tokens: Sequence[str] = (),
        spaces_between_special_tokens: bool = True,
        min_tokens: int = 0,
    ):
        self._text = TextDecoder(
            tokenizer.bytes_table, skip_special_tokens=skip_special_tokens, keep_special_tokens=keep_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        self._text.skip_prompt(prompt_ids)
        self._scanner = _new_scanner(stops.strings, stops.patterns)
        self._include_stop = stops.is_included
        self._min_tokens = min_tokens
        self.stopped: str | None = None
        self.num_tokens_kept = 0

    @property
    def can_stop(self) -> bool:
        """Whether there are strings that end the text."""
        return self._scanner is not None

    def push(self, ids: Sequence[int]) -> str:
        """The text that has become certain with these tokens; empty once stopped."""
        if self.stopped is not None:
            return ""
        if self._scanner is None:
            self.num_tokens_kept += len(ids)
            return self._text.push(ids)
        certain = ""
        for token_id in ids:  # one at a time, so that `num_tokens_kept` is exact when a stop string is found
            self.num_tokens_kept += 1
            text = self._text.push((token_id,))
            certain += self._scan(text) if self.num_tokens_kept > self._min_tokens else text
            if self.stopped is not None:
                break
        return certain

    def finish(self) -> str:
        """No more tokens: the text held back. A character still incomplete becomes U+FFFD."""
        if self.stopped is not None:
            return ""
        text = self._text.finish()
        if self._scanner is None:
            return text
        certain = self._scan(text)
        if self.stopped is None and not self._include_stop:
            certain += self._scanner.tail
        self._scanner.tail = ""
        return certain

    def _scan(self, text: str) -> str:
        """The part of the held text plus ``text`` that is certain. With ``include_stop`` a stop string is output too,
        so nothing is held: then what the scanner keeps in ``tail`` has been returned before."""
        assert self._scanner is not None
        held = self._scanner.tail
        found = self._scanner.scan(text)
        if found is None:
            if self._include_stop or not (held or self._scanner.tail):
                return text
            window = held + text
            return window[: len(window) - len(self._scanner.tail)]
        self.stopped, start, end = found
        return (held + text)[len(held):end] if self._include_stop else (held + text)[:start]
