"""Collectives by stores into peers' memory: values against plain torch, with all ranks on one GPU, each on a stream of
its own; and what of them is decided without a device."""

from __future__ import annotations

from collections import deque
from random import Random

import pytest
import torch

from headrace.kernels.collective import COLLECTIVES, MOST_RANKS, UNMEASURED, Limits, reference
from headrace.kernels.collective.push import ROOM as DEFAULT_ROOM
from headrace.kernels.collective.push import PushCollectives, Room
from headrace.kernels.collective.sent import Place, Ring
from headrace.kernels.operation import KernelQuery

ROOM = Room(sums=4 << 20, gathers=2 << 20, sent=2 << 20)
ONE_STEP, TWO_STEPS = Limits(4 << 20, 4 << 20, 4 << 20, 1 << 20), Limits(0, 4 << 20, 4 << 20, 1 << 20)
TYPES = [torch.bfloat16, torch.float16, torch.float32]


class Ranks:
    """Ranks that share one GPU: a mailbox, a stream and few blocks each, so that all of them run at once."""

    def __init__(self, size: int, limits: Limits = ONE_STEP):
        from headrace.kernels.collective.mailbox import Mailbox

        self.device = torch.device("cuda", 0)
        self.mailboxes = [Mailbox(self.device, ROOM.mailbox(size)) for _ in range(size)]
        self.streams = [torch.cuda.Stream() for _ in range(size)]
        addresses = [mailbox.address for mailbox in self.mailboxes]
        self.ranks = [
            PushCollectives(addresses, rank, self.device, room=ROOM, limits=limits, most_blocks=12)
            for rank in range(size)
        ]
        for stream in self.streams:  # memory that the allocator need not ask the driver for while kernels wait
            with torch.cuda.stream(stream):
                held = [torch.empty(n, dtype=torch.uint8, device="cuda") for n in (1 << 18, 8 << 20, 40 << 20)]
                del held
        torch.cuda.synchronize()

    def run(self, call, absent: tuple[int, ...] = ()):
        """``call(collectives, rank)`` of all ranks at once; their results."""
        torch.cuda.synchronize()
        results = []
        for rank, (collectives, stream) in enumerate(zip(self.ranks, self.streams, strict=True)):
            with torch.cuda.stream(stream):
                results.append(None if rank in absent else call(collectives, rank))
        torch.cuda.synchronize()
        return results

    def close(self):
        for mailbox in self.mailboxes:
            mailbox.close()


@pytest.fixture
def make_ranks():
    made = []

    def make(*arguments):
        made.append(Ranks(*arguments))
        for dtype in TYPES:
            made[-1].ranks[0].prepare(dtype)
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def draw(shape, dtype, seed: int) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    x[x.abs() < 0.3] = 0.0  # zeros are what mailboxes hold between calls
    return x.to("cuda", dtype)


