"""Sampling by own C++ kernels; in plain torch until they are there. S sampled rows, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch

from headrace.kernels.native import NATIVE
from headrace.kernels.sample import DrawParams, reference


def sample(logits: torch.Tensor, params: DrawParams) -> torch.Tensor:
    """See `headrace.kernels.sample.SAMPLE`."""
    ops = NATIVE.find()
    if ops is None:
        return reference.sample(logits, params)
    ids = torch.empty(len(logits), dtype=torch.int64)
    ops.draw_tokens(logits, params.temperature, params.top_k, params.top_p, params.min_p, params.seed, params.position, ids)
    return ids


def find_best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `headrace.kernels.sample.FIND_BEST`."""
    ops = NATIVE.find()
    if ops is None:
        return reference.find_best(logits)
    _, values, ids = search(ops, logits, None, None)
    return values, ids


def search(ops: Any, logits: torch.Tensor, masks: torch.Tensor | None, mask_of_row: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `headrace.kernels.token_mask.TOKEN_MASK`; without masks nothing is forbidden."""
    raw, values = torch.empty((2, len(logits)), dtype=torch.float32)
    ids = torch.empty(len(logits), dtype=torch.int64)
    ops.search_logits(logits, masks, mask_of_row, raw, values, ids)
    return raw, values, ids
