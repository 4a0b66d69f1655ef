"""Steps of our own before the first request: a tiny one on every device, the largest one on a GPU to see what it
takes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from headrace.base.cache import NULL_PAGE, CacheLayout
from headrace.base.errors import ModelError
from headrace.base.pooling import PoolingSpec
from headrace.base.sampling import SamplingSpec
from headrace.base.step import PageAppend, RowStart, StepPlan
from headrace.execution.result import PendingSample

Execute = Callable[[StepPlan], PendingSample]

FIRST_PAGE = NULL_PAGE + 1
PROMPT_LEN = 3
OWN_STEP = -1
"""``step_id`` of steps that no scheduler planned."""


def run_tiny_steps(
    execute: Execute, layout: CacheLayout, *, is_reader: bool = False, sampling: SamplingSpec | None = None
) -> None:
    """Prefill and decode one request (a model that reads: prefill it), greedily if nothing else is said, then give its
    row back; raises `ModelError` when the model yields no numbers."""
    num_pages = -(-(PROMPT_LEN + 1) // layout.page_size)
    pages = [
        FIRST_PAGE + i if FIRST_PAGE + i < group.num_pages else NULL_PAGE
        for group in layout.groups
        for i in range(num_pages)
    ]
    appends = [PageAppend(g, 0, 0, pages[g * num_pages : (g + 1) * num_pages]) for g in range(len(layout.groups))]
    start = RowStart(
        0, "warm-up", [0] * PROMPT_LEN, PROMPT_LEN, sampling or SamplingSpec(), PoolingSpec() if is_reader else None
    )
    prefill = StepPlan(OWN_STEP, 0, [0], [0], [PROMPT_LEN], [int(not is_reader)], starts=[start], appends=appends)
    decodes = [] if is_reader else [StepPlan(OWN_STEP, 1, [0], [PROMPT_LEN], [1], [1])]
    for plan in (prefill, *decodes, StepPlan(OWN_STEP, 0, [], [], [], [], releases=[0])):
        result = execute(plan).result()
        if result.failed_rows:
            raise ModelError(
                f"the first step of the model failed: {result.failed_rows[0][1]}; are its weights sound, and its dtype "
                "wide enough?"
            )


def measure_largest_steps(
    execute: Execute, layout: CacheLayout, max_tokens: int, device: torch.device, *, is_reader: bool = False
) -> int:
    """Bytes that the largest steps take beyond what is allocated now: one of as many requests as can be, all drawing at
    random, and one of the longest. Reads and writes the null page only, so two pages per group are enough."""
    def run() -> None:
        many = min(layout.max_rows, max_tokens)
        few = min(layout.max_rows, -(-max_tokens // layout.max_model_len))
        for num_rows in (many, few):
            length = min(max(1, max_tokens // num_rows), layout.max_model_len)
            spec = SamplingSpec(temperature=1.0, top_p=0.9, num_logprobs=1)
            pooling = PoolingSpec() if is_reader else None
            starts = [RowStart(row, "measure", [0] * length, length, spec, pooling) for row in range(num_rows)]
            rows = list(range(num_rows))
            execute(
                StepPlan(
                    OWN_STEP, 0, rows, [0] * num_rows, [length] * num_rows, [int(not is_reader)] * num_rows,
                    starts=starts
                )
            ).result()

    return measure_peak(run, device)


def measure_peak(run: Callable[[], object], device: torch.device) -> int:
    """The most bytes that ``run`` has at a time beyond what is allocated now."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
