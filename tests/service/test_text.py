"""Text in, text out: `LLM`, `AsyncLLM` and `EngineClient` with a byte-level tokenizer over a fake model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from fakes import BUILDER, continuation
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.base.config import engine_config
from headrace.base.errors import HeadraceError, ModelError, RequestError
from headrace.base.sampling import SamplingParams
from headrace.service.client.client import EngineClient
from headrace.service.client.local import LocalClient
from headrace.service.client.replica import Supervision
from headrace.serving.offline import async_llm
from headrace.serving.offline import llm as offline
from headrace.serving.offline.async_llm import AsyncLLM
from headrace.serving.offline.llm import LLM

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% "
    "endif %}"
)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture
def folder(config_only: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder with one token a byte; token i is the i-th symbol of the byte-level alphabet."""
    monkeypatch.setattr(offline, "LocalClient", partial(LocalClient, builder=BUILDER))
    monkeypatch.setattr(async_llm, "EngineClient", partial(EngineClient, supervision=Supervision(builder=BUILDER)))
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(config_only / "tokenizer.json"))
    (config_only / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (config_only / "model.safetensors").touch()
    return config_only


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder)) as llm:
        yield llm


def greedy(max_tokens: int = 24, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)


def encode(text: str) -> list[int]:
    return [
        ALPHABET.index(symbol) for token,
        _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text) for symbol in token
    ]


def test_text_is_encoded_and_decoded(llm: LLM):
    outputs = llm.generate(["water", {"prompt": "wheel"}], greedy())
    for text, output in zip(("water", "wheel"), outputs, strict=True):
        assert output.prompt == text and output.prompt_token_ids == encode(text)
        assert output.outputs[0].token_ids == continuation(encode(text), 24)
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)


def test_ids_need_no_text_and_get_some(llm: LLM):
    ids = encode("water")
    with_text, without = llm.generate([ids, ids], [greedy(), greedy(detokenize=False)])
    assert with_text.outputs[0].text and with_text.prompt is None
    assert without.outputs[0].text == "" and without.outputs[0].token_ids == with_text.outputs[0].token_ids


def test_a_stop_string_ends_the_request_in_the_engine(llm: LLM):
    whole = llm.generate("water", greedy(200))[0].outputs[0].text
    stop = next(whole[i:i + 2] for i in range(5, 100) if whole[i:i + 2].isascii() and whole.index(whole[i:i + 2]) == i)
    made = llm.stats().generation_tokens_total
    (output,) = llm.generate("water", greedy(200, stop=[stop]))
    assert output.outputs[0].text == whole[:whole.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)
    assert llm.stats().generation_tokens_total - made < 200 and llm.stats().num_running == 0
    (output,) = llm.generate("water", greedy(200, stop=stop, include_stop_str_in_output=True))
    assert output.outputs[0].text == whole[:whole.index(stop) + len(stop)]


def test_chat_renders_the_template(llm: LLM):
    messages = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(messages, greedy())
    assert one.prompt == "<user>hi<assistant>"
    assert one.outputs[0].token_ids == continuation(encode("<user>hi<assistant>"), 24)
    bare, other = llm.chat(
        [messages, [{"role": "system", "content": "x"}, *messages]], greedy(), add_generation_prompt=False
    )
    assert (bare.prompt, other.prompt) == ("<user>hi", "<system>x<user>hi")
    (custom,) = llm.chat(
        messages, greedy(), chat_template="{{ messages[0]['content'] }}{{ mark }}", chat_template_kwargs={"mark": "!"}
    )
    assert custom.prompt == "hi!"


def test_a_model_without_tokenizer_serves_ids(folder: Path):
    (folder / "tokenizer.json").unlink()
    with LLM(str(folder)) as llm:
        assert llm.generate([1, 2], greedy())[0].outputs[0].token_ids == continuation([1, 2], 24)
        for call in (
            lambda: llm.generate("text", greedy()), lambda: llm.chat([{"role": "user", "content": "x"}]),
            lambda: llm.generate([1], greedy(stop="x"))
        ):
            with pytest.raises(RequestError, match="tokenizer"):
                call()


async def test_a_stop_string_ends_a_stream_and_frees_its_id(folder: Path):
    async with AsyncLLM(str(folder), seed=5) as llm:
        expected = [o async for o in llm.generate("water", greedy(60))][-1].outputs[0].text
        stop = next(
            expected[i:i + 1] for i in range(3, 50) if expected[i].isascii() and expected.index(expected[i]) == i
        )
        seen = [o async for o in llm.generate("water", greedy(4000, stop=stop), request_id="again")]
        assert seen[-1].outputs[0].text == expected[:expected.index(stop)]
        assert all(seen[-1].outputs[0].text.startswith(o.outputs[0].text) for o in seen)
        while llm._client.num_inflight:
            await asyncio.sleep(0.01)
        stats = await llm.stats()
        assert stats.num_running == 0 and stats.generation_tokens_total < 1000


async def test_a_server_without_its_tokenizer_does_not_start(folder: Path):
    (folder / "tokenizer.json").unlink()
    client = EngineClient(engine_config(model=str(folder)), supervision=Supervision(builder=BUILDER))
    with pytest.raises(ModelError, match="tokenizer"):
        await client.start()
    assert client.state == "stopped" and client.engine_pids[0] is None
    with pytest.raises(HeadraceError):
        await client.wait_ready()
