"""Adapters on one rank: `AdapterStore` keeps them in host memory, `AdapterInputs` tells layers which rows have which.

T tokens, S sampled positions.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from headrace.base.adapters import AdapterConfig, AdapterFacts, LoadAdapter
from headrace.base.errors import AdapterError, HeadraceError, ModelError, RequestError, UnsupportedFeature
from headrace.execution.rows import Rows
from headrace.execution.step import Step
from headrace.execution.upload import Upload
from headrace.kernels.lora import SlotRows
from headrace.layers.lora.contract import AdapterSites, AdapterWeights
from headrace.layers.lora.memory import AdapterMemory
from headrace.layers.lora.parts import LoadBytes
from headrace.layers.lora.rows import RowsLayout, Segments
from headrace.layers.lora.sites import AdapterBanks, PreparedAdapter
from headrace.memory.copies import to_device
from headrace.memory.pinning import PIECE_BYTES, PinnedReserve
from headrace.memory.plan import free_bytes
from headrace.models.adapters.gguf import GgufForm
from headrace.models.adapters.reader import AdapterSource, count_whole_bytes, read_adapter

logger = logging.getLogger(__name__)

NUM_READERS = 2
"""Threads that read adapters."""
MOST_RESERVED = 256 << 20
"""Bytes of host memory that are pinned at most before an adapter needs them."""

ReadAdapter = Callable[[LoadAdapter, AdapterSites, int, AdapterMemory], AdapterWeights]
"""From a call, the model's sites, the largest rank and memory to weights; raises typed errors."""


def read_call(
    call: LoadAdapter, sites: AdapterSites, max_rank: int, memory: AdapterMemory, *, gguf: GgufForm | None = None
) -> AdapterWeights:
    """Read the adapter of a call; ``gguf``: what GGUF files of the family are like."""
    source = AdapterSource(call.name, call.path, call.tensors, call.config)
    return read_adapter(source, sites, max_rank=max_rank, gguf=gguf, memory=memory)


def count_startup_bytes(banks: AdapterBanks | None, config: AdapterConfig, item_bytes: int) -> int:
    """Bytes to set aside for the adapters of ``lora_modules`` beside their low-rank additions, with so many for a
    number: of those with the most, as many as are on the device at a time. What cannot be read counts nothing here; it
    is refused when it is loaded."""
    if banks is None:
        return 0
    counts = []
    for module in config.modules:
        try:
            counts.append(count_whole_bytes(module.path, banks.sites, item_bytes))
        except (HeadraceError, OSError):
            continue
    return sum(sorted(counts)[-config.max_loras :])


@dataclass
class _Source:
    """Where an adapter comes from, and what it was when it was first read. ``digest``: of the content that it must
    have, where another rank has read it first."""

    call: LoadAdapter
    facts: AdapterFacts | None = None
    digest: str = ""

    def describe(self, _: PreparedAdapter) -> AdapterFacts:
        """Facts of the adapter as it was first read."""
        assert self.facts is not None
        return self.facts

    def check(self) -> None:
        """Raise `ModelError` where it was read, but is not what it must be."""
        if self.facts is not None and self.digest not in ("", self.facts.digest):
            raise ModelError(f"the files of adapter {self.call.name} changed while the ranks read them")


class _Room:
    """What the adapters that may be on the device at a time, ``most`` of them, take of it beside the room of banks: an
    adapter is refused when it is read, rather than a step that needs it. Called by threads that read."""

    def __init__(self, most: int):
        self._most, self._lock = most, threading.Lock()
        self._needed: dict[int, LoadBytes] = {}  # of adapters that take any
        self._slots: dict[int, int] = {}  # adapters on the device, by slot

    def reserve(self, adapter_id: int, name: str, needed: LoadBytes, free: Callable[[], int]) -> None:
        """Count on an adapter, too; raises `AdapterError` where those with the most would not fit together into what is
        ``free`` and what such adapters have already."""
        if not needed.kept + needed.passing:
            return
        with self._lock:
            all_needed = self._needed | {adapter_id: needed}
            kept = sum(sorted(one.kept for one in all_needed.values())[-self._most :])
            passing = max(one.passing for one in all_needed.values())
            room = free() + sum(self._needed[i].kept for i in self._slots.values() if i in self._needed)
            if kept + passing > room:
                raise _make_refusal(name, needed, kept, room)
            self._needed = all_needed

    def put(self, slot: int, adapter_id: int) -> None:
        """An adapter takes a slot."""
        self._slots[slot] = adapter_id

    def forget(self, adapter_id: int) -> None:
        """Count on an adapter no longer."""
        with self._lock:
            self._needed.pop(adapter_id, None)

    def clear_slots(self) -> None:
        """No adapter is on the device."""
        self._slots.clear()


