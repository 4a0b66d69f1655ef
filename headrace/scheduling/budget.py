"""`StepLimit` and `StepBudget`: how much a step may compute: tokens, and beside decodes also seconds.

No number of tokens fits all devices and all lengths of contexts: attention to a long context and an encoder take time,
too. So where a time between tokens is wanted, what fits is found from measured steps (`StepTimes`).
"""

from __future__ import annotations

import math
from typing import Protocol

from headrace.scheduling.timing import StepTimes, StepWork

LEAST_TOKENS = 16
"""Tokens of a step below which running out of device memory is an error, as smaller steps would not help."""
CALM_STEPS = 512
"""Steps without running out of memory after which the budget is doubled again."""


class StepLimit:
    """The token budget of a step: what is configured, halved when the device runs out of memory, and doubled again
    after every `CALM_STEPS` steps without another such failure. ``num_stages``: steps that are computed at the same
    time, each in another pipeline stage. ``target_s``: seconds between tokens of a stream that prompts and media should
    not exceed."""

    def __init__(self, most: int, num_stages: int = 1, target_s: float | None = None):
        self.tokens = self._most = most
        self.num_stages = num_stages
        self._calm = 0
        # a token passes all stages before the row decodes again
        self._target_s = None if target_s is None else target_s / num_stages
        self._times = StepTimes()

    def begin_step(self, begins: list[int], lengths: list[int]) -> StepBudget:
        """The budget for prompts in a step with these decodes."""
        tokens = self.tokens - sum(lengths)
        if self._target_s is None or not begins:
            return StepBudget(tokens)
        return TimedBudget(tokens, self._times, self._target_s, StepWork(sum(lengths), sum(begins)))

    def measure(self, spans: Spans, num_encoded: float) -> StepWork | None:
        """The work of a step; None without an ``inter_token_target_ms``, as nobody needs it then."""
        if self._target_s is None:
            return None
        count = spans.num_decodes
        begins, lengths = spans.begins, spans.lengths
        prompts = list(zip(begins[count:], lengths[count:], strict=True))
        return StepWork(
            sum(lengths[:count]), sum(begins[:count]), sum(lengths[count:]),
            sum(length * (begin + length / 2) for begin, length in prompts), num_encoded,
        )

    def note_time(self, work: StepWork | None, seconds: float) -> None:
        """A step of this work took so long."""
        if work is not None:
            self._times.note(work, seconds)

    def shrink(self) -> bool:
        """Halve the budget; False, and unchanged, when it cannot get any smaller."""
        if self.tokens <= LEAST_TOKENS:
            return False
        self.tokens, self._calm = max(LEAST_TOKENS, self.tokens // 2), 0
        return True

    @property
    def num_withheld(self) -> int:
        """Tokens of the configured budget that steps do without for now."""
        return self._most - self.tokens

    def count_step(self) -> None:
        """A step was planned."""
        if self.tokens < self._most:
            self._calm += 1
            if self._calm >= CALM_STEPS:
                self.tokens, self._calm = min(self._most, 2 * self.tokens), 0


LEAST_BESIDE = 32
"""Tokens of prompts in a step with decodes, however long it takes: a prompt always goes on."""
FIRST_CHUNK = 256
"""Tokens of the first chunk beside decodes; see `StepTimes.reach`."""
FIRST_ENCODED = 64
"""Placeholders' worth of encoding beside decodes, until it was measured."""
ENCODER_SHARE = 0.5
"""Share of the time beside decodes that encoders may take, so that text prompts need not wait for images."""


MEDIA_CHUNK = 128
"""Tokens of prompts with media in a step with decodes, for each such prompt. Decodes and what is encoded are among
them, as a placeholder takes about as long to encode as to compute. Steps of so many are captured with media, and take
little longer than those of decodes: reading the weights takes as long as multiplying them. A whole prompt of an image
would hold up decodes for as long as ten of their steps."""


class Spans(Protocol):
    """The spans of a plan being made, decodes first."""

    begins: list[int]
    lengths: list[int]
    num_decodes: int


class StepBudget:
    """Tokens that are left in a step for prompts. ``encoder_tokens``: placeholders that may be encoded;
    ``media_tokens``: tokens of prompts with media. None for any number."""

    encoder_tokens: int | None = None
    media_tokens: int | None = None

    def __init__(self, tokens: int):
        self.tokens = tokens

    def reserve_encoding(self, num_tokens: float) -> None:
        """Note that the step encodes media of this many placeholders."""

    def bound_media(self, num_taken: int, num_prompts: int) -> None:
        """Bound prompts with media beside decodes, which take ``num_taken`` tokens together with what is encoded: few
        hold decodes up but little, and of many that wait (``num_prompts``) as much is computed as ever."""
        if self.encoder_tokens is None:  # else time bounds them
            self.media_tokens = max(MEDIA_CHUNK // 2, MEDIA_CHUNK * max(1, num_prompts) - num_taken)

    def most(self, begin: int) -> int:
        """Tokens that a chunk from position ``begin`` may have."""
        return self.tokens

    def take(self, begin: int, length: int, *, has_media: bool = False) -> None:
        """A chunk was planned; it may be larger than `most`, if it could not be divided."""
        self.tokens -= length
        if has_media and self.media_tokens is not None:
            self.media_tokens -= length


class TimedBudget(StepBudget):
    """Tokens and seconds that are left in a step with decodes, whose work is ``decodes``."""

    def __init__(self, tokens: int, times: StepTimes, target_s: float, decodes: StepWork):
        super().__init__(tokens)
        self._times, self._target_s, self._decodes = times, target_s, decodes
        self._cap = max(FIRST_CHUNK, times.reach(target_s))
        self._is_first = True
        self._left_s = 0.0
        self.reserve_encoding(0)
        known_s = times.encoded_s
        self.encoder_tokens = int(ENCODER_SHARE * self._left_s / known_s) if known_s else FIRST_ENCODED

    def reserve_encoding(self, num_tokens: float) -> None:
        self._left_s = max(0.0, self._target_s - self._times.seconds(self._decodes._replace(encoded=num_tokens)))

    def most(self, begin: int) -> int:
        left_s = max(0.0, self._left_s)
        # n tokens take n * per_token + n**2 * per_square seconds
        per_token, per_square = self._times.token_s + begin * self._times.pair_s, self._times.pair_s / 2
        slowest = per_token + math.sqrt(per_token**2 + 4 * per_square * left_s)
        count = int(min(self._cap, 2 * left_s / slowest if slowest else self._cap))
        if self._is_first:
            count = max(count, LEAST_BESIDE)
        return min(self.tokens, count)

    def take(self, begin: int, length: int, *, has_media: bool = False) -> None:
        super().take(begin, length, has_media=has_media)
        self._is_first = False
        self._cap = max(0, self._cap - length)
        self._left_s -= length * (self._times.token_s + self._times.pair_s * (begin + length / 2))
