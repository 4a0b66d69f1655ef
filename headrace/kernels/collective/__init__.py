"""Collectives of small messages among the GPUs of one host, by stores into each other's memory. Torch-free itself.

W ranks, T tokens, D hidden size, S split-K partial sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headrace.kernels.operation import KernelQuery, Operation, requires

if TYPE_CHECKING:
    import torch

MOST_RANKS = 8


@dataclass(frozen=True)
class Limits:
    """Bytes of a tensor up to which sums go in one step, with a norm in one kernel, at all, and gathers go at all.
    Above them, two steps, separate kernels and other libraries are faster."""

    one_step: int
    fused: int
    sums: int
    gathers: int


UNMEASURED = Limits(128 << 10, 1 << 20, 8 << 20, 256 << 10)
"""Until `headrace.parallel.limits` has measured the machine."""


@dataclass(frozen=True)
class LentSum:
    """What a kernel needs that itself adds up a tensor over ``size`` ranks, in place of `Collectives.all_reduce`: in
    one step, by the functions of ``csrc/cuda/mailbox.cuh``, each vector at its place in the contiguous tensor. ``call``
    is ``Ranks`` of that source; ``meet`` is called behind the launch. ``is_muted``: nothing is to be exchanged."""

    size: int
    call: Any
    meet: Callable[[], None]
    is_muted: bool = False


class BegunSum(Protocol):
    """A sum over ranks of a tensor x that is under way. One of the two is called, once, with the same x, which it
    overwrites: sums are finished in the order in which they were begun."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""

    def reduce_add_norm(
        self, x: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `Collectives`; None, and not finished, for what it does not take."""


class LargeSums(Protocol):
    """Sums of tensors of megabytes, which copy engines move while multiprocessors compute what is launched next."""

    def begin(self, x: torch.Tensor) -> BegunSum | None:
        """Begin the sum of ``x`` [T, D], which must not be written until it is finished. The same bits as those of
        `Collectives`. None as there: also while a CUDA graph is captured, and where too many sums are under way.
        Raises `CudaSourceError` where ranks cannot copy to each other."""


class Collectives(Protocol):
    """What a rank does together with its peers. All ranks must make the same calls in the same order, and each rank's
    calls must follow each other on its device. Calls may be captured in CUDA graphs. Each returns None, with nothing
    done, where another library should be used (large or misaligned tensors): alike on all ranks, as it depends on
    shapes, dtypes and strides alone.

    A call that waits for a peer longer than the budget ends with meaningless results, and so do all later ones;
    `failure` tells. ``limits`` must be the same on all ranks, and may be changed between two calls. ``large``: for
    tensors whose sum need not be there at once.
    """

    limits: Limits
    large: LargeSums

    def all_reduce(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor | None:
        """The sum of all ranks' ``x``, added up in the order of ranks in float32 and rounded once. ``more``: of x's
        shape and dtype, added to it before and rounded then."""

    def lend_sum(self, num_bytes: int, dtype: torch.dtype) -> LentSum | None:
        """For a kernel that adds up a tensor of so many bytes itself; ranks with and without such kernels may meet.
        None where `all_reduce` takes two steps, or none."""

    def reduce_add_norm(
        self, x: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """`all_reduce` followed by `headrace.kernels.rowwise.ADD_RMS_NORM`; ``stream`` is updated in place. x is
        [T, D], or split-K partial sums [S, T, D] float32, which are rounded to the stream's dtype before they are sent.
        """

    def all_gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """The ranks' ``x`` [..., n], side by side along the last dim: [..., W * n]; bit for bit, any dtype."""

    def exchange(self, x: torch.Tensor) -> torch.Tensor | None:
        """Of ``x`` [W, ...] part r goes to rank r. Returns the ranks' parts for this one, in their order, [W, ...]; bit
        for bit, any dtype."""

    def broadcast(self, x: torch.Tensor) -> torch.Tensor | None:
        """``x`` of rank 0, written into the others' ``x``; bit for bit, any dtype."""

    def prepare(self, dtype: torch.dtype) -> None:
        """Compile what tensors of that type need. Raises `CudaSourceError` and `OSError`."""

    def set_budget(self, seconds: float) -> None:
        """How long calls wait for peers, from now on; calls that are running or in graphs too."""

    def abort(self) -> None:
        """End all calls, those that are running too; their results are meaningless."""

    @property
    def failure(self) -> str:
        """Why results are meaningless; empty if they are not. Does not wait for the device."""


COLLECTIVES = Operation("collectives kernel")
"""``make(mailboxes, rank, device) -> Collectives``: ``mailboxes`` are the addresses of every rank's memory in this
process (`headrace.kernels.collective.mailbox`). The query's shape has ``ranks``."""

_on_gpu = requires(device="cuda", dtypes=("float32", "bfloat16", "float16"), capability=(8, 0))


def _reason_against_ranks(ranks: int) -> str | None:
    return None if ranks in range(2, MOST_RANKS + 1) else f"takes 2 to {MOST_RANKS} ranks, not {ranks}"


def reason_against(query: KernelQuery) -> str | None:
    """Why own kernels do not serve such ranks; None if they do."""
    return _on_gpu(query) or _reason_against_ranks(query.shape.get("ranks", 2))


COLLECTIVES.add(
    "push", "headrace.kernels.collective.push:PushCollectives", supports=reason_against, priority=10,
    doc="own CUDA C++: every rank stores into its peers' memory",
)