def _make_refusal(name: str, needed: LoadBytes, kept: int, room: int) -> AdapterError:
    while_loaded = f" and {needed.passing / 2**20:.0f} MiB while it is loaded," if needed.passing else ""
    others = f" (with other adapters {kept / 2**20:.0f} MiB)" if kept > needed.kept else ""
    return AdapterError(
        f"adapter {name!r}: its whole modules and embeddings take {needed.kept / 2**20:.0f} MiB of the device beside "
        f"the room for max_lora_rank{others},{while_loaded} and {room / 2**20:.0f} MiB are there for them; lower "
        "memory_fraction or max_loras, or train it without modules_to_save and use_dora", param="lora_path"
    )


class AdapterStore:
    """Adapters in host memory by number, prepared for this rank's banks. Of more than ``num_host_adapters`` the one
    used least lately is dropped, and read again when it is needed; at most as many more stay that requests wait for.
    Called by the engine's thread; reading is done on others."""

    def __init__(self, banks: AdapterBanks | None, config: AdapterConfig, read: ReadAdapter):
        self._banks, self._config, self._read = banks, config, read
        self._threads = ThreadPoolExecutor(NUM_READERS, "adapter-reader")  # starts none before there is work
        self._sources: dict[int, _Source] = {}
        self._prepared: OrderedDict[int, Future[PreparedAdapter]] = OrderedDict()
        # asked for, and not yet on the device: kept too, so that loading need not read again what was dropped meanwhile
        self._wanted: OrderedDict[int, Future[PreparedAdapter]] = OrderedDict()
        is_gpu = banks is not None and banks.device.type == "cuda"
        self._side = torch.cuda.Stream(banks.device) if is_gpu and banks is not None else None
        self._begun = torch.cuda.Event() if is_gpu else None
        self._copied: torch.cuda.Event | None = None
        self._room = _Room(config.max_loras)
        self._reserve = _reserve_pinned(banks) if is_gpu and banks is not None else None

    def serve(self, banks: AdapterBanks | None) -> None:
        """The model was loaded anew: its banks are others, of the same shapes, and empty."""
        self.wait()
        self._banks = banks
        self._room.clear_slots()
        if banks is not None and banks.device.type == "cuda":
            banks.stage_loads()

    def wait(self) -> None:
        """Let the current stream wait for what is copied beside steps: of memory of banks that is freed or read."""
        if self._copied is not None and self._side is not None:
            torch.cuda.current_stream(self._side.device).wait_event(self._copied)
            self._copied = None

    def read(self, adapter_id: int, call: LoadAdapter) -> Future[AdapterFacts]:
        """Read an adapter under a number of its own."""
        source = self._sources[adapter_id] = _Source(call)
        prepared = self._keep(adapter_id, self._threads.submit(self._read_first, adapter_id, source))
        return self._threads.submit(lambda: source.describe(prepared.result()))

    def prepare(self, adapter_id: int, digest: str = "") -> Future[PreparedAdapter]:
        """Have an adapter in host memory soon; the future raises what reading it raises. ``digest``: of rank 0's."""
        self._sources[adapter_id].digest = digest or self._sources[adapter_id].digest
        known = self._prepared.get(adapter_id) or self._wanted.get(adapter_id)
        if known is None or (known.done() and known.exception()):  # what failed is tried again
            known = self._threads.submit(self._read_again, self._sources[adapter_id])
        self._wanted[adapter_id] = known
        if len(self._wanted) > self._config.num_host_adapters:  # of requests that ended before they ran
            self._wanted.popitem(last=False)
        return self._keep(adapter_id, known)

    def forget(self, adapter_id: int) -> None:
        """Drop an adapter; harmless for an unknown number."""
        self._sources.pop(adapter_id, None)
        self._room.forget(adapter_id)
        self._prepared.pop(adapter_id, None)
        self._wanted.pop(adapter_id, None)

    def load(self, slot: int, adapter_id: int) -> None:
        """Copy an adapter into a slot of the device, in stream order; 0 empties it."""
        self._own_banks.load(slot, self._take(adapter_id))
        self._room.put(slot, adapter_id)

    def load_beside(self, slot: int, adapter_id: int) -> None:
        """As `load`, beside the step that was launched since `begin_step`, which does not use the slot."""
        banks, adapter = self._own_banks, self._take(adapter_id)
        self._room.put(slot, adapter_id)
        if self._side is None or self._begun is None or not banks.is_copied(adapter):
            banks.load(slot, adapter)
            return
        # steps that are in flight may still read what is replaced, for rows that have ended
        self._side.wait_event(self._begun)
        try:
            with torch.cuda.stream(self._side):
                banks.load(slot, adapter)
        finally:  # what failed half-way is overwritten, too, behind what it copied
            self._copied = self._side.record_event()

    def begin_step(self, *, has_loads: bool) -> None:
        """Let the step, and what follows, wait for what was copied beside others; ``has_loads``: more will be."""
        if self._side is None:
            return
        self.wait()
        if has_loads and self._begun is not None:
            self._begun.record(torch.cuda.current_stream(self._own_banks.device))

    def _take(self, adapter_id: int) -> PreparedAdapter:
        if not adapter_id:
            return PreparedAdapter()
        adapter = self.prepare(adapter_id).result()
        self._wanted.pop(adapter_id, None)
        self._sources[adapter_id].check()
        return adapter

    def close(self) -> None:
        """End the threads, and let go of the banks, which refer to the model."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._reserve is not None:
            self._reserve.close()
        self._banks = None

    @property
    def _own_banks(self) -> AdapterBanks:
        if self._banks is None:
            raise UnsupportedFeature("adapters are not served here; start with enable_lora", param="enable_lora")
        return self._banks

    def _keep(self, adapter_id: int, prepared: Future[PreparedAdapter]) -> Future[PreparedAdapter]:
        self._prepared[adapter_id] = prepared
        self._prepared.move_to_end(adapter_id)
        for other in list(self._prepared):
            if len(self._prepared) <= self._config.num_host_adapters:
                break
            if other != adapter_id and self._prepared[other].done():
                del self._prepared[other]
        return prepared

    def _read_first(self, adapter_id: int, source: _Source) -> PreparedAdapter:
        weights, prepared = self._load(source)
        banks = self._own_banks
        needed = banks.count_bytes(prepared)
        self._room.reserve(adapter_id, source.call.name, needed, lambda: free_bytes(banks.device))
        source.facts = AdapterFacts(weights.digest, weights.rank, weights.num_bytes, weights.modules)
        return prepared

    def _read_again(self, source: _Source) -> PreparedAdapter:
        weights, prepared = self._load(source)
        if source.facts is None or weights.digest != source.facts.digest:
            raise RequestError(
                f"the files of adapter {source.call.name} have changed since it was loaded; load it again in place",
                param="model",
            )
        return prepared

    def _load(self, source: _Source) -> tuple[AdapterWeights, PreparedAdapter]:
        reserve, banks = self._reserve, self._own_banks
        memory = AdapterMemory() if reserve is None else AdapterMemory(reserve.take, PIECE_BYTES)
        try:
            weights = self._read(source.call, banks.sites, self._config.max_lora_rank, memory)
            return weights, banks.prepare(weights, None if reserve is None else memory)
        except (HeadraceError, MemoryError):
            raise
        except OSError as error:
            raise ModelError(f"adapter {source.call.name} cannot be read: {error.strerror or error}") from error


def _reserve_pinned(banks: AdapterBanks) -> PinnedReserve:
    """For one adapter of the largest rank in float32, as PEFT writes most, and what is lost at the ends of pieces."""
    return PinnedReserve(-(-min(banks.slot_bytes * 2 * 9 // 8, MOST_RESERVED) // PIECE_BYTES))


class AdapterInputs:
    """Which rows have which adapter: `pack` and `pack_outputs` add what the host knows to a step's upload, `view` makes
    of it what layers read, and `outputs` what a head or classifier reads."""

    def __init__(self, banks: AdapterBanks, rows: Rows, device: torch.device):
        self.banks, self._rows, self._device = banks, rows, device
        # Off: on a GPU the first such step of many requests took 11 s, for a reason that was not found. The native call
        # over all layers of a CPU takes adapters of all tokens.
        self.prunes = False
        # of captured steps: in others two streams take the host more time than they save. First, as it is short.
        self._side = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @property
    def captured(self) -> list[CapturedAdapters]:
        """The same for kinds of captured steps, of which the first that fits a step is the fastest. Not kept: a cycle
        would hold the banks after their engine is closed."""
        return [CapturedAdapters(self, count) for count in self.banks.dense_counts]

    def pack(self, step: Step, upload: Upload, size: int = 0) -> None:
        """For all tokens of a step with adapters; ``size``: room for so many, in a captured step."""
        slots = self._token_slots(step)
        layout = self._layout(size or len(slots), self.find_dense(step))
        step.segments = self._add(upload, "adapter_rows", slots, layout)

    def pack_outputs(self, step: Step, upload: Upload) -> None:
        """For its sampled positions."""
        slots = self._token_slots(step)[step.shape.query_start[1:][step.samples] - 1]
        layout = self._layout(len(slots), self.find_dense(step))
        step.output_segments = self._add(upload, "adapter_outputs", slots, layout)

    def view(self, step: Step, sent: dict[str, torch.Tensor]) -> SlotRows:
        """The slots of all tokens of a step."""
        num_dense = self.find_dense(step)
        layout = self._layout(step.shape.num_tokens, num_dense)
        return layout.view(
            sent["adapter_rows"], step.segments, num_dense=min(num_dense, self._count_slots(step)),
            num_runs=len(step.shape.rows),
        )

    def make_static(self, size: int, num_dense: int) -> torch.Tensor:
        """The buffer that `pack` fills for a captured step of at most ``size`` tokens, at first without adapters."""
        packed, _ = self._layout(size, num_dense).pack(np.full(size, -1))
        return to_device(packed, self._device)

    def view_static(self, static: torch.Tensor, size: int, num_dense: int) -> SlotRows:
        """The slots of a captured step's tokens."""
        return self._layout(size, num_dense).view(static, [], self._side, num_dense=num_dense)

    def find_dense(self, step: Step) -> int:
        """`SlotRows.num_dense` of the captured steps that can compute this step; 0 if it uses too many slots."""
        used = self._count_slots(step)
        return next((count for count in self.banks.dense_counts if used <= count), 0)

    def _count_slots(self, step: Step) -> int:
        """How many of the first slots have all adapters of the step."""
        return int(self._rows.adapter_slots_np[step.shape.rows].max()) + 1

    def view_outputs(self, step: Step, sent: dict[str, torch.Tensor]) -> SlotRows:
        """The slots of a step's sampled positions."""
        num_dense = self.find_dense(step)
        layout = self._layout(len(step.samples), num_dense)
        return layout.view(
            sent["adapter_outputs"], step.output_segments, num_dense=min(num_dense, self._count_slots(step))
        )

    @contextmanager
    def outputs(self, rows: SlotRows | None) -> Iterator[None]:
        """The rows that a head or classifier is called with in the body."""
        self.banks.context.output_rows = rows
        try:
            yield
        finally:
            self.banks.context.output_rows = None

    def sampled_outputs(self, step: Step, sent: dict[str, torch.Tensor]) -> AbstractContextManager[None]:
        """`outputs` of the sampled positions."""
        return self.outputs(self.view_outputs(step, sent))

    def outputs_of(self, rows: np.ndarray) -> AbstractContextManager[None]:
        """`outputs` that belong to these rows of the request state, one each."""
        slots = self._rows.adapter_slots_np[rows]
        if not (slots >= 0).any():
            return self.outputs(None)
        layout = RowsLayout(len(slots), self.banks.num_slots)
        packed, segments = layout.pack(slots)
        return self.outputs(layout.view(to_device(packed, self._device), segments))

    def _token_slots(self, step: Step) -> np.ndarray:
        return np.repeat(self._rows.adapter_slots_np[step.shape.rows], step.shape.lengths)

    def _add(self, upload: Upload, name: str, slots: np.ndarray, layout: RowsLayout) -> Segments:
        packed, segments = layout.pack(slots)
        upload.add(name, packed)
        return segments

    def _layout(self, size: int, num_dense: int) -> RowsLayout:
        # with fewer slots there are fewer blocks that may be empty
        return RowsLayout(size, num_dense or self.banks.num_slots)


@dataclass(frozen=True)
class CapturedAdapters:
    """`AdapterInputs` for captured steps, in which `SlotRows.num_dense` is fixed."""

    inputs: AdapterInputs
    num_dense: int

    def fits(self, step: Step) -> bool:
        """Whether such steps compute this one."""
        return self.inputs.find_dense(step) == self.num_dense

    def make_static(self, size: int) -> torch.Tensor:
        """See `AdapterInputs`."""
        return self.inputs.make_static(size, self.num_dense)

    def view_static(self, static: torch.Tensor, size: int) -> SlotRows:
        """See `AdapterInputs`."""
        return self.inputs.view_static(static, size, self.num_dense)