def same(results, expected, ranks: Ranks):
    assert not any(collectives.failure for collectives in ranks.ranks)
    for result in results:
        assert torch.equal(result, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("limits", [ONE_STEP, TWO_STEPS], ids=["one step", "two steps"])
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_sums(size, limits, make_ranks):
    ranks = make_ranks(size, limits)
    for turn, count in enumerate([8, 4096, 24, 100_000, 8, 4096, 65_536, 1000]):
        dtype = TYPES[turn % 3]
        parts = [draw(count, dtype, seed=turn * 10 + rank) for rank in range(size)]
        results = ranks.run(lambda collectives, rank, parts=parts: collectives.all_reduce(parts[rank]))
        same(results, reference.all_reduce(parts), ranks)


@pytest.mark.cuda
@pytest.mark.parametrize("limits", [ONE_STEP, TWO_STEPS], ids=["one step", "two steps"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_sums_of_two_parts_have_the_bits_of_one(size, limits, make_ranks):
    ranks = make_ranks(size, limits)
    for turn, count in enumerate([8, 4096, 4096, 100_000, 24, 65_536, 1000]):
        dtype = TYPES[turn % 3]
        parts, more = ([draw(count, dtype, seed=turn * 40 + 20 * i + rank) for rank in range(size)] for i in (0, 1))
        kept = [[own.clone() for own in both] for both in (parts, more)]
        results = ranks.run(
            lambda collectives, rank, parts=parts, more=more: collectives.all_reduce(parts[rank], more[rank])
        )
        same(results, reference.all_reduce([x + y for x, y in zip(parts, more, strict=True)]), ranks)
        assert all(map(torch.equal, [*parts, *more], [*kept[0], *kept[1]])), "neither is overwritten"


@pytest.mark.cuda
@pytest.mark.parametrize("size", [2, 3])
def test_streams_add_up_over_ranks_in_the_same_kernel(size, make_ranks):
    """The bits of a sum before it; between other collectives, and where some rank takes two kernels."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("compiled for Hopper")
    from headrace.kernels.streams import Pending, StreamMix, StreamShape, few, groups

    shape, ranks = StreamShape(20, 1e-6, 1e-6), make_ranks(size)
    # few clusters and groups: those of all ranks run at once on one GPU
    cases = [
        (few, 1, 4096, True), (few, 1, 4096, False), (groups, 9, 4096, True), (groups, 33, 1024, False),
        (few, 2, 512, True), (groups, 2, 4096, True), (groups, 64, 512, True),
    ]
    for turn, (own_kernel, count, width, has_more) in enumerate(cases * 3):
        streams = draw((count, 4, width), torch.bfloat16, turn)
        parts, more = (
            [draw((count, width), torch.bfloat16, 100 * i + 10 * turn + rank) for rank in range(size)] for i in (1, 2)
        )
        own = [x + y for x, y in zip(parts, more, strict=True)] if has_more else parts
        post, mixing = draw((count, 4), torch.float32, 3), draw((count, 4, 4), torch.float32, 4)
        mix = StreamMix(
            0.02 * draw((24, 4 * width), torch.float32, 5), draw(3, torch.float32, 6), draw(24, torch.float32, 7)
        )
        norm, num_bytes = draw(width, torch.bfloat16, 8), parts[0].nbytes
        whole = Pending(reference.all_reduce(own), post, mixing)
        expected = own_kernel.pass_streams(streams, whole, mix, norm, shape)

        def run(
            collectives, rank, pending, turn=turn, own=own, rest=(streams, mix, norm, shape), num_bytes=num_bytes,
            own_kernel=own_kernel
        ):
            if turn % 3 == 2 and rank == size - 1:  # whose kernel does not compile, say
                total = collectives.all_reduce(own[rank])
                return own_kernel.pass_streams(rest[0], pending[rank]._replace(out=total, more=None), *rest[1:])
            lent = collectives.lend_sum(num_bytes, torch.bfloat16)
            assert lent is not None and own_kernel.can_sum(rest[0], pending[rank], lent)
            return own_kernel.pass_streams(rest[0], pending[rank], *rest[1:], lent)

        # A kernel's first launch waits for the device, and with it for ranks that wait for this one: a first rank has
        # each of them.
        same(ranks.run(lambda c, rank, own=own: c.all_reduce(own[rank])), whole.out, ranks)
        pending = [Pending(parts[r], post, mixing, more[r] if has_more else None) for r in range(size)]
        results = ranks.run(lambda collectives, rank, run=run, pending=pending: run(collectives, rank, pending))
        for i, wanted in enumerate(expected):
            same([result[i] for result in results], wanted, ranks)
        if turn % 2:
            other = [draw(4096, torch.float16, turn + rank) for rank in range(size)]
            same(ranks.run(lambda c, rank, other=other: c.all_reduce(other[rank])), reference.all_reduce(other), ranks)
    lent, apart = ranks.ranks[0].lend_sum(64, torch.bfloat16), draw((2, 1024), torch.bfloat16, 1)[:, :512]
    for own_kernel in (few, groups):
        streams = draw((2, 4, 512), torch.bfloat16, 1)
        assert not own_kernel.can_sum(streams, Pending(apart, post, mixing), lent), "rows are apart"
    assert ranks.ranks[0].lend_sum(8 << 20, torch.bfloat16) is None, "too large"
    assert make_ranks(size, TWO_STEPS).ranks[0].lend_sum(64, torch.bfloat16) is None


@pytest.mark.cuda
@pytest.mark.parametrize("limits", [ONE_STEP, TWO_STEPS], ids=["one step", "two steps"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_sums_with_norm(size, limits, make_ranks):
    ranks = make_ranks(size, limits)
    cases = [
        (rows, width, splits, TYPES[turn % 2])
        for turn, (rows, width, splits) in enumerate(
            [(1, 4096, 0), (1, 64, 0), (17, 2048, 3), (5, 5120, 0), (30, 8192, 2), (3, 16384, 0), (1, 4096, 4),
             (9, 4096, 5), (2, 72, 1)]
        )
    ]
    for rows, width, splits, dtype in cases:
        weight, stream = draw(width, dtype, 1), draw((rows, width), dtype, 2)
        parts = [
            draw((splits, rows, width), torch.float32, 3 + rank) if splits else draw((rows, width), dtype, 3 + rank)
            for rank in range(size)
        ]
        streams = [stream.clone() for _ in range(size)]
        results = ranks.run(
            lambda collectives, rank, parts=parts, streams=streams, weight=weight: collectives.reduce_add_norm(
                parts[rank], streams[rank], weight, eps=1e-5, offset=1.0
            )
        )
        normed, total = reference.reduce_add_norm(parts, stream, weight, eps=1e-5, offset=1.0)
        same([result[1] for result in results], total, ranks)
        same([result[0] for result in results], results[0][0], ranks)
        error = (results[0][0].double() - normed.double()).norm() / normed.double().norm()
        assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("size", [2, 3, 8])
def test_gathers_and_broadcasts_keep_bits(size, make_ranks):
    ranks = make_ranks(size)
    for turn, shape in enumerate([(1, 2), (3, 1000), (4,), (2, 3, 6), (7, 333), (1, 9000), (5, 2)]):
        rng = torch.Generator().manual_seed(turn)
        parts = [torch.randint(-3, 3, shape, generator=rng, dtype=torch.int32).cuda() for _ in range(size)]
        if turn % 2:
            parts = [part.to(torch.int16).repeat_interleave(2, dim=-1) for part in parts]
        results = ranks.run(lambda collectives, rank, parts=parts: collectives.all_gather(parts[rank]))
        same(results, reference.all_gather(parts), ranks)
        swapped = [torch.stack([part + 5 * rank for rank in range(size)]) for part in parts]
        expected = reference.exchange(swapped)
        results = ranks.run(lambda collectives, rank, parts=swapped: collectives.exchange(parts[rank]))
        assert all(torch.equal(got, wanted) for got, wanted in zip(results, expected, strict=True))
        root = parts[0].clone()
        results = ranks.run(lambda collectives, rank, parts=parts: collectives.broadcast(parts[rank]))
        same(results, root, ranks)


@pytest.mark.cuda
def test_graphs_and_eager_calls_mix(make_ranks):
    ranks = make_ranks(2)
    inputs = {count: [draw(count, torch.bfloat16, rank) for rank in range(2)] for count in (64, 8192, 20_000)}
    graphs = {}
    for count, parts in inputs.items():
        for rank in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=ranks.streams[rank]):
                once = ranks.ranks[rank].all_reduce(parts[rank])
                twice = ranks.ranks[rank].all_reduce(once)
                ranks.ranks[rank].all_gather(twice)
            graphs[count, rank] = graph, twice
    order = [64, 20_000, 8192, 64, 64, 20_000, 20_000, 8192]
    for turn, count in enumerate(order):
        for rank in range(2):
            inputs[count][rank].copy_(draw(count, torch.bfloat16, turn * 2 + rank))
        if turn % 3 == 0:
            eager = [draw(4096, torch.float16, turn + rank) for rank in range(2)]
            same(ranks.run(lambda c, rank, parts=eager: c.all_reduce(parts[rank])), reference.all_reduce(eager), ranks)
        ranks.run(lambda _, rank, count=count: graphs[count, rank][0].replay())
        once = reference.all_reduce(inputs[count])
        same([graphs[count, rank][1] for rank in range(2)], reference.all_reduce([once, once]), ranks)


@pytest.mark.cuda
@pytest.mark.parametrize("size", [2, 3])
def test_large_sums(size, make_ranks):
    """Two under way at once, the first one finished with a norm; places in the mailbox come round many times."""
    ranks = make_ranks(size)
    for turn in range(24):
        rows, width = [(64, 1024), (5, 4096), (33, 1096), (9, 2048)][turn % 4]
        dtype = TYPES[turn % 3] if width < 4096 else torch.bfloat16
        weight, stream = draw(width, dtype, 1), draw((rows, width), dtype, 2)
        parts = [[draw((rows, width), dtype, 10 * turn + 3 * rank + i) for i in (0, 1)] for rank in range(size)]
        own = [[part.clone() for part in both] for both in parts]
        streams = [stream.clone() for _ in range(size)]
        begun = ranks.run(lambda collectives, rank, own=own: [collectives.large.begin(x) for x in own[rank]])

        def finish(_, rank, begun=begun, own=own, streams=streams, weight=weight):
            first, second = begun[rank]
            normed = first.reduce_add_norm(own[rank][0], streams[rank], weight, eps=1e-5, offset=1.0)
            return *normed, second.all_reduce(own[rank][1])

        results = ranks.run(finish)
        normed, total = reference.reduce_add_norm([both[0] for both in parts], stream, weight, eps=1e-5, offset=1.0)
        same([result[1] for result in results], total, ranks)
        same([result[2] for result in results], reference.all_reduce([both[1] for both in parts]), ranks)
        same([result[0] for result in results], results[0][0], ranks)
        error = (results[0][0].double() - normed.double()).norm() / normed.double().norm()
        assert error < (1e-2 if dtype == torch.bfloat16 else 2e-3)


@pytest.mark.cuda
def test_large_sums_have_the_bits_of_others(make_ranks):
    ranks = make_ranks(2)
    parts, stream = [draw((64, 1024), torch.bfloat16, rank) for rank in (0, 1)], draw((64, 1024), torch.bfloat16, 2)
    weight = draw(1024, torch.bfloat16, 3)

    def fuse(collectives, rank):
        return collectives.reduce_add_norm(parts[rank], stream.clone(), weight, eps=1e-5, offset=0.0)

    expected = ranks.run(fuse)
    own = [part.clone() for part in parts]
    begun = ranks.run(lambda collectives, rank: collectives.large.begin(own[rank]))
    results = ranks.run(
        lambda _, rank: begun[rank].reduce_add_norm(own[rank], stream.clone(), weight, eps=1e-5, offset=0.0)
    )
    for got, wanted in zip(results, expected, strict=True):
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])


@pytest.mark.cuda
def test_large_sums_that_are_refused(make_ranks):
    ranks = make_ranks(2)
    own = [[draw((128, 2048), torch.bfloat16, 8 * rank + i) for i in range(5)] for rank in (0, 1)]
    assert ROOM.sent == 4 * own[0][0].nbytes
    expected = [reference.all_reduce([own[0][i], own[1][i]]) for i in range(5)]
    begun = ranks.run(lambda collectives, rank: [collectives.large.begin(x) for x in own[rank]])
    for rank in (0, 1):
        assert [one is None for one in begun[rank]] == [False] * 4 + [True], "four fill the ring"
    results = ranks.run(lambda _, rank: [begun[rank][i].all_reduce(own[rank][i]) for i in range(4)])
    for i in range(4):
        same([result[i] for result in results], expected[i], ranks)
    large, x = ranks.ranks[0].large, torch.zeros(4, 64, device="cuda")
    assert large.begin(x[:, ::2]) is None and large.begin(x[None]) is None and large.begin(x[:0]) is None
    assert large.begin(x.int()) is None and large.begin(x[:, :3].contiguous()) is None
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert large.begin(x) is None, "a replay would repeat the number of the sum"


@pytest.mark.cuda
def test_a_large_sum_does_not_wait_for_an_absent_peer(make_ranks):
    ranks = make_ranks(3)
    for collectives in ranks.ranks:
        collectives.set_budget(0.05)
    own = [draw((4, 1024), torch.bfloat16, rank) for rank in range(3)]
    begun = ranks.run(lambda collectives, rank: collectives.large.begin(own[rank]), absent=(1,))
    ranks.run(lambda _, rank: begun[rank].all_reduce(own[rank]), absent=(1,))
    assert ranks.ranks[0].late == ranks.ranks[2].late == [1]


@pytest.mark.cuda
def test_an_absent_peer_ends_the_wait(make_ranks):
    for limits in (ONE_STEP, TWO_STEPS):
        ranks = make_ranks(3, limits)
        for collectives in ranks.ranks:
            collectives.set_budget(0.05)
        x = draw((4, 1024), torch.bfloat16, 0)
        ranks.run(lambda collectives, rank, x=x: collectives.all_reduce(x), absent=(1,))
        assert 1 in ranks.ranks[0].late and 1 in ranks.ranks[2].late
        assert "rank 0 waited in vain for rank 1" in ranks.ranks[0].failure
        # later calls do not wait again
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(20):
            ranks.ranks[0].reduce_add_norm(x, x.clone(), x[0], eps=1e-5, offset=0.0)
            ranks.ranks[0].all_gather(x)
        end.record()
        end.synchronize()
        assert start.elapsed_time(end) < 50


@pytest.mark.cuda
def test_the_host_ends_a_wait(make_ranks):
    ranks = make_ranks(2)
    ranks.ranks[0].set_budget(60)
    with torch.cuda.stream(ranks.streams[0]):
        ranks.ranks[0].all_gather(draw(64, torch.float32, 0))
    assert not ranks.ranks[0].failure
    ranks.ranks[0].abort()
    torch.cuda.synchronize()
    assert ranks.ranks[0].failure


@pytest.mark.cuda
def test_what_is_refused_is_left_to_others(make_ranks):
    first = make_ranks(2).ranks[0]
    assert first.all_reduce(torch.zeros(3, device="cuda")) is None, "no whole vector"
    assert first.all_reduce(torch.zeros(64, dtype=torch.int32, device="cuda")) is None
    assert first.all_reduce(torch.zeros(4, 64, device="cuda")[:, ::2]) is None
    assert first.all_reduce(torch.zeros(4, 32, device="cuda"), torch.zeros(4, 64, device="cuda")[:, ::2]) is None
    assert first.all_reduce(torch.zeros(0, 8, device="cuda")) is None
    assert first.all_reduce(torch.zeros(8 << 20, device="cuda")) is None, "too large"
    stream = torch.zeros(2, 20, device="cuda", dtype=torch.bfloat16)
    assert first.reduce_add_norm(stream, stream, stream[0], eps=1e-5, offset=0.0) is None
    assert first.all_gather(torch.zeros(1, 3, dtype=torch.uint8, device="cuda")) is None
    assert first.broadcast(torch.zeros(2 << 20, device="cuda")) is None


def test_ranks_are_added_in_order():
    # in float32, from rank 0 on: 2^24 + 1 is 2^24, so the order shows
    parts = [torch.tensor([value]) for value in (2.0**24, 1.0, 1.0, -(2.0**24))]
    assert reference.all_reduce(parts).item() == 0.0
    assert reference.all_reduce(parts[::-1]).item() == 2.0
    assert reference.all_reduce([parts[1], parts[2], parts[0], parts[3]]).item() == 2.0


def test_splits_are_rounded_before_they_are_sent():
    splits = torch.tensor([[[1.0]], [[2.0**-9]]])  # 1 + 2^-9 is no bfloat16
    ones = torch.ones(1, 1, dtype=torch.bfloat16)
    weight = torch.ones(1, dtype=torch.bfloat16)
    _, total = reference.reduce_add_norm([splits, splits], ones, weight, eps=0.0, offset=0.0)
    assert total.item() == 3.0 and reference.round_splits(splits, torch.float32).item() > 1.0


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_two_steps_fit_their_room(size):
    """As `Half` in the source lays them out: the sums, then a slot for each peer."""
    made = PushCollectives.__new__(PushCollectives)
    made.size = size
    for vectors in (1, 7, 8, 9, 63, 64, 65, 1000, 4096, 99_999):
        last = vectors - 1 + 8 * size
        slot = (last // (8 * size) * 8 + last % 8) // 8 * 8
        places = {(v // 8 % size, v // (8 * size) * 8 + v % 8) for v in range(vectors)}
        assert len(places) == vectors and max(place for _, place in places) < slot
        assert 16 * (vectors + (size - 1) * slot) <= made.two_step_bytes(16 * vectors)


READ, MEET = 0, -1


@pytest.mark.parametrize("seed", range(40))
def test_nobody_writes_what_a_peer_has_still_to_read(seed):
    """Ranks of one program that go at their own pace, and sometimes meet; copies take any time, those of a rank end in
    their order."""
    draw = Random(seed)
    size, capacity, program, unread = draw.choice((2, 3)), 1000, [], 0
    for _ in range(150):
        if unread and draw.random() < 0.5:
            program.append(READ)
            unread -= 1
        elif draw.random() < 0.1:
            program.append(MEET)
        elif unread < draw.choice((2, 4, 70)):
            program.append(draw.choice((100, 240, 250, 490)))
            unread += 1
    ranks = [_Rank(Ring(capacity)) for _ in range(size)]
    while any(rank.at < len(program) for rank in ranks):
        rank = draw.choice(ranks)
        peers = [peer for peer in ranks if peer is not rank]
        if rank.copying and draw.random() < 0.3:
            rank.copied.append(rank.copying.popleft().number)
        elif rank.at < len(program):
            rank.advance(program[rank.at], peers)
    assert [rank.refused for rank in ranks] == [ranks[0].refused] * size, "all ranks decide alike"
    assert ranks[0].num_begun > 20


class _Rank:
    """What a rank has sent (None: refused) and read; of its copies which are under way and which have ended."""

    def __init__(self, ring: Ring):
        self.ring, self.at = ring, 0
        self.sent: deque[Place | None] = deque()
        self.copying: deque[Place] = deque()
        self.copied: list[int] = []
        self.unread: list[Place] = []
        self.refused: list[int] = []
        self.num_begun = 0

    def advance(self, num_bytes: int, peers: list[_Rank]) -> None:
        """Send so many bytes, read the next sum if its parts are there, or meet the others if they are there."""
        if num_bytes == MEET:
            if any(peer.at < self.at for peer in peers):
                return
            self.ring.meet()
        elif num_bytes != READ:
            place = self.ring.take(num_bytes)
            self.sent.append(place)
            if place is None:
                self.refused.append(self.at)
            else:
                self.num_begun += 1
                self.copying.append(place)  # from now on it may be written at any time
                for peer in peers:
                    for other in peer.unread:
                        assert place.end <= other.begin or other.end <= place.begin or other.number == place.number
                self.unread.append(place)
        else:
            place = self.sent[0]
            if place is not None:
                if any(place.number not in peer.copied for peer in peers):
                    return
                self.ring.read(place)
                self.unread.remove(place)
            self.sent.popleft()
        self.at += 1


def test_a_sum_that_is_left_out_does_not_keep_its_place():
    """As where a step fails between sending and reading."""
    ring = Ring(1000)
    ring.take(400)
    second = ring.take(400)
    assert second is not None and ring.take(400) is None
    ring.read(second)
    third = ring.take(200)
    assert third is not None and third.begin == 800
    ring.read(third)  # whoever sent it had read the second
    assert ring.take(800) is not None


def test_served_for_two_to_eight_gpus():
    def reason(device="cuda", dtype="bfloat16", ranks=2, capability=(9, 0)):
        return COLLECTIVES.reason_against("push", KernelQuery(device, dtype, capability, {"ranks": ranks}))

    assert reason() is None and reason(ranks=8) is None and reason(dtype="float32", capability=(8, 0)) is None
    assert reason(ranks=9) and reason(ranks=1) and reason(device="cpu") and reason(capability=(7, 5))
    assert 2 * (UNMEASURED.gathers + 4) * (MOST_RANKS - 1) <= DEFAULT_ROOM.gathers
