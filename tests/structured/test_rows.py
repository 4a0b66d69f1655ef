"""Masks by row: what the device must know before the host knows the token before, replay, held tokens, broken
grammars."""

from __future__ import annotations

from concurrent.futures import Future
from threading import Event
from typing import Any

import numpy as np
import pytest

from headrace.base.errors import ConfigError, RequestError, UnsupportedFeature
from headrace.base.grammar import Grammar, Vocabulary
from headrace.base.sampling import LogitRules, SamplingSpec
from headrace.base.step import RowDraft, RowStart
from headrace.execution.rows import Rows, RowTokens
from headrace.execution.step import SampleBatch
from headrace.execution.structured.bitmasks import BitmaskTable, RowBitmasks
from headrace.execution.structured.lazy_dfa import LazyDfa
from headrace.execution.structured.library import GrammarStore
from headrace.execution.structured.rows import GrammarRows

torch = pytest.importorskip("torch")

VOCAB_SIZE, EOS = 40, 39


class CountMatcher:
    """Allows the one token that is the number of tokens so far; after ``end`` of them end-of-text alone."""

    def __init__(self, end: int):
        self.end, self.seen, self.error = end, [], None

    def accept(self, token_ids: list[int]) -> None:
        for token in token_ids:
            if token not in self.allowed():
                self.error = f"{token} is not allowed"
                return
            self.seen.append(token)

    def forced_bytes(self) -> bytes:
        raise AssertionError("no vocabulary, no jumps")

    def allowed(self) -> set[int]:
        return (
            {EOS} if len(self.seen) >= self.end
            else {len(self.seen), *({EOS} if len(self.seen) >= self.end - 1 else ())}
        )


class CountGrammar:
    states = None

    def __init__(self, library: CountLibrary, end: int):
        self.library, self.end = library, end

    def start(self) -> CountMatcher:
        return CountMatcher(self.end)


