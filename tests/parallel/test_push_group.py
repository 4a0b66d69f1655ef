"""A group that pushes small tensors: which calls go where, and the start-up test with its fallback; on two GPUs with
real processes, which share one GPU or have one each."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.multiprocessing
from parallel.thread_group import ThreadGroup, on_all_ranks

from headrace.kernels.collective import UNMEASURED, LentSum, Limits, reference
from headrace.kernels.cuda_source import CudaSourceError
from headrace.parallel import limits, push
from headrace.parallel.experts import reduce_scatter_rows
from headrace.parallel.group import Group, PeerTimeout, Rendezvous, TorchGroup, find_store, join_group, serve_rendezvous
from headrace.parallel.limits import (
    MOST_SENDING_RANKS,
    NEVER,
    SIZES,
    choose_limits,
    measure_limits,
)
from headrace.parallel.push import LEAST_SENT_BYTES, PATIENT_SECONDS, PushGroup, open_push_group

CPU = torch.device("cpu")


class Recorder(Group):
    """Notes its calls; plays both the library and the kernels. ``serves``: the most elements that kernels take."""

    def __init__(self, serves: int | None = None):
        self.rank, self.size, self.calls, self.serves, self.failure = 0, 2, [], serves, ""
        self.budgets, self.limits, self.is_aborted = [], UNMEASURED, False

    def set_budget(self, seconds):
        self.budgets.append(seconds)

    def abort(self):
        self.is_aborted = True

    def _take(self, name, x):
        if self.serves is not None and x.numel() > self.serves:
            return None
        self.calls.append(name)
        return x

    def all_reduce(self, x, more=None):
        if self._take("all_reduce", x) is None:
            return None
        return x if more is None else x + more

    def reduce_add_norm(self, x, stream, weight, *, eps, offset):
        return None if self._take("reduce_add_norm", x) is None else (x, stream)

    def all_gather(self, x, sizes=()):
        return self._take("all_gather", x)

    def broadcast(self, x):
        return self._take("broadcast", x)


def test_small_tensors_are_pushed_and_large_ones_left_to_the_library():
    library, kernels = Recorder(), Recorder(serves=8)
    group = PushGroup(library, kernels, CPU)
    small, large = torch.zeros(8), torch.zeros(9)
    for x in (small, large):
        group.all_reduce(x), group.all_gather(x, [8, 8]), group.broadcast(x)
    assert kernels.calls == library.calls == ["all_reduce", "all_gather", "broadcast"]
    assert group.reduce_add_norm(large, large, large, eps=1.0, offset=0.0) is None
    assert group.reduce_add_norm(small, small, small, eps=1.0, offset=0.0) is not None
    group.all_gather(small, [8, 7])
    assert library.calls[-1] == "all_gather", "parts of different sizes are not pushed"


def test_two_parts_of_a_sum_are_added_up_by_whoever_sums():
    library, kernels = Recorder(), Recorder(serves=8)
    group = PushGroup(library, kernels, CPU)
    for count, called in ((8, kernels), (9, library)):
        x, more = torch.arange(count), torch.full((count,), 3)
        assert torch.equal(group.all_reduce(x, more), torch.arange(count) + 3)
        assert called.calls == ["all_reduce"] and torch.equal(more, torch.full((count,), 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_parts_of_a_sum_have_the_bits_of_one(dtype: torch.dtype):
    def run(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(group.rank)
        x, more = (torch.randn(3, 40, generator=draw).to(dtype) for _ in range(2))
        return group.all_reduce(x + more), group.all_reduce(x, more)

    for one, two in on_all_ranks(3, run):
        assert torch.equal(one, two)
    x = torch.ones(2, 3)
    assert torch.equal(Group().all_reduce(x.clone(), x), 2 * x)


def test_sums_that_other_kernels_make_are_lent_unless_muted():
    kernels = Recorder()
    group = PushGroup(Recorder(), kernels, CPU)
    kernels.lend_sum = lambda num_bytes, dtype: LentSum(2, num_bytes, list) if num_bytes <= 64 else None
    find = group.lending.find_sum
    assert find(64, torch.bfloat16) == LentSum(2, 64, list) and find(65, torch.bfloat16) is None
    with group.muted():
        assert find(64, torch.bfloat16) == LentSum(2, 64, list, is_muted=True) and find(65, torch.bfloat16) is None
    assert find(64, torch.bfloat16) == LentSum(2, 64, list)
    assert Group().lending.find_sum(64, torch.bfloat16) is None


class ThreadKernels:
    """What kernels compute, for ranks that are threads; ``most``: the most bytes that a rank sends to another."""

    def __init__(self, group: ThreadGroup, most: int):
        self._group, self._most, self.num_calls = group, most, 0

    def set_budget(self, seconds: float) -> None:
        """See `Collectives`."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """See `Collectives`."""
        if x.nbytes > self._most:
            return None
        self.num_calls += 1
        return reference.all_gather(self._group._share(x))

    def exchange(self, x: torch.Tensor) -> torch.Tensor | None:
        """See `Collectives`."""
        if x[0].nbytes > self._most:
            return None
        self.num_calls += 1
        return reference.exchange(self._group._share(x))[self._group.rank]


@pytest.mark.parametrize("most", [10_000, 50])
@pytest.mark.parametrize("counts", [[3, 3, 3], [2, 0, 5], [0, 0, 1], [0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bfloat16])
def test_rows_of_different_numbers_are_padded_or_left_to_the_library(
    dtype: torch.dtype, counts: list[int], most: int
):
    def run(base: ThreadGroup) -> tuple[list[torch.Tensor], int]:
        kernels = ThreadKernels(base, most)
        draw = torch.Generator().manual_seed(base.rank)
        own = torch.randint(0, 9, (counts[base.rank], 6), generator=draw).to(dtype)
        sums = torch.randint(0, 9, (sum(counts), 6), generator=draw).to(dtype)
        out = []
        for group in (base, PushGroup(base, kernels, CPU)):
            out += [group.all_gather_rows(own, counts), reduce_scatter_rows(group, sums, counts)]
        return out, kernels.num_calls

    is_pushed = 0 < max(counts) * 6 * dtype.itemsize <= most
    for (gathered, reduced, *pushed), num_calls in on_all_ranks(3, run):
        assert torch.equal(pushed[0], gathered) and torch.equal(pushed[1], reduced)
        assert num_calls == (2 if is_pushed else 0)


def test_a_muted_group_waits_for_nobody():
    library, kernels = Recorder(), Recorder()
    group = PushGroup(library, kernels, CPU)
    with group.muted():
        group.all_reduce(torch.zeros(8))
        assert group.reduce_add_norm(*[torch.zeros(8)] * 3, eps=1.0, offset=0.0) is None
    assert not kernels.calls and library.calls == ["all_reduce"]
    group.all_reduce(torch.zeros(8))
    assert kernels.calls == ["all_reduce"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_muted_group_receives_zeros(rank: int):
    """What is in fresh memory may be no index, and no state of a row."""
    library = TorchGroup(rank, 2, CPU)
    group = PushGroup(library, Recorder(), CPU)
    with group.muted():
        own = torch.full((2, 3), -64128)
        assert torch.equal(group.broadcast(own.clone()), own if rank == 0 else torch.zeros_like(own))
        assert not group.all_gather(own, [3, 3]).any() and not group.all_gather_rows(own, [2, 2]).any()
        assert not group.exchange_rows(own, [1, 1], [1, 1]).any()


class RecordedSums:
    """Large sums that are begun; ``serves``: whether there is room for them."""

    def __init__(self, serves: bool = True):
        self.serves, self.begun = serves, []

    def begin(self, x):
        self.begun.append(x)
        return self if self.serves else None


def test_large_sums_are_begun_where_they_can_be():
    kernels = Recorder()
    kernels.large = RecordedSums()
    large, small = torch.zeros(LEAST_SENT_BYTES // 4), torch.zeros(LEAST_SENT_BYTES // 4 - 1)
    group = PushGroup(Recorder(), kernels, CPU, can_send=True)
    assert group.can_slice
    assert group.begin_sum(large) is kernels.large and group.begin_sum(small) is group
    kernels.large.serves = False
    assert group.begin_sum(large) is group, "too many are under way"
    with group.muted():
        assert not group.can_slice and group.begin_sum(large) is group
    assert len(kernels.large.begun) == 2
    for other in (PushGroup(Recorder(), kernels, CPU), Group()):
        assert not other.can_slice and other.begin_sum(large) is other


class Alone(Group):
    """Two ranks, of which the other has no reason against anything."""

    size = 2

    def all_gather(self, x, sizes):
        return torch.cat((x, torch.zeros_like(x)), dim=1)


def test_ranks_that_cannot_copy_do_without(caplog):
    kernels = Recorder()
    with caplog.at_level(logging.WARNING):
        kernels.large = RecordedSums(serves=False)
        assert not push._can_send(Alone(), CPU, kernels)
        kernels.large.begin = Mock(side_effect=CudaSourceError("no access"))
        assert not push._can_send(Alone(), CPU, kernels)
    assert [record.message for record in caplog.records] == [
        "sums of large steps do not run beside products: rank 0: a tensor was refused",
        "sums of large steps do not run beside products: rank 0: cannot copy: no access",
    ]


def test_a_late_peer_is_a_typed_error():
    kernels = Recorder()
    group = PushGroup(Recorder(), kernels, CPU)
    group.waits.check()
    kernels.failure = "rank 0 waited in vain for rank 1"
    with pytest.raises(PeerTimeout, match="rank 1; the ranks must be restarted"):
        group.waits.check()


def test_ranks_wait_long_while_they_load_and_capture():
    kernels = Recorder()
    group = PushGroup(Recorder(), kernels, CPU)
    with group.waits.patient():
        with group.waits.patient():  # as where a weight update captures graphs
            assert kernels.budgets[-1] == PATIENT_SECONDS == 600
        assert kernels.budgets[-1] == 600
    assert kernels.budgets[0] == kernels.budgets[-1] == 10
    with pytest.raises(KeyError), group.waits.patient():
        raise KeyError
    assert kernels.budgets[-1] == 10
    group.waits.abort()
    assert kernels.is_aborted
    with Group().waits.patient():  # of one rank
        Group().waits.check()


def test_limits_are_where_the_next_way_gets_faster():
    sizes = [8, 16, 32, 64, 128]

    def times(*took):
        return dict(zip(sizes, took, strict=True))

    limits = choose_limits({
        "sum_one": times(2, 3, 6, 12, 24), "sum_two": times(4, 5, 5.5, 8, 16), "library": times(9, 9, 9, 9, 9),
        # in one step up to 16, in two beyond
        "norm": times(2, 2, 2, 2, 2), "fused_one": times(3, 4, 9, 9, 9), "fused_two": times(9, 9, 7, 11, NEVER),
        "gather": times(2, 10, 4, 10, 10), "library_gather": times(5, 5, 5, 5, 5),
    })
    # a gather that was slow once, at 16, between fast ones is noise
    assert limits == Limits(one_step=16, fused=32, sums=64, gathers=32)
    nothing = {name: times(*[NEVER] * 5) for name in ("sum_one", "sum_two", "fused_one", "fused_two", "gather")}
    library = {name: times(*[1] * 5) for name in ("library", "norm", "library_gather")}
    assert choose_limits({**nothing, **library}) == Limits(0, 0, 0, 0)


def test_all_ranks_take_the_times_of_the_slowest():
    class Kernels(Recorder):
        """What they return is how long they take."""

        def all_reduce(self, x, more=None):
            return 10.0 if self.limits.one_step else 20.0

        def reduce_add_norm(self, x, stream, weight, *, eps, offset):
            return None

        def all_gather(self, x):
            return 1.0

    class Library(Recorder):
        def __init__(self, one_step_elsewhere):
            super().__init__()
            self.elsewhere = -round(1000 * one_step_elsewhere)

        def all_reduce(self, x, more=None):
            return 15.0

        def all_gather(self, x, sizes):
            return 15.0

        def agree(self, values):
            return [min(self.elsewhere, values[0]), *values[1:]]

    def clock(call):
        made = call()
        return NEVER if made is None else made if isinstance(made, float) else 3.0

    kernels, largest = Kernels(), SIZES[-1]
    assert measure_limits(Library(9.0), kernels, CPU, clock) == Limits(largest, 0, largest, largest)
    assert measure_limits(Library(25.0), kernels, CPU, clock) == Limits(0, 0, 0, largest)
    assert kernels.limits is UNMEASURED


def test_the_norm_that_is_timed_is_compiled_while_ranks_meet(monkeypatch: pytest.MonkeyPatch):
    """On a thread, once, for tensors as those that are timed; what fails there fails in the measurement."""
    called: list[tuple[str, list[tuple[torch.dtype, int]], float]] = []

    def norm(x: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        tensors = [(tensor.dtype, tensor.shape[-1]) for tensor in (x, stream, weight)]
        called.append((threading.current_thread().name, tensors, eps))
        raise CudaSourceError("no")

    monkeypatch.setattr(limits, "ADD_RMS_NORM", SimpleNamespace(choose=lambda query: norm))
    limits.begin_norm.cache_clear()
    try:
        begun = limits.begin_norm(CPU)
        assert isinstance(begun.exception(60), CudaSourceError) and limits.begin_norm(CPU) is begun
    finally:
        limits.begin_norm.cache_clear()
    with pytest.raises(CudaSourceError):
        limits._list_ways(Recorder(), None, torch.ones(4, limits.WIDTH, dtype=torch.bfloat16))["norm"]()
    ahead, timed = called
    assert ahead[0].startswith("norm") and timed[0] == threading.current_thread().name and ahead[1:] == timed[1:]



def test_without_gpus_the_group_stays_as_it_is():
    for group in (Group(), Recorder()):
        assert open_push_group(group, torch.device("cpu")) is group


def test_one_line_says_who_cannot_and_why(caplog):
    class Both(Group):
        rank, size = 0, 2

        def all_gather(self, x, sizes):
            other = bytearray(b"no peer access".ljust(x.shape[1], b"\0"))
            return torch.cat((x, torch.frombuffer(other, dtype=torch.uint8)[None]), dim=1)

    with caplog.at_level(logging.WARNING):
        assert not push._all_can(Both(), torch.device("cpu"), "")
    assert [record.message for record in caplog.records] == [
        "all collectives run on NCCL, which is slower for small tensors: rank 1: no peer access"
    ]


class OverHost(Group):
    """A base group of ranks that share a GPU, which NCCL refuses: all goes through Gloo."""

    def __init__(self, cpus: Group):
        self.rank, self.size, self._cpus = cpus.rank, cpus.size, cpus

    def all_reduce(self, x, more=None):
        return self._cpus.all_reduce(super().all_reduce(x, more).cpu()).to(x.device)

    def all_gather(self, x, sizes):
        return self._cpus.all_gather(x.cpu(), sizes).to(x.device)

    def broadcast(self, x):
        return x.copy_(self._cpus.broadcast(x.cpu()))

    def agree(self, values):
        return self._cpus.agree(values)

    def close(self):
        self._cpus.close()


def _join(rank: int, size: int, port: int):
    own_gpus = torch.cuda.device_count() >= size
    device = torch.device("cuda", rank if own_gpus else 0)
    torch.cuda.set_device(device)
    meeting = Rendezvous("127.0.0.1", port)
    store = serve_rendezvous(meeting.address, size, port)[0] if rank == 0 else find_store(meeting, size)
    library = join_group(rank, size, device if own_gpus else torch.device("cpu"), store)
    return device, library if own_gpus else OverHost(library)


def _check_values(rank: int, size: int, port: int) -> None:
    device, library = _join(rank, size, port)
    group = open_push_group(library, device)
    assert isinstance(group, PushGroup)
    group.collectives.set_budget(30)
    group.collectives.limits = Limits(UNMEASURED.one_step, *[8 << 20] * 3)  # ranks may share a GPU: nothing is fast
    rng = torch.Generator().manual_seed(0)
    for turn, rows in enumerate((1, 3, 200, 1, 2000, 64)):
        parts = [torch.randn(rows, 1024, generator=rng).to(device, torch.bfloat16) for _ in range(size)]
        stream = torch.randn(rows, 1024, generator=rng).to(device, torch.bfloat16)
        assert torch.equal(group.all_reduce(parts[rank].clone()), reference.all_reduce(parts))
        assert torch.equal(group.all_gather(parts[rank], [1024] * size), reference.all_gather(parts))
        assert torch.equal(group.broadcast(parts[rank].clone()), parts[0])
        normed, total = group.reduce_add_norm(parts[rank], stream.clone(), stream[0], eps=1e-5, offset=0.0)
        expected = reference.reduce_add_norm(parts, stream, stream[0], eps=1e-5, offset=0.0)
        assert torch.equal(total, expected[1]), turn
        assert (normed.float() - expected[0].float()).norm() < 1e-2 * expected[0].float().norm()
    _check_large_sums(group, rank, size, device)
    x = torch.ones(4, 2048, device=device, dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = x
        for _ in range(5):
            out = group.all_reduce(out)
    for value in (1.0, 0.0, 3.0):
        x.fill_(value)
        graph.replay()
        assert (out == value * size**5).all()
        assert (group.all_reduce(torch.full_like(x, value)) == value * size).all()
    group.waits.check()
    group.collectives.set_budget(0.1)
    assert group.agree([rank + 5]) == [5]
    if rank == 0:  # the others never come
        group.all_reduce(x)
        torch.cuda.synchronize()
        with pytest.raises(PeerTimeout):
            group.waits.check()
    group.agree([0])
    group.close()


def _check_large_sums(group: PushGroup, rank: int, size: int, device: torch.device) -> None:
    """As a step computes them: those of two slices, each begun while the other is under way, and products beside."""
    rng, weight = torch.Generator().manual_seed(1), torch.eye(2048, device=device, dtype=torch.bfloat16)
    shape = (LEAST_SENT_BYTES // 4096, 2048)
    parts, stream, streams, begun = {}, {}, {}, {}
    for half in (0, 1):
        stream[half] = torch.randn(shape, generator=rng).to(device, torch.bfloat16)
        streams[half] = stream[half].clone()
    for number in range(12):
        half = number % 2
        if number > 1:  # finish the one before of this half
            x, one = begun[half]
            normed, _ = one.reduce_add_norm(x, streams[half], stream[0][0], eps=1e-5, offset=0.0)
            expected = reference.reduce_add_norm(parts[half], stream[half], stream[0][0], eps=1e-5, offset=0.0)
            stream[half] = expected[1]
            assert torch.equal(streams[half], expected[1]), number
            assert (normed.float() - expected[0].float()).norm() < 1e-2 * expected[0].float().norm()
        parts[half] = [torch.randn(shape, generator=rng).to(device, torch.bfloat16) for _ in range(size)]
        x = parts[half][rank] @ weight
        begun[half] = x, group.begin_sum(x)
        assert (begun[half][1] is group) == (size > MOST_SENDING_RANKS)
    for half in (0, 1):
        x, one = begun[half]
        assert torch.equal(one.all_reduce(x), reference.all_reduce(parts[half]))


def _check_fallback(rank: int, size: int, port: int) -> None:
    device, library = _join(rank, size, port)
    make, push._test = push._test, lambda *_: "broken for a test" if rank == size - 1 else ""
    assert open_push_group(library, device) is library
    push._test = make
    assert (library.all_reduce(torch.ones(8, device=device)) == size).all()
    library.close()


@pytest.mark.cuda
@pytest.mark.parametrize("check,port", [(_check_values, 29711), (_check_fallback, 29712)])
def test_processes_on_gpus(check, port):
    size = max(2, torch.cuda.device_count())
    torch.multiprocessing.spawn(check, (size, port), nprocs=size)
