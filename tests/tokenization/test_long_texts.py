"""Texts of megabytes: the same ids as ever, and refused by their beginning where they are too long."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizer_samples import CORPUS, byte_level, model_facts, pieces

from headrace.base.errors import ContextLengthExceeded
from headrace.service.client.prompts import encode_prompt
from headrace.service.client.texts import Reader
from headrace.service.tokenization import Tokenizer
from headrace.service.tokenization.tokenizer import CUT_TOKENS, LETTERS_READ, LONG_TEXT

TOKENIZERS = (byte_level, pieces)


def draw_text(length: int) -> str:
    draw = random.Random(length)
    text = ""
    while len(text) < length:
        text += draw.choice(CORPUS) * draw.choice((1, 1, 40))
    return text[:length]


@pytest.mark.parametrize("make", TOKENIZERS)
def test_long_texts_have_the_ids_of_short_ones(make: Any):
    tokenizer = make()
    text = draw_text(2 * LONG_TEXT)
    assert tokenizer.encode(text, add_special_tokens=False) == tokenizer._backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("text", [draw_text(30_000), "a" * 30_000, " " * 30_000, "1234567890" * 3000, "水车轮" * 10_000])
def test_what_is_said_to_be_longer_is(make: Any, text: str):
    tokenizer = make()
    whole = len(tokenizer.encode(text, add_special_tokens=False))
    for count in (1, 100, whole // 2, whole - 1, whole, whole + 1):
        is_longer = tokenizer.is_longer(text, count)
        assert not is_longer or whole > count
        if count <= 100 and whole * LETTERS_READ >= len(text):
            assert is_longer


def test_only_the_beginning_of_what_is_refused_is_read(monkeypatch: pytest.MonkeyPatch):
    tokenizer, facts, read = byte_level(), model_facts(500), []
    encode = Tokenizer._encode_bare
    monkeypatch.setattr(Tokenizer, "_encode_bare", lambda self, text: (read.append(len(text)), encode(self, text))[1])
    with pytest.raises(ContextLengthExceeded, match=f"max_model_len, which is {facts.max_model_len}"):
        encode_prompt("the mill " * 500_000, tokenizer, most=facts.max_model_len)
    with pytest.raises(ContextLengthExceeded) as caught:
        Reader(facts, tokenizer).read("the mill " * 500_000)
    assert caught.value.param == "input"
    assert max(read) <= LETTERS_READ**2 * (facts.max_model_len + CUT_TOKENS)
    assert len(Reader(facts, tokenizer, 7).read("the mill " * 500).token_ids) == 7
