"""`RequestStream` and `Collector` on their own: merging, broken assemblers, one abort a child."""

from __future__ import annotations

import asyncio

from headrace.base.messages import Abort, EngineRequest, ErrorInfo, Finish, RequestOutput
from headrace.base.sampling import SamplingSpec, StopSpec
from headrace.base.step import TokenLogprobs
from headrace.service.client.outputs import ChoiceDelta, Collector, first_error
from headrace.service.client.stream import RequestStream, merge_deltas


class ScriptedAssembler:
    """Deltas straight from outputs; fails on token 13, finds a stop string at token 7."""

    def __init__(self, num_choices: int):
        self.open = set(range(num_choices))
        self.aborts: list[Abort] = []

    @property
    def is_finished(self) -> bool:
        return not self.open

    def feed(self, output: RequestOutput) -> ChoiceDelta | None:
        index = int(output.request_id[-1])
        if index not in self.open:
            return None
        if 13 in output.token_ids:
            raise UnicodeError("no such token")
        reason = output.finish.reason if output.finish else None
        if 7 in output.token_ids:
            reason = "stop"
            self.aborts.append(Abort(output.request_id, "stop"))
        if reason:
            self.open.discard(index)
        error = output.finish.error if output.finish else None
        return ChoiceDelta(
            index, "".join(map(chr, output.token_ids)), list(output.token_ids), finish_reason=reason, error=error
        )

    def to_abort(self) -> list[Abort]:
        aborts, self.aborts = self.aborts, []
        return aborts


def make_stream(num_choices: int = 2) -> tuple[RequestStream, list[Abort]]:
    sent: list[Abort] = []
    requests = [EngineRequest(f"r/{i}", [1, 2], SamplingSpec(), StopSpec(max_tokens=9)) for i in range(num_choices)]
    return RequestStream("r", requests, ScriptedAssembler(num_choices), sent.extend), sent


async def read(stream: RequestStream) -> list[ChoiceDelta]:
    return [d async for d in stream]


async def test_unread_deltas_are_merged_by_choice():
    stream, sent = make_stream()
    for output in (
        RequestOutput("r/0", [65]), RequestOutput("r/1", [97]), RequestOutput("r/0", [66]),
        RequestOutput("r/1", [98], Finish("length")), RequestOutput("r/0", [], Finish("stop"))
    ):
        stream.feed(output)
    deltas = await read(stream)
    assert (
        {d.index: (d.text, d.token_ids, d.finish_reason) for d in deltas}
        == {0: ("AB", [65, 66], "stop"), 1: ("ab", [97, 98], "length")}
    )
    assert len(deltas) == 2 and not sent and not stream.is_running


async def test_a_stop_string_ends_the_choice_before_the_engine_answers():
    stream, sent = make_stream(1)
    stream.feed(RequestOutput("r/0", [65, 7]))
    assert stream.is_finished and stream.is_running and sent == [Abort("r/0", "stop")]
    assert (await read(stream))[0].finish_reason == "stop"
    stream.feed(RequestOutput("r/0", [66], Finish("stop")))
    assert not stream.is_running and len(sent) == 1, "leaving the loop must not abort what is being aborted"
    assert await read(stream) == []


async def test_output_that_cannot_be_assembled_fails_its_request_alone():
    stream, sent = make_stream()
    stream.feed(RequestOutput("r/1", [98], Finish("length")))
    stream.feed(RequestOutput("r/0", [13]))
    assert sent == [Abort("r/0")]
    stream.feed(RequestOutput("r/0", [14], Finish("abort")))
    deltas = {d.index: d for d in await read(stream)}
    assert deltas[1].finish_reason == "length" and deltas[1].text == "b"
    assert deltas[0].finish_reason == "error" and "no such token" in deltas[0].error.message
    assert not stream.is_running


async def test_failing_ends_every_unfinished_choice():
    stream, sent = make_stream(3)
    stream.feed(RequestOutput("r/1", [98], Finish("length")))
    stream.fail(ErrorInfo("engine_unavailable", "gone"))
    deltas = {d.index: d for d in await read(stream)}
    assert [deltas[i].finish_reason for i in range(3)] == ["error", "length", "error"]
    assert deltas[0].error.kind == "engine_unavailable" and not sent


async def test_a_waiting_reader_is_woken():
    stream, _ = make_stream(1)
    reader = asyncio.create_task(read(stream))
    for token in (65, 66, 67):
        await asyncio.sleep(0)
        stream.feed(RequestOutput("r/0", [token]))
    stream.feed(RequestOutput("r/0", [], Finish("length")))
    assert [t for d in await reader for t in d.token_ids] == [65, 66, 67]


def test_merging_keeps_everything():
    first, second = TokenLogprobs(1, -0.5, 1), TokenLogprobs(2, -1.5, 3)
    merged = merge_deltas(
        ChoiceDelta(
            0, "a", [1], [first], num_cached_tokens=4, prompt_logprobs=[None], num_draft_tokens=3, num_accepted_tokens=1
        ),
        ChoiceDelta(
            0, "b", [2], [second], finish_reason="stop", stop_reason="x", num_draft_tokens=2, num_accepted_tokens=2
        ),
    )
    assert (merged.num_draft_tokens, merged.num_accepted_tokens) == (5, 3)
    merged.num_draft_tokens = merged.num_accepted_tokens = 0
    assert merged == ChoiceDelta(0, "ab", [1, 2], [first, second], "stop", "x", None, 4, [None])


def test_collector_adds_up_and_snapshots_do_not_change():
    collector = Collector("r", "hi", [1], 2)
    collector.add(ChoiceDelta(1, "a", [5], [TokenLogprobs(5, -0.25, 1)], num_cached_tokens=16))
    early = collector.snapshot()
    collector.add(
        ChoiceDelta(
            1, "b", [6], [TokenLogprobs(6, -0.5, 1)], finish_reason="stop", stop_reason=6, num_draft_tokens=4,
            num_accepted_tokens=1
        )
    )
    collector.add(ChoiceDelta(0, "", [], finish_reason="error", error=ErrorInfo("step_failed", "boom")))
    output = collector.output
    assert [(o.num_draft_tokens, o.num_accepted_tokens) for o in (*early.outputs, *output.outputs)] == [
        (0, 0), (0, 0), (0, 0), (4, 1)
    ]
    assert (early.outputs[1].text, early.outputs[1].token_ids, early.outputs[1].finish_reason) == ("a", [5], None)
    assert (output.outputs[1].text, output.outputs[1].token_ids, output.outputs[1].stop_reason) == ("ab", [5, 6], 6)
    assert output.outputs[1].cumulative_logprob == -0.75 and output.num_cached_tokens == 16 and output.prompt == "hi"
    assert first_error(early) is None and first_error(output).kind == "step_failed"
