"""A prefill and a decode engine, with their agents: the same tokens as one engine gives, for every kind of cache, and
whatever happens to the other side."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_tiers_served as tiers
from adapter_rig import write_adapter
from msgspec.structs import replace as replace_fields

from headrace.base.config import engine_config
from headrace.base.disaggregation import DisaggregationConfig
from headrace.base.errors import NotFound
from headrace.base.grammar import Grammar
from headrace.base.messages import EngineRequest, RequestOutput
from headrace.base.sampling import SamplingSpec, StopSpec, TransferSpec
from headrace.base.transfer import Offer, Reclaim, ToAgent
from headrace.service.engine import Engine
from headrace.service.ranks.starting import build_ranked_engine
from headrace.service.transfer import build as transfer
from headrace.service.transfer import gate
from headrace.service.transfer.gate import TransferGate

NUM_TOKENS = 6
LIMIT_S = 60.0
GREEDY = SamplingSpec(temperature=0.0, num_logprobs=2)


class Side:
    """An engine that is stepped by hand."""

    def __init__(self, folder: str, options: dict[str, Any], port: int, **role: Any):
        config = engine_config(model=folder, skip_tokenizer=True, **options)
        if role:
            role["disaggregation_bootstrap_port"] = port
            config = replace(config, disaggregation=DisaggregationConfig(**role))
        self.engine: Engine = build_ranked_engine(config, lambda stage, fraction: None)
        self.port = port
        self.outputs: dict[str, list[RequestOutput]] = {}

    @property
    def gate(self) -> TransferGate:
        return next(c for c in self.engine._waiting_room._coordinators if isinstance(c, TransferGate))

    def submit(self, name: str, prompt: list[int], *, sampling: SamplingSpec = GREEDY, fetches_from: int = 0,
               room: str = "", num_tokens: int = NUM_TOKENS, adapter: str = "") -> None:
        spec = TransferSpec(room, "127.0.0.1" if fetches_from else "", fetches_from) if room else None
        self.outputs[name] = []
        self.engine.submit(EngineRequest(
            name, prompt, sampling, StopSpec(max_tokens=num_tokens), transfer=spec, adapter=adapter
        ))

    def step(self) -> bool:
        """Whether it said anything."""
        outputs = self.engine.step()  # also without work: it hears what the agent says
        for output in outputs:
            self.outputs[output.request_id].append(output)
        return bool(outputs)

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.token_ids]

    def is_done(self, name: str) -> bool:
        return bool(self.outputs[name]) and self.outputs[name][-1].finish is not None

    def close(self) -> None:
        for coordinator in self.engine._waiting_room._coordinators:
            if isinstance(coordinator, TransferGate):
                coordinator.close()
        self.engine.close()


def run_until(sides: list[Side], done: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        if not any([side.step() for side in sides]):
            time.sleep(0.001)  # what is waited for are agents, which need the processor
        assert time.monotonic() < deadline, [side.outputs for side in sides]


def settle(sides: list[Side]) -> None:
    """Every lease is free again, and every page accounted for."""
    def is_free() -> bool:
        return all(
            side.gate._leases.num_taken_bytes == 0 and not side.gate._held and not side.engine.has_work
            for side in sides
        )

    run_until(sides, is_free)
    for side in sides:
        side.engine.check()
        assert not side.gate._exchange._exports and not side.gate._exchange._imports
        assert not side.gate._exchange.expected


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        return int(holder.getsockname()[1])


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Side]]:
    monkeypatch.setattr(transfer, "LEASE_S", 6.0)  # pages of requests that were aborted are waited for
    with ExitStack() as undo:
        def make(folder: str, options: dict[str, Any], mode: str = "", backend: str = "shared-memory") -> Side:
            role = {"disaggregation_mode": mode, "disaggregation_transfer_backend": backend} if mode else {}
            side = Side(folder, options, free_port(), **role)
            undo.callback(side.close)
            return side

        yield make


@pytest.mark.parametrize("name", [*tiers.SMALL, *tiers.V4])
def test_two_engines_give_the_tokens_of_one(name: str, tmp_path: Path, start):
    folder, options, prompts = tiers.save(name, tmp_path)
    options = {**options, "max_step_tokens": 256 if name in tiers.V4 else 16}  # several chunks
    one = start(folder, options)
    for i, prompt in enumerate(prompts):
        one.submit(f"r{i}", prompt)
    run_until([one], lambda: all(map(one.is_done, one.outputs)))
    hot = {"hot_slots": 16} if name in tiers.V4 else {}  # there pages come straight to host memory
    prefill, decode = start(folder, options, "prefill"), start(folder, {**options, **hot}, "decode")
    for turn in ("first", "again"):  # again: the prefix caches of both sides have the prompts
        for i, prompt in enumerate(prompts):
            prefill.submit(f"{turn}{i}", prompt, room=f"{turn}-{i}")
            decode.submit(f"{turn}{i}", prompt, room=f"{turn}-{i}", fetches_from=prefill.port)
        run_until([prefill, decode], lambda: all(map(decode.is_done, decode.outputs)))
        for i in range(len(prompts)):
            assert decode.tokens(f"{turn}{i}") == one.tokens(f"r{i}"), f"{turn} {i}"
            assert [e.token_id for o in decode.outputs[f"{turn}{i}"] for e in o.logprobs or ()] == one.tokens(f"r{i}")
            assert len(prefill.tokens(f"{turn}{i}")) == 1
        settle([prefill, decode])
    assert decode.gate.outcomes == {"received": 2 * len(prompts)}
    assert prefill.gate.outcomes == {"sent": 2 * len(prompts)}
    stats = decode.engine.stats()
    sent, received = prefill.engine.stats().tiers.peers, stats.tiers.peers
    assert (sent.sent_requests_total, received.received_requests_total) == (2 * len(prompts), 2 * len(prompts))
    assert sent.sent_pages_total >= received.received_pages_total > 0 == received.lost_requests_total
    assert stats.computed_tokens_total <= 2 * len(prompts) * (NUM_TOKENS + 1), "the decode engine computed a prompt"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], list[list[int]]]:
    folder, options, prompts = tiers.save("Llama", tmp_path_factory.mktemp("llama"))
    return folder, {**options, "max_step_tokens": 16}, prompts


@pytest.fixture(scope="module")
def expected(llama: tuple[str, dict[str, Any], list[list[int]]]) -> list[list[int]]:
    """What one engine says to each prompt."""
    folder, options, prompts = llama
    one = Side(folder, options, 0)
    for i, prompt in enumerate(prompts):
        one.submit(f"r{i}", prompt)
    run_until([one], lambda: all(map(one.is_done, one.outputs)))
    one.close()
    return [one.tokens(f"r{i}") for i in range(len(prompts))]


def pair_of(start, llama, backend: str = "shared-memory") -> tuple[Side, Side]:
    folder, options, _ = llama
    return start(folder, options, "prefill", backend), start(folder, options, "decode", backend)


def test_adapters_are_those_of_both_sides(start, llama, tmp_path: Path):
    """Pages of another adapter of the same name are of no use, and a request for one that is not here ends alone."""
    folder, options, prompts = llama
    with_lora = [{**options, "enable_lora": True}] * 3
    for i in range(2):
        path = write_adapter(Path(folder), tmp_path / f"a{i}", 30 + i)
        with_lora[i] = {**with_lora[i], "lora_modules": f"sql={path}"}
    own, other, none = with_lora
    answers = {}
    for name, side in (("own", start(folder, own)), ("other", start(folder, other))):
        side.submit("r", prompts[0], adapter="sql")
        side.submit("base", prompts[0])
        run_until([side], lambda side=side: side.is_done("r") and side.is_done("base"))
        answers[name], answers["base"] = side.tokens("r"), side.tokens("base")
    assert len({tuple(tokens) for tokens in answers.values()}) == 3
    prefill, decode = start(folder, own, "prefill"), start(folder, own, "decode")
    differs, lacks = start(folder, other, "decode"), start(folder, none, "decode")
    sides = [prefill, decode, differs, lacks]
    for i, side in enumerate(sides[1:]):
        for name, adapter in (("r", "sql"), ("base", "")):
            prefill.submit(f"{name}{i}", prompts[0], room=f"{name}{i}", adapter=adapter)
            side.submit(name, prompts[0], room=f"{name}{i}", fetches_from=prefill.port, adapter=adapter)
    run_until(sides, lambda: all(side.is_done("r") and side.is_done("base") for side in sides[1:]))
    assert [side.tokens("r") for side in sides[1:]] == [answers["own"], answers["other"], []]
    assert [side.tokens("base") for side in sides[1:]] == [answers["base"]] * 3
    assert decode.gate.outcomes["received"] == 2 and differs.gate.outcomes["received"] == 1
    error = lacks.outputs["r"][-1].finish.error
    assert error.kind == NotFound.kind and "no adapter 'sql', load it first" in error.message
    settle(sides)


@pytest.mark.parametrize("fault", [
    "corrupt=1", "drop=1", "refuse=1", "corrupt=0.2&drop=0.2&delay=0.01&duplicate=0.5&seed=7",
])
def test_faults_of_the_network_change_no_token(fault: str, start, llama, expected):
    prefill, decode = pair_of(start, llama, f"faulty?{fault}")
    prompts = llama[2]
    for i, prompt in enumerate(prompts):
        prefill.submit(f"r{i}", prompt, room=f"{i}")
        decode.submit(f"r{i}", prompt, room=f"{i}", fetches_from=prefill.port)
    run_until([prefill, decode], lambda: all(map(decode.is_done, decode.outputs)))
    assert [decode.tokens(f"r{i}") for i in range(len(prompts))] == expected
    settle([prefill, decode])
    if fault.endswith("=1"):
        assert decode.gate.outcomes == {"lost": len(prompts)}


@pytest.mark.parametrize("ended", ["prefill", "decode"])
def test_a_request_that_ends_while_its_grammar_is_compiled_holds_no_memory(ended: str, start, llama, expected):
    """It never reaches the gate of transfers, which comes after that of grammars."""
    sides = dict(zip(("prefill", "decode"), pair_of(start, llama), strict=True))
    compiled = {name: Future[object]() for name in sides}
    for name, side in sides.items():
        side.engine.executor.prepare_grammar = lambda grammar, name=name: compiled[name]
    constrained = replace_fields(GREEDY, grammar=Grammar.json_object())
    sides["prefill"].submit("r0", llama[2][0], sampling=constrained, room="0")
    sides["decode"].submit("r0", llama[2][0], sampling=constrained, room="0", fetches_from=sides["prefill"].port)
    sides[ended].engine.abort("r0")
    run_until(list(sides.values()), lambda: sides[ended].is_done("r0"))
    compiled[ended].set_result(None)
    sides[ended].step()
    other = next(name for name in sides if name != ended)
    sides[other].engine.abort("r0")
    compiled[other].set_result(None)
    settle(list(sides.values()))
    for i, prompt in enumerate(llama[2][:2]):
        sides["prefill"].submit(f"n{i}", prompt, room=f"n{i}")
        sides["decode"].submit(f"n{i}", prompt, room=f"n{i}", fetches_from=sides["prefill"].port)
    run_until(list(sides.values()), lambda: all(map(sides["decode"].is_done, sides["decode"].outputs)))
    assert [sides["decode"].tokens(f"n{i}") for i in range(2)] == expected[:2]
    settle(list(sides.values()))


def test_a_prefill_engine_that_never_hears_of_the_request(start, llama, expected):
    prefill, decode = pair_of(start, llama)
    began = time.monotonic()
    decode.submit("r0", llama[2][0], room="0", fetches_from=prefill.port)
    run_until([decode], lambda: decode.is_done("r0"))
    assert decode.tokens("r0") == expected[0] and time.monotonic() - began < 8.0
    settle([prefill, decode])


@pytest.mark.parametrize("lack", ["queue", "region"])
def test_what_the_prefill_engine_has_no_place_for_is_computed_at_once(
    lack: str, start, llama, expected, monkeypatch, caplog: pytest.LogCaptureFixture
):
    folder, options, prompts = llama
    decode = start(folder, options, "decode")
    if lack == "region":
        monkeypatch.setattr(transfer, "region_bytes", lambda layout, page_bytes: sum(page_bytes))
    prefill = start(folder, {**options, "max_queued": 1} if lack == "queue" else options, "prefill")
    if lack == "queue":
        prefill.submit("waits", prompts[0])
    for i, prompt in enumerate(prompts[:3]):
        prefill.submit(f"r{i}", prompt, room=f"{i}")
        decode.submit(f"r{i}", prompt, room=f"{i}", fetches_from=prefill.port)
    run_until([prefill, decode], lambda: all(map(decode.is_done, decode.outputs)))
    assert [decode.tokens(f"r{i}") for i in range(3)] == expected[:3]
    assert "without the prefill engine" in caplog.text
    assert "got no such request within" not in caplog.text, "sooner than an agent waits for a room"
    settle([prefill, decode])


@pytest.mark.parametrize("lack", ["size", "time"])
def test_pages_that_the_decode_engine_has_no_place_for_are_given_up(
    lack: str, start, llama, expected, monkeypatch, caplog: pytest.LogCaptureFixture
):
    """They would keep memory of the prefill engine until nobody can have fetched them."""
    folder, options, prompts = llama
    prefill = start(folder, options, "prefill")
    if lack == "size":
        monkeypatch.setattr(transfer, "region_bytes", lambda layout, page_bytes: sum(page_bytes))
    decode = start(folder, options, "decode")
    if lack == "time":
        monkeypatch.setattr(gate, "ROOM_S", 0.0)
        decode.gate._leases.acquire(0, decode.gate._leases.num_bytes)
    prefill.submit("r0", prompts[0], room="0")
    decode.submit("r0", prompts[0], room="0", fetches_from=prefill.port)
    run_until([prefill, decode], lambda: decode.is_done("r0") and not prefill.gate._held)
    assert decode.tokens("r0") == expected[0] and "pages were not fetched: the decode engine gave it up" in caplog.text
    assert prefill.gate.outcomes == decode.gate.outcomes == {"lost": 1}
    decode.gate._leases.release(0)
    settle([prefill, decode])


def test_a_prefill_engine_without_memory_asks_for_that_of_pages_nobody_wants(start, llama, monkeypatch):
    folder, options, prompts = llama
    prefill, sent = start(folder, options, "prefill"), list[ToAgent]()
    monkeypatch.setattr(prefill.gate._line, "send", sent.append)
    prefill.gate._leases.acquire(0, prefill.gate._leases.num_bytes)
    prefill.submit("r0", prompts[0], room="0")
    run_until([prefill], lambda: Reclaim() in sent)
    assert sent == [Reclaim()], "no more than a few a second"
    prefill.gate._leases.release(0)
    run_until([prefill], lambda: prefill.is_done("r0"))
    assert [type(message) for message in sent[1:2]] == [Offer]


@pytest.mark.parametrize("action", ["kill", "stop"])
@pytest.mark.parametrize("whose", ["prefill", "decode"])
def test_an_agent_that_dies_or_hangs_in_the_middle(action: str, whose: str, start, llama, expected):
    prefill, decode = pair_of(start, llama)
    prompts, victim = llama[2], {"prefill": prefill, "decode": decode}[whose]
    for i, prompt in enumerate(prompts):
        decode.submit(f"r{i}", prompt, room=f"{i}", fetches_from=prefill.port)
        prefill.submit(f"r{i}", prompt, room=f"{i}")
    prefill.step()  # the first chunk, not more
    pid = victim.gate._line.pid
    os.kill(pid, signal.SIGKILL if action == "kill" else signal.SIGSTOP)
    run_until([prefill, decode], lambda: all(map(decode.is_done, decode.outputs)))
    assert [decode.tokens(f"r{i}") for i in range(len(prompts))] == expected
    if action == "stop" and victim.gate._line.pid == pid:
        os.kill(pid, signal.SIGCONT)
    settle([prefill, decode])
    # Afterwards pages are exchanged again.
    run_until([prefill, decode], lambda: _is_up(prefill) and _is_up(decode))
    time.sleep(2.2)  # a peer that broke is left alone for a moment
    before = decode.gate.outcomes["received"]
    prefill.submit("again", prompts[1], room="again")
    decode.submit("again", prompts[1], room="again", fetches_from=prefill.port)
    run_until([prefill, decode], lambda: decode.is_done("again"))
    assert decode.tokens("again") == expected[1] and decode.gate.outcomes["received"] == before + 1
    settle([prefill, decode])


def _is_up(side: Side) -> bool:
    return side.gate._line.is_up


@pytest.mark.parametrize("whose", ["prefill", "decode", "both"])
def test_requests_that_are_aborted_leave_nothing_behind(whose: str, start, llama):
    prefill, decode = pair_of(start, llama)
    for i, prompt in enumerate(llama[2]):
        decode.submit(f"r{i}", prompt, room=f"{i}", fetches_from=prefill.port)
        prefill.submit(f"r{i}", prompt, room=f"{i}")
    prefill.step()
    decode.step()
    for side, names in ((prefill, ("prefill", "both")), (decode, ("decode", "both"))):
        if whose in names:
            for name in list(side.outputs):
                side.engine.abort(name)
    run_until([prefill, decode], lambda: all(
        side.is_done(name) for side in (prefill, decode) for name in side.outputs
    ))
    settle([prefill, decode])


def test_a_failed_step_on_either_side(start, llama, expected, monkeypatch):
    prefill, decode = pair_of(start, llama)
    for side in (prefill, decode):
        execute, counts = side.engine.executor.execute, iter(range(1000))

        def fail_once(plan, execute=execute, counts=counts):
            if plan.rows and next(counts) == 1:
                raise RuntimeError("a kernel failed")
            return execute(plan)

        monkeypatch.setattr(side.engine.executor, "execute", fail_once)
    prompts = llama[2]
    for i, prompt in enumerate(prompts):
        prefill.submit(f"r{i}", prompt, room=f"{i}")
        decode.submit(f"r{i}", prompt, room=f"{i}", fetches_from=prefill.port)
    run_until([prefill, decode], lambda: all(map(decode.is_done, decode.outputs)))
    for i in range(len(prompts)):
        finish = decode.outputs[f"r{i}"][-1].finish
        assert finish.reason == "error" or decode.tokens(f"r{i}") == expected[i]
    settle([prefill, decode])


@pytest.mark.parametrize("differ", ["weights", "positions"])
def test_a_prompt_of_another_model_is_computed(differ: str, start, llama, expected, tmp_path: Path, caplog):
    """Peers whose weights, or rotary positions, differ exchange nothing."""
    folder, options, prompts = llama
    if differ == "positions":
        options = {**options, "config_overrides": tiers.STRETCHED}
        prefill, decode = start(folder, options, "prefill"), start(folder, {**options, "max_model_len": 76}, "decode")
        one = start(folder, {**options, "max_model_len": 76})
        one.submit("r0", prompts[0])
        run_until([one], lambda: one.is_done("r0"))
        expected = [one.tokens("r0")]
    else:
        other, _, _ = tiers.save("Llama", tmp_path)
        config = Path(other) / "config.json"
        config.write_text(config.read_text().replace('"rms_norm_eps"', '"rms_norm_eps_"'))
        prefill, decode = start(other, options, "prefill"), start(folder, options, "decode")
    prefill.submit("r0", prompts[0], room="0")
    decode.submit("r0", prompts[0], room="0", fetches_from=prefill.port)
    run_until([prefill, decode], lambda: decode.is_done("r0"))
    assert decode.tokens("r0") == expected[0] and decode.gate.outcomes == {"lost": 1}
    assert "the models, or how their weights are quantized, differ" in caplog.text


def test_sampled_tokens_and_stops_are_the_same(start, llama):
    folder, options, prompts = llama
    one, (prefill, decode) = start(folder, options), pair_of(start, llama)
    sampling = SamplingSpec(temperature=1.0, seed=5, num_logprobs=0)
    for side in (one, prefill, decode):
        for i, prompt in enumerate(prompts):
            room = "" if side is one else f"s{i}"
            side.submit(f"s{i}", prompt, sampling=sampling, room=room, num_tokens=1 if i == 0 else NUM_TOKENS,
                        fetches_from=prefill.port if side is decode else 0)
    run_until([one, prefill, decode], lambda: all(
        side.is_done(name) for side in (one, prefill, decode) for name in side.outputs
    ))
    for i in range(len(prompts)):
        assert decode.tokens(f"s{i}") == one.tokens(f"s{i}")
        assert decode.outputs[f"s{i}"][-1].finish == one.outputs[f"s{i}"][-1].finish
    assert decode.gate.outcomes == {"received": len(prompts)}
    settle([prefill, decode])


@pytest.mark.parametrize(("name", "ranks"), [("Llama", (2, 1)), ("Gemma3Text", (1, 2)), ("DeepseekV3", (2, 1))])
def test_each_side_divides_heads_as_it_likes(name: str, ranks: tuple[int, int], tmp_path: Path, start):
    """Keys and values, windows, and latents, which every rank has."""
    folder, options, prompts = tiers.save(name, tmp_path)
    options = {**options, "max_step_tokens": 16}
    one = start(folder, options)
    prefill = start(folder, options | {"tensor_parallel_size": ranks[0]}, "prefill")
    decode = start(folder, options | {"tensor_parallel_size": ranks[1]}, "decode")
    for i, prompt in enumerate(prompts):
        one.submit(f"r{i}", prompt)
        prefill.submit(f"r{i}", prompt, room=f"{i}")
        decode.submit(f"r{i}", prompt, room=f"{i}", fetches_from=prefill.port)
    run_until([one, prefill, decode], lambda: all(all(map(s.is_done, s.outputs)) for s in (one, decode)))
    assert [decode.tokens(f"r{i}") for i in range(len(prompts))] == [one.tokens(f"r{i}") for i in range(len(prompts))]
    assert decode.gate.outcomes == {"received": len(prompts)}
    # New agents have new regions, which all ranks map.
    lines = [side.gate._line for side in (prefill, decode)]
    epochs = [line.epoch for line in lines]
    for line in lines:
        assert line.pid is not None
        os.kill(line.pid, signal.SIGKILL)
    run_until([prefill, decode], lambda: all(
        line.is_up and line.epoch != epoch for line, epoch in zip(lines, epochs, strict=True)
    ))
    prompt = [*prompts[0][::-1], 7]
    one.submit("last", prompt)
    prefill.submit("last", prompt, room="last")
    decode.submit("last", prompt, room="last", fetches_from=prefill.port)
    run_until([one, prefill, decode], lambda: one.is_done("last") and decode.is_done("last"))
    assert decode.tokens("last") == one.tokens("last") and decode.gate.outcomes["received"] == len(prompts) + 1
    settle([prefill, decode])


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["shared-memory", "cuda-ipc"])
@pytest.mark.parametrize("name", list(tiers.SMALL))
def test_two_engines_on_a_gpu(name: str, backend: str, tmp_path: Path, start):
    folder, options, prompts = tiers.save(name, tmp_path)
    options = {**options, "device": "cuda", "page_size": 16, "kv_pages": 40, "max_step_tokens": 32}
    one = start(folder, options)
    for i, prompt in enumerate(prompts):
        one.submit(f"r{i}", prompt)
    run_until([one], lambda: all(map(one.is_done, one.outputs)))
    prefill, decode = start(folder, options, "prefill", backend), start(folder, options, "decode", backend)
    for i, prompt in enumerate(prompts):
        prefill.submit(f"r{i}", prompt, room=f"{i}")
        decode.submit(f"r{i}", prompt, room=f"{i}", fetches_from=prefill.port)
    run_until([prefill, decode], lambda: all(map(decode.is_done, decode.outputs)))
    assert [decode.tokens(f"r{i}") for i in range(len(prompts))] == [one.tokens(f"r{i}") for i in range(len(prompts))]
    assert decode.gate.outcomes == {"received": len(prompts)}
    settle([prefill, decode])
