"""`Trial`: when text is asked for drafts, by the measured speed with and without."""

from __future__ import annotations

import random

import pytest

from headrace.scheduling.speculation.trial import FIRST_PAUSE, LONGEST_PAUSE, PLAIN_STEPS, REFRESH_STEPS, Trial


def run(trial: Trial, num_steps: int, *, tokens: float, seconds: float, noise: float = 0.0, rows: int = 4):
    """Whether text was asked in each of these steps of ``rows`` rows: 10 ms long without drafts; ``seconds``, and
    ``tokens`` a row, with them."""
    chance, states = random.Random(1), []
    for _ in range(num_steps):
        is_on = trial.is_on
        states.append(is_on)
        made = round(rows * tokens) if is_on else rows
        trial.note(rows, made, (seconds if is_on else 0.01) * (1.0 + noise * chance.uniform(-1, 1)))
    return states


def test_plain_steps_are_measured_first():
    states = run(Trial(), 40, tokens=2.0, seconds=0.012)
    assert not any(states[:PLAIN_STEPS]) and all(states[PLAIN_STEPS:])


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_drafts_that_gain_stay_on(noise: float):
    states = run(Trial(), 8 * REFRESH_STEPS, tokens=1.5, seconds=0.012, noise=noise)
    assert sum(states) > 0.98 * len(states)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_drafts_that_lose_are_tried_ever_more_rarely(noise: float):
    states = run(Trial(), 20_000, tokens=1.25, seconds=0.016, noise=noise)
    assert 0.01 * len(states) < sum(states) < 0.06 * len(states)
    last = states[-2 * LONGEST_PAUSE :]
    assert sum(last) > 0, "they are tried again"


def test_drafts_come_back_once_they_gain():
    trial = Trial()
    run(trial, 5000, tokens=1.0, seconds=0.015)
    states = run(trial, 3 * LONGEST_PAUSE, tokens=2.0, seconds=0.012)
    assert sum(states[-LONGEST_PAUSE:]) > 0.95 * LONGEST_PAUSE


def test_a_step_that_was_held_up_does_not_end_drafts():
    trial = Trial()
    run(trial, 100, tokens=1.5, seconds=0.012)
    trial.note(4, 4, 3.0)
    assert all(run(trial, 2 * FIRST_PAUSE, tokens=1.5, seconds=0.012))


def test_other_numbers_of_rows_are_compared_with_their_own_steps():
    trial = Trial()
    for _ in range(4000):
        rows = 1 if trial.is_on else 64  # 64 rows take six times as long
        trial.note(rows, rows, 0.01 if rows == 1 else 0.06)
    states = run(trial, 200, tokens=1.5, seconds=0.012)
    assert states.count(True) > 150
