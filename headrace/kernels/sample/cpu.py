"""Sampling by own C++ kernels; by the reference until these are loaded. S sampled rows, V vocabulary."""

from __future__ import annotations

import torch

from headrace.kernels.native import NATIVE
from headrace.kernels.sample import SampleParams, reference


def sample_rows(logits: torch.Tensor, params: SampleParams) -> torch.Tensor:
    """See `reference.sample_rows`."""
    ops = NATIVE.find()
    if ops is None:
        return reference.sample_rows(logits, params)
    ids = torch.empty(len(logits), dtype=torch.int64)
    ops.sample_tokens(
        logits, params.temperature, params.top_k, params.top_p, params.min_p, params.seed, params.position, ids
    )
    return ids


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `headrace.kernels.sample.ARGMAX`."""
    if NATIVE.find() is None:
        return reference.argmax(logits)
    _, values, ids = _search(logits)
    return values, ids


def mask_argmax(
    logits: torch.Tensor, masks: torch.Tensor, mask_of_row: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `reference.mask_argmax`."""
    if NATIVE.find() is None:
        return reference.mask_argmax(logits, masks, mask_of_row)
    return _search(logits, masks, mask_of_row)


def _search(
    logits: torch.Tensor, masks: torch.Tensor | None = None, mask_of_row: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(largest logit before masking [S], after it [S], argmax [S])``; masks in place. The native library is
    loaded."""
    raw, values = torch.empty((2, len(logits)), dtype=torch.float32)
    ids = torch.empty(len(logits), dtype=torch.int64)
    ops = NATIVE.find()
    assert ops is not None
    ops.argmax_logits(logits, masks, mask_of_row, raw, values, ids)
    return raw, values, ids


sample = reference.compose(argmax, mask_argmax, sample_rows)
"""See `headrace.kernels.sample.SAMPLE`."""