class CountLibrary:
    """The text of a grammar is the number of tokens; compiles when ``gate`` is open."""

    def __init__(self, *_: Any):
        self.gate, self.compiled = Event(), []
        self.gate.set()

    def compile(self, grammar: Grammar) -> CountGrammar:
        self.gate.wait(200)
        self.compiled.append(grammar.text)
        if grammar.text == "bad":
            raise RequestError("a bad grammar", param="regex")
        return CountGrammar(self, int(grammar.text))

    def fill(self, matchers: list[CountMatcher], masks: np.ndarray) -> None:
        masks[:] = 0
        for mask, matcher in zip(masks, matchers, strict=True):
            for token in matcher.allowed():
                mask[token // 32] |= np.int32(1 << token % 32) if token % 32 < 31 else np.int32(-(2**31))


class Step:
    """A launched step whose ids are known when ``is_done``."""

    def __init__(self, ids: list[int], *, is_done: bool = True):
        self.ids, self.is_done, self.num_reads = ids, is_done, 0
        self.drafts: list[RowDraft] = []

    def read_tokens(self) -> tuple[list[int], list[int]]:
        self.num_reads += 1
        return self.ids, [1] * len(self.ids)


def store_of(library: CountLibrary, **options: Any) -> GrammarStore:
    return GrammarStore(
        lambda: Vocabulary([], frozenset()), VOCAB_SIZE, [EOS], choose=lambda _: ("count", lambda *_: library),
        **options
    )


class Bench:
    """Rows and their grammars, as the runner drives them."""

    def __init__(self) -> None:
        self.rows = Rows(8, torch.device("cpu"))
        self.grammars = GrammarRows(store_of(CountLibrary()), VOCAB_SIZE, 8, torch.device("cpu"))
        self.num_sampled: dict[int, int] = {}

    def start(
        self, row: int, end: int | None, *, output: tuple[int, ...] = (), rules: LogitRules | None = None
    ) -> RowTokens:
        grammar = None if end is None else Grammar("regex", str(end))
        self.num_sampled[row] = len(output)
        known = self.rows.start(
            RowStart(row, f"r{row}", [1, 2, *output], 2, SamplingSpec(grammar=grammar, rules=rules))
        )
        if grammar is not None:
            self.grammars.start(row, known)
        return known

    def batch(self, *rows: int) -> SampleBatch:
        return SampleBatch.of(np.array((rows, [0] * len(rows))), 0, self.rows)

    def step(
        self, ids: dict[int, int], *, is_done: bool = True
    ) -> tuple[dict[int, set[int]], dict[int, str | None], Step]:
        """One step of the rows of ``ids``, which then draw those: the tokens each was allowed, errors, the step."""
        batch = self.batch(*ids)
        fill = self.grammars.begin(batch)
        assert fill is not None
        masks = fill.result()
        step = Step(list(ids.values()), is_done=is_done)
        fill.follow(step)
        for row in ids:
            self.num_sampled[row] += 1
        allowed = read_masks(masks, list(ids))
        return {row: allowed[row] for row in ids if self.rows[row].sampling.grammar is not None}, masks.errors, step


def read_masks(masks: RowBitmasks, rows: list[int]) -> dict[int, set[int]]:
    table, mask_of_row = (part.numpy() for part in masks.send())
    bits = np.unpackbits(table.astype("<i4").view(np.uint8), bitorder="little", axis=-1)[:, :VOCAB_SIZE]
    return {
        row: set(map(int, np.flatnonzero(bits[place]))) if place >= 0 else set(range(VOCAB_SIZE)) for row,
        place in zip(rows, mask_of_row, strict=True)
    }


@pytest.mark.parametrize("is_done", [True, False])
def test_masks_follow_the_tokens_whenever_they_become_known(is_done: bool):
    bench = Bench()
    bench.start(0, 3), bench.start(5, 2)
    bench.start(2, None)
    assert bench.grammars.begin(bench.batch(2)) is None
    allowed, _, first = bench.step({2: 9, 5: 0, 0: 0}, is_done=is_done)
    assert allowed == {5: {0}, 0: {0}}
    allowed, _, second = bench.step({0: 1, 2: 9, 5: 1}, is_done=is_done)
    assert allowed == {0: {1}, 5: {1, EOS}} and first.num_reads == 1 and second.num_reads == 0
    assert bench.step({5: EOS, 0: 2})[0] == {5: {EOS}, 0: {2, EOS}}


def test_a_step_beyond_the_end_is_free():
    bench = Bench()
    bench.start(0, 1)
    bench.step({0: EOS}, is_done=False)
    allowed, errors, _ = bench.step({0: 7})
    assert allowed == {0: set(range(VOCAB_SIZE))} and errors == {}
    assert bench.step({0: 7})[1] == {}


def test_a_token_that_was_not_allowed_ends_the_row():
    bench = Bench()
    bench.start(0, 5), bench.start(1, 5)
    bench.step({0: 30, 1: 0})
    allowed, errors, _ = bench.step({0: 1, 1: 1})
    assert allowed == {0: set(), 1: {1}} and errors == {0: "30 is not allowed"}


def test_rows_resume_after_a_retraction_and_are_not_confused_with_their_successors():
    bench = Bench()
    bench.start(0, 4)
    bench.step({0: 0}, is_done=False)
    bench.grammars.release(0)
    bench.start(0, 4, output=(0, 1))
    assert bench.step({0: 2})[0] == {0: {2}}, "what the step before drew for the row's former request is not its token"
    bench.grammars.reset()
    bench.start(0, 4)
    assert bench.step({0: 0})[0] == {0: {0}}


def test_ends_are_held_back_while_there_is_something_else():
    bench = Bench()
    bench.start(0, 1, rules=LogitRules(min_tokens=3, held_ids=[EOS]))
    assert bench.step({0: 0})[0] == {0: {0}}, "the end is allowed, and held back"
    assert bench.step({0: EOS})[0] == {0: {EOS}}, "nothing else is allowed"
    bench.start(1, 2, rules=LogitRules(min_tokens=1, held_ids=[EOS]))
    assert [bench.step({1: t})[0][1] for t in (0, 1)] == [{0}, {1, EOS}]


def test_the_store_compiles_each_grammar_once_and_forgets_the_oldest():
    library = CountLibrary()
    store = store_of(library, max_compiled=2)
    first = store.prepare(Grammar("regex", "1"))
    assert store.prepare(Grammar("regex", "1")) is first and first.result(200).end == 1
    for text in ("2", "3", "4"):
        store.prepare(Grammar("regex", text)).result(200)
    again = store.prepare(Grammar("regex", "1"))
    assert again is not first and again.result(200).end == 1
    assert store.find(Grammar("regex", "4")).end == 4 and library.compiled == ["1", "2", "3", "4", "1"]
    with pytest.raises(RequestError, match="bad grammar"):
        store.prepare(Grammar("regex", "bad")).result(200)
    store.close()


def test_what_is_being_compiled_is_not_forgotten():
    library = CountLibrary()
    library.gate.clear()
    store = store_of(library, max_compiled=1)
    futures: list[Future[Any]] = [store.prepare(Grammar("regex", str(i))) for i in range(4)]
    assert store.prepare(Grammar("regex", "0")) is futures[0] and not any(f.done() for f in futures)
    library.gate.set()
    assert [f.result(200).end for f in futures] == [0, 1, 2, 3]
    store.close()


def test_models_that_cannot_be_constrained_say_why():
    no_end = GrammarStore(lambda: Vocabulary([], frozenset()), VOCAB_SIZE, [], choose=lambda _: ("count", CountLibrary))
    with pytest.raises(UnsupportedFeature, match="end-of-text"):
        no_end.prepare(Grammar.json_object()).result(200)

    def no_tokenizer() -> Vocabulary:
        raise ConfigError("no tokenizer.json")

    with pytest.raises(UnsupportedFeature, match=r"no tokenizer\.json"):
        GrammarStore(
            no_tokenizer, VOCAB_SIZE, [EOS], choose=lambda _: ("count", CountLibrary)
        ).prepare(Grammar.json_object()).result(200)


class StateGrammar(CountGrammar):
    """Its outputs stand in states, which are their numbers of tokens; ``b"x"`` is every token's text."""

    def __init__(self, library: CountLibrary, end: int):
        super().__init__(library, end)
        self.states = LazyDfa(Counting(), [b"x"] * VOCAB_SIZE)


class Counting:
    byte_classes = None
    start = 0

    def step(self, inside: int, byte: int) -> int:
        return inside + 1

    def mask_key(self, inside: int) -> int:
        return inside

    def weigh(self, inside: int) -> int:
        return 1


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Rows of grammars with states; the first of ``num_asked`` is how many masks were asked for."""
    bench = Bench()
    bench.num_asked = []
    monkeypatch.setattr(CountLibrary, "compile", lambda library, grammar: StateGrammar(library, int(grammar.text)))
    fill = CountLibrary.fill
    monkeypatch.setattr(
        CountLibrary, "fill", lambda library, matchers,
        masks: bench.num_asked.append(len(matchers)) or fill(library, matchers, masks)
    )
    return bench


def test_outputs_in_one_state_share_a_mask(shared: Bench):
    for row in (0, 1, 4):
        shared.start(row, 3)
    assert shared.step({0: 0, 1: 0, 4: 0})[0] == {0: {0}, 1: {0}, 4: {0}} and shared.num_asked == [1]
    assert shared.step({1: 1})[0] == {1: {1}} and shared.step({0: 1})[0] == {0: {1}} and shared.num_asked == [1, 1]
    shared.grammars.release(4)
    shared.start(4, 3, output=(0, 1))
    allowed = shared.step({4: EOS, 0: 2, 1: 2})[0]
    assert allowed == {0: {2, EOS}, 1: {2, EOS}, 4: {2, EOS}} and shared.num_asked == [1, 1, 1]
    shared.start(2, 5)
    assert shared.step({2: 0})[0] == {2: {0}} and len(shared.num_asked) == 4, "another grammar"
    shared.start(3, 3, rules=LogitRules(min_tokens=9, held_ids=[EOS]))
    assert [shared.step({3: t})[0][3] for t in (0, 1, 2)] == [{0}, {1}, {2}], (
        "an end that is held back makes another mask"
    )


def test_a_row_that_cannot_go_on_shares_that_with_nobody(shared: Bench, monkeypatch: pytest.MonkeyPatch):
    shared.start(0, 9), shared.start(1, 9), shared.start(2, 9)
    shared.step({0: 30, 1: 0, 2: 0})
    allowed, errors, _ = shared.step({0: 1, 1: 1, 2: 1})
    assert allowed == {0: set(), 1: {1}, 2: {1}} and list(errors) == [0]
    assert shared.step({1: 2, 2: 2, 0: 3})[0] == {0: set(), 1: {2}, 2: {2}}


def test_a_table_drops_what_was_not_used_for_longest():
    table = BitmaskTable(1, 1, torch.device("cpu"), min_slots=3, max_slots=3)
    slots = [table.add(key) for key in "abc"]
    assert sorted(slots) == [0, 1, 2] and table.find("a") == slots[0]
    assert table.add("d") == slots[1] and table.find("b") is None and table.find("a") is not None
    table.drop("d")
    assert table.add("e") == slots[1]
    table = BitmaskTable(1, 2, torch.device("cpu"), min_slots=2, max_slots=4)
    table.tensor[table.add("a")] = 7
    slots = [table.find("a"), *(table.add(key) for key in "bcd")]
    assert sorted(slots) == [0, 1, 2, 3] and table.tensor.shape == (4, 2), "it grows"
    assert int(table.tensor[slots[0]].sum()) == 14
    assert table.add("e") == slots[0]
    assert BitmaskTable(9, 1, torch.device("cpu"), min_slots=3).tensor.shape == (18, 1), "every row may use two"


def test_masks_that_wait_for_a_step_are_begun_as_it_is_read():
    bench = Bench()
    bench.start(0, 3)
    _, _, first = bench.step({0: 0}, is_done=False)
    fill = bench.grammars.begin(bench.batch(0))
    second = Step([1], is_done=False)
    fill.follow(second)
    assert fill.bitmasks is None and first.num_reads == 0
    bench.grammars.catch_up(first)
    assert fill.bitmasks is not None and first.num_reads == 1 and second.num_reads == 0
    assert read_masks(fill.result(), [0]) == {0: {1}}
    bench.num_sampled[0] += 1
    fill = bench.grammars.begin(bench.batch(0))
    assert fill.bitmasks is None and read_masks(fill.result(), [0]) == {0: {2, EOS}}, (
        "whoever is in a hurry reads it himself"
    )
    assert second.num_reads == 1
