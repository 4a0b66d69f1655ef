"""Whether two outputs that differ do so at a near tie, judged by the target in transformers and float32.

A near tie is a position where changing every logit by at most ``bound`` can make the sampler choose either token: as
processors and sampling are written down in `sampling_oracle`, with the seed of that position."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sampling_oracle import edited_logits, kept_probabilities, sample

from headrace.base.messages import EngineRequest

NUM_RANDOM = 64


@dataclass(frozen=True)
class Difference:
    """The first token that two outputs of a request do not share."""

    where: str
    index: int
    tokens: tuple[int, int]


class Referee:
    """``model`` is the target; ``bound`` is in units of logits (0: there are no ties)."""

    def __init__(self, model: Any, bound: float):
        self._model = model
        self._bound = bound

    def logits(self, tokens: list[int]) -> np.ndarray:
        """Those behind ``tokens``: ``[V]``."""
        with torch.no_grad():
            return self._model(torch.tensor([tokens], device=self._model.device)).logits[0, -1].double().cpu().numpy()

    def choose(self, logits: np.ndarray, request: EngineRequest, output: list[int], allowed: set[int] | None) -> int:
        """The token that follows ``output``. ``allowed``: what a grammar leaves."""
        prompt, spec = request.prompt_token_ids.tolist(), request.sampling
        edited = edited_logits(logits, spec, prompt, output)
        if allowed is not None:
            edited[[token for token in range(len(edited)) if token not in allowed]] = -math.inf
        if spec.is_greedy:
            return int(edited.argmax())
        return sample(kept_probabilities(edited, spec), spec.seed, len(output))

    def can_choose(
        self, token: int, logits: np.ndarray, request: EngineRequest, output: list[int], allowed: set[int] | None
    ) -> bool:
        """Whether logits near ``logits`` make ``token`` follow."""
        return any(
            self.choose(logits + self._bound * signs, request, output, allowed) == token
            for signs in _directions(token, len(logits))
        )

    def is_tie(self, difference: Difference, request: EngineRequest, output: list[int], allowed: set[int]) -> bool:
        """Whether either token may follow ``output``, which the two outputs share."""
        if not self._bound:
            return False
        spec = request.sampling
        # What a grammar leaves beside the two does not matter to the most likely token.
        left = None if spec.grammar is None else set(difference.tokens) if spec.is_greedy else allowed
        logits = self.logits([*request.prompt_token_ids, *output])
        return all(self.can_choose(token, logits, request, output, left) for token in difference.tokens)


def _directions(token: int, vocab: int) -> Iterator[np.ndarray]:
    """Signs by which logits are changed: in favour of the token, of it and all before it, of it and all behind it (what
    a draw from the cumulative distribution needs), and at random (what top-k, top-p and min-p need)."""
    ids = np.arange(vocab)
    for favoured in (ids == token, ids <= token, ids >= token, ids < token, ids > token):
        yield np.where(favoured, 1.0, -1.0)
    chance = np.random.default_rng(token)
    for _ in range(NUM_RANDOM):
        signs = chance.choice([-1.0, 1.0], vocab)
        signs[token] = 1.0
        yield signs
