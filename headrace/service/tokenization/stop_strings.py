"""Finds the first stop string in text that comes in parts. Refuses: tokens."""

from __future__ import annotations

import re


class StopScanner:
    """The match that is complete first wins (of two that end together, the longer), whatever the parts.

    ``scan`` keeps ``tail``: the longest end of the text so far that may still become part of a match.
    """

    def __init__(self, stops: list[str]):
        self._stops = stops
        self._find_start = re.compile("[" + re.escape("".join({s[0] for s in stops})) + "]").search
        self.tail = ""

    def scan(self, text: str) -> tuple[str, int, int] | None:
        """Take the next part. Returns ``(stop string, start, end)`` of the first match, as offsets into the old
        ``tail`` plus ``text``, or None; ``tail`` is then the new one."""
        if not self.tail and self._find_start(text) is None:  # nearly always
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
