"""`PushGroup`: a group of GPUs of one host that adds up and exchanges small tensors by stores into each other's memory,
and larger ones as its base group does.

`open_push_group` tests every pair of ranks first, and returns the base group where one cannot.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace

import torch

from headrace.base.errors import PluginError
from headrace.kernels.collective import COLLECTIVES, BegunSum, Collectives, LentSum, Limits
from headrace.kernels.collective.calls import begin_compiling
from headrace.kernels.collective.mailbox import HANDLE_BYTES, Mailbox
from headrace.kernels.collective.push import BUDGET_SECONDS, ROOM, Room
from headrace.kernels.cuda_source import FAULTS, CudaSourceError, note_fallback
from headrace.kernels.operation import KernelQuery
from headrace.parallel.group import Group, Lending, PeerTimeout, Waits
from headrace.parallel.limits import MOST_SENDING_RANKS, begin_norm, measure_limits

logger = logging.getLogger(__name__)

PATIENT_SECONDS = 600.0
"""Budget while ranks load, compile and capture."""
TEST_SECONDS = 0.25
"""Budget of each call of the start-up test."""
TEST_BYTES = 64 << 10
LEAST_SENT_BYTES = 4 << 20
"""Of a sum that is made beside products. Smaller ones take less than it takes to begin a copy."""
REASON_BYTES = 240
GIVEN_UP = "all collectives run on NCCL, which is slower for small tensors"


class PushWaits(Waits):
    """See `Waits`; of collectives that have a budget of time and an error word."""

    def __init__(self, collectives: Collectives, device: torch.device):
        self._collectives, self._device, self._is_patient = collectives, device, False
        collectives.set_budget(BUDGET_SECONDS)

    @contextlib.contextmanager
    def patient(self) -> Iterator[None]:
        """See `Waits`."""
        was_patient, self._is_patient = self._is_patient, True
        self._collectives.set_budget(PATIENT_SECONDS)
        try:
            yield
            if not was_patient and self._device.type == "cuda":
                # what was launched here may still wait for ranks that are slower
                torch.cuda.synchronize(self._device)
        finally:
            self._is_patient = was_patient
            if not was_patient:
                self._collectives.set_budget(BUDGET_SECONDS)

    def check(self) -> None:
        """See `Waits`."""
        if failure := self._collectives.failure:
            raise PeerTimeout(f"{failure}; the ranks must be restarted")

    def abort(self) -> None:
        """See `Waits`."""
        self._collectives.abort()


class PushLending(Lending):
    """See `Lending`; of a group that may be muted: kernels are then found, and exchange nothing."""

    def __init__(self, collectives: Collectives):
        self._collectives, self.is_muted = collectives, False

    def find_sum(self, num_bytes: int, dtype: torch.dtype) -> LentSum | None:
        """See `Lending`."""
        lent = self._collectives.lend_sum(num_bytes, dtype)
        return replace(lent, is_muted=True) if lent is not None and self.is_muted else lent


class PushGroup(Group):
    """See `Group`. ``base`` has the same ranks; ``mailbox`` is closed with the group. ``can_send``: large sums can be
    made beside products."""

    def __init__(
        self, base: Group, collectives: Collectives, device: torch.device, mailbox: Mailbox | None = None, *,
        can_send: bool = False,
    ):
        self.rank, self.size = base.rank, base.size
        self._base, self.collectives, self._mailbox = base, collectives, mailbox
        self.waits, self._device = PushWaits(collectives, device), device
        self.lending: PushLending = PushLending(collectives)
        self._is_muted, self._can_send = False, can_send

    def all_reduce(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        """See `Group`."""
        out = None if self._is_muted else self.collectives.all_reduce(x, more)
        return self._base.all_reduce(x, more) if out is None else out

    def reduce_add_norm(
        self, x: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `Group`."""
        if self._is_muted:
            return None
        return self.collectives.reduce_add_norm(x, stream, weight, eps=eps, offset=offset)

    @property
    def can_slice(self) -> bool:
        """See `Group`. Not in steps that are captured or measured."""
        is_here = self._can_send and not self._is_muted
        return is_here and not (self._device.type == "cuda" and torch.cuda.is_current_stream_capturing())

    def begin_sum(self, x: torch.Tensor) -> BegunSum:
        """See `Group`."""
        is_here = self._can_send and not self._is_muted and x.nbytes >= LEAST_SENT_BYTES
        return (self.collectives.large.begin(x) if is_here else None) or self

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """See `Group`."""
        is_here = not self._is_muted and min(sizes) == max(sizes)
        out = self.collectives.all_gather(x.contiguous()) if is_here else None
        return self._base.all_gather(x, sizes) if out is None else out

    def all_gather_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """See `Group`. Small tensors are padded to the most rows of a rank."""
        most, out = max(counts), None
        if most and not self._is_muted:
            out = self.collectives.all_gather(_pad_rows(x, most).view(1, -1))
        if out is None:
            return self._base.all_gather_rows(x, counts)
        return _take_rows(out.view(self.size, most, *x.shape[1:]), counts)

    def exchange_rows(
        self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int], most: int = 0
    ) -> torch.Tensor:
        """See `Group`. Small tensors whose rows all ranks can bound are padded to that bound."""
        out = None
        if most and not self._is_muted:
            out = self.collectives.exchange(torch.stack([_pad_rows(part, most) for part in x.split(list(sent))]))
        return self._base.exchange_rows(x, sent, received, most) if out is None else _take_rows(out, received)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """See `Group`."""
        out = None if self._is_muted else self.collectives.broadcast(x)
        return self._base.broadcast(x) if out is None else out

    def agree(self, values: Sequence[int]) -> list[int]:
        """See `Group`."""
        return self._base.agree(values)

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """See `Group`."""
        was_muted, self._is_muted = self._is_muted, True
        self.lending.is_muted = True
        try:
            with self._base.muted():
                yield
        finally:
            self._is_muted = self.lending.is_muted = was_muted

    def close(self) -> None:
        """See `Group`. All ranks must have finished their calls."""
        if self._mailbox is not None:
            self._mailbox.close()
        self._base.close()


