"""`Residence`: what of a model is on its device. Parts leave, come back, and weights are replaced, all between two
steps.

Refuses: requests. Whoever calls sees to it that none is running: a runner that comes back knows nothing of the last
one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from headrace.base.admin import VITAL_PARTS, DevicePart
from headrace.base.config import ModelConfig
from headrace.base.errors import EngineAsleep, HeadraceError
from headrace.execution.assembly import Assembly
from headrace.execution.loading import LoadedModel, Progress, check_alike
from headrace.execution.runner import Runner

HOST = torch.device("cpu")
RETRY_AFTER_S = 5.0


class Residence:
    """``runner`` is None while a part it needs is away. ``equip`` is called with every new runner. Graphs hold
    addresses of pools and weights, so each runner captures its own: whatever leaves takes the runner with it."""

    def __init__(self, assembly: Assembly, loaded: LoadedModel, runner: Runner):
        self.runner: Runner | None = runner
        self.released: frozenset[DevicePart] = frozenset()
        self.equip: Callable[[Runner], None] = lambda runner: None
        self.model_config = assembly.config.model
        self._assembly, self._loaded = assembly, loaded
        self._is_discarded = False

    def release(self, parts: Collection[DevicePart], progress: Progress, *, discards_weights: bool = False) -> None:
        """Take parts off the device. On a CPU, weights that are not discarded stay where they are."""
        self._drop_runner()
        if "weights" in parts:
            self._is_discarded = self._is_discarded or discards_weights
            if self._is_discarded:
                self._loaded = replace(self._loaded, model=None)
            else:
                self._loaded.model.to(HOST)
        self.released |= set(parts)
        sweep(self._assembly.device)
        self._restore(progress)

    def acquire(self, parts: Collection[DevicePart], progress: Progress) -> None:
        """Bring parts back. Raises `EngineAsleep` when the device has no room for them, and what loading raises; then
        it is as before, or with the weights back and nothing else."""
        wanted = self.released - set(parts)
        if "weights" in self.released - wanted:
            self._load_back(progress)
            self.released -= {"weights"}
        if self.runner is not None and self.released != wanted:  # graphs alone were away
            self._drop_runner()
        self.released = wanted
        self._restore(progress)

    def replace_weights(self, model: ModelConfig, progress: Progress) -> None:
        """Load another model of the same shapes in the place of this one, which waits in host memory meanwhile and
        comes back when that fails. Raises `RequestError` for one of another kind, and what loading raises."""
        assert "weights" not in self.released, "there is nothing to replace"
        check_alike(model, self._loaded)
        self._drop_runner()
        self._loaded.model.to(HOST)
        sweep(self._assembly.device)
        fresh = None
        try:
            fresh = self._assembly.load(model, progress)
        finally:
            if fresh is None:
                sweep(self._assembly.device)
                self._loaded.model.to(self._assembly.device)
            else:
                self._loaded, self.model_config = fresh, model
            sweep(self._assembly.device)
            self._restore(progress)

    def close(self) -> None:
        """Free everything."""
        self.runner = None
        self._loaded = replace(self._loaded, model=None)
        sweep(self._assembly.device)

    def _load_back(self, progress: Progress) -> None:
        if self._is_discarded:
            self._loaded = self._assembly.load(self.model_config, progress)
            self._is_discarded = False
            return
        try:
            self._loaded.model.to(self._assembly.device)
        except torch.OutOfMemoryError as error:
            self._loaded.model.to(HOST)
            sweep(self._assembly.device)
            raise EngineAsleep(f"the device has no room for the weights: {error}", retry_after=RETRY_AFTER_S) from error

    def _restore(self, progress: Progress) -> None:
        """A runner, when all that it needs is there."""
        if self.runner is not None or self.released & VITAL_PARTS:
            return
        try:
            runner = self._assembly.rebuild_runner(
                self._loaded, captures="cuda_graph" not in self.released, progress=progress
            )
        except (HeadraceError, torch.OutOfMemoryError) as error:
            self.released |= {"kv_cache"}
            sweep(self._assembly.device)
            raise EngineAsleep(
                f"the device has no room for the KV cache: {error}", retry_after=RETRY_AFTER_S
            ) from error
        self.equip(runner)
        self.runner = runner
        refreeze()

    def _drop_runner(self) -> None:
        if self.runner is not None:
            self.runner.detach()
            self.runner = None


def sweep(device: torch.device) -> None:
    """Give memory that nothing refers to back to the device, cycles in a frozen heap included."""
    num_frozen = gc.get_freeze_count()
    if num_frozen:
        gc.unfreeze()
    gc.collect()
    if num_frozen:
        gc.freeze()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def refreeze() -> None:
    """Keep what has come to stay out of garbage collection, if that was done before."""
    if gc.get_freeze_count():
        gc.collect()
        gc.freeze()
