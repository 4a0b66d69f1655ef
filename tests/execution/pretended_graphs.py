"""Captured steps on a CPU: graphs that are the work itself, and attention that reads lengths from the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from headrace.execution.inputs import InputBuilder
from headrace.execution.runner import Runner
from headrace.layers.attention.contract import AttentionInputs
from headrace.layers.attention.reference import ReferenceAttention

NO_MEDIA: Any = SimpleNamespace(make_static=lambda most: False)
"""The media of steps of a model that takes text alone."""


class OpenAttention(ReferenceAttention):
    """Reads from the device how long the spans of a captured step are, which a CPU can."""

    def prepare(self, inputs: AttentionInputs) -> None:
        if inputs.has_dynamic_lengths:
            lengths, ends = inputs.query_start.diff().tolist(), inputs.kv_lens.tolist()
            assert len(lengths) == len(ends) == len(inputs.page_table)
            count = sum(length > 0 for length in lengths)
            assert 0 not in lengths[:count], "padding comes last"
            inputs = replace(
                inputs, has_dynamic_lengths=False, query_lens_cpu=lengths[:count], kv_lens_cpu=ends[:count],
                kv_lens=inputs.kv_lens[:count], max_query_len=max(lengths), max_kv_len=max(ends, default=0),
            )
        super().prepare(inputs)

    def attend(self, q: torch.Tensor, *about: Any) -> torch.Tensor:
        return super().attend(q, *about).nan_to_num(0.0)  # rows of padding are not written


class PretendedRecorder:
    """A graph is the work itself."""

    def record(self, work: Callable[[], Any]) -> Callable[[], Any]:
        return work


def open_attention(runner: Runner, max_tokens: int) -> None:
    """Let the runner's steps be captured."""
    runner._backends = [OpenAttention(backend.geometry, torch.device("cpu")) for backend in runner._backends]
    runner._inputs = InputBuilder(
        runner.layout, runner._rows, runner._tables, runner._backends, max_tokens, runner._media
    )
