"""Outputs of several steps joined say what they said one by one."""

from __future__ import annotations

import pytest

from headrace.base.messages import Finish, RequestOutput
from headrace.base.step import TokenLogprobs
from headrace.service.joining import join_outputs


def entry(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5 * token, 1, [token], [-0.5 * token])


OUTPUTS = [
    RequestOutput("r", [], None, 4, None, [entry(1), entry(2)]),
    RequestOutput("r", [3], None, 4, [entry(3)], [entry(4)], queued_s=0.25),
    RequestOutput("r", [5, 6], None, 4, [entry(5), entry(6)], num_draft_tokens=3, num_accepted_tokens=1),
    RequestOutput("r", [7], Finish("stop", 7), 4, [entry(7)], queued_s=0.25, num_draft_tokens=2),
]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_nothing_is_lost_or_moved(count: int):
    parts = [join_outputs(OUTPUTS[i : i + count]) for i in range(0, len(OUTPUTS), count)]
    assert len(parts) == -(-len(OUTPUTS) // count)
    assert [token for part in parts for token in part.token_ids] == [3, 5, 6, 7]
    assert [p.token_id for part in parts for p in part.logprobs or ()] == [3, 5, 6, 7]
    assert [p.token_id for part in parts for p in part.prompt_logprobs or ()] == [1, 2, 4]
    assert [part.finish for part in parts] == [None] * (len(parts) - 1) + [Finish("stop", 7)]
    assert sum(part.num_draft_tokens for part in parts) == 5 and sum(part.num_accepted_tokens for part in parts) == 1
    assert all(part.num_cached_tokens == 4 for part in parts) and parts[-1].queued_s == 0.25


def test_what_nobody_asked_for_stays_away():
    joined = join_outputs([RequestOutput("r", [1], queued_s=0.5), RequestOutput("r", [2])])
    assert joined == RequestOutput("r", [1, 2], queued_s=0.5)
