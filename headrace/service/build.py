"""`build_engine`: from configuration to a ready `Engine` in this process. One of several ranks: service/ranks/build."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from headrace.base import env
from headrace.base.config import EngineConfig, ModelConfig
from headrace.base.errors import ConfigError
from headrace.base.grammar import Vocabulary
from headrace.base.hooks import HOOKS, RequestUpdate, load_hooks
from headrace.base.messages import Place
from headrace.base.registry import start_plugins
from headrace.base.step import StepPlan
from headrace.execution.building import build_executor
from headrace.execution.executor import LocalExecutor
from headrace.execution.loading import ignore_progress
from headrace.parallel.ranks import Ranks
from headrace.scheduling.drafting import build_drafting
from headrace.scheduling.scheduler import Features, Scheduler
from headrace.service.coordination import Gate
from headrace.service.engine import Engine
from headrace.service.executor import Executor, Pace, Progress

logger = logging.getLogger(__name__)

LOCK_NAMES = frozenset({"lock", ".ninja_lock"})
MAX_AGE_S = 30 * 60.0
"""A lock older than this belongs to a process that died: no compilation takes as long."""

HOOKS.add(
    "step_log", "headrace.service.build:StepLog",
    supports=lambda config: None if env.log_level() == "debug" else "needs --log-level debug",
    doc="steps and requests in the log, at level debug",
)


def read_vocabulary(config: ModelConfig) -> Vocabulary:
    """The model's tokenizer as grammars see it; raises `ConfigError` or `ModelError` when there is none."""
    # Imported here: most engines never need a tokenizer, and start sooner without.
    from headrace.service.tokenization.loading import open_tokenizer

    tokenizer = open_tokenizer(config)
    if tokenizer is None:
        raise ConfigError("the model is served without one", param="skip_tokenizer")
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    return Vocabulary(tokens, tokenizer.bytes_table.special_ids, partial(tokenizer.encode, add_special_tokens=False))


def build_engine(config: EngineConfig, progress: Progress = ignore_progress) -> Engine:
    """Load the model onto its device and build the scheduler and engine; raises the typed errors of base/errors."""
    if config.parallel.num_ranks > 1:
        raise ConfigError("an engine in this process has one rank; start it in its own", param="tensor_parallel_size")
    prepare_process()
    return assemble_engine(build_rank_0(config, progress))


def prepare_process() -> None:
    """Prepare this process; called before any executor is built."""
    # First: a compiler of torch extensions waits for ever for a lock that a killed process has left.
    sweep_stale_locks(env.torch_extensions_dir())
    start_plugins()


def build_rank_0(
    config: EngineConfig, progress: Progress, ranks: Ranks | None = None, place: Place | None = None
) -> LocalExecutor:
    """The executor of this process: the only one, or that of rank 0, which alone needs grammars."""
    executor = build_executor(config, progress, ranks, place)
    executor.serve_grammars(partial(read_vocabulary, config.model))
    return executor


def assemble_engine(
    executor: Executor, pace: Pace | None = None,
    join: Callable[[Scheduler], Sequence[Gate]] = lambda scheduler: (),
) -> Engine:
    """The scheduler and engine over an executor, with the coordinators that ``join`` returns beside those of the
    registry."""
    hooks = load_hooks(executor.config)
    drafting = build_drafting(executor.config.speculation.options, executor.speculation)
    scheduler = Scheduler(
        executor.config.scheduler, executor.config.cache, executor.layout, drafting=drafting, hooks=hooks,
        features=Features(
            executor.config.parallel.pipeline_parallel_size, executor.config.adapters.num_slots, executor.facts.media
        ),
    )
    gates = [*join(scheduler), *open_event_gates(executor.config, scheduler)]
    engine = Engine(scheduler, executor, hooks, pace, gates)
    engine.adapters.load_modules(executor.config.adapters)
    return engine


def open_event_gates(config: EngineConfig, scheduler: Scheduler) -> list[Gate]:
    """The publisher of KV events, if ``kv_events_config`` is set; raises `ConfigError`."""
    options = config.cache.kv_events
    if options is None:
        return []
    from headrace.service.kv_events import EventGate, EventPublisher

    return [EventGate(EventPublisher(options, config.replica), scheduler.changes)]


class StepLog:
    """A `StepHook` that logs planned steps and request events at level debug."""

    def __init__(self, config: EngineConfig):
        pass

    def step_planned(self, plan: StepPlan) -> None:
        """Sizes, and pages given out."""
        num_pages = sum(len(append.pages) for append in plan.appends)
        chunks = plan.lengths[plan.num_decodes :]
        logger.debug(
            "step %d: %d decodes, %d chunks of %d tokens, %d pages given out", plan.step_id, plan.num_decodes,
            len(chunks), sum(chunks), num_pages
        )

    def request_admitted(self, update: RequestUpdate) -> None:
        """See `StepHook`, here and below."""
        logger.debug(
            "request %s: prompt of %d tokens computed, in row %d", update.request_id, update.prompt_len, update.row
        )

    def request_retracted(self, update: RequestUpdate) -> None:
        """The request goes back to the queue."""
        logger.debug("request %s: back to the queue with %d computed tokens", update.request_id, update.computed_len)

    def request_finished(self, update: RequestUpdate, reason: str) -> None:
        """The request has finished."""
        logger.debug("request %s: ended (%s) after %d tokens", update.request_id, reason, update.output_len)


def sweep_stale_locks(folder: Path, *, max_age_s: float = MAX_AGE_S) -> int:
    """Remove lock files below ``folder`` that were last modified more than ``max_age_s`` seconds ago; returns how many.
    0 or less removes none. What cannot be read or removed stays."""
    if max_age_s <= 0:
        return 0
    oldest, num_removed = time.time() - max_age_s, 0
    for parent, _, names in os.walk(folder):
        for name in LOCK_NAMES.intersection(names):
            path = Path(parent, name)
            with contextlib.suppress(OSError):  # another process may be sweeping, or it is not ours
                if path.stat().st_mtime < oldest:
                    path.unlink()
                    num_removed += 1
    if num_removed:
        logger.warning("removed %d stale locks of compilers below %s", num_removed, folder)
    return num_removed
