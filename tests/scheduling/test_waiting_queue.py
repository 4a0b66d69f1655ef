"""Order of admission: policies, and the bound on being overtaken."""

from __future__ import annotations

from headrace.scheduling.queue import MAX_COMPARED, POLICIES, WaitingQueue
from headrace.scheduling.request import Request
from tests.scheduling.fake_runner import make_ask, make_engine, make_layout


def make_queue(policy: str, starvation_steps: int = 1000, hits: dict[int, int] | None = None) -> WaitingQueue:
    return WaitingQueue(POLICIES.load(policy), starvation_steps, lambda request: (hits or {}).get(request.seq, 0))


def make_request(seq: int, priority: int = 0) -> Request:
    return Request(make_ask(f"r{seq}", [1], priority=priority), seq=seq, max_model_len=64, deadline=None)


def drain(queue: WaitingQueue) -> list[int]:
    order = []
    while (request := queue.peek()) is not None:
        queue.admit(request)
        queue.end_step()
        order.append(request.seq)
    return order


def test_fcfs_goes_by_arrival_and_a_retracted_request_keeps_its_place() -> None:
    queue = make_queue("fcfs")
    for seq in (1, 2, 3):
        queue.push(make_request(seq))
    queue.push(make_request(0))
    assert drain(queue) == [0, 1, 2, 3]


def test_priority_goes_first_then_arrival() -> None:
    queue = make_queue("priority")
    for seq, priority in enumerate([0, 2, 1, 2]):
        queue.push(make_request(seq, priority))
    assert drain(queue) == [1, 3, 2, 0]


def test_who_is_let_in_goes_first_at_its_own_priority_whoever_came_meanwhile() -> None:
    queue = WaitingQueue(POLICIES.load("priority"), 1000, lambda request: 0, {("a",): 1})
    for seq, client in enumerate("aab"):
        ask = make_ask(f"r{seq}", [1], origin=(client, str(seq)))
        queue.push(Request(ask, seq=seq, max_model_len=64, deadline=None))
    newcomer = queue.newcomer()
    assert newcomer is not None and newcomer.path == ("b",)
    queue.push(make_request(3, priority=1))
    queue.let_in(newcomer)
    assert drain(queue) == [3, 2, 0, 1]


def test_longest_prefix_goes_first_then_arrival() -> None:
    queue = make_queue("longest-prefix", hits={1: 3, 2: 9, 3: 3})
    for seq in range(4):
        queue.push(make_request(seq))
    assert drain(queue) == [2, 1, 3, 0]


def test_longest_prefix_goes_by_arrival_when_too_many_wait() -> None:
    looks = []
    queue = WaitingQueue(POLICIES.load("longest-prefix"), 1000, lambda request: looks.append(request) or request.seq)
    for seq in range(MAX_COMPARED + 2):
        queue.push(make_request(seq))
    assert drain(queue)[:3] == [0, 1, MAX_COMPARED + 1]
    assert min(request.seq for request in looks) >= 2


def test_removed_requests_are_skipped_and_may_come_back() -> None:
    queue = make_queue("priority")
    requests = [make_request(seq, priority=seq) for seq in range(3)]
    for request in requests:
        queue.push(request)
    queue.remove(requests[2])
    assert queue.peek() is requests[1] and requests[2] not in queue
    queue.push(requests[2])
    assert drain(queue) == [2, 1, 0]


def test_nobody_is_overtaken_more_often_than_the_bound() -> None:
    queue = make_queue("priority", starvation_steps=5)
    queue.push(make_request(0, priority=-1))
    admitted = []
    for seq in range(1, 50):
        queue.push(make_request(seq, priority=1))
        request = queue.peek()
        queue.admit(request)
        queue.end_step()
        admitted.append(request.seq)
    assert admitted[:7] == [1, 2, 3, 4, 5, 0, 6]


def test_waiting_counts_anew_after_a_retraction() -> None:
    queue = make_queue("priority", starvation_steps=2)
    meek = make_request(0, priority=-1)
    queue.push(meek)
    for seq in (1, 2, 3):
        queue.push(make_request(seq, priority=1))
        queue.admit(queue.peek())
        queue.end_step()
    assert meek not in queue and drain(queue) == [3]
    queue.push(meek)
    queue.push(make_request(4, priority=1))
    assert queue.peek().seq == 4


def test_starvation_bound_holds_in_the_whole_scheduler() -> None:
    """One row, an endless stream of urgent requests, one that is not urgent."""
    engine = make_engine(make_layout(40, max_rows=1), policy="priority", starvation_steps=3)
    engine.add(make_ask("late", [1], 1, priority=-5))
    for index in range(12):
        engine.add(make_ask(f"urgent{index}", [2, index], 1, priority=1))
    order = []
    while engine.scheduler.has_work:
        order += [output.request_id for output in engine.step()]
    assert order.index("late") == 3
    engine.check_outputs()


def test_the_wait_for_the_first_step_is_told_once_it_is_over() -> None:
    """With the first token and the last output; a second wait after a retraction does not count."""
    now = [100.0]
    engine = make_engine(make_layout(40, max_rows=1), clock=lambda: now[0])
    engine.add(make_ask("a", [1, 2], max_tokens=3))
    now[0] += 2
    engine.add(make_ask("b", [3, 4], max_tokens=2))
    engine.add(make_ask("c", [5], max_tokens=2))
    outputs = []
    while engine.scheduler.has_work:
        now[0] += 1
        outputs += engine.step()
        if len(outputs) == 1:
            now[0] += 10
            outputs.append(engine.scheduler.abort("c"))
    told = {
        (o.request_id, len(o.token_ids), o.finish is not None): o.queued_s
        for o in outputs if o.queued_s is not None or o.finish is not None
    }
    assert told["a", 1, False] == told["a", 1, True] == 3.0
    assert told["b", 1, False] == told["b", 1, True] > 10.0 and told["c", 0, True] is None