def _pad_rows(x: torch.Tensor, count: int) -> torch.Tensor:
    """``x`` [n, ...] with rows behind it, [count, ...], contiguous."""
    return x.contiguous() if len(x) == count else torch.cat((x, x.new_zeros(count - len(x), *x.shape[1:])))


def _take_rows(parts: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """The first ``counts[r]`` rows of each part of ``parts`` [W, most, ...], one behind the other."""
    if min(counts) == parts.shape[1]:
        return parts.flatten(0, 1)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def compile_early(device: torch.device, size: int) -> None:
    """Begin to compile what `open_push_group` will need for a group of ``size`` ranks, which takes seconds, while they
    meet. Errors are those of `open_push_group`."""
    if device.type != "cuda" or size == 1:
        return
    try:
        COLLECTIVES.choose(_describe(device, size))
    except PluginError:
        return
    begin_compiling(size, torch.bfloat16, device)
    begin_norm(device)


def _describe(device: torch.device, size: int) -> KernelQuery:
    return KernelQuery("cuda", "bfloat16", torch.cuda.get_device_capability(device), {"ranks": size})


def open_push_group(base: Group, device: torch.device, *, room: Room = ROOM) -> Group:
    """A `PushGroup` over ``base``, or ``base`` itself with one line in the log that says which ranks cannot and why.
    All ranks must call this."""
    if base.is_single or device.type != "cuda":
        return base
    if base.size > MOST_SENDING_RANKS:
        room = replace(room, sent=0)
    mailbox, handle, reason = _make_mailbox(base, device, room)
    if not _all_can(base, device, reason):
        return _give_up(base, mailbox)
    assert mailbox is not None, "the others would have been told the reason"
    addresses, reason = _open_mailboxes(base, device, mailbox, handle)
    if not _all_can(base, device, reason):
        return _give_up(base, mailbox)
    collectives, reason = _make_collectives(base, device, addresses, room)
    if not _all_can(base, device, reason):
        return _give_up(base, mailbox)
    collectives.set_budget(TEST_SECONDS)
    if not _all_can(base, device, _test(base, device, collectives)):
        return _give_up(base, mailbox)
    can_send = base.size <= MOST_SENDING_RANKS and _can_send(base, device, collectives)
    collectives.set_budget(PATIENT_SECONDS)
    began = time.monotonic()
    collectives.limits = measure_limits(base, collectives, device)
    if not _all_can(base, device, collectives.failure):
        return _give_up(base, mailbox)
    if base.rank == 0:
        told = _tell_limits(collectives.limits) + (", large sums beside products" if can_send else "")
        logger.info("%s, measured in %.0f ms", told, 1000 * (time.monotonic() - began))
    return PushGroup(base, collectives, device, mailbox, can_send=can_send)


def _tell_limits(limits: Limits) -> str:
    one_step, fused, sums, gathers = (
        f"{size / 1024:.0f} KB" for size in (limits.one_step, limits.fused, limits.sums, limits.gathers)
    )
    return (
        f"own collectives up to {sums} ({one_step} in one step, {fused} fused with a norm, gathers {gathers}), NCCL "
        "above"
    )


def _give_up(base: Group, mailbox: Mailbox | None) -> Group:
    if mailbox is not None:
        mailbox.close()
    return base


def _make_mailbox(base: Group, device: torch.device, room: Room) -> tuple[Mailbox | None, bytes, str]:
    try:
        COLLECTIVES.choose(_describe(device, base.size))
        mailbox = Mailbox(device, room.mailbox(base.size))
        return mailbox, mailbox.handle(), ""
    except (PluginError, *FAULTS) as error:
        return None, bytes(HANDLE_BYTES), str(error)


def _open_mailboxes(
    base: Group, device: torch.device, mailbox: Mailbox, handle: bytes
) -> tuple[list[int], str]:
    """The addresses of all ranks' mailboxes here."""
    handles = _gather_bytes(base, device, handle, HANDLE_BYTES)
    addresses = []
    for rank, data in enumerate(handles):
        try:
            addresses.append(mailbox.address if rank == base.rank else mailbox.open(data))
        except CudaSourceError as error:
            return [], f"cannot write the memory of rank {rank}: {error}"
    return addresses, ""


def _make_collectives(
    base: Group, device: torch.device, addresses: list[int], room: Room
) -> tuple[Collectives, str]:
    collectives = COLLECTIVES.choose(_describe(device, base.size))(addresses, base.rank, device, room=room)
    try:
        collectives.prepare(torch.bfloat16)
        wait([begin_norm(device)])  # if it fails, so it will where it is timed
        return collectives, ""
    except FAULTS as error:
        note_fallback(GIVEN_UP, error)
        return collectives, f"cannot compile: {error}"


def _make_pattern(rank: int, device: torch.device) -> torch.Tensor:
    """What a rank sends in the test: whole numbers up to 250, with zeros among them."""
    return (torch.arange(TEST_BYTES // 2, device=device) * (2 * rank + 3) % 251).to(torch.bfloat16)


def _test(base: Group, device: torch.device, collectives: Collectives) -> str:
    """Copies and flags between every pair, then a sum, with known numbers; what is wrong, or an empty string."""
    patterns = [_make_pattern(rank, device) for rank in range(base.size)]
    for turn in range(4):  # both halves of the mailboxes, twice
        gathered, total = collectives.all_gather(patterns[base.rank]), collectives.all_reduce(patterns[base.rank])
        torch.cuda.synchronize(device)
        if collectives.failure:
            return f"{collectives.failure} ({TEST_SECONDS} s, turn {turn})"
        if gathered is None or total is None:
            return "a small tensor was refused"
        parts = gathered.view(base.size, -1)
        wrong = [rank for rank in range(base.size) if not torch.equal(parts[rank], patterns[rank])]
        if wrong:
            return f"received wrong bytes from rank {', '.join(map(str, wrong))}"
        if not torch.equal(total, torch.stack(patterns).float().sum(0).to(torch.bfloat16)):
            return "a sum over all ranks is wrong"
    return ""


def _can_send(base: Group, device: torch.device, collectives: Collectives) -> bool:
    """Whether sums by copies are right, two at once, on all ranks. Where one cannot copy, no other waits for it."""
    patterns = [_make_pattern(rank, device).view(4, -1) for rank in range(base.size)]
    told = "sums of large steps do not run beside products"
    try:
        tensors = [patterns[base.rank].clone() for _ in range(2)]
        begun, reason = [collectives.large.begin(x) for x in tensors], ""
    except CudaSourceError as error:
        begun, reason = [], f"cannot copy: {error}"
    if not _all_can(base, device, "a tensor was refused" if None in begun else reason, told):
        return False
    sums = [one.all_reduce(x) for one, x in zip(begun, tensors, strict=True) if one is not None]
    torch.cuda.synchronize(device)
    total = torch.stack(patterns).float().sum(0).to(torch.bfloat16)
    is_right = all(torch.equal(x, total) for x in sums)
    return _all_can(base, device, "" if is_right else collectives.failure or "a sum by copies is wrong", told)


def _gather_bytes(base: Group, device: torch.device, data: bytes, size: int) -> list[bytes]:
    """``data``, padded to ``size`` bytes, of every rank."""
    own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)[None].to(device)
    gathered = bytes(base.all_gather(own, [size] * base.size)[0].tolist())
    return [gathered[at : at + size] for at in range(0, len(gathered), size)]


def _all_can(base: Group, device: torch.device, reason: str, told: str = GIVEN_UP) -> bool:
    """Whether no rank has a reason against. Otherwise rank 0 logs what follows, as ``told``, and the reasons."""
    encoded = reason.encode(errors="replace")[:REASON_BYTES]
    reasons = [
        data.rstrip(b"\0").decode(errors="replace") for data in _gather_bytes(base, device, encoded, REASON_BYTES)
    ]
    if any(reasons) and base.rank == 0:
        told_reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)
        logger.warning("%s: %s", told, told_reasons)
    return not any(reasons)
