"""What rank 0 sends to workers and what they answer, as msgspec records.

An `Assignment` comes first, over the worker's socket; then every `Command` over the ring, to all workers alike. Replies
come over the socket. On the socket each message has a length prefix, as in service/framing. `Shared` is an argument
of the process, as its numbers mean something on its machine alone.
"""

from __future__ import annotations

import msgspec

from headrace.base.adapters import LoadAdapter
from headrace.base.admin import AcquireMemory, ReleaseMemory, ReplaceWeights
from headrace.base.config import EngineConfig
from headrace.base.messages import ErrorInfo, Place, Starting
from headrace.base.step import Arrival, StepPlan
from headrace.base.token_ids import from_wire
from headrace.service.ranks.ring import RingPlace


class Shared(msgspec.Struct, frozen=True):
    """What a worker shares with the process that started it, as inherited descriptors: the command ring, and the memory
    of ``num_heartbeats`` heartbeats, of which this worker has number ``heartbeat``. ``parent_is_replaced``: the parent
    is started again when it dies, so that one which stands still may be killed."""

    ring: RingPlace
    heartbeats: int
    heartbeat: int
    num_heartbeats: int
    parent_is_replaced: bool


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """Which rank of ``size`` a worker is, its place among those of its machine, and where it meets the others:
    ``address`` and ``port`` of the store of rank 0. The ranks are on ``num_hosts`` machines."""

    config: EngineConfig
    rank: int
    size: int
    place: Place
    address: str
    port: int
    num_hosts: int = 1


class Execute(msgspec.Struct, frozen=True, array_like=True, tag="execute"):
    """Launch a plan."""

    plan: StepPlan


class RecordNext(msgspec.Struct, frozen=True, array_like=True, tag="record_next"):
    """Use an idle moment, see `Executor.use_idle_moment`."""


class Reset(msgspec.Struct, frozen=True, array_like=True, tag="reset"):
    """Wait for the device and forget all rows."""


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """Take parts off the device. Answered by `Done`, as are the next two."""

    call: ReleaseMemory


class Acquire(msgspec.Struct, frozen=True, array_like=True, tag="acquire"):
    """Bring parts back."""

    call: AcquireMemory


class Replace(msgspec.Struct, frozen=True, array_like=True, tag="replace"):
    """Load other weights."""

    call: ReplaceWeights


class ReadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="read_adapter"):
    """Begin to read an adapter. Whether it can be read is found out by rank 0, which reads the same."""

    adapter_id: int
    call: LoadAdapter


class PrepareAdapter(msgspec.Struct, frozen=True, array_like=True, tag="prepare_adapter"):
    """Begin to read it again, if need be. ``digest``: of what rank 0 has read; other content fails."""

    adapter_id: int
    digest: str


class ForgetAdapter(msgspec.Struct, frozen=True, array_like=True, tag="forget_adapter"):
    """Drop it."""

    adapter_id: int


class OpenRegion(msgspec.Struct, frozen=True, array_like=True, tag="open_region"):
    """Map the memory in which pages for and of other engines lie, by a handle of its `Door`; none for an empty one."""

    handle: bytes
    epoch: int


class Close(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    """Free the device and end."""


Command = (
    Execute | RecordNext | Reset | Release | Acquire | Replace | ReadAdapter | PrepareAdapter | ForgetAdapter
    | OpenRegion | Close
)


class RankReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The worker's executor is built."""


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """A call was carried out, or changed nothing because of ``error``."""

    error: ErrorInfo | None = None


class Moved(msgspec.Struct, frozen=True, array_like=True, tag="moved"):
    """Page moves have ended on this worker."""

    arrived: list[Arrival]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The worker cannot start or go on; it ends after this."""

    error: ErrorInfo


FromWorker = Starting | RankReady | Done | Moved | Failed

# made before a worker imports on another thread, see `headrace.service.transport.decode_config`
decode_assignment = msgspec.msgpack.Decoder(Assignment).decode
decode_shared = msgspec.json.Decoder(Shared).decode
decode_command = msgspec.msgpack.Decoder(Command, dec_hook=from_wire).decode
decode_reply = msgspec.msgpack.Decoder(FromWorker).decode
