"""`EncoderAccount`: which encoder outputs are on the device, and which media a step encodes.

The encoder has a budget of tokens a step of its own, beside that of the model; outputs are kept by namespace and
content digest in a number of bytes. Refuses: tensors. An output is pinned while a running request has placeholders of
it that are not planned yet.

An encoder takes many times as long as a step of decodes. Beside these it gets `BESIDE_TOKENS` a step for each item that
waits, and what is larger is computed in pieces, over several steps: few images hold up streams but little, and many are
encoded as fast as without streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headrace.base.errors import RequestError
from headrace.base.media import MediaPlace
from headrace.base.media_facts import MediaFacts, check_media
from headrace.base.step import Encode, MediaPlan, MediaUse
from headrace.scheduling.request import Request


@dataclass(frozen=True)
class EncoderLimits:
    """``step_tokens``: placeholders whose media one step encodes; a larger item is encoded alone. ``cache_tokens``:
    those whose outputs are kept. ``model_tokens``: those of an item that must be computed in one step."""

    step_tokens: int
    cache_tokens: int
    model_tokens: int


BESIDE_TOKENS = 128
"""Placeholders' worth of encoding in a step with decodes, for each item that waits: about a millisecond on a GPU, less
than what a short prompt adds to a step. The first step of a batch, which also sends its pixels, has half of that.
"""

Key = tuple[str, bytes]
"""The namespace of a request (``cache_salt``, adapter), and an item's content digest."""


class _Output:
    """One item's output on the device; ``pins`` counts requests that still need it. ``is_ready``: it is there when the
    spans of the plan being made are computed."""

    __slots__ = ("is_ready", "key", "num_tokens", "pins")

    def __init__(self, key: int, num_tokens: int):
        self.key, self.num_tokens, self.pins, self.is_ready = key, num_tokens, 0, True

    @property
    def is_kept(self) -> bool:
        """Whether it must not be dropped."""
        return self.pins > 0 or not self.is_ready


@dataclass
class _Batch:
    """Outputs that are computed together, over several steps; ``num_left`` pieces are not planned yet."""

    outputs: list[_Output]
    num_left: int

    @property
    def num_tokens(self) -> int:
        return sum(output.num_tokens for output in self.outputs)


