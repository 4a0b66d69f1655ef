"""`LocalExecutor`: runs plans in one process, on one device.

Refuses: scheduling.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from traceback import clear_frames

import torch

from headrace.base.admin import DevicePart, StartProfile
from headrace.base.cache import CacheLayout
from headrace.base.config import EngineConfig
from headrace.base.errors import OutOfDeviceMemory, UnsupportedFeature
from headrace.base.grammar import Grammar, Vocabulary
from headrace.base.messages import ExpertStats, HotSlotStats, MemoryLine, ModelFacts
from headrace.base.speculation import Speculation
from headrace.base.step import StepPlan
from headrace.execution.adapters import AdapterStore, read_call
from headrace.execution.loading import Progress
from headrace.execution.profiling import Profiler
from headrace.execution.result import PendingSample
from headrace.execution.runner import Runner
from headrace.execution.sleep import DeviceModel
from headrace.execution.structured.library import CompiledGrammar, GrammarStore
from headrace.execution.tiers import DeviceTiers, build_tiers
from headrace.kernels.cuda_source import fallen_back
from headrace.kernels.late import LateKernels

logger = logging.getLogger(__name__)


class LocalExecutor:
    """Runs plans in this process; see `headrace.service.executor.Executor`."""

    def __init__(
        self, model: DeviceModel, *, facts: ModelFacts, memory: list[MemoryLine], progress: Progress,
        speculation: Speculation,
    ):
        self.facts, self.memory, self.speculation = facts, memory, speculation
        self._model, self._progress = model, progress
        self._device = model.device
        self._profiler, self._late = Profiler(model.device), LateKernels(model.device)
        self._grammars: GrammarStore | None = None
        self._swapped = HotSlotStats()  # by runners before this one
        self._tiers = build_tiers(model)
        self.adapters = AdapterStore(
            model.adapters, model.config.adapters, partial(read_call, gguf=model.gguf_form)
        )
        model.equips.append(self._serve_adapters)
        if model.runner is not None:
            self._serve_adapters(model.runner)

    def _serve_adapters(self, runner: Runner) -> None:
        self.adapters.serve(self._model.adapters)
        runner.adapters = self.adapters

    @property
    def config(self) -> EngineConfig:
        """No device default is left open; the model may have been replaced since the start."""
        return self._model.config

    @property
    def layout(self) -> CacheLayout:
        """The pages of all cache groups."""
        return self._model.layout

    @property
    def _runner(self) -> Runner | None:
        return self._model.runner

    @property
    def experts(self) -> ExpertStats:
        """See `headrace.service.executor.Executor`."""
        return ExpertStats() if self._model.balancer is None else self._model.balancer.stats

    @property
    def hot_slots(self) -> HotSlotStats:
        """See `headrace.service.executor.Executor`."""
        return self._swapped if self._runner is None else _add_swaps(self._swapped, self._runner)

    @property
    def late_kernels(self) -> int:
        """See `headrace.service.executor.Executor`."""
        return self._late.count

    @property
    def fallen_back(self) -> tuple[str, ...]:
        """See `headrace.service.executor.Executor`."""
        return fallen_back()

    @property
    def released(self) -> frozenset[DevicePart]:
        """Parts that are off the device; nothing runs without `VITAL_PARTS`."""
        return self._model.released

    def execute(self, plan: StepPlan) -> PendingSample:
        """Launch a plan. On a CPU the step is done when this returns."""
        assert self._runner is not None, "the executor is closed, or asleep"
        self._profiler.count_step()
        if self._model.balancer is not None and (plan.rows or any(plan.replica_tokens)):
            self._model.balancer.begin_step()
        try:
            with self._late.watch():
                if self._tiers is not None:
                    self._tiers.mover.start(plan.moves)  # first: steps may overwrite the pages that are read
                pending = self._runner.execute(plan)
            if self._tiers is not None:
                pending.poll_moves = self._tiers.mover.poll
            return pending
        except torch.OutOfMemoryError as error:
            clear_frames(error.__traceback__)  # or the error would keep the step's tensors alive
            raise OutOfDeviceMemory(f"no device memory for a step of {sum(plan.lengths)} tokens: {error}") from error

    @property
    def regions(self) -> DeviceTiers | None:
        """See `headrace.service.executor.Executor`."""
        return self._tiers

    @property
    def tiers(self) -> DeviceTiers | None:
        """Where else pages can be; None for the device alone."""
        return self._tiers

    def check(self) -> None:
        """See `headrace.service.executor.Executor`."""
        self._model.ranks.tensor.waits.check()
        device = self._model.device
        if device.type == "cuda" and self._model.ranks.world.size > 1:
            torch.cuda.current_stream(device).query()  # does not wait; raises what a kernel has failed with

    def use_idle_moment(self) -> bool:
        """See `headrace.service.executor.Executor`."""
        if self._runner is None or self._device.type == "cpu":
            return False
        ranks = self._model.ranks
        with ranks.tensor.waits.patient():
            is_left = self._record_next(self._runner)
            # ranks capture at their own pace: the next step must not have to wait for one that still compiles
            return bool(ranks.world.agree([int(is_left)])[0])

    def _record_next(self, runner: Runner) -> bool:
        try:
            return runner.record_next() or runner.plan_next()
        except torch.OutOfMemoryError as error:
            logger.warning("no memory for a graph: %s", error)
            return True

    def serve_grammars(self, read_vocabulary: Callable[[], Vocabulary]) -> None:
        """Take requests with grammars from now on. ``read_vocabulary`` reads the tokenizer; it is called when the first
        of them comes, on another thread."""
        assert self._runner is not None, "the executor is closed"
        store = self._grammars = GrammarStore(read_vocabulary, self.facts.vocab_size, self.facts.eos_ids)
        self._model.equips.append(lambda runner: runner.serve_grammars(store))
        self._runner.serve_grammars(store)

    def prepare_grammar(self, grammar: Grammar) -> Future[CompiledGrammar]:
        """Compile a grammar on another thread."""
        if self._grammars is not None:
            return self._grammars.prepare(grammar)
        refused: Future[CompiledGrammar] = Future()
        refused.set_exception(UnsupportedFeature("structured outputs are not served here", param="grammar"))
        return refused

    def reset(self) -> None:
        """Wait for the device after a failed step. Rows need no clearing: whatever still runs is started anew."""
        # Steps in flight still use the memory that is given back here.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        if self._tiers is not None:
            self._tiers.mover.reset()
        if self._runner is not None:
            self._runner.reset()

    def release_memory(self, parts: Collection[DevicePart], *, discards_weights: bool = False) -> None:
        """Take parts off the device; see `headrace.base.admin`. Nothing may be running."""
        with self._without_moves():
            self._model.release(parts, self._progress, discards_weights=discards_weights)

    def acquire_memory(self, parts: Collection[DevicePart]) -> None:
        """Bring them back."""
        with self._without_moves():
            self._model.acquire(parts, self._progress)

    def replace_weights(self, model: str, load_format: str) -> None:
        """Serve another checkpoint of the same shapes; nothing of a row is kept."""
        config = replace(self.config.model, model=model, load_format=load_format, revision=None)
        with self._without_moves():
            self._model.replace_weights(config, self._progress)

    def start_profile(self, options: StartProfile) -> None:
        """Record what this process and its device do."""
        self._profiler.start(options)

    def stop_profile(self) -> str:
        """Write the trace; returns its file's name."""
        return self._profiler.stop()

    @contextlib.contextmanager
    def _without_moves(self) -> Iterator[None]:
        """While the runner may be dropped: ranks wait for each other patiently, no page moves and nothing else refers
        to the pools. Afterwards pages move between those that there are then."""
        if self._tiers is not None:
            self._tiers.leave()
        before, swapped = None if self._runner is None else weakref.ref(self._runner), self.hot_slots
        try:
            with self._model.ranks.tensor.waits.patient():
                yield
        finally:
            if before is not None and (self._runner is None or before() is not self._runner):
                self._swapped = swapped
            if self._tiers is not None and self._model.runner is not None:
                self._tiers.join(self._model)

    def close(self) -> None:
        """Free the device; idempotent."""
        if self._tiers is not None:
            self._tiers.close()
        self.adapters.close()
        self._model.close()
        if self._grammars is not None:
            self._grammars.close()
            self._grammars = None


def _add_swaps(before: HotSlotStats, runner: Runner) -> HotSlotStats:
    wanted, loaded = runner.swaps.totals
    return HotSlotStats(before.wanted_entries_total + wanted, before.loaded_entries_total + loaded)
