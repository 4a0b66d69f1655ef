"""Whatever is wrong with a call of `LLM` is a typed error that names the field; and an `LLM` shared by threads, over
fakes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fakes import BUILDER, continuation

from headrace.base.errors import EngineUnavailable, RequestError
from headrace.base.messages import EngineRequest, decode_to_engine, encode
from headrace.base.sampling import SamplingParams
from headrace.service.client.client import EngineClient
from headrace.service.client.local import LocalClient
from headrace.service.client.replica import Supervision
from headrace.service.client.requests import build_requests
from headrace.serving.offline import async_llm
from headrace.serving.offline import llm as offline
from headrace.serving.offline.async_llm import AsyncLLM
from headrace.serving.offline.llm import LLM
from headrace.serving.offline.params import default_params

GREEDY = SamplingParams(temperature=0.0, max_tokens=3)


@pytest.fixture(autouse=True)
def over_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "LocalClient", partial(LocalClient, builder=BUILDER))
    monkeypatch.setattr(async_llm, "EngineClient", partial(EngineClient, supervision=Supervision(builder=BUILDER)))


@pytest.fixture
def llm(config_only: Path) -> Iterator[LLM]:
    with LLM(str(config_only), skip_tokenizer=True) as llm:
        yield llm


@pytest.mark.parametrize(("param", "values"), [
    ("n", [1.5, "2", None, True]), ("temperature", ["1", None]), ("top_k", [1.5, "3", None]),
    ("seed", [1.5, "x", True, 2**63]),
    ("max_tokens", [1.5, "3", True]), ("min_tokens", [1.5, None]), ("stop", [5, [5], ["a", None]]),
    ("stop_token_ids", [5, "ab", [1.5], [None]]),
    ("ignore_eos", ["yes", None, 1]), ("bad_words", ["word", [5]]),
    ("logit_bias", [[1], {"a": 1}, {1: "x"}, {1: None}]),
    ("allowed_token_ids", [5, "ab"]), ("logprobs", [1.5, "2", True]), ("prompt_logprobs", [1.5, "x"]),
    ("detokenize", ["x"]), ("grammar", ["x"]),
])
def test_parameters_of_the_wrong_type(llm: LLM, param: str, values: list[Any]):
    for value in values:
        with pytest.raises(RequestError, match=param) as caught:
            llm.generate([1], SamplingParams(**{"temperature": 1.0, "max_tokens": 3, param: value}))
        assert caught.value.param == param
    assert llm.stats().requests_total == 0


def test_numbers_of_numpy_are_numbers(llm: LLM):
    params = SamplingParams(temperature=np.float64(0.5), top_p=np.float64(0.9), max_tokens=2)
    (request,) = build_requests("r", [1], params, facts=llm.facts, tokenizer=None)
    decoded = decode_to_engine(encode(request))
    assert isinstance(decoded, EngineRequest) and decoded.sampling.temperature == 0.5


@pytest.mark.parametrize(("arguments", "param"), [
    *[
        ({"prompts": value}, "prompts")
        for value in (5, 3.5, b"ab", {1, 2}, [None], [[1], 5], {"prompt": 5}, {"prompt": None}, {5: 5}, {})
    ],
    *[({"prompt_token_ids": value}, "prompts") for value in (5, [[5], None], np.array([[1, 2]]))],
    *[({"prompt_token_ids": value}, "prompt_token_ids") for value in ("abc", ["abc"], [[5], "a"])],
    *[
        ({"prompts": [[1]], "sampling_params": value}, "sampling_params")
        for value in (5, "x", {"temperature": 0}, [None], [{}], SamplingParams)
    ],
    *[({"prompts": [[1]], "priority": value}, "priority") for value in ("x", 1.5, True, 2**40)],
])
def test_arguments_of_the_wrong_type(llm: LLM, arguments: dict[str, Any], param: str):
    with pytest.raises(RequestError) as caught:
        llm.generate(**{"sampling_params": GREEDY, **arguments})
    assert caught.value.param == param
    assert llm.stats().requests_total == 0


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(("arguments", "param"), [
    *[
        ({"messages": value}, "messages")
        for value in (5, None, "hello", USER, [5], [[5]], [None], [USER, 5], [[USER], USER], [USER, [USER]])
    ],
    ({"messages": [USER], "chat_template": 5}, "chat_template"),
    *[
        ({"messages": [USER], "chat_template_kwargs": value}, "chat_template_kwargs")
        for value in (5, {5: 1}, {"messages": 1}, {"template": "x"}, {"self": 1})
    ],
])
def test_conversations_of_the_wrong_type(llm: LLM, arguments: dict[str, Any], param: str):
    with pytest.raises(RequestError) as caught:
        llm.chat(**{"sampling_params": GREEDY, **arguments})
    assert caught.value.param == param


@pytest.mark.parametrize("prompts", [(3, 4), [(3, 4)], ((3, 4),), iter([[3, 4]]), {"prompt_token_ids": (3, 4)}])
def test_tuples_and_iterators_are_lists(llm: LLM, prompts: Any):
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY)] == [continuation([3, 4], 3)]


def test_recommended_sampling_is_valid_whole_numbers_included(llm: LLM):
    facts = msgspec.structs.replace(llm.facts, default_sampling={"top_k": 20, "temperature": 1})
    sent = msgspec.msgpack.decode(encode(facts), type=type(facts))
    assert default_params(sent).validate() == SamplingParams(top_k=20, temperature=1, fits_context=True)


def run_long(llm: LLM, results: dict[int, object], i: int) -> None:
    try:
        results[i] = llm.generate([i], SamplingParams(temperature=0.0, max_tokens=4000))[0].outputs[0].token_ids
    except EngineUnavailable as error:
        results[i] = error


def test_other_threads_may_look_on_and_close(config_only: Path):
    """While one thread generates, others ask, check and reset; then one closes: the run ends, and so do those in
    line."""
    results: dict[int, object] = {}
    llm = LLM(str(config_only), skip_tokenizer=True, seed=1)
    threads = [threading.Thread(target=run_long, args=(llm, results, i)) for i in range(3)]
    for thread in threads:
        thread.start()
    while llm.stats().generation_tokens_total < 20:
        llm.check()
        llm.reset_prefix_cache()
    engine = llm._client._engine
    llm.close()
    for thread in threads:
        thread.join(200)
    assert not any(thread.is_alive() for thread in threads) and engine.executor.is_closed
    assert {type(result) for result in results.values()} == {EngineUnavailable} and len(results) == 3
    engine.check()
    assert engine.stats().num_running == 0


def signal_midway(llm: LLM) -> None:
    while llm.stats().generation_tokens_total < 10:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGUSR1)


def test_a_signal_handler_may_close(config_only: Path):
    """It runs in the middle of a step of the thread that owns the engine."""
    llm = LLM(str(config_only), skip_tokenizer=True, seed=5)
    before = signal.signal(signal.SIGUSR1, lambda *_: llm.close())
    signaller = threading.Thread(target=signal_midway, args=(llm,), daemon=True)
    signaller.start()
    try:
        with pytest.raises(EngineUnavailable, match="closed"):
            llm.generate([[1], [2]], SamplingParams(temperature=0.0, max_tokens=4000))
    finally:
        signaller.join()
        signal.signal(signal.SIGUSR1, before)


def test_an_exception_in_the_block_closes(config_only: Path):
    with pytest.raises(KeyError), LLM(str(config_only), skip_tokenizer=True) as llm:
        raise KeyError("the caller's own")
    with pytest.raises(EngineUnavailable, match="closed"):
        llm.generate([1], GREEDY)
    llm.close()
    with LLM(config_only, skip_tokenizer=True) as first, LLM(str(config_only), skip_tokenizer=True) as second:
        assert (
            first.generate([5], GREEDY)[0].outputs[0].token_ids == second.generate([5], GREEDY)[0].outputs[0].token_ids
            == continuation([5], 3)
        )


async def test_ids_of_choices_and_of_requests_are_told_apart(config_only: Path):
    async def finish(llm: AsyncLLM, request_id: Any, n: int = 1) -> list[str | None]:
        params = SamplingParams(temperature=1.0, max_tokens=30, n=n)
        outputs = [output async for output in llm.generate([1, 2], params, request_id)]
        return [choice.finish_reason for choice in outputs[-1].outputs]

    async with AsyncLLM(str(config_only), skip_tokenizer=True, seed=2) as llm:
        for first, second in ((("a", 2), ("a/1", 1)), (("a/1", 1), ("a", 2))):
            results = await asyncio.wait_for(
                asyncio.gather(finish(llm, *first), finish(llm, *second), return_exceptions=True), 200
            )
            assert (
                results[0] == ["length"] * first[1] and isinstance(results[1], RequestError)
                and results[1].param == "request_id"
            )
        assert await finish(llm, "a/1") == ["length"]
        with pytest.raises(RequestError, match="request_id"):
            await finish(llm, 5)
        with pytest.raises(RequestError, match="sampling_params"):
            await anext(llm.generate([1], "x"))
