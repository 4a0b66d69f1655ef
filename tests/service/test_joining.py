"""Outputs of several steps as one message: what each request got is the same."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from headrace.base.messages import EngineStats, Finish, Outputs, Reply, RequestOutput
from headrace.base.step import TokenLogprobs
from headrace.service.joining import join_messages

NAMES = ("a", "b", "c")


@st.composite
def runs(draw: st.DrawFn) -> list[Outputs | Reply]:
    """What an engine may send: requests that begin, go on, end, and begin again under the same id; answers in
    between."""
    messages: list[Outputs | Reply] = []
    running: set[str] = set()
    for number in range(draw(st.integers(1, 12))):
        if draw(st.integers(0, 5)) == 0:
            messages.append(Reply(number))
            continue
        outputs = []
        for name in NAMES:
            if draw(st.booleans()):
                is_first, ends = name not in running, draw(st.integers(0, 3)) == 0
                tokens = draw(st.lists(st.integers(0, 99), max_size=2))
                logprobs = (
                    [TokenLogprobs(t, -1.0, 1, [], []) for t in tokens] if draw(st.booleans()) and tokens else None
                )
                outputs.append(
                    RequestOutput(
                        name, tokens, Finish("length") if ends else None, 5 if is_first else 0, logprobs,
                        queued_s=0.5 if is_first else None
                    )
                )
                running = running - {name} if ends else running | {name}
        messages.append(Outputs(outputs, EngineStats(steps_total=number) if draw(st.booleans()) else None))
    return messages


def lives_of(messages: list) -> dict[str, list[list]]:
    """Of each id, each life's tokens, logprobs, cached tokens, seconds queued and end."""
    lives: dict[str, list[list]] = {name: [] for name in NAMES}
    for output in (o for m in messages if isinstance(m, Outputs) for o in m.outputs):
        lived = lives[output.request_id]
        if not lived or lived[-1][-1] is not None:
            lived.append([[], [], 0, None, None])
        life = lived[-1]
        life[0] += output.token_ids
        life[1] += output.logprobs or []
        life[2] = max(life[2], output.num_cached_tokens)
        life[3] = life[3] if life[3] is not None else output.queued_s
        life[4] = output.finish
    return lives


@given(runs())
def test_joined_messages_say_the_same(messages: list):
    joined = join_messages(messages)
    assert lives_of(joined) == lives_of(messages)
    assert [m for m in joined if isinstance(m, Reply)] == [m for m in messages if isinstance(m, Reply)]
    assert not any(isinstance(a, Outputs) and isinstance(b, Outputs) for a, b in itertools.pairwise(joined))
    assert (
        [m.stats for m in messages if isinstance(m, Outputs) and m.stats][-1:]
        == [m.stats for m in joined if isinstance(m, Outputs) and m.stats][-1:]
    )
    replies = [
        sum(len(o.token_ids) for m in messages[: messages.index(r)] if isinstance(m, Outputs) for o in m.outputs)
        for r in messages if isinstance(r, Reply)
    ]
    assert replies == [
        sum(len(o.token_ids) for m in joined[: joined.index(r)] if isinstance(m, Outputs) for o in m.outputs)
        for r in joined if isinstance(r, Reply)
    ]


def test_a_message_alone_stays_as_it_is():
    message = Outputs([RequestOutput("a", [1])])
    assert join_messages([message])[0] is message
