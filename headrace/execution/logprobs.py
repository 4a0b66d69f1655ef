"""Log-probabilities from raw logits: of drawn tokens and of prompts. n positions, V vocabulary, k best tokens.

Refuses: anything after temperature, penalties or masks: what is reported is the model's own distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.base.step import TokenLogprobs
from headrace.execution.upload import to_host

SLICE_POSITIONS = 256
"""Prompt positions whose logits exist at a time."""


@dataclass(slots=True)
class Logprobs:
    """``logprobs`` and ``ranks`` [n] of the tokens ``ids`` [n]; ``top_ids`` and ``top_logprobs`` [n, k], best first."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def copy_to_host(self) -> Logprobs:
        """The same on the host, once the device has come this far."""
        return Logprobs(*(to_host(t) for t in (self.ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs)))

    def records(self, top_counts: list[int]) -> list[TokenLogprobs]:
        """One record per position with its own number of best tokens; for tensors on the host."""
        columns = (t.tolist() for t in (self.ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs))
        return [
            TokenLogprobs(token, logprob, rank, top_ids[:count], top_logprobs[:count])
            for token, logprob, rank, top_ids, top_logprobs, count in zip(*columns, top_counts, strict=True)
        ]


def compute_logprobs(logits: torch.Tensor, ids: torch.Tensor, k: int) -> Logprobs:
    """Logprobs of ``ids`` [n] under logits [n, V] float32. The rank counts tokens strictly more likely, plus one."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(-1) + 1
    top = logprobs.topk(min(k, logits.shape[1]), dim=-1)
    return Logprobs(ids, chosen.squeeze(1), ranks, top.indices, top.values)


def compute_prompt_logprobs(
    hidden: torch.Tensor, targets: torch.Tensor, k: int, compute_logits: Callable[[torch.Tensor], torch.Tensor],
) -> Logprobs:
    """Logprobs of ``targets`` [n], each predicted by the hidden state [n, D] beside it; a slice of logits at a time."""
    parts = [
        compute_logprobs(compute_logits(states), ids, k)
        for states, ids in zip(hidden.split(SLICE_POSITIONS), targets.split(SLICE_POSITIONS), strict=True)
    ]
    names = Logprobs.__slots__
    return Logprobs(*(torch.cat([getattr(part, name) for part in parts]) for name in names))
