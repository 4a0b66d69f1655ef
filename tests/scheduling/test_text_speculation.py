"""`TextSpeculation` over simulated steps: a device that verifies its guesses against set texts, one or two steps in
flight."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.scheduling.speculation.costs import StepCosts
from headrace.scheduling.speculation.drafter import DrafterOptions
from headrace.scheduling.speculation.ngram import NgramDrafter
from headrace.scheduling.speculation.policy import DraftPolicy
from headrace.scheduling.speculation.suffix import SuffixDrafter
from headrace.scheduling.speculation.text import MOST_COLD, TRIES, TextRow, TextSpeculation
from headrace.scheduling.speculation.trial import PLAIN_STEPS


class SimulatedRow:
    """``truth`` is the whole text; ``tokens`` what the host knows of it; the device is at ``computed``."""

    def __init__(self, truth: list[int], prompt_len: int):
        self.truth = truth
        self.tokens = truth[:prompt_len]
        self.computed = prompt_len  # tokens that the device knows
        self.ahead = 0  # most that steps in flight may add to ``tokens``

    @property
    def room(self) -> int:
        """Drafts that fit before the end of the text."""
        return len(self.truth) - len(self.tokens) - self.ahead - 1


class Simulation:
    def __init__(
        self, drafter, truths: list[list[int]], *, prompt_len: int, depth: int, seconds=None, fixed=None, asking_s=0.0
    ):
        self.asking_s = asking_s  # what a step takes longer because text is asked
        self.seconds = seconds or (lambda n: 0.005 + 0.00002 * n)
        self.policy = DraftPolicy(StepCosts([(n, self.seconds(n)) for n in (1, 2, 4, 8, 16, 32, 64)]), fixed=fixed)
        self.speculation = TextSpeculation(drafter, self.policy)
        self.rows = {key: SimulatedRow(truth, prompt_len) for key, truth in enumerate(truths)}
        self.depth = depth
        self.flights: deque = deque()
        self.num_steps = self.num_tokens = self.num_drafts = self.num_accepted = self.num_asked = 0
        self.elapsed = 0.0
        for key, row in self.rows.items():
            self.speculation.start(key, row.tokens)
        self.policy.note_time(len(truths), self.seconds(len(truths)))

    def plan(self) -> None:
        ready = [key for key, row in self.rows.items() if len(row.tokens) + row.ahead < len(row.truth) - 1]
        if not ready:
            return
        due = [key for key in self.speculation.due(len(ready)) if key in ready]
        self.num_asked += len(due)
        asked = [TextRow(key, self.rows[key].ahead, min(6, self.rows[key].room)) for key in due]
        guesses = {guess.key: guess for guess in self.speculation.guess(asked, len(ready), 4 * len(ready))}
        assert sum(guess.num_drafts for guess in guesses.values()) <= 3 * len(ready)
        made = {}
        for key in ready:
            row, count = self.rows[key], 0
            if key in guesses:
                guess = guesses[key]
                assert guess.start == len(row.tokens) and guess.num_drafts > 0
                count = guess.num_drafts
                # As on the device: the guess counts if it has the latest tokens; the drafts are those behind them.
                at = row.computed - guess.start
                is_right = guess.token_ids[:at] == row.truth[guess.start : row.computed]
                drafts = guess.token_ids[at : at + count] if is_right else []
                accepted = 0
                while accepted < len(drafts) and drafts[accepted] == row.truth[row.computed + accepted]:
                    accepted += 1
                self.num_drafts += count
                self.num_accepted += accepted
            else:
                accepted = 0
            new = row.truth[row.computed : row.computed + accepted + 1]
            row.computed += len(new)
            row.ahead += 1 + count
            made[key] = (new, count)
        num_entries = len(ready) + sum(count for _, count in made.values())
        self.flights.append((made, num_entries, len(ready), self.seconds(num_entries) + bool(due) * self.asking_s))

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            while len(self.flights) < self.depth:
                before = len(self.flights)
                self.plan()
                if len(self.flights) == before:
                    break
            if not self.flights:
                return
            made, entries, num_rows, seconds = self.flights.popleft()
            for key, (new, count) in made.items():
                row = self.rows[key]
                row.tokens.extend(new)
                row.ahead -= 1 + count
                self.num_tokens += len(new)
            self.policy.note_time(entries, seconds, num_rows=num_rows)
            self.speculation.note_step(num_rows, sum(len(new) for new, _ in made.values()), seconds)
            self.elapsed += seconds
            self.num_steps += 1

    @property
    def speed(self) -> float:
        """Tokens per second relative to no drafts, which is near one token per row and step."""
        num_rows = len(self.rows)
        return self.num_tokens / self.elapsed / (num_rows / self.seconds(num_rows))


def quoting(chance: random.Random, length: int, changed: float = 0.02) -> list[int]:
    """A text that repeats its first third, with changes."""
    first = [chance.randrange(500) for _ in range(length // 3)]
    text = list(first)
    while len(text) < length:
        text += [chance.randrange(500) if chance.random() < changed else token for token in first]
    return text[:length]


@pytest.mark.parametrize("drafter", [NgramDrafter, SuffixDrafter])
@pytest.mark.parametrize("depth", [1, 2])
def test_quotes_are_generated_faster(drafter, depth: int):
    chance = random.Random(1)
    truths = [quoting(chance, 900) for _ in range(4)]
    options = DrafterOptions(prompt_lookup_min=2, prompt_lookup_max=8)
    simulation = Simulation(drafter(options), truths, prompt_len=300, depth=depth)
    simulation.run(10**6)
    assert all(row.tokens == row.truth[: len(row.tokens)] for row in simulation.rows.values())
    assert simulation.num_accepted > 0.6 * simulation.num_drafts
    # With two steps in flight, a step behind one with a wrong draft has none.
    assert simulation.num_tokens / simulation.num_steps / 4 > (2.8 if depth == 1 else 2.2)
    assert simulation.speed > (2.5 if depth == 1 else 2.0)


@pytest.mark.parametrize("depth", [1, 2])
def test_random_texts_lose_less_than_a_hundredth(depth: int):
    chance = random.Random(2)
    for vocabulary in (2, 20, 5000):
        truths = [[chance.randrange(vocabulary) for _ in range(1500)] for _ in range(8)]
        simulation = Simulation(SuffixDrafter(DrafterOptions()), truths, prompt_len=100, depth=depth)
        simulation.run(1200)
        assert simulation.speed > 0.99, (vocabulary, simulation.speed)


def test_expensive_drafts_are_not_made_at_all():
    chance = random.Random(3)
    truths = [quoting(chance, 600) for _ in range(8)]
    simulation = Simulation(
        SuffixDrafter(DrafterOptions()), truths, prompt_len=200, depth=1, seconds=lambda n: 0.001 * n
    )
    simulation.run(300)
    assert simulation.num_drafts == 0
    assert simulation.num_asked == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_that_cost_the_host_more_than_they_save_are_given_up(depth: int):
    """Text that repeats itself seldom: what is saved is less than what asking adds to each step, which no comparison
    of steps with drafts and without shows."""
    chance = random.Random(6)
    truths = [quoting(chance, 6000, 0.35)]
    simulation = Simulation(
        SuffixDrafter(DrafterOptions()), truths, prompt_len=2000, depth=depth, asking_s=0.005, seconds=lambda n: 0.005
    )
    simulation.run(3000)
    assert simulation.num_accepted > 0
    assert simulation.speed > 0.9
    assert simulation.num_asked < 0.5 * simulation.num_steps


def test_drafts_that_gain_are_kept_although_asking_costs():
    chance = random.Random(6)
    simulation = Simulation(
        SuffixDrafter(DrafterOptions()), [quoting(chance, 3000)], prompt_len=1000, depth=1, asking_s=0.002,
    )
    simulation.run(10**6)
    assert simulation.speed > 1.7


def test_a_fixed_number_is_verified_wherever_there_is_a_proposal():
    chance = random.Random(4)
    simulation = Simulation(
        NgramDrafter(DrafterOptions(prompt_lookup_min=3, prompt_lookup_max=3)), [quoting(chance, 900, 0.0)],
        prompt_len=310, depth=1, fixed=3
    )
    simulation.run(100)
    assert simulation.num_tokens == 4 * simulation.num_steps


def test_outputs_are_remembered_from_their_first_token():
    """Also of rows that nobody was asked about before they had some."""
    drafter = SuffixDrafter(DrafterOptions())
    simulation = Simulation(drafter, [], prompt_len=0, depth=1, fixed=4)
    speculation = simulation.speculation
    tokens = [1, 2, 3]
    speculation.start(0, tokens)
    tokens += range(100, 130)
    assert speculation.guess([TextRow(key, 0, 4) for key in speculation.due(1)], 1, 100) == []
    speculation.stop(0)
    other = [9, 100, 101, 102]
    speculation.start(1, other)
    (guess,) = speculation.guess([TextRow(key, 0, 4) for key in speculation.due(1)], 1, 100)
    assert guess.token_ids == [103, 104, 105]


def test_with_a_fixed_number_every_row_is_asked_about_in_every_step():
    chance = random.Random(4)
    truths = [[chance.randrange(10**6) for _ in range(100)] for _ in range(40)]
    for truth in truths:
        truth += truth[:100]
    options = DrafterOptions(prompt_lookup_min=2, prompt_lookup_max=2)
    simulation = Simulation(NgramDrafter(options), truths, prompt_len=20, depth=1, fixed=2)
    simulation.run(82)  # up to the second token of the repetition
    assert simulation.num_asked == 40 * 82 and simulation.num_accepted == 0
    simulation.run(10)
    assert simulation.num_accepted == 40 * 2 * 10


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6), depth=st.integers(1, 2), num_rows=st.integers(1, 5), fixed=st.sampled_from([None, 2])
)
def test_accepted_drafts_are_those_the_device_accepted(seed: int, depth: int, num_rows: int, fixed: int | None):
    """What is read from the texts is what happened."""
    chance = random.Random(seed)
    truths = [quoting(chance, chance.randrange(60, 200), 0.1) for _ in range(num_rows)]
    simulation = Simulation(
        SuffixDrafter(DrafterOptions(max_tree_depth=8)), truths, prompt_len=20, depth=depth, fixed=fixed
    )
    noted = {"drafts": 0, "accepted": 0}
    note, void = simulation.policy.note, simulation.policy.note_void

    def count(key: int, num_drafts: int, num_accepted: int, probabilities=None) -> None:
        noted["drafts"] += num_drafts
        noted["accepted"] += num_accepted
        note(key, num_drafts, num_accepted, probabilities)

    def count_void(num_drafts: int) -> None:
        noted["drafts"] += num_drafts
        void(num_drafts)

    simulation.policy.note, simulation.policy.note_void = count, count_void
    simulation.run(10**6)
    for key in simulation.rows:
        simulation.speculation.stop(key)
    assert noted == {"drafts": simulation.num_drafts, "accepted": simulation.num_accepted}


def test_rows_without_proposals_are_rarely_asked_about():
    chance = random.Random(5)
    num_rows = 256
    truths = [[chance.randrange(10**6) for _ in range(300)] for _ in range(num_rows)]
    simulation = Simulation(SuffixDrafter(DrafterOptions()), truths, prompt_len=50, depth=1)
    simulation.run(PLAIN_STEPS + TRIES + 8)
    asked, simulation.num_asked = simulation.num_asked, 0
    assert asked <= num_rows * TRIES + 4 * MOST_COLD
    simulation.run(100)
    assert simulation.num_asked <= 100


def test_a_row_that_begins_to_quote_is_found():
    chance = random.Random(6)
    truths = [[chance.randrange(10**6) for _ in range(200)] for _ in range(32)]
    for truth in truths:
        truth += truth[:200] + [10**6 + i for i in range(50)]
    simulation = Simulation(SuffixDrafter(DrafterOptions()), truths, prompt_len=50, depth=1)
    simulation.run(150)
    assert simulation.num_accepted == 0
    simulation.run(100)
    assert simulation.num_accepted > 32 * 100
