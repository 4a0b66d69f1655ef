"""`PendingSample`: a launched step whose tokens are on their way back to the host. The only place where the host waits
for the device in a step.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import torch

from headrace.base.errors import OutOfDeviceMemory
from headrace.base.step import Arrival, PromptLogprobs, RowDraft, StepResult
from headrace.execution.logprobs import Logprobs, PromptSpan
from headrace.execution.pooling import PooledRows
from headrace.execution.sampling import MESSAGES, SampleBatch, Sampled
from headrace.kernels.sample import NOT_FINITE, NOTHING_ALLOWED, OK
from headrace.memory.copies import to_host

MOVES_WAIT_S = 0.001
"""How long a step without spans waits for a page move to end."""


class PendingSample:
    """A `PendingStep`. The copies to the host are launched here, asynchronously; `result` waits for them.

    ``sample`` launches the sampling, which may have to wait for grammar bitmasks; `close` calls it, at the latest when
    the tokens are read. ``order``: see `Step`. ``pooled``: results of pooled rows. ``before_result`` is called with
    this step once it is done; it advances the grammars and may add to ``drafts`` (see `StepResult`).
    """

    def __init__(
        self, step_id: int, batch: SampleBatch | None = None, sample: Callable[[], Sampled] | None = None,
        prompts: list[tuple[PromptSpan, Logprobs]] | None = None, *, check_finite: bool = True,
        order: list[int] | None = None,
        pooled: list[PooledRows] | None = None, propose: Callable[[torch.Tensor], object] | None = None,
    ):
        self._step_id, self._batch, self._check_finite, self._order = step_id, batch, check_finite, order
        self._pooled = pooled or []
        self._prompts = [(span, logprobs.copy_to_host()) for span, logprobs in prompts or []]
        self._sample, self._propose = sample, propose
        self._tokens: torch.Tensor | list[list[int]] | None = None
        self._logprobs: Logprobs | None = None
        self._errors: dict[int, str | None] = {}
        self.drafts: list[RowDraft] = []
        self.before_result: Callable[[PendingSample], None] | None = None
        self.poll_moves: Callable[[float], list[Arrival]] | None = None  # those that end within so many seconds
        self._done: torch.cuda.Event | None = None
        if sample is None:
            self._record()
            if propose is not None:  # nothing was sampled: the drafter only follows a chunk
                propose(torch.zeros((3, 0), dtype=torch.int64))

    def close(self) -> None:
        """Launch the sampling and the copy of its tokens, once. Raises what the sampling raises, and again when called
        again, as it has then not been launched. Out of memory becomes `OutOfDeviceMemory`."""
        if self._sample is None:
            return
        try:
            sampled = self._sample()
            self._tokens = to_host(sampled.tokens)
            if sampled.tokens.is_cpu:  # then they are there, and the next launch may overwrite them
                self._read()
            self._logprobs = sampled.logprobs.copy_to_host() if sampled.logprobs is not None else None
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(
                f"no device memory to sample {len(self._batch.rows) if self._batch else 0} tokens: {error}"
            ) from error
        self._sample, self._errors = None, sampled.errors
        self._record()
        if self._propose is not None:  # behind the copies: the host reads the tokens while the device makes drafts
            self._propose(sampled.tokens)

    def _record(self) -> None:
        # Behind the copies in the stream: when the event has passed, the pinned host tensors may be read.
        if torch.cuda.is_initialized():
            self._done = torch.cuda.Event()
            self._done.record()

    @property
    def is_done(self) -> bool:
        """Whether reading the result would not wait: sampling is launched and the device is through with it."""
        return self._sample is None and (self._done is None or self._done.query())

    @property
    def waits_for_device(self) -> bool:
        """See `headrace.service.executor.PendingStep`."""
        return self._sample is None and not self.is_done

    def read_tokens(self) -> tuple[list[int], list[int]]:
        """The sampled ids, and how many of their row's count, in the order of the batch; waits for the step."""
        self._wait()
        ids, _, counts = self._read()
        return ids, counts

    def _read(self) -> list[list[int]]:
        """Ids, states and counts, which are on the host."""
        if isinstance(self._tokens, torch.Tensor):
            self._tokens = self._tokens.tolist()
        assert self._tokens is not None
        return self._tokens

    def _wait(self) -> None:
        self.close()
        if self._done is not None:
            self._done.synchronize()

    def result(self) -> StepResult:
        """Wait for the step; raises what the device raised."""
        result = self._read_result()
        arrived = self.take_arrived(0.0 if self._batch is not None else MOVES_WAIT_S)
        return msgspec.structs.replace(result, arrived=arrived) if arrived else result

    def take_arrived(self, wait_s: float = 0.0) -> list[Arrival]:
        """Page moves that have ended and that no result has told; waits so long for the first."""
        return [] if self.poll_moves is None else self.poll_moves(wait_s)

    def _read_result(self) -> StepResult:
        self._wait()
        if self.before_result is not None:
            self.before_result(self)
        prompts = [
            PromptLogprobs(s.row, s.start, s.records(logprobs)) for s, logprobs in self._prompts
        ]
        failed, pooled = self._read_pooled()
        if self._tokens is None or self._batch is None:
            return StepResult(self._step_id, [], None, prompts, failed, pooled)
        # [3, S or more]: a graph's output includes its padding.
        ids, states, counts = (column[: len(self._batch.rows)] for column in self._read())
        kept, span_counts = self._find_kept(counts)
        logprobs = self._spread_logprobs(len(ids))
        # Failures are by row, so they need no reordering.
        troubled = self._find_troubled(states, kept)
        failed += [(row, MESSAGES[state]) for row, state in troubled if state != NOTHING_ALLOWED]
        refused = [
            (row, self._errors.get(row) or MESSAGES[state]) for row, state in troubled if state == NOTHING_ALLOWED
        ]
        if kept is not None:
            ids, logprobs = [ids[i] for i in kept], logprobs and [logprobs[i] for i in kept]
        return StepResult(
            self._step_id, ids, logprobs, prompts, failed, pooled, refused, self.drafts, span_counts
        )

    def _find_kept(self, counts: list[int]) -> tuple[list[int] | None, list[int]]:
        """The indices in the batch of the tokens that count, in plan order (None: all, in the order of the batch), and
        how many each span has ([]: one each)."""
        assert self._batch is not None
        if not self._batch.most_drafts:
            return self._order, []
        firsts = list(map(int, self._batch.firsts))
        if self._order is not None:
            firsts = [firsts[index] for index in self._order]  # back to plan order, as the scheduler's spans are
        kept = [index for first in firsts for index in range(first, first + counts[first])]
        return kept, [counts[first] for first in firsts]

    def _read_pooled(self) -> tuple[list[tuple[int, str]], list[tuple[int, bytes]]]:
        """``(failed rows, results)`` of the pooled rows."""
        parts = [rows.records(check_finite=self._check_finite) for rows in self._pooled]
        return (
            [failure for _, failures in parts for failure in failures],
            [result for results, _ in parts for result in results]
        )

    def _spread_logprobs(self, num_rows: int) -> list | None:
        """One entry per sampled row, None for those that want no logprobs; None where no row does."""
        if self._logprobs is None or self._batch is None:
            return None
        spread: list = [None] * num_rows
        records = self._logprobs.records(self._batch.top_counts, self._batch.id_counts)
        for index, record in zip(self._batch.logged, records, strict=True):
            spread[index] = record
        return spread

    def _find_troubled(self, states: list[int], kept: list[int] | None) -> list[tuple[int, int]]:
        """``(row, state)`` of rows for which no token could be sampled where one counts."""
        assert self._batch is not None
        harmless = (OK,) if self._check_finite else (OK, NOT_FINITE)
        if not any(states):  # as nearly always; OK is 0
            return []
        found = {
            int(self._batch.rows[index]): states[index]
            for index in (range(len(states)) if kept is None else kept)
            if states[index] not in harmless
        }
        return list(found.items())


class PendingDrafts:
    """Drafts on their way to the host; see `headrace.execution.structured.rows.PendingDrafts`."""

    def __init__(self, drafts: torch.Tensor):
        self._drafts = to_host(drafts)
        self._done: torch.cuda.Event | None = None
        if drafts.device.type == "cuda":
            self._done = torch.cuda.Event()
            self._done.record()

    def read(self) -> np.ndarray:
        """[n, N] int64; waits for the device to come this far."""
        if self._done is not None:
            self._done.synchronize()
        return self._drafts.numpy()
