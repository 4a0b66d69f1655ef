"""Agents that are killed or stopped in each phase of an exchange, and packages that carry pages in place of shared
memory: the tokens are those of one engine, and nothing stays taken."""

from __future__ import annotations

import os
import signal
import time

import pytest
import test_disaggregated as pairs
from memory.transfer_packages import is_usable
from test_disaggregated import Side, pair_of, run_until, settle

start, llama, expected = pairs.start, pairs.llama, pairs.expected

PHASES = ("asked", "computed", "arrived", "decoding")
"""Only the decode engine has the requests; the prefill engine has computed all of them, and the decode engine has not
heard of it; pages of some have come; tokens behind them are computed. Between chunks: in `test_disaggregated`."""
QUICK = {
    ("asked", "prefill", "kill"), ("asked", "decode", "stop"), ("computed", "prefill", "kill"),
    ("computed", "decode", "kill"), ("computed", "prefill", "stop"), ("arrived", "prefill", "kill"),
    ("arrived", "decode", "stop"), ("decoding", "decode", "kill"),
}
"""The others run with --slow."""


def submit(side: Side, prompts: list[list[int]], fetches_from: int = 0) -> None:
    for i, prompt in enumerate(prompts):
        side.submit(f"r{i}", prompt, room=f"{i}", fetches_from=fetches_from)


def reach(phase: str, prefill: Side, decode: Side, prompts: list[list[int]]) -> None:
    submit(decode, prompts, prefill.port)
    decode.step()
    if phase == "asked":
        return
    submit(prefill, prompts)
    if phase == "computed":
        run_until([prefill], lambda: all(map(prefill.is_done, prefill.outputs)))
    elif phase == "arrived":
        run_until([prefill, decode], lambda: decode.gate.outcomes["received"] > 0)
    else:
        run_until([prefill, decode], lambda: any(
            2 <= len(decode.tokens(name)) < pairs.NUM_TOKENS for name in decode.outputs
        ))


def exchange_again(prefill: Side, decode: Side, prompt: list[int], tokens: list[int]) -> None:
    run_until([prefill, decode], lambda: prefill.gate._line.is_up and decode.gate._line.is_up)
    time.sleep(2.2)  # a peer that broke is left alone for a moment
    before = decode.gate.outcomes["received"]
    prefill.submit("again", prompt, room="again")
    decode.submit("again", prompt, room="again", fetches_from=prefill.port)
    run_until([prefill, decode], lambda: decode.is_done("again"))
    assert decode.tokens("again") == tokens and decode.gate.outcomes["received"] == before + 1
    settle([prefill, decode])


@pytest.mark.parametrize(("phase", "whose", "action"), [
    pytest.param(phase, whose, action, marks=[] if (phase, whose, action) in QUICK else pytest.mark.slow)
    for phase in PHASES for whose in ("prefill", "decode") for action in ("kill", "stop")
])
def test_an_agent_that_dies_or_hangs_in_any_phase(phase: str, whose: str, action: str, start, llama, expected):
    prefill, decode = pair_of(start, llama)
    prompts, victim = llama[2], {"prefill": prefill, "decode": decode}[whose]
    reach(phase, prefill, decode, prompts)
    pid = victim.gate._line.pid
    os.kill(pid, signal.SIGKILL if action == "kill" else signal.SIGSTOP)
    if phase == "asked":
        submit(prefill, prompts)
    run_until([prefill, decode], lambda: all(map(decode.is_done, decode.outputs)))
    assert [decode.tokens(f"r{i}") for i in range(len(prompts))] == expected
    if action == "stop" and victim.gate._line.pid == pid:
        os.kill(pid, signal.SIGCONT)
    settle([prefill, decode])
    exchange_again(prefill, decode, prompts[1], expected[1])


@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
@pytest.mark.parametrize("action", ["", "kill"])
def test_packages_carry_pages_as_shared_memory_does(backend: str, action: str, start, llama, expected):
    """Real libraries over the loopback device, also when one's agent is killed amid its transfers."""
    if not is_usable(backend):
        pytest.skip(f"{backend} is not installed, or lacks libraries of the system")
    prefill, decode = pair_of(start, llama, backend)
    prompts = llama[2]
    reach("computed" if action else "decoding", prefill, decode, prompts)
    if action:
        os.kill(prefill.gate._line.pid, signal.SIGKILL)
    run_until([prefill, decode], lambda: all(map(decode.is_done, decode.outputs)))
    assert [decode.tokens(f"r{i}") for i in range(len(prompts))] == expected
    if not action:
        assert decode.gate.outcomes == {"received": len(prompts)}
    settle([prefill, decode])
    exchange_again(prefill, decode, prompts[1], expected[1])
