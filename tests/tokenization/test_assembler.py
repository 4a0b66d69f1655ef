"""Deltas of a choice merge to its whole output, whatever the chunking; stop strings end it for the user at once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_samples import byte_level, model_facts, pieces

from headrace.base.messages import Abort, ErrorInfo, Finish, RequestOutput
from headrace.base.sampling import SamplingParams
from headrace.base.step import TokenLogprobs
from headrace.service.client.assembler import OutputAssembler
from headrace.service.client.outputs import ChoiceDelta
from headrace.service.client.requests import build_requests
from headrace.service.tokenization import Tokenizer


def assemble(tokenizer: Tokenizer | None, prompt: list[int] | None = None, **params: object) -> OutputAssembler:
    asked = SamplingParams(**{"max_tokens": 40, **params})
    return OutputAssembler(
        build_requests("r", prompt or [5], asked, facts=model_facts(500), tokenizer=tokenizer), asked, tokenizer
    )


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def logprobs_of(ids: list[int]) -> list[TokenLogprobs]:
    return [TokenLogprobs(i, -float(i), 1) for i in ids]


def test_text_and_tokens_arrive():
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "Hello, world!")
    assembler = assemble(tokenizer)
    first = assembler.feed(RequestOutput("r", ids[:2], num_cached_tokens=4))
    assert first == ChoiceDelta(0, tokenizer.decode(ids[:2]), ids[:2], num_cached_tokens=4)
    last = assembler.feed(RequestOutput("r", ids[2:], Finish("length")))
    assert first.text + last.text == "Hello, world!"
    assert (
        last.finish_reason, last.stop_reason, assembler.is_finished, assembler.to_abort()
    ) == ("length", None, True, [])
    assert assembler.feed(RequestOutput("r", ids)) is None
    assert assembler.feed(RequestOutput("unknown", ids)) is None


def test_a_stop_string_ends_the_choice_and_the_engine_is_told_once():
    tokenizer = byte_level()
    ids = [tokenizer._backend.token_to_id(c) for c in "abxyzcd"]
    assembler = assemble(tokenizer, stop=["yz", "never"], logprobs=0)
    held = assembler.feed(RequestOutput("r", ids[:4], logprobs=logprobs_of(ids[:4])))
    assert (held.text, held.token_ids, held.finish_reason) == ("abx", ids[:4], None)
    last = assembler.feed(RequestOutput("r", ids[4:], logprobs=logprobs_of(ids[4:])))
    assert (last.text, last.token_ids, last.logprobs) == ("", ids[4:5], logprobs_of(ids[4:5]))
    assert (last.finish_reason, last.stop_reason, assembler.is_finished) == ("stop", "yz", True)
    assert assembler.to_abort() == [Abort("r", "stop")]
    assert assembler.to_abort() == []
    assert assembler.feed(RequestOutput("r", [5], Finish("stop"))) is None


def test_drafts_behind_a_stop_string_are_not_counted():
    tokenizer = byte_level()
    ids = [tokenizer._backend.token_to_id(c) for c in "abxyz"]
    for kept, stop in ((4, "y"), (1, "a")):
        assembler = assemble(tokenizer, stop=[stop])
        delta = assembler.feed(RequestOutput("r", ids, num_draft_tokens=6, num_accepted_tokens=4))
        assert (len(delta.token_ids), delta.num_draft_tokens, delta.num_accepted_tokens) == (kept, 6, kept - 1)
    whole = assemble(tokenizer).feed(RequestOutput("r", ids, num_draft_tokens=6, num_accepted_tokens=4))
    assert (whole.num_draft_tokens, whole.num_accepted_tokens) == (6, 4)


def test_a_stop_string_in_the_last_output_needs_no_abort():
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "abc")
    assembler = assemble(tokenizer, stop="b", include_stop_str_in_output=True)
    delta = assembler.feed(RequestOutput("r", ids, Finish("length")))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("ab", "stop", "b")
    assert assembler.to_abort() == []


def test_the_stop_token_is_counted_but_not_shown():
    tokenizer = byte_level()
    x, y = (tokenizer._backend.token_to_id(c) for c in "xy")
    for include, text in ((False, "x"), (True, "xy")):
        assembler = assemble(tokenizer, stop_token_ids=[y], include_stop_str_in_output=include)
        delta = assembler.feed(RequestOutput("r", [x, y], Finish("stop", stop_id=y)))
        assert (delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason) == (text, [x, y], "stop", y)
    ended = assemble(tokenizer).feed(RequestOutput("r", [x, 2], Finish("stop", stop_id=2)))
    assert (ended.text, ended.stop_reason) == ("x", None)


def test_a_special_token_named_as_stop_string_is_the_reason():
    tokenizer = byte_level()
    pad = tokenizer.special_id("<|pad|>")
    delta = assemble(tokenizer, stop=["<|pad|>"]).feed(RequestOutput("r", [pad], Finish("stop", stop_id=pad)))
    assert (delta.finish_reason, delta.stop_reason, delta.text) == ("stop", "<|pad|>", "")


def test_errors_and_aborts_pass():
    info = ErrorInfo("step_failed", "boom")
    failed = assemble(None).feed(RequestOutput("r", [], Finish("error", error=info)))
    assert (failed.finish_reason, failed.error, failed.text) == ("error", info, "")
    tokenizer = byte_level()
    half = tokenizer._backend.token_to_id("ð")
    assembler = assemble(tokenizer)
    assert assembler.feed(RequestOutput("r", [half])).text == ""
    aborted = assembler.feed(RequestOutput("r", [], Finish("abort")))
    assert (aborted.text, aborted.finish_reason) == ("\ufffd", "abort")


def test_prompt_logprobs_wait_for_the_first_token():
    assembler = assemble(None, [5, 6, 7, 8], prompt_logprobs=1)
    found = logprobs_of([6, 7, 8])
    assert assembler.feed(RequestOutput("r", [], prompt_logprobs=found[:2])) is None
    assert assembler.feed(RequestOutput("r", [9], prompt_logprobs=found[2:])).prompt_logprobs == [None, *found]
    assert assembler.feed(RequestOutput("r", [9])).prompt_logprobs is None


def test_choices_are_kept_apart():
    tokenizer = byte_level()
    assembler = assemble(tokenizer, n=2, temperature=1.0, stop="b", prompt_logprobs=0)
    a, b = (tokenizer._backend.token_to_id(c) for c in "ab")
    assert assembler.feed(RequestOutput("r/1", [a])).prompt_logprobs is None
    assert assembler.feed(RequestOutput("r/0", [a])).prompt_logprobs == [None]
    assert assembler.feed(RequestOutput("r/1", [b])).index == 1
    assert not assembler.is_finished
    assert assembler.to_abort() == [Abort("r/1", "stop")]
    assembler.feed(RequestOutput("r/0", [a], Finish("length")))
    assert assembler.is_finished


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([byte_level, pieces]), st.lists(st.integers(3, 270), min_size=1, max_size=30),
    st.lists(st.integers(1, 5), min_size=1),
    st.lists(st.sampled_from(["a", "ab", "é", "xy", " "]), max_size=3), st.booleans(),
)
def test_deltas_merge_to_one_output(make, ids, sizes, stops, include):
    tokenizer = make()
    ids = [i % tokenizer.vocab_size for i in ids]
    params = {"stop": stops, "include_stop_str_in_output": include, "logprobs": 0}
    whole = assemble(tokenizer, **params).feed(RequestOutput("r", ids, Finish("length"), logprobs=logprobs_of(ids)))
    assembler, text, tokens, logprobs, finish, at = assemble(tokenizer, **params), "", [], [], None, 0
    for size in [*sizes, len(ids)]:
        part, at = ids[at : at + size], at + size
        delta = assembler.feed(
            RequestOutput("r", part, Finish("length") if at >= len(ids) else None, logprobs=logprobs_of(part))
        )
        if delta is not None:
            text, tokens, logprobs, finish = (
                text + delta.text, tokens + delta.token_ids, logprobs + delta.logprobs, delta
            )
        if at >= len(ids):
            break
    assert (text, tokens, logprobs) == (whole.text, whole.token_ids, whole.logprobs)
    assert (finish.finish_reason, finish.stop_reason) == (whole.finish_reason, whole.stop_reason)
    assert len(tokens) == len(logprobs)
