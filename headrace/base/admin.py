"""Admin calls, which concern the engine as a whole and run between two steps: release and acquire memory (sleep),
replace weights, profile, load and unload adapters (``base/adapters``).

Each record is the ``arguments`` of the `Call` whose method it names.
"""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

import msgspec

from headrace.base.adapters import AdapterCall

DevicePart = Literal["kv_cache", "weights", "cuda_graph"]
"""What takes device memory: the pools with all that was cached, the model, the captured decode steps."""

DEVICE_PARTS: tuple[DevicePart, ...] = get_args(DevicePart)
VITAL_PARTS: frozenset[DevicePart] = frozenset({"kv_cache", "weights"})
"""Parts without which nothing can be computed; without the others steps are only slower."""


class ReleaseMemory(msgspec.Struct, frozen=True):
    """Take parts off the device; the reply lists all released parts. Refused with `Conflict` while there are requests.
    Weights move to host memory; with ``discards_weights`` they are dropped, and read again when they come back."""

    method: ClassVar[str] = "release_memory"
    parts: list[DevicePart]
    discards_weights: bool = False


class AcquireMemory(msgspec.Struct, frozen=True):
    """Bring parts back; the reply lists the parts that are still released."""

    method: ClassVar[str] = "acquire_memory"
    parts: list[DevicePart]


class ReplaceWeights(msgspec.Struct, frozen=True):
    """Serve the weights of another checkpoint of the same architecture and shapes. Requests go on with them, from the
    tokens they have; nothing that was cached stays. When it fails the weights are the old ones."""

    method: ClassVar[str] = "replace_weights"
    model: str
    load_format: str = "auto"


class StartProfile(msgspec.Struct, frozen=True):
    """Record what the engine's process does, and its device unless ``has_device`` is false; ends by itself after
    ``num_steps`` steps. ``folder`` is where the trace goes."""

    method: ClassVar[str] = "start_profile"
    folder: str
    num_steps: int | None = None
    has_stacks: bool = False
    has_shapes: bool = False
    has_device: bool = True


class StopProfile(msgspec.Struct, frozen=True):
    """Write the trace; the reply is the file's name."""

    method: ClassVar[str] = "stop_profile"


AdminCall = ReleaseMemory | AcquireMemory | ReplaceWeights | StartProfile | StopProfile | AdapterCall
ADMIN_CALLS: dict[str, type] = {record.method: record for record in get_args(AdminCall)}
