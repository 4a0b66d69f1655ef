"""Text that a grammar forces: what the libraries say is forced, how it is split, and how rows jump over it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_structured_engine import BASE, folder  # noqa: F401
from walks import EOS, NUM_WORDS, TOKENS, allowed, library

from headrace import LLM, Grammar, SamplingParams
from headrace.base.grammar import Vocabulary
from headrace.base.sampling import LogitRules, SamplingSpec
from headrace.base.step import RowGrowth, RowStart
from headrace.execution.rows import Rows
from headrace.execution.step import SampleBatch
from headrace.execution.structured import rows as rows_module
from headrace.execution.structured.bitmasks import RowBitmasks
from headrace.execution.structured.forced_tokens import ForcedTokens
from headrace.execution.structured.library import GrammarStore
from headrace.execution.structured.rows import GrammarRows

SPECIAL = frozenset([EOS, TOKENS.index(b"<|call|>")])
TOOL = {
    "type": "object", "properties": {"delivery_town": {"type": "string"}, "number_of_people": {"type": "integer"}},
    "required": ["delivery_town", "number_of_people"], "additionalProperties": False
}
BEGIN, END = '<tool_call>\n{"name": "book_a_table", "arguments": ', "}\n</tool_call>"
CALL = Grammar.structural_tag({"type": "structural_tag", "format": {
    "type": "tag", "begin": BEGIN, "content": {"type": "json_schema", "json_schema": TOOL}, "end": END}})  # fmt: skip
PATTERNED = Grammar.structural_tag({"type": "structural_tag", "format": {"type": "sequence", "elements": [
    {"type": "const_string", "value": "The code is "}, {"type": "regex", "pattern": "[a-c]{2}"}, {
        "type": "const_string", "value": ", as agreed."
    }]}})


def longest(text: str) -> list[int]:
    """The longest token first, as the plainest tokenizer would split."""
    rest, ids = text.encode(), []
    while rest:
        found = max(
            (i for i, token in enumerate(TOKENS) if i not in SPECIAL and rest.startswith(token)),
            key=lambda i: len(TOKENS[i])
        )
        ids.append(found)
        rest = rest[len(TOKENS[found]) :]
    return ids


VOCABULARY = Vocabulary(TOKENS, SPECIAL, longest)


@given(
    st.text('": ,}{[]abtruefls12é\n', min_size=1, max_size=12), st.text('": ,}{[]abtruefls12é\n', max_size=6),
    st.sampled_from('"a :')
)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_runs_are_what_the_tokenizer_writes_whatever_comes_next(text: str, more: str, before: str):
    run = ForcedTokens(VOCABULARY).find(text.encode(), ord(before))
    for continuation in ("", more):
        ids = longest(before + text + continuation)
        if ids[0] == ord(before):
            assert ids[1 : 1 + len(run)] == run
    assert text.encode().startswith(b"".join(TOKENS[i] for i in run))


def test_runs_end_where_a_token_could_reach_beyond():
    finder = ForcedTokens(VOCABULARY)
    assert (
        finder.find(b"xyz", ord("{")) == list(b"xyz") and finder.find(b'xy"', ord("{")) == list(b"xy")
    ), 'it may become ": "'
    assert finder.find(b"xa", ord("{")) == list(b"x"), "ab is a token"
    assert finder.find(b"\xb8\x80", ord("a")) == [] and finder.find(b"", ord("a")) == [], "no text begins there"
    assert finder.find(b"bx", ord("a")) == list(b"bx"), "the tokenizer joins a and b, the output has them apart"
    assert ForcedTokens(Vocabulary(TOKENS, SPECIAL)).find(b"xyz", 5) == []


@pytest.mark.parametrize("grammar", [
    CALL, Grammar.json_schema(TOOL), Grammar.json_schema({"enum": ["alpha", "alphabet", "beta"]}),
    Grammar.regex("(yes|yesterday|no)!?"),
    Grammar.choice(["ab", "abc"]), Grammar.ebnf('root ::= "x" root "y" | "longer"'), Grammar.json_object(), PATTERNED,
    Grammar.structural_tag({"type": "structural_tag", "format": {"type": "const_string", "value": "a日本é"}}),
])  # fmt: skip
def test_what_is_forced_is_all_that_is_allowed(grammar: Grammar):
    lib, seen = library(), 0
    compiled = lib.compile(grammar)
    for seed in range(8):
        draw, matcher = np.random.default_rng(seed), compiled.start()
        for _ in range(60):
            text, ids = matcher.forced_bytes(), allowed(lib, matcher)
            if text:
                seen += 1
                assert EOS not in ids
                assert all(text.startswith(TOKENS[i]) or TOKENS[i].startswith(text) for i in ids), (
                    (text, [TOKENS[i] for i in ids])
                )
            ids = ids[ids != EOS]
            if not len(ids):
                break
            matcher.accept([int(draw.choice(ids))])
    assert seen or grammar == Grammar.json_object()


class Step:
    def __init__(self, ids: list[int], *, is_done: bool):
        self.ids, self.is_done, self.forced = ids, is_done, []

    def read_ids(self) -> list[int]:
        return self.ids


def allowed_words(masks: RowBitmasks) -> np.ndarray:
    """The mask of the only row; everything is allowed where it has none."""
    table, mask_of_row = (part.numpy() for part in masks.send())
    return table[mask_of_row[0]] if mask_of_row[0] >= 0 else np.full_like(table[0], -1)


class Bench:
    """One row with a grammar, driven as the runner does."""

    def __init__(self, grammar: Grammar, *, min_forced: int = 2, **sampling: Any):
        self.store = GrammarStore(lambda: VOCABULARY, len(TOKENS), [EOS])
        self.rows, self.grammars = (
            Rows(2, torch.device("cpu")),
            GrammarRows(self.store, len(TOKENS), 2, torch.device("cpu"), min_forced=min_forced)
        )
        self.store.prepare(grammar).result(200)
        self.grammars.start(0, self.rows.start(RowStart(0, "r", [1, 2], 2, SamplingSpec(grammar=grammar, **sampling))))

    def step(self, index: int, token: int, *, is_done: bool = True) -> tuple[Step, int]:
        """A step that draws output token ``index``; the step, and how many tokens it had to choose from."""
        fill = self.grammars.begin(SampleBatch.of(np.array([0]), np.array([2 + index]), self.rows))
        masks = allowed_words(fill.result())
        step = Step([token], is_done=is_done)
        fill.follow(step)
        return step, int(np.unpackbits(masks.view(np.uint8)).sum())


def test_a_row_jumps_with_one_step_in_flight():
    bench = Bench(CALL)
    step, _ = bench.step(0, ord("<"))
    bench.grammars.catch_up(step)
    ((row, run),) = step.forced
    text = b"".join(TOKENS[i] for i in run).decode()
    assert row == 0 and (BEGIN + "{").startswith("<" + text) and len(text) > len(BEGIN) - 3
    left = (BEGIN + "{")[1 + len(text) :]
    after, _ = bench.step(1 + len(run), longest(left)[0])
    bench.grammars.catch_up(after)
    assert bench.grammars._constraints[0].matcher.error is None


def test_a_row_jumps_with_two_steps_in_flight():
    """The second step is launched before the first is read; what it draws is known by then."""
    bench = Bench(CALL)
    first, _ = bench.step(0, ord("<"), is_done=False)
    second, num_allowed = bench.step(1, 5, is_done=False)
    assert num_allowed == NUM_WORDS * 32, "its draw means nothing"
    bench.grammars.catch_up(first)
    ((_, run),) = first.forced
    third, num_allowed = bench.step(1 + len(run), ord("{"), is_done=False)
    assert num_allowed < 10 and second.forced == []
    bench.grammars.catch_up(third)
    assert bench.grammars._constraints[0].num_tokens == 2 + len(run) + sum(len(r) for _, r in third.forced)


def test_a_matcher_that_gives_up_within_a_run_ends_its_row_alone():
    bench = Bench(CALL)
    constraint = bench.grammars._constraints[0]
    accept, told = constraint.matcher.accept, []

    class Tired:
        error = None
        inner, forced_bytes = constraint.matcher.inner, constraint.matcher.forced_bytes

        def accept(self, token_ids: list[int]) -> None:
            told.extend(token_ids)
            accept(token_ids)
            self.error = "too much work" if len(told) == 4 else None

    constraint._matcher = Tired()
    step, _ = bench.step(0, ord("<"))
    bench.grammars.catch_up(step)
    ((row, run),) = step.forced
    assert (row, [ord("<"), *run], constraint.num_tokens) == (0, told, 4)
    fill = bench.grammars.begin(SampleBatch.of(np.array([0]), np.array([2 + 4]), bench.rows))
    masks = fill.result()
    assert masks.errors == {0: "too much work"} and not allowed_words(masks).any()


def test_rows_jump_where_they_gain_more_together_than_their_step_loses(monkeypatch: pytest.MonkeyPatch):
    gain = len(forced_together(1)[0]) - 1
    assert gain > 1
    monkeypatch.setattr(rows_module, "FORCED_COST", 0.75 * gain)
    assert forced_together(1) == [] and len(forced_together(2)) == 2


def forced_together(num_jumping: int) -> list[list[int]]:
    """The runs of a step of two rows, of which so many may jump."""
    bench = Bench(CALL)
    bench.grammars.release(0)
    for row in range(2):
        sampling = SamplingSpec(grammar=CALL, num_logprobs=-1 if row < num_jumping else 0)
        bench.grammars.start(row, bench.rows.start(RowStart(row, "r", [1, 2], 2, sampling)))
    fill = bench.grammars.begin(SampleBatch.of(np.array([0, 1]), np.array([2, 2]), bench.rows))
    fill.result()
    step = Step([ord("<")] * 2, is_done=True)
    fill.follow(step)
    bench.grammars.catch_up(step)
    return [run for _, run in step.forced]


@pytest.mark.parametrize(
    "sampling", [{"num_logprobs": 1}, {"rules": LogitRules(min_tokens=1, held_ids=[3])}, {"min_forced": 1000}], ids=str
)
def test_rows_that_must_be_sampled_one_by_one_do_not_jump(sampling: dict[str, Any]):
    bench = Bench(CALL, **sampling)
    step, _ = bench.step(0, ord("<"))
    bench.grammars.catch_up(step)
    assert step.forced == []


def test_rows_know_what_they_have_grown_by():
    rows = Rows(2, torch.device("cpu"))
    rows.start(RowStart(1, "r", [4, 5, 6], 3, SamplingSpec()))
    rows.grow(RowGrowth(1, 5, [8, 9]))
    assert rows[1].token_ids.tolist() == [4, 5, 6, -1, -1, 8, 9] and rows[1].prompt_len == 3
    rows.grow(RowGrowth(1, 8, [3]))
    assert rows[1].token_ids.tolist()[-2:] == [-1, 3]


def generate(llm: LLM, asks: list[SamplingParams], min_forced: int) -> list[list[Any]]:
    llm._client._engine.executor._runner._grammars.min_forced = min_forced
    return [output.outputs for output in llm.generate([f"Prompt {i}" for i in range(len(asks))], asks)]


@pytest.fixture(scope="module", params=[1, 2])
def llm(request: pytest.FixtureRequest, folder: Path):  # noqa: F811
    with LLM(str(folder), **BASE, overlap_depth=request.param) as llm:
        llm.generate("x", SamplingParams(grammar=CALL, max_tokens=2))
        yield llm
        llm.check()


def test_documents_are_whole_and_take_fewer_steps(llm: LLM):
    asks = [
        SamplingParams(grammar=CALL, max_tokens=250, temperature=0.0),
        SamplingParams(grammar=CALL, max_tokens=250, seed=4, n=2),
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0),
        SamplingParams(grammar=PATTERNED, max_tokens=60, seed=1),
        SamplingParams(grammar=CALL, max_tokens=250, seed=4, logprobs=1),
    ]
    stepwise = generate(llm, asks, 10**6)
    before = llm.stats()
    jumping = generate(llm, asks, 1)
    after = llm.stats()
    assert (
        after.generation_tokens_total - before.generation_tokens_total
        == sum(len(o.token_ids) for outputs in jumping for o in outputs)
    )
    assert (
        jumping[2][0].token_ids == stepwise[2][0].token_ids and jumping[4][0].token_ids == stepwise[4][0].token_ids
    ), "beside others"
    for outputs in [jumping[i] for i in (0, 1, 4)]:
        for output in outputs:
            if output.finish_reason == "stop":
                assert output.text.startswith(BEGIN) and output.text.endswith(END)
                jsonschema.validate(json.loads(output.text[len(BEGIN) : -len(END)]), TOOL)
            assert output.text.startswith(BEGIN[: len(output.text)])
    assert jumping[3][0].text.startswith("The code is ") and jumping[3][0].text.endswith(", as agreed.")
    assert len(jumping[4][0].logprobs) == len(jumping[4][0].token_ids)


def test_limits_and_stop_strings_within_a_run(llm: LLM):
    for length in (3, 9, 20):
        ((output,),) = generate(llm, [SamplingParams(grammar=CALL, max_tokens=length, temperature=0.0)], 1)
        assert (
            (len(output.token_ids), output.finish_reason) == (length, "length")
            and BEGIN.startswith(output.text[: len(BEGIN)])
        )
    ((output,),) = generate(llm, [SamplingParams(grammar=CALL, max_tokens=100, stop=["book"], temperature=0.0)], 1)
    assert (output.text, output.stop_reason) == ('<tool_call>\n{"name": "', "book")
