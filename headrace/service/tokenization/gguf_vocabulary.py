"""Builds a tokenizer from GGUF metadata (keys ``tokenizer.ggml.*``). Names in quotes are values of that file format:
``tokenizer.ggml.pre`` names the pre-tokenizer, whose split pattern the file does not contain.

The split patterns are those with which each vocabulary's merges were learned, published in the models' tokenizer.json.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from headrace.base.errors import ModelError
from headrace.service.tokenization.sentencepiece import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    PieceVocabulary,
    build_sentencepiece,
)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_THREE_DIGITS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_ONE_DIGIT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_MARKS = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}" + _CASED_TAIL
_CASED_THREE_DIGITS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}"
    + _CASED_TAIL
)
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_PUNCTUATED = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

PLAIN, DIGITS = "plain", "digits"
"""Not patterns: the byte-level splitter's own rule, alone or after cutting out single digits."""

SPLITS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "default", "gpt-2", "phi-2", "olmo", "mpt", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de",
            "jina-v2-code", "roberta-bpe", "exaone4", "gigachat", "modern-bert", "trillion",
        ),
        (PLAIN,),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "granite-docling"),
        (DIGITS,)
    ),
    **dict.fromkeys(
        (
            "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "dbrx",
            "smaug-bpe", "glm4", "chatglm-bpe",
        ),
        (_THREE_DIGITS,),
    ),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan-dense", "solar-open"), (_ONE_DIGIT,)
    ),
    "qwen35": (_MARKS,),
    "tekken": (_CASED,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_CASED_THREE_DIGITS,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan"), (r"\p{N}{1,3}", _HAN_AND_KANA, _PUNCTUATED)),
}
COMPOSED = {"qwen2", "deepseek-r1-qwen", "qwen35", "megrez", "stablelm2"}
"""Vocabularies whose reference tokenizer composes characters first (Unicode form NFC)."""
WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "tekken", "gpt-4o", "llama4", "falcon3", "pixtral", "lfm2"}
"""Vocabularies in which a split that is itself a token is taken without merging."""
BEGIN_BY_DEFAULT = {"llama3", "llama-v3", "llama-bpe", "tekken"}


def build_gguf(metadata: dict[str, Any]) -> Tokenizer:
    """The tokenizer that the metadata describes, without a post-processor; raises `ModelError` when it cannot be
    built."""
    model = metadata.get("tokenizer.ggml.model")
    if "tokenizer.ggml.tokens" not in metadata:
        raise ModelError(
            "the GGUF file holds no tokenizer (tokenizer.ggml.tokens); name a folder that has one with --tokenizer"
        )
    if model == "gpt2":
        return _build_byte_level(metadata)
    if model in ("llama", "gemma4"):
        return _build_pieces(metadata, "bpe")
    if model == "t5":
        return _build_pieces(metadata, "unigram")
    raise ModelError(
        f"the GGUF file's tokenizer type {model!r} is not supported (gpt2, llama and t5 are); "
        "name a folder that has the model's tokenizer.json with --tokenizer"
    )


def adds_bos(metadata: dict[str, Any]) -> bool:
    """Whether bos is put before a text. Without ``add_bos_token`` in the file the tokenizer type decides."""
    said = metadata.get("tokenizer.ggml.add_bos_token")
    if said is not None:
        return bool(said)
    return metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in BEGIN_BY_DEFAULT


def _merges(metadata: dict[str, Any]) -> list[tuple[str, str]] | None:
    if "tokenizer.ggml.merges" not in metadata:
        return None
    return [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]


def _types(metadata: dict[str, Any]) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type")
    return [NORMAL] * len(metadata["tokenizer.ggml.tokens"]) if types is None else list(types)


def _build_pieces(metadata: dict[str, Any], algorithm: str) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    # Without scores ids are the ranks of merges. The map of characters may be stored as signed bytes.
    scores = metadata.get("tokenizer.ggml.scores")
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    return build_sentencepiece(PieceVocabulary(
        pieces=tokens, scores=[-float(i) for i in range(len(tokens))] if scores is None else list(scores),
        types=_types(metadata), add_space_prefix=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)),
        algorithm=algorithm,
        merges=_merges(metadata), unk_id=metadata.get("tokenizer.ggml.unknown_token_id"),
        charsmap=b"" if charsmap is None else bytes(bytearray(int(b) & 0xFF for b in charsmap)),
        collapse_spaces=bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)),
    ))


def _build_byte_level(metadata: dict[str, Any]) -> Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    merges = _merges(metadata)
    if name not in SPLITS:
        near = get_close_matches(name, SPLITS, n=3) or sorted(SPLITS)
        raise ModelError(
            f"the GGUF file's pre-tokenizer {name!r} is not known (nearest: {', '.join(near)}); "
            "name a folder that has the model's tokenizer.json with --tokenizer"
        )
    if merges is None:
        raise ModelError(
            "the GGUF file's tokenizer has no merges (tokenizer.ggml.merges); name another tokenizer with --tokenizer"
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, fuse_unk=False, byte_fallback=False, ignore_merges=name in WHOLE_WORDS)
    )
    if name in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _splitter(SPLITS[name])
    tokenizer.decoder = decoders.ByteLevel()
    types = _types(metadata)
    tokenizer.add_special_tokens([
        AddedToken(t, normalized=False, special=True) for t,
        kind in zip(tokens, types, strict=True) if kind in (CONTROL, UNKNOWN) and t
    ])
    tokenizer.add_tokens(
        [
            AddedToken(t, normalized=False, special=False) for t,
            kind in zip(tokens, types, strict=True) if kind == USER_DEFINED and t
        ]
    )
    return tokenizer


def _splitter(rules: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    """Rules are applied one after the other, each to the pieces of the one before, then bytes are spelled."""
    if rules == (PLAIN,):
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rules == (DIGITS,):
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
            ]
        )
    splits = [pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in rules]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
