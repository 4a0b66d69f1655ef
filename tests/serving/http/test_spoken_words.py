"""When words were said, and which tokens they are: as transformers has it."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.base.pooling import pack_floats
from headrace.serving.http.generation.spoken_words import find_times, find_words

generation = pytest.importorskip("transformers.models.whisper.generation_whisper")
tokenization = pytest.importorskip("transformers.models.whisper.tokenization_whisper")


@pytest.mark.parametrize("tokens, positions", [(1, 1), (1, 9), (7, 7), (9, 4), (23, 120)])
def test_times_are_those_of_dynamic_time_warping(tokens: int, positions: int):
    for seed in range(3):
        matrix = np.random.default_rng(seed).standard_normal((tokens, positions)).astype(np.float32)
        matrix = matrix if seed else np.round(matrix)  # with ties
        texts, times = generation._dynamic_time_warping(-matrix.astype(np.float64))
        jumps = np.pad(np.diff(texts), (1, 0), constant_values=1).astype(bool)
        found = find_times(pack_floats(matrix.ravel().tolist()), tokens)
        assert found == pytest.approx((times[jumps] * 0.02).tolist())


class Bytes:
    """A tokenizer whose tokens are runs of bytes."""

    eos_token_id = 10**6
    language = None

    def __init__(self, pieces: list[bytes]):
        self._pieces = pieces

    def decode(self, ids: list[int], decode_with_timestamps: bool = False) -> str:
        return b"".join(self._pieces[i] for i in ids).decode(errors="replace")


@pytest.mark.parametrize("language, name", [("en", "english"), ("zh", "chinese")])
@pytest.mark.parametrize("pieces", [
    [b" Hel", b"lo", b",", b" ", b'"', b"world", b'"', b"!", b" (", b"yes", b")", b"."],
    ["\u4f60".encode()[:1], "\u4f60".encode()[1:], "\u597d".encode(), "\u3002".encode(), "\u597d".encode()[:2]],
    [b"a", b" -", b" b", b"c", "\ufffd".encode(), b" d"], [b" "], [b"!", b"?"],
])
def test_words_are_those_of_transformers(pieces: list[bytes], language: str, name: str):
    tokenizer, ids = Bytes(pieces), list(range(len(pieces)))
    words, _, indices = tokenization._combine_tokens_into_words(tokenizer, ids, name)
    times = [i / 10 for i in range(len(pieces) + 1)]
    found = find_words(ids, times, tokenizer.decode, language)
    assert [word.text for word in found] == words
    assert [(word.start, word.end) for word in found] == [(times[own[0]], times[own[-1] + 1]) for own in indices]
