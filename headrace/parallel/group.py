"""`Group`: the ranks that compute one model together, and their collectives.

Refuses: processes, and who is in which group; those who start ranks decide that. All ranks of a group must call the
same collectives in the same order.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from headrace.base.errors import ConfigError, HeadraceError
from headrace.kernels.collective import BegunSum, LentSum
from headrace.parallel.share import Share, share_heads, share_units

logger = logging.getLogger(__name__)

TIMEOUT = timedelta(minutes=30)
"""Of collectives on the host. Dead and hung ranks are noticed by those who watch the processes, far earlier."""


class PeerTimeout(HeadraceError):
    """A rank waited for another longer than it may, so results are meaningless; the ranks must be restarted."""

    kind = "peer_timeout"
    status = 503


class Waits:
    """How long collectives wait for other ranks on the device. Of groups whose library has no such bounds: as long as
    it takes."""

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """While the body runs, waits may be long: each rank loads, compiles and captures at its own pace. Afterwards
        they last as long as a step may take."""
        yield

    def check(self) -> None:
        """Raise `PeerTimeout` if results are meaningless because another rank came too late. Does not wait for the
        device."""

    def abort(self) -> None:
        """End all waits, from any thread; results are meaningless."""


class Lending:
    """Sums over ranks that other kernels make, in place of `Group.all_reduce`. Of groups that cannot: none."""

    def find_sum(self, num_bytes: int, dtype: torch.dtype) -> LentSum | None:
        """For a kernel that adds up a tensor of so many bytes; None where there is nothing for it."""
        return None


class Group:
    """A group of one rank, whose collectives change nothing; the base class of larger groups."""

    rank: int = 0
    size: int = 1
    waits: Waits = Waits()
    lending: Lending = Lending()

    @property
    def is_single(self) -> bool:
        """Whether there are no other ranks."""
        return self.size == 1

    @property
    def can_slice(self) -> bool:
        """Whether `begin_sum` begins large sums now. Then the rows of a large step better go through layers in slices
        (`headrace.parallel.limits.slice_rows`): while one is added up, the next is computed. Alike on all ranks."""
        return False

    def share(self, size: int, noun: str, rank: int | None = None) -> Share:
        """A rank's part of a dimension, by default this one's; see `share_units`."""
        return share_units(size, self.size, self.rank if rank is None else rank, noun=noun)

    def share_heads(self, num_heads: int, num_kv_heads: int) -> tuple[Share, Share]:
        """This rank's query and KV heads; see `headrace.parallel.share.share_heads`."""
        return share_heads(num_heads, num_kv_heads, self.size, self.rank)

    def all_reduce(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        """The sum over all ranks, with the same bits on each; ``x`` may be overwritten. ``more``: of x's shape and
        dtype, to which it is added first."""
        return x if more is None else x.add_(more)

    def reduce_add_norm(
        self, x: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`all_reduce`, then `headrace.kernels.rowwise.ADD_RMS_NORM`, in one kernel; None where that is not faster,
        with nothing changed."""
        return None

    def begin_sum(self, x: torch.Tensor) -> BegunSum:
        """Begin to add up ``x``, where that can be done beside what is launched next; else this group. The sum is
        finished by a method of the result, and x must not be written before. Sums are finished in their order."""
        return self

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """The ranks' tensors, side by side along the last dim, which is ``sizes[r]`` on rank r."""
        return x

    def all_gather_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The ranks' rows [n, ...], one rank's behind the other's, in any dtype; n is ``counts[r]`` on rank r."""
        return x

    def exchange_rows(
        self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int], most: int = 0
    ) -> torch.Tensor:
        """Send ``sent[r]`` consecutive rows of ``x`` [n, ...] to each rank r and return the ``received[r]`` rows that
        each has for this one, in the order of ranks; in any dtype. ``most``: the most rows between any two ranks, where
        all of them know it."""
        return x

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of rank 0, written into the others' ``x``."""
        return x

    def agree(self, values: Sequence[int]) -> list[int]:
        """The smallest of each of some numbers over all ranks. Waits for all ranks."""
        return list(values)

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """While the body runs, collectives return right shapes and meaningless numbers without the other ranks, and
        zeros for what others would have sent, as it may be indices or states: for steps that are run for their memory
        or their kernels, which ranks need not do alike."""
        yield

    def close(self) -> None:
        """Leave the group."""


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a group meet: ``address`` and ``port`` of the store that rank 0 serves."""

    address: str
    port: int


class TorchGroup(Group):
    """A group over ``torch.distributed``: NCCL between GPUs, Gloo between CPUs."""

    def __init__(self, rank: int, size: int, device: torch.device, group: dist.ProcessGroup | None = None):
        self.rank, self.size, self.device = rank, size, device
        self._group = group
        self._is_muted = False

    def all_reduce(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        """See `Group`."""
        x = x.contiguous() if more is None else x.add_(more).contiguous()
        if not self._is_muted:
            dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """See `Group`."""
        widest = max(sizes)
        if x.shape[-1] < widest:  # equal shapes are what the library gathers
            x = torch.nn.functional.pad(x, (0, widest - x.shape[-1]))
        flat = x.flatten(0, -2).contiguous()
        gathered = x.new_empty(self.size * flat.shape[0], widest)
        if self._is_muted:
            gathered.zero_()
        else:
            dist.all_gather(list(gathered.chunk(self.size)), flat, group=self._group)
        parts = gathered.view(self.size, *x.shape[:-1], widest)
        if min(sizes) == widest:
            return parts.movedim(0, -2).flatten(-2)
        return torch.cat([part[..., :size] for part, size in zip(parts, sizes, strict=True)], dim=-1)

    def all_gather_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """See `Group`."""
        most = max(counts)
        if self._is_muted or not most:
            return x.new_zeros(sum(counts), *x.shape[1:])
        if len(x) < most:  # equal shapes are what the library gathers
            x = torch.cat((x, x.new_empty(most - len(x), *x.shape[1:])))
        gathered = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(gathered.unbind()), x.contiguous(), group=self._group)
        if min(counts) == most:
            return gathered.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)])

    def exchange_rows(
        self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int], most: int = 0
    ) -> torch.Tensor:
        """See `Group`."""
        out = x.new_empty(sum(received), *x.shape[1:])
        if self._is_muted:
            return out.zero_()
        # as bytes, which every library moves
        theirs, own = (rows.flatten(1).view(torch.uint8) for rows in (out, x.contiguous()))
        dist.all_to_all_single(theirs, own, list(received), list(sent), group=self._group)
        return out

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `Group`."""
        if not self._is_muted:
            dist.broadcast(x, group=self._group, group_src=0)
        elif self.rank:
            x.zero_()
        return x

    def agree(self, values: Sequence[int]) -> list[int]:
        """See `Group`."""
        agreed = torch.tensor(values, dtype=torch.int64, device=self.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._group)
        return agreed.tolist()

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """See `Group`."""
        was_muted, self._is_muted = self._is_muted, True
        try:
            yield
        finally:
            self._is_muted = was_muted

    def close(self) -> None:
        """See `Group`."""
        if dist.is_initialized():
            dist.destroy_process_group()


def serve_rendezvous(address: str, size: int, port: int = 0) -> tuple[Any, Rendezvous]:
    """On rank 0, open the store in which ranks find each other; the port is free one unless given. Returns the store,
    which must be kept, and where it is."""
    store = dist.TCPStore(address, port, size, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    return store, Rendezvous(address, store.port)


def join_group(rank: int, size: int, device: torch.device, store: Any) -> Group:
    """The group of ``size`` ranks that meet in a store; waits for all of them. Raises `ConfigError` where this process
    is in a group already."""
    if size == 1:
        return Group()
    if dist.is_initialized():
        raise ConfigError(
            "this process already uses torch.distributed; start the engine in a process of its own",
            param="tensor_parallel_size",
        )
    backend = "nccl" if device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"device_id": device} if device.type == "cuda" else {}
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT, **options)
    return TorchGroup(rank, size, device)


def find_store(rendezvous: Rendezvous, size: int) -> Any:
    """On other ranks, the store of `serve_rendezvous`; waits for it to be there."""
    return dist.TCPStore(rendezvous.address, rendezvous.port, size, is_master=False, timeout=TIMEOUT)