class EncoderAccount:
    """The outputs by `Key`, least recently used first. ``facts`` is None for a model that takes text alone."""

    def __init__(self, facts: MediaFacts | None, limits: EncoderLimits):
        self._facts, self._limits = facts, limits
        self._most_pieces = 1 if facts is None else facts.num_pieces
        self._outputs: dict[Key, _Output] = {}
        self._pinned: dict[Request, dict[int, _Output]] = {}  # by the item's index
        self._num_tokens, self._next_key = 0, 0
        self._most = self._left = limits.step_tokens  # of the step being planned
        self._reserved = 0.0
        self._encodes: list[Encode] = []
        self._uses: list[MediaUse] = []
        self._drops: list[int] = []
        self._batch: _Batch | None = None
        self._begun: list[Encode] = []
        self._num_pieces, self._piece_tokens = 0, 0.0
        self._pieces: list[_Output] = []  # of which the plan being made computes pieces
        self._is_beside = False
        self.num_encoded, self.num_hits = 0, 0

    def check(self, request: Request) -> None:
        """Raise `RequestError` for media that the model does not take, or that can never be computed here."""
        check_media(request.media, request.tokens, self._facts)
        for item in request.media:
            most, name = self._limits.cache_tokens, "encoder_cache_mib"
            if self._facts is not None and self._facts.is_whole and self._limits.model_tokens < most:
                most, name = self._limits.model_tokens, "max_step_tokens"
            if item.place.num_tokens > most:
                raise RequestError(
                    f"an item of {item.place.num_tokens} tokens is larger than the {most} that fit; send a smaller "
                    f"{item.place.kind}, or serve with more {name}", param="media",
                )

    def begin_step(
        self, prefilling: Iterable[Request] = (), *, is_beside: bool = False, most: int | None = None
    ) -> float:
        """A step is being planned; what an abandoned one had encoded stays due. ``prefilling``: requests whose prompts
        are being computed; ``is_beside``: the step has decodes, which must not wait for long; ``most``: the
        placeholders' worth of encoding that they may wait for, if any fits. Returns how many the step encodes, if it
        gets to all that it may."""
        if self._facts is None or self._encodes or self._begun or self._num_pieces:
            return self._reserved
        limit = self._limits.step_tokens
        self._most = self._left = limit if most is None else min(limit, max(1, most))
        self._is_beside, self._reserved = is_beside and self._most_pieces > 1, 0.0
        due = self._find_due(prefilling) if self._is_beside or self._batch is not None else []
        if self._batch is not None and not any(output.pins for output in self._batch.outputs):
            self._give_up(self._batch, {_key(request, request.media[index].place) for request, index in due})
        if self._is_beside:
            self._share_step(due, is_bound=most is not None)
        elif self._batch is not None:
            self._advance(self._batch, self._batch.num_left)
        return self._reserved

    @property
    def divides_prompts(self) -> bool:
        """Whether prompts with media may be divided among steps, and steps beside decodes gain by it. A window of sound
        stands beside few tokens of text, in a step that is not captured."""
        return self._facts is not None and not self._facts.is_whole and self._facts.speech is None

    @property
    def num_planned(self) -> float:
        """Placeholders' worth of encoding in the plan being made."""
        return self._piece_tokens + sum(encode.item.place.num_tokens for encode in self._encodes)

    def limit(self, request: Request, begin: int, end: int, *, hard_end: int) -> int:
        """How far a chunk of a request from ``begin`` can go, at most to ``end``: up to the first item that the encoder
        has no budget or room for. An item that must be computed in one step may go beyond ``end``, to ``hard_end``."""
        if not request.media:
            return end
        left, room = self._left, self._limits.cache_tokens - self._count_kept()
        for place in _places(request, begin, end):
            known = self._outputs.get(_key(request, place))
            if known is not None and not known.is_ready:
                return self.align(request, begin, place.offset)
            if known is None or not known.pins:
                room -= place.num_tokens
            if known is None:
                is_first = left == self._most and not self._is_beside
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

    def count_undivided(self, request: Request) -> int:
        """The most tokens of a request that one step computes or none; 1 where every chunk may be divided."""
        if self._facts is None or not self._facts.is_whole:
            return 1
        return max((item.place.end - item.place.offset for item in request.media), default=1)

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
        places = {i: item.place for i, item in enumerate(request.media) if _is_covered(item.place, begin, end)}
        for index in places.keys() - pinned.keys():  # first: room for the others must not be made of what is known
            if (known := self._find_known(request, index)) is not None:
                pinned[index] = known
                known.pins += 1
        for index, place in places.items():
            output = pinned.get(index)
            if output is None:  # as an earlier one of the chunk may have the same content, it may be known by now
                output = pinned[index] = self._find_known(request, index) or self._encode(request, index)
                output.pins += 1
            self._uses.append(MediaUse(request.row, index, output.key))
            if place.end <= end:
                pinned.pop(index).pins -= 1
        if not pinned:
            del self._pinned[request]

    def take_plan(self) -> MediaPlan:
        """The media part of the plan; starts a new one."""
        plan = MediaPlan(self._encodes, self._uses, self._drops, self._begun, self._num_pieces)
        self._encodes, self._uses, self._drops, self._begun, self._num_pieces = [], [], [], [], 0
        self._piece_tokens = 0.0
        return plan

    def find_waiting(self) -> list[Request]:
        """Requests that wait for what the plan being made encodes in pieces."""
        if not self._num_pieces:
            return []
        return [request for request, pinned in self._pinned.items() if any(o in self._pieces for o in pinned.values())]

    def leave(self, request: Request) -> None:
        """The request runs no more: its outputs may be dropped."""
        for output in self._pinned.pop(request, {}).values():
            output.pins -= 1

    def forget_device(self) -> None:
        """The device has lost all outputs."""
        self._outputs.clear()
        self._pinned.clear()
        self._num_tokens, self._batch = 0, None
        self.take_plan()

    def audit(self, running: set[Request]) -> None:
        """Raise AssertionError unless all outputs are counted, and only running requests pin any."""
        assert self._num_tokens == sum(output.num_tokens for output in self._outputs.values())
        assert set(self._pinned) <= running, "a request that does not run pins encoder outputs"
        pins = [output for pinned in self._pinned.values() for output in pinned.values()]
        assert all(output.pins == sum(p is output for p in pins) for output in self._outputs.values())
        under_way = [] if self._batch is None else self._batch.outputs
        assert [output for output in self._outputs.values() if not output.is_ready] == under_way

    def _find_due(self, prefilling: Iterable[Request]) -> list[tuple[Request, int]]:
        """Items that requests wait for, or will, and that are not encoded; each content once."""
        found: dict[Key, tuple[Request, int]] = {}
        for request in prefilling:
            for index, item in enumerate(request.media):
                known = self._outputs.get(key := _key(request, item.place))
                if item.place.end > request.planned_len and (known is None or not known.is_ready):
                    found.setdefault(key, (request, index))
        return list(found.values())

    def _give_up(self, batch: _Batch, due: set[Key]) -> None:
        """Stop encoding what nobody waits for any more."""
        keys = [key for key, output in self._outputs.items() if output in batch.outputs]
        if not due.intersection(keys):
            for key in keys:
                output = self._outputs.pop(key)
                self._num_tokens -= output.num_tokens
                self._drops.append(output.key)
            self._batch = None

    def _share_step(self, due: list[tuple[Request, int]], *, is_bound: bool) -> None:
        """Divide the encoding beside decodes: small items come first and are encoded whole, the rest is for a batch
        that takes several steps. ``is_bound``: the step's encoding is fixed, so items of newcomers wait for the next
        one."""
        most = self._left = self._left if is_bound else min(self._left, BESIDE_TOKENS * max(1, len(due)))
        whole, large = 0, list[tuple[Request, int]]()
        for request, index in due:
            place = request.media[index].place
            if _key(request, place) in self._outputs:
                continue
            if whole + place.num_tokens <= most:
                whole += place.num_tokens
            else:
                large.append((request, index))
        if self._batch is None:
            self._begin_batch(large, self._limits.step_tokens - whole)
        batch = self._batch
        if batch is not None:
            size = batch.num_tokens / self._most_pieces
            count = int((most - whole) / size) // (2 if self._begun else 1)
            count = min(batch.num_left, max(1, count))
            self._advance(batch, count)
            # the tensors of what is unfinished stay, and leave less memory to others
            room = self._limits.step_tokens - (batch.num_tokens if batch.num_left else 0)
            self._left = max(whole, min(room, most - int(count * size)))
        self._reserved = whole + self._piece_tokens
        if is_bound:
            self._left = whole

    def _begin_batch(self, due: list[tuple[Request, int]], most: int) -> None:
        """Begin to encode the first of ``due``, of at most ``most`` tokens together, or a larger one alone. An item is
        pinned from then on, so those before it in its prompt are, too: else they might find no room beside it."""
        left, room, outputs = most, self._limits.cache_tokens - self._count_kept(), list[_Output]()
        for request, index in due:
            count, earlier = request.media[index].place.num_tokens, self._find_earlier(request, index)
            if earlier is None:
                continue
            needed = count + sum(output.num_tokens for output in earlier.values() if not output.pins)
            if needed > room or (outputs and count > left):
                break
            left, room = left - count, room - needed
            pinned = self._pinned.setdefault(request, {})
            for number, known in earlier.items():
                pinned[number] = known
                known.pins += 1
            output = pinned[index] = self._add_output(request, index)
            output.is_ready, output.pins = False, 1
            self._begun.append(Encode(output.key, request.media[index]))
            outputs.append(output)
        if outputs:
            self._batch = _Batch(outputs, self._most_pieces)

    def _find_earlier(self, request: Request, index: int) -> dict[int, _Output] | None:
        """The outputs of items before this one that the request still needs and has not pinned, by their index; None if
        one is not encoded yet, nor under way."""
        pinned, found = self._pinned.get(request, {}), dict[int, _Output]()
        for number, item in enumerate(request.media[:index]):
            if item.place.end > request.planned_len and number not in pinned:
                known = self._outputs.get(_key(request, item.place))
                if known is None:
                    return None
                found[number] = known
        return found

    def _advance(self, batch: _Batch, num_pieces: int) -> None:
        """Plan pieces of the batch under way."""
        batch.num_left -= num_pieces
        self._num_pieces, self._piece_tokens = num_pieces, num_pieces * batch.num_tokens / self._most_pieces
        self._pieces = batch.outputs
        if not batch.num_left:
            for output in batch.outputs:
                output.is_ready = True
            self._batch = None

    def _count_kept(self) -> int:
        return sum(output.num_tokens for output in self._outputs.values() if output.is_kept)

    def _find_known(self, request: Request, index: int) -> _Output | None:
        key = _key(request, request.media[index].place)
        output = self._outputs.pop(key, None)
        if output is not None:
            self._outputs[key] = output  # used last
            self.num_hits += 1
        return output

    def _encode(self, request: Request, index: int) -> _Output:
        output = self._add_output(request, index)
        self._left -= output.num_tokens
        self._encodes.append(Encode(output.key, request.media[index]))
        return output

    def _add_output(self, request: Request, index: int) -> _Output:
        """One more, in the place of those used least lately."""
        item = request.media[index]
        count = item.place.num_tokens
        for key, old in list(self._outputs.items()):
            if self._num_tokens + count <= self._limits.cache_tokens:
                break
            if not old.is_kept:
                self._drops.append(old.key)
                self._num_tokens -= self._outputs.pop(key).num_tokens
        output = self._outputs[_key(request, item.place)] = _Output(self._next_key, count)
        self._next_key += 1
        self._num_tokens += count
        self.num_encoded += 1
        return output


def _key(request: Request, place: MediaPlace) -> Key:
    """Users with different salts must not learn from the time of a request what others have sent."""
    return request.namespace, place.digest


def _places(request: Request, begin: int, end: int) -> Iterator[MediaPlace]:
    """The items that a chunk covers at least in part."""
    return (item.place for item in request.media if _is_covered(item.place, begin, end))


def _is_covered(place: MediaPlace, begin: int, end: int) -> bool:
    """Whether a chunk has placeholders of an item; between the moments of a video it may have text alone."""
    if place.offset >= end or place.end <= begin:
        return False
    return any(offset < end and offset + count > begin for offset, count in place.runs)
