"""`DeviceModel`: which parts of a model are on its device. Parts are offloaded and brought back, and weights replaced,
all between two steps.

Refuses: requests. The caller ensures that none is running: a new runner has no rows and no KV of the last one.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import torch

from headrace.base.admin import VITAL_PARTS, DevicePart
from headrace.base.cache import CacheLayout
from headrace.base.config import ModelConfig
from headrace.base.errors import EngineAsleep, HeadraceError, PeerFailed
from headrace.execution.assembly import Assembly
from headrace.execution.draft_loading import load_with_draft
from headrace.execution.loading import LoadedModel, Progress, check_alike
from headrace.execution.runner import Runner
from headrace.execution.warmup import measure_steps, run_tiny_steps
from headrace.layers.lora.sites import AdapterBanks
from headrace.layers.moe.balancing import ExpertBalancer
from headrace.models.adapters.gguf import find_gguf_form

HOST = torch.device("cpu")
RETRY_AFTER_S = 5.0


class DeviceModel:
    """``runner`` is None while a part that it needs is off the device. ``equips`` are called with every new runner.
    Graphs hold addresses of pools and weights, so each runner captures its own, and releasing any part drops it."""

    def __init__(self, assembly: Assembly, layout: CacheLayout):
        self.layout, self.device, self.config = layout, assembly.device, assembly.config
        self.released: frozenset[DevicePart] = frozenset()
        self.equips: list[Callable[[Runner], None]] = []
        self.ranks, self._stage = assembly.loaded.ranks, assembly.loaded.stage
        self.gguf_form = find_gguf_form(assembly.loaded.family, assembly.loaded.spec)
        self._loaded: LoadedModel | None = assembly.loaded  # None while the weights are discarded
        self.runner: Runner | None = assembly.build_runner(layout)
        self._dropped: list[weakref.ref[Any]] = []  # what the next sweep must have freed
        self._run_first_steps(self.runner, assembly)

    @property
    def adapters(self) -> AdapterBanks | None:
        """The model's banks, while it is loaded."""
        return None if self._loaded is None else self._loaded.model.adapters

    @property
    def balancer(self) -> ExpertBalancer | None:
        """Moves experts between ranks; None while the model is not loaded, or experts do not move."""
        return None if self._loaded is None else self._loaded.balancer

    @property
    def loaded(self) -> LoadedModel:
        """The model, whose weights must not be discarded."""
        assert self._loaded is not None
        return self._loaded

    def release(self, parts: Collection[DevicePart], progress: Progress, *, discards_weights: bool = False) -> None:
        """Take parts off the device. On a CPU, weights that are not discarded stay where they are."""
        self._drop_runner()  # first: it refers to the pools, and its graphs to the weights
        if "weights" in parts:
            if discards_weights:
                self._drop_loaded()
            elif self._loaded is not None:
                self._loaded.move(HOST)
        self.released |= set(parts)
        self._sweep()
        self._restore(progress)

    def acquire(self, parts: Collection[DevicePart], progress: Progress) -> None:
        """Bring parts back. Raises `EngineAsleep` when the device has no room for them, and what loading raises. After
        an error the state is as before, or the weights are back and nothing else."""
        wanted = self.released - set(parts)
        if "weights" in self.released - wanted:
            self._load_back_together(progress)
            self.released -= {"weights"}
        if self.runner is not None and self.released != wanted:  # graphs alone were away
            self._drop_runner()
        self.released = wanted
        self._restore(progress)

    def replace_weights(self, model: ModelConfig, progress: Progress) -> None:
        """Load another model of the same shapes in the place of this one, which is kept in host memory meanwhile and
        brought back if loading fails on any rank. Raises `RequestError` for another architecture or shape, and what
        loading raises."""
        assert self._loaded is not None and "weights" not in self.released, "there is nothing to replace"
        check_alike(model, self._loaded)
        self._drop_runner()
        self._loaded.move(HOST)  # two models may not fit the device
        self._sweep()
        loaded = fresh = None
        try:
            with self.ranks.together():
                loaded = self._load(model, progress)
            fresh = loaded
        finally:
            loaded = None
            if fresh is None:
                sweep(self.device)  # what was loaded of the other model would take the old one's place
                self._loaded.move(self.device)
            else:
                self._drop_loaded()
                self._loaded, self.config = fresh, replace(self.config, model=model)
            self._sweep()
            self._restore(progress)

    def close(self) -> None:
        """Free everything."""
        self._release_runner()
        self._drop_loaded()
        self._sweep()

    def _load(self, model: ModelConfig, progress: Progress) -> LoadedModel:
        return load_with_draft(replace(self.config, model=model), self.device, progress, self.ranks, self._stage)

    def _load_back_together(self, progress: Progress) -> None:
        """On all ranks, or with the weights where they were."""
        was_discarded = self._loaded is None
        try:
            with self.ranks.together():
                self._load_back(progress)
        except PeerFailed:
            assert self._loaded is not None
            self._loaded.move(HOST)
            if was_discarded:
                self._drop_loaded()
            self._sweep()
            raise

    def _load_back(self, progress: Progress) -> None:
        if self._loaded is None:
            self._loaded = self._load(self.config.model, progress)
            return
        try:
            self._loaded.move(self.device)
        except torch.OutOfMemoryError as error:
            self._loaded.move(HOST)
            sweep(self.device)
            raise EngineAsleep(f"the device has no room for the weights: {error}", retry_after=RETRY_AFTER_S) from error

    def _restore(self, progress: Progress) -> None:
        """Build a runner once all that it needs is there: measure, allocate, run, capture, as the start does."""
        if self.runner is not None or self.released & VITAL_PARTS:
            return
        assert self._loaded is not None
        # Memory may have been taken by others meanwhile. The layout stays: the scheduler and clients know it.
        try:
            assembly = Assembly.of(self.config, self._loaded, self.device)
            with self.ranks.together(), self.ranks.muted():
                measure_steps(assembly)
                runner = assembly.build_runner(self.layout)
            self._run_first_steps(runner, assembly)
            if "cuda_graph" not in self.released:
                assembly.capture_graphs(runner, progress)
        except (HeadraceError, torch.OutOfMemoryError) as error:
            self.released |= {"kv_cache"}
            sweep(self.device)
            raise EngineAsleep(
                f"the device has no room for the KV cache: {error}", retry_after=RETRY_AFTER_S
            ) from error
        for equip in self.equips:
            equip(runner)
        self.runner = runner
        refreeze()

    def _run_first_steps(self, runner: Runner, assembly: Assembly) -> None:
        with self.ranks.apart():
            run_tiny_steps(runner, is_pooling=assembly.is_pooling)
            runner.plan_next()  # what a first long prompt beside others needs; the rest in idle moments

    def _drop_runner(self) -> None:
        if self.runner is not None:
            self.runner.detach()
            self._release_runner()

    def _release_runner(self) -> None:
        if self.runner is not None:
            self._dropped += map(weakref.ref, (self.runner, *self.runner.paths, *self.runner.pools))
            self.runner = None

    def _drop_loaded(self) -> None:
        if self._loaded is not None:
            for model in self._loaded.models:
                self._dropped += map(weakref.ref, (model, *model.parameters(), *model.buffers()))
            self._loaded = None

    def _sweep(self) -> None:
        sweep(self.device, self._dropped)
        self._dropped.clear()


def sweep(device: torch.device, dropped: Iterable[weakref.ref[Any]] = ()) -> None:
    """Free unreferenced tensors, those in reference cycles included, and return torch's cached memory to the device.
    ``dropped``: what may be among frozen objects (`gc.freeze` at the start), which collections skip."""
    gc.collect()
    # As a rule references alone free it, and a large process takes seconds to look at, a tenth of one even to count.
    # Graphs on a GPU hold memory that none of these refer to.
    if (device.type == "cuda" or any(ref() is not None for ref in dropped)) and gc.get_freeze_count():
        gc.unfreeze()
        gc.collect()
        gc.freeze()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def refreeze() -> None:
    """Keep long-lived objects out of garbage collection, if that was done before."""
    if gc.get_freeze_count():
        gc.collect()
        gc.freeze()
