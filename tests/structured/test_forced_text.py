"""Text that a grammar forces: what the libraries say is forced, how it is split, and how rows verify it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_structured_engine import BASE, folder  # noqa: F401
from walks import EOS, TOKENS, allowed, library

from headrace import LLM, Grammar, SamplingParams
from headrace.base.grammar import Vocabulary
from headrace.base.sampling import LogitRules, SamplingSpec
from headrace.base.step import RowDraft, RowStart
from headrace.execution.rows import Rows
from headrace.execution.step import SampleBatch
from headrace.execution.structured.forced_tokens import ForcedTokens
from headrace.execution.structured.library import GrammarStore
from headrace.execution.structured.rows import GrammarRows
from headrace.scheduling.speculation.policy import DraftPolicy

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
    """A launched step; of its ids ``count`` count."""

    def __init__(self, ids: list[int], count: int, *, is_done: bool):
        self.ids, self.count, self.is_done = ids, count, is_done
        self.drafts: list[RowDraft] = []

    def read_tokens(self) -> tuple[list[int], list[int]]:
        return self.ids, [self.count] * len(self.ids)


class Drafts:
    def __init__(self, ids: list[int]):
        self.ids = ids

    def read(self) -> np.ndarray:
        return np.array([self.ids])


class Bench:
    """One row with a grammar, driven as the runner does."""

    def __init__(self, grammar: Grammar, *, forces: bool = True, **sampling: Any):
        self.store = GrammarStore(lambda: VOCABULARY, len(TOKENS), [EOS])
        self.rows, self.grammars = (
            Rows(2, torch.device("cpu")),
            GrammarRows(self.store, len(TOKENS), 2, torch.device("cpu"), forces=forces)
        )
        self.store.prepare(grammar).result(200)
        self.grammars.start(0, self.rows.start(RowStart(0, "r", [1, 2], 2, SamplingSpec(grammar=grammar, **sampling))))

    def step(
        self, sampled: list[int], drafts: tuple[int, ...] = (), *, is_done: bool = True
    ) -> tuple[Step, np.ndarray]:
        """A step that verifies drafts, and of whose tokens ``sampled`` count; the step, and [1 + drafts, V] what each
        of its positions was allowed."""
        offsets = range(1 + len(drafts))
        batch = SampleBatch.of(np.array(([0] * len(offsets), offsets)), len(drafts), self.rows)
        fill = self.grammars.begin(batch, Drafts(list(drafts)) if drafts else None)
        table, mask_of_row = (part.numpy() for part in fill.result().send())
        masks = np.stack([table[slot] if slot >= 0 else np.full_like(table[0], -1) for slot in mask_of_row])
        step = Step(sampled + [7] * (len(offsets) - len(sampled)), len(sampled), is_done=is_done)
        fill.follow(step)
        return step, np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")[:, : len(TOKENS)]


def forced(step: Step) -> list[int]:
    return step.drafts[0].token_ids if step.drafts else []


@pytest.mark.parametrize(
    "sampling", [{}, {"num_logprobs": 1}, {"rules": LogitRules(min_tokens=1, held_ids=[3])}], ids=str
)
def test_forced_text_is_reported_behind_what_was_sampled(sampling: dict[str, Any]):
    bench = Bench(CALL, **sampling)
    step, _ = bench.step([ord("<")])
    bench.grammars.catch_up(step)
    (draft,) = step.drafts
    text = b"".join(TOKENS[i] for i in draft.token_ids).decode()
    assert (draft.row, draft.start) == (0, 3), "behind the prompt and one token"
    assert (BEGIN + "{").startswith("<" + text) and len(text) > len(BEGIN) - 3
    quiet = Bench(CALL, forces=False)
    step, _ = quiet.step([ord("<")])
    quiet.grammars.catch_up(step)
    assert step.drafts == []


@pytest.mark.parametrize("has_states", [True, False])
@pytest.mark.parametrize("is_done", [True, False])
def test_positions_behind_drafts_are_allowed_what_they_would_be_one_by_one(
    has_states: bool, is_done: bool, monkeypatch: pytest.MonkeyPatch
):
    if not has_states:
        monkeypatch.setattr("headrace.execution.structured.llguidance.build_automaton", lambda *_: None)
    whole = longest(BEGIN + '{"delivery_town": "a", "number_of_people": 12}' + END)
    plain = Bench(CALL)
    expected = []
    for token in whole:
        step, masks = plain.step([token])
        plain.grammars.catch_up(step)
        expected.append(masks[0])
    bench, at = Bench(CALL), 0
    for right, more in ((0, 0), (3, 0), (2, 3), (0, 4), (9, 0), (5, 2), (1, 1)):
        drafts = whole[at : at + right]
        if more:
            drafts = [*drafts, whole[at + right] + 1, *range(5, 5 + more - 1)]
        step, masks = bench.step(whole[at : at + right + 1], tuple(drafts), is_done=is_done)
        assert (masks[: right + 1] == expected[at : at + right + 1]).all()
        at += right + 1
        if is_done:
            bench.grammars.catch_up(step)
    bench.grammars.catch_up(step)
    assert bench.grammars._constraints[0].num_tokens == at


def test_nothing_is_asked_behind_an_end_or_a_missing_draft():
    bench = Bench(Grammar.regex("ab"))
    _, masks = bench.step([ord("a")], (ord("a"), ord("b"), EOS, 7, 7))
    assert masks[0].sum() >= 1 and masks[2, EOS] and masks[3:].all()
    bench = Bench(Grammar.regex("ab"))
    _, masks = bench.step([ord("a")], (ord("a"), -1, 7))
    assert not masks[1].all() and masks[2:].all()


def generate(llm: LLM, asks: list[SamplingParams], *, forces: bool) -> list[list[Any]]:
    llm._client._engine.executor._runner._grammars._forces = forces
    return [output.outputs for output in llm.generate([f"Prompt {i}" for i in range(len(asks))], asks)]


@pytest.fixture(scope="module", params=[1, 2])
def llm(request: pytest.FixtureRequest, folder: Path):  # noqa: F811
    # Without measured times all that is forced is verified at once; the number of steps depends on nothing else.
    with pytest.MonkeyPatch.context() as patch, LLM(str(folder), **BASE, overlap_depth=request.param) as llm:
        patch.setattr(DraftPolicy, "note_time", lambda *_, **__: None)
        llm.generate("x", SamplingParams(grammar=CALL, max_tokens=2))
        yield llm
        llm.check()


def test_drafts_change_nothing_but_the_number_of_steps(llm: LLM):
    asks = [
        SamplingParams(grammar=CALL, max_tokens=250, temperature=0.0),
        SamplingParams(grammar=CALL, max_tokens=250, seed=4, n=2),
        SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0),
        SamplingParams(grammar=PATTERNED, max_tokens=60, seed=1, repetition_penalty=1.3),
        SamplingParams(grammar=CALL, max_tokens=250, seed=4, logprobs=1),
        SamplingParams(grammar=Grammar.regex("[ab]" + "ZQXJ" * 12), max_tokens=60, seed=4, min_tokens=9),
    ]
    stepwise, before = generate(llm, asks, forces=False), llm.stats()
    drafted, after = generate(llm, asks, forces=True), llm.stats()
    for plain, fast in zip(stepwise, drafted, strict=True):
        assert [o.token_ids for o in fast] == [o.token_ids for o in plain]
        assert [o.finish_reason for o in fast] == [o.finish_reason for o in plain]
    tokens = after.generation_tokens_total - before.generation_tokens_total
    assert tokens == sum(len(o.token_ids) for outputs in drafted for o in outputs)
    plain, fast = stepwise[4][0].logprobs, drafted[4][0].logprobs
    assert [(e.token_id, e.rank) for e in plain] == [(e.token_id, e.rank) for e in fast]
    assert [e.logprob for e in plain] == pytest.approx([e.logprob for e in fast], abs=1e-4)
    ((alone,),), start = generate(llm, asks[5:], forces=True), after.steps_total
    assert alone.text[1:] == "ZQXJ" * 12 and llm.stats().steps_total - start < 12


def test_limits_and_stop_strings_within_a_run(llm: LLM):
    for length in (3, 9, 20):
        ((output,),) = generate(llm, [SamplingParams(grammar=CALL, max_tokens=length, temperature=0.0)], forces=True)
        assert (
            (len(output.token_ids), output.finish_reason) == (length, "length")
            and BEGIN.startswith(output.text[: len(BEGIN)])
        )
    for forces in (False, True):
        asks = [SamplingParams(grammar=CALL, max_tokens=100, stop=["book"], temperature=0.0)]
        ((output,),) = generate(llm, asks, forces=forces)
        assert output.text == BEGIN[: BEGIN.index("book")] and output.finish_reason == "stop"
