"""`EncoderAccount`: which encoder outputs are on the device, and which media a step encodes.

The encoder has a budget of tokens a step of its own, beside that of the model; outputs are kept by namespace and
content digest in a number of bytes. Refuses: tensors. An output is pinned while a running request has placeholders of
it that are not planned yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace.base.errors import RequestError
from headrace.base.media import MediaFacts, MediaPlace, check_media
from headrace.base.step import Encode, MediaPlan, MediaUse
from headrace.scheduling.request import Request


@dataclass(frozen=True)
class EncoderLimits:
    """``step_tokens``: placeholders whose media one step encodes; a larger item is encoded alone. ``cache_tokens``:
    those whose outputs are kept. ``model_tokens``: those of an item that must be computed in one step."""

    step_tokens: int
    cache_tokens: int
    model_tokens: int


Key = tuple[str, bytes]
"""The namespace of a request (``cache_salt``, adapter), and an item's content digest."""


class _Output:
    """One item's output on the device; ``pins`` counts requests that still need it."""

    __slots__ = ("key", "num_tokens", "pins")

    def __init__(self, key: int, num_tokens: int):
        self.key, self.num_tokens, self.pins = key, num_tokens, 0


class EncoderAccount:
    """The outputs by `Key`, least recently used first. ``facts`` is None for a model that takes text alone."""

    def __init__(self, facts: MediaFacts | None, limits: EncoderLimits):
        self._facts, self._limits = facts, limits
        self._outputs: dict[Key, _Output] = {}
        self._pinned: dict[Request, dict[int, _Output]] = {}  # by the item's index
        self._num_tokens, self._next_key, self._left = 0, 0, limits.step_tokens
        self._encodes: list[Encode] = []
        self._uses: list[MediaUse] = []
        self._drops: list[int] = []
        self.num_encoded, self.num_hits = 0, 0

    def check(self, request: Request) -> None:
        """Raise `RequestError` for media that the model does not take, or that can never be computed here."""
        check_media(request.media, request.prompt_token_ids, self._facts)
        for item in request.media:
            most, name = self._limits.cache_tokens, "encoder_cache_mib"
            if self._facts is not None and self._facts.is_whole and self._limits.model_tokens < most:
                most, name = self._limits.model_tokens, "max_step_tokens"
            if item.place.num_tokens > most:
                raise RequestError(
                    f"an item of {item.place.num_tokens} tokens is larger than the {most} that fit; send a smaller "
                    f"{item.place.kind}, or serve with more {name}", param="media",
                )

    def begin_step(self) -> None:
        """A step is being planned; what an abandoned one had encoded stays due."""
        if not self._encodes:
            self._left = self._limits.step_tokens

    def limit(self, request: Request, begin: int, end: int, *, hard_end: int) -> int:
        """How far a chunk of a request from ``begin`` can go, at most to ``end``: up to the first item that the encoder
        has no budget or room for. An item that must be computed in one step may go beyond ``end``, to ``hard_end``."""
        if not request.media:
            return end
        left, room = self._left, self._limits.cache_tokens - self._count_pinned()
        for place in _places(request, begin, end):
            known = self._outputs.get(_key(request, place))
            if known is None or not known.pins:
                room -= place.num_tokens
            if known is None:
                is_first = left == self._limits.step_tokens
                left -= place.num_tokens
                if left < 0 and not is_first:
                    return self.align(request, begin, place.offset)
            if room < 0:
                return self.align(request, begin, place.offset)
        aligned = self.align(request, begin, end)
        if aligned > begin:
            return aligned
        # The first item does not fit the chunk: it may take more of the step than this request's share.
        whole = next((place.end for place in _places(request, begin, end)), end)
        return whole if whole <= hard_end else begin

    def align(self, request: Request, begin: int, end: int) -> int:
        """The largest end of a chunk up to ``end`` that divides no item which must be computed in one step."""
        if self._facts is not None and self._facts.is_whole:
            for place in _places(request, begin, end):
                if place.offset < end < place.end:
                    return max(begin, place.offset)
        return end

    def take(self, request: Request, begin: int, end: int) -> None:
        """Plan the encoder's part of a chunk that `limit` has allowed."""
        if not request.media:
            return
        pinned = self._pinned.setdefault(request, {})
        for index, item in enumerate(request.media):
            place = item.place
            if not _is_covered(place, begin, end):
                continue
            output = pinned.get(index)
            if output is None:
                output = pinned[index] = self._find(_key(request, item.place)) or self._encode(request, index)
                output.pins += 1
            self._uses.append(MediaUse(request.row, index, output.key))
            if place.end <= end:
                pinned.pop(index).pins -= 1
        if not pinned:
            del self._pinned[request]

    def take_plan(self) -> MediaPlan:
        """What the plan says of media."""
        plan = MediaPlan(self._encodes, self._uses, self._drops)
        self._encodes, self._uses, self._drops = [], [], []
        return plan

    def leave(self, request: Request) -> None:
        """The request runs no more: its outputs may be dropped."""
        for output in self._pinned.pop(request, {}).values():
            output.pins -= 1

    def forget_device(self) -> None:
        """The device has lost all outputs."""
        self._outputs.clear()
        self._pinned.clear()
        self._num_tokens = 0
        self.take_plan()

    def audit(self, running: set[Request]) -> None:
        """Raise AssertionError unless all outputs are counted, and only running requests pin any."""
        assert self._num_tokens == sum(output.num_tokens for output in self._outputs.values())
        assert set(self._pinned) <= running, "a request that does not run pins encoder outputs"
        pins = [output for pinned in self._pinned.values() for output in pinned.values()]
        assert all(output.pins == sum(p is output for p in pins) for output in self._outputs.values())

    def _count_pinned(self) -> int:
        return sum(output.num_tokens for output in self._outputs.values() if output.pins)

    def _find(self, key: Key) -> _Output | None:
        output = self._outputs.pop(key, None)
        if output is not None:
            self._outputs[key] = output  # used last
            self.num_hits += 1
        return output

    def _encode(self, request: Request, index: int) -> _Output:
        item = request.media[index]
        count = item.place.num_tokens
        for key, old in list(self._outputs.items()):
            if self._num_tokens + count <= self._limits.cache_tokens:
                break
            if not old.pins:
                self._drops.append(old.key)
                self._num_tokens -= self._outputs.pop(key).num_tokens
        output = self._outputs[_key(request, item.place)] = _Output(self._next_key, count)
        self._next_key += 1
        self._num_tokens += count
        self._left -= count
        self._encodes.append(Encode(output.key, item))
        self.num_encoded += 1
        return output


def _key(request: Request, place: MediaPlace) -> Key:
    """Users with different salts must not learn from the time of a request what others have sent."""
    return request.namespace, place.digest


def _places(request: Request, begin: int, end: int) -> Iterator[MediaPlace]:
    """Those that a chunk covers a part of."""
    return (item.place for item in request.media if _is_covered(item.place, begin, end))


def _is_covered(place: MediaPlace, begin: int, end: int) -> bool:
    """Whether a chunk has placeholders of an item; between the moments of a video it may have text alone."""
    if place.offset >= end or place.end <= begin:
        return False
    return any(offset < end and offset + count > begin for offset, count in place.runs)
