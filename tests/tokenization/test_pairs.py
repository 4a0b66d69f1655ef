"""Pairs of texts and cut texts against the tokenizers library's own post-processors and truncation."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from headrace.service.tokenization.tokenizer import Tokenizer, TokenizerFacts, cut_longest

WORDS = {
    "[CLS]": 0, "[SEP]": 1, "[UNK]": 2, **{word: i for i, word in enumerate(["a", "b", "c", "d", "e", "f", "g"], 3)}
}
TEMPLATES = {
    "bert": dict(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1"),
    "roberta": dict(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B [SEP]"),
    "end": dict(single="$A [SEP]", pair="$A [SEP] $B:1 [SEP]:1"),
}


def make_backend(template: str | None) -> Backend:
    backend = Backend(WordLevel(WORDS, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    if template is not None:
        backend.post_processor = TemplateProcessing(**TEMPLATES[template], special_tokens=[("[CLS]", 0), ("[SEP]", 1)])
    return backend


words = st.lists(st.sampled_from("abcdefg"), min_size=0, max_size=12).map(" ".join)


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=60, deadline=None)
@given(first=words, second=words, limit=st.none() | st.integers(5, 20))
def test_pairs_equal_the_library(template: str, first: str, second: str, limit: int | None):
    oracle, tokenizer = make_backend(template), Tokenizer(make_backend(template), TokenizerFacts())
    if limit is not None:
        oracle.enable_truncation(limit, strategy="longest_first")
    encoded = oracle.encode(first, second)
    ids, second_start = tokenizer.encode_pair(first, second, limit=limit)
    assert ids == encoded.ids
    assert 0 not in encoded.sequence_ids[second_start:] and 1 not in encoded.sequence_ids[:second_start]
    assert tokenizer.encode(first, limit=limit) == oracle.encode(first).ids


def test_without_a_template_texts_follow_each_other():
    tokenizer = Tokenizer(make_backend(None), TokenizerFacts())
    assert tokenizer.encode_pair("a b", "c") == ([3, 4, 5], 2)
    assert tokenizer.encode("a b c", limit=2) == [3, 4]


def test_a_limit_below_the_special_tokens_leaves_those():
    tokenizer = Tokenizer(make_backend("bert"), TokenizerFacts())
    assert tokenizer.encode("a b c", limit=1) == [0, 1]
    assert tokenizer.encode("a b c", add_special_tokens=False, limit=2) == [3, 4]


@given(first=st.integers(0, 50), second=st.integers(0, 50), room=st.integers(0, 60))
def test_the_longer_text_gives_way(first: int, second: int, room: int):
    kept = cut_longest(first, second, room)
    assert kept[0] <= first and kept[1] <= second
    assert sum(kept) == min(first + second, room)
    cut = [have > keep for have, keep in zip((first, second), kept, strict=True)]
    if all(cut):
        assert abs(kept[0] - kept[1]) <= 1
    elif any(cut):
        assert kept[cut.index(True)] >= kept[cut.index(False)] - 1
