"""Text that tokenizers get wrong, and tokenizers made on the spot."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from headrace.base.config import ModelConfig
from headrace.base.messages import ModelFacts
from headrace.models.source import ModelSource, resolve_source
from headrace.service.tokenization import Tokenizer as HeadraceTokenizer
from headrace.service.tokenization import load_tokenizer
from headrace.service.tokenization.tokenizer import TokenizerFacts

CORPUS = [
    "", " ", "  ", "\n", "\n\n\n", "\t\t x", "Hello, world!", " leading", "trailing ", "two  spaces   three    four",
    "def f(x):\n    return x ** 2\n\n\nclass A:\n\tpass\n", "for (int i = 0; i < n; ++i) { a[i] += b[i]; }",
    "don't we'll I'M THEY'RE it's", "Grüße aus Köln, naïve café", "Привет, мир! Как дела?",
    "日本語のテキストです。", "中文测试,標點符號。",
    "한국어 문장입니다", "مرحبا بالعالم", "שלום עולם", "हिन्दी में लिखा हुआ", "ไทยไม่มีช่องว่าง", "🙂🙃 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "e\u0301 vs é", "a\u00a0b\u200bc\u2028d",
    "x = {'a': [1, 2, 3], \"b\": null}", "https://example.org/a?b=c&d=%20#e", "!!!???...---___===",
    "\u0000\u0001\u007f", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𒀀",
    "MixedCASE camelCase snake_case kebab-case", "a" * 200, "ab" * 100, " " * 40 + "deep", "<tag attr='v'>text</tag>",
    "�",
]
DIGITS = ["CO₂ x² ½ №1 ①", "12345", "3.14159", "2024-01-31", "a1b22c333", "1 2  3   4", "１２３", "٣٤٥", "1,000,000.00"]


def have(package: str) -> bool:
    return find_spec(package) is not None


def package_path(package: str) -> Path:
    """Folder of an installed model package; skips the test when it is not there."""
    found = find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"package {package} is not installed")
    return Path(found.origin).parent


@cache
def load_model(name: str) -> HeadraceTokenizer:
    return load_tokenizer(resolve_source(ModelConfig(model=name)))


def load_folder(folder: Path, **config: object) -> HeadraceTokenizer:
    return load_tokenizer(ModelSource("test", "folder", folder, dict(config)))


def write_folder(folder: Path, backend: Tokenizer, **config: object) -> Path:
    """A model folder with nothing but a tokenizer."""
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@cache
def byte_level() -> HeadraceTokenizer:
    """Byte-level BPE with three special tokens, trained on the corpus."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>", "</s>", "<|pad|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return HeadraceTokenizer(backend, TokenizerFacts(names={"bos_token": "<s>", "eos_token": "</s>"}))


@cache
def pieces() -> HeadraceTokenizer:
    """SentencePiece-like BPE with byte fallback and a space put before a text, taken off again by the decoder."""
    words = ["\u2581", "a", "b", "c", "e", "o", "\u2581a", "\u2581b", "ab", "\u2581ab", "ce", "é", "\u2581\u2581", "日"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{i:02X}>": 3 + i for i in range(256)}
    for word in words:
        vocab[word] = len(vocab)
    merges = [("\u2581", "a"), ("\u2581", "b"), ("a", "b"), ("\u2581", "ab"), ("c", "e"), ("\u2581", "\u2581")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>")])
    return HeadraceTokenizer(backend, TokenizerFacts(names={"bos_token": "<s>", "eos_token": "</s>"}, add_bos=True))


@cache
def word_pieces() -> HeadraceTokenizer:
    words = ["[UNK]", "[CLS]", "[SEP]", "the", "cat", "##s", "sat", ".", ",", "'", "don", "t", "##t", "n", "é"]
    backend = Tokenizer(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    backend.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return HeadraceTokenizer(backend, TokenizerFacts())


@cache
def metaspace() -> HeadraceTokenizer:
    """Unigram with the older decoder that drops the first token's space itself."""
    scored = [
        ("<unk>", 0.0), ("</s>", 0.0), ("\u2581", -2.0), ("\u2581a", -2.5), ("a", -3.0), ("b", -3.0),
        ("\u2581\u2581b", -4.0), ("é", -5.0)
    ]
    backend = Tokenizer(models.Unigram(scored, 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    return HeadraceTokenizer(backend, TokenizerFacts(names={"eos_token": "</s>"}))


def model_facts(vocab_size: int, **changed: object) -> ModelFacts:
    base = {
        "model": "m", "architecture": "A", "family": "f", "dtype": "float32", "device": "cpu", "max_model_len": 64,
        "vocab_size": vocab_size,
        "eos_ids": [2], "num_parameters": 1, "page_size": 16, "num_kv_tokens": 1024,
    }
    return ModelFacts(**{**base, **changed})
