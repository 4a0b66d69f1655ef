"""SentencePiece: reads ``.model`` files and builds a tokenizer from a vocabulary of pieces with scores and types.

A ``.model`` file is one protobuf message of which a tokenizer needs few fields; they are parsed here without a protobuf
library. Field numbers and defaults: sentencepiece_model.proto of the SentencePiece project. GGUF files carry the same
vocabularies. Refuses: the ``word`` and ``char`` model types.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from headrace.base.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Piece types; SentencePiece and GGUF number them alike."""

SPACE = "\u2581"


@dataclass(frozen=True)
class PieceVocabulary:
    """A SentencePiece vocabulary. ``pieces``, ``scores`` (log-probabilities; for BPE merge priority) and ``types`` are
    parallel lists, indexed by token id. ``merges``: None when they are to be derived from the pieces (`derive_merges`).

    ``algorithm`` is ``bpe`` or ``unigram``. ``charsmap`` is the precompiled normalization map, empty for none.
    """

    pieces: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    add_space_prefix: bool
    algorithm: str = "bpe"
    merges: Sequence[tuple[str, str]] | None = None
    unk_id: int | None = None
    charsmap: bytes = b""
    collapse_spaces: bool = False


def build_sentencepiece(vocabulary: PieceVocabulary) -> Tokenizer:
    """Build a tokenizer with the vocabulary's ids and without a post-processor (no token is added around a text)."""
    pieces = [_respell(piece, kind) for piece, kind in zip(vocabulary.pieces, vocabulary.types, strict=True)]
    build = _unigram if vocabulary.algorithm == "unigram" else _bpe
    tokenizer = Tokenizer(build(vocabulary, pieces))
    normalizer = _normalizer(vocabulary)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if vocabulary.algorithm == "unigram":
        scheme = "always" if vocabulary.add_space_prefix else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.add_space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    _mark_added(tokenizer, vocabulary.pieces, pieces, vocabulary.types)
    return tokenizer


def _respell(piece: str, kind: int) -> str:
    """User-defined runs of spaces may be stored as real spaces; inside the model a space is always U+2581."""
    return SPACE * len(piece) if kind == USER_DEFINED and piece and not piece.strip(" ") else piece


def _normalizer(vocabulary: PieceVocabulary) -> normalizers.Normalizer | None:
    # Unigram replaces and prepends spaces in its Metaspace pre-tokenizer, BPE here: it is not pre-tokenized at all.
    steps: list[normalizers.Normalizer] = []
    if vocabulary.charsmap:
        steps.append(normalizers.Precompiled(vocabulary.charsmap))
    if vocabulary.collapse_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if vocabulary.algorithm == "bpe":
        if vocabulary.add_space_prefix:
            steps.append(normalizers.Prepend(SPACE))
        steps.append(normalizers.Replace(" ", SPACE))
    if not steps:
        return None
    return steps[0] if len(steps) == 1 else normalizers.Sequence(steps)


def _unigram(vocabulary: PieceVocabulary, pieces: list[str]) -> models.Model:
    # Control and unused pieces must never be found in plain text: a score this low loses in every Viterbi path.
    out_of_reach = min(vocabulary.scores, default=0.0) - 1e4
    reachable = (NORMAL, USER_DEFINED, UNKNOWN)
    scored = [
        (p, float(s) if k in reachable else out_of_reach) for p, s,
        k in zip(pieces, vocabulary.scores, vocabulary.types, strict=True)
    ]
    return models.Unigram(scored, _unk_id(vocabulary), BYTE in set(vocabulary.types))


def _bpe(vocabulary: PieceVocabulary, pieces: list[str]) -> models.Model:
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = (
        vocabulary.merges if vocabulary.merges is not None
        else derive_merges(pieces, vocabulary.scores, vocabulary.types, vocab)
    )
    unk = _unk_id(vocabulary)
    return models.BPE(
        vocab=vocab, merges=list(merges), unk_token=None if unk is None else pieces[unk], fuse_unk=True,
        byte_fallback=BYTE in set(vocabulary.types),
    )


def _unk_id(vocabulary: PieceVocabulary) -> int | None:
    if vocabulary.unk_id is not None:
        return vocabulary.unk_id
    return next((index for index, kind in enumerate(vocabulary.types) if kind == UNKNOWN), None)


def derive_merges(
    pieces: Sequence[str], scores: Sequence[float], types: Sequence[int], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """All pairs of pieces that concatenate to a piece, in order of the merged piece's rank, then of the pair's ids.

    The ids of a BPE vocabulary follow the order in which its merges were learned, which is also that of descending
    scores. Where the two disagree among normal pieces the score decides.
    """
    mergeable = [i for i, kind in enumerate(types) if kind in (NORMAL, USER_DEFINED) and len(pieces[i]) > 1]
    normal = [scores[i] for i in mergeable if types[i] == NORMAL]
    if any(later > earlier for earlier, later in pairwise(normal)):
        mergeable.sort(key=lambda i: -scores[i])
    known, merges = vocab.get, []
    for index in mergeable:
        piece = pieces[index]
        pairs = []
        for cut in range(1, len(piece)):
            left = known(piece[:cut])
            if left is not None and (right := known(piece[cut:])) is not None:
                pairs.append((left, right))
        if len(pairs) > 1:
            pairs.sort()
        for left, right in pairs:
            merges.append((pieces[left], pieces[right]))
    return merges


def _mark_added(tokenizer: Tokenizer, raw: Sequence[str], pieces: Sequence[str], types: Sequence[int]) -> None:
    """Add control pieces as special tokens, and user-defined pieces as tokens that match anywhere in a text. Runs of
    spaces are not added: the model merges them."""
    special = [
        AddedToken(p, normalized=False, special=True) for p,
        kind in zip(raw, types, strict=True) if kind == CONTROL and p
    ]
    whole = [
        AddedToken(p, normalized=False, special=False)
        for p, spelled,
        kind in zip(raw, pieces, types, strict=True) if kind == USER_DEFINED and p == spelled and p.strip(SPACE)
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(whole)


# Protobuf field numbers: of ModelProto, TrainerSpec (ids of special tokens) and NormalizerSpec.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _UNK_ID, _BOS_ID, _EOS_ID, _PAD_ID = 3, 40, 41, 42, 43
_CHARSMAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_SPACES = 2, 3, 4
_ALGORITHMS = {1: "unigram", 2: "bpe"}  # TrainerSpec.ModelType


@dataclass(frozen=True)
class SentencePieceModel:
    """A parsed model. Special ids are -1 where the model has none."""

    vocabulary: PieceVocabulary
    bos_id: int
    eos_id: int
    pad_id: int


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """Parse the file; raises `ModelError` when it is no SentencePiece model or one of an unsupported type."""
    try:
        return _read(path.read_bytes())
    except (IndexError, struct.error, UnicodeDecodeError, ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read as a SentencePiece model: {error}") from error


def _read(data: bytes) -> SentencePieceModel:
    pieces, scores, types = [], [], []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if number == _PIECES and isinstance(value, bytes):
            piece = dict(_fields(value))
            pieces.append(_bytes(piece.get(1, b"")).decode())
            scores.append(struct.unpack("<f", _bytes(piece[2]))[0] if 2 in piece else 0.0)
            types.append(_int(piece.get(3, NORMAL)))
        elif number == _TRAINER:
            trainer = dict(_fields(_bytes(value)))
        elif number == _NORMALIZER:
            normalizer = dict(_fields(_bytes(value)))
    algorithm = _ALGORITHMS.get(_int(trainer.get(_MODEL_TYPE, 1)))
    if algorithm is None or not pieces:
        raise ValueError("only bpe and unigram models with pieces are supported")
    vocabulary = PieceVocabulary(
        pieces=pieces, scores=scores, types=types, algorithm=algorithm,
        add_space_prefix=bool(normalizer.get(_ADD_DUMMY_PREFIX, 1)),
        collapse_spaces=bool(normalizer.get(_REMOVE_EXTRA_SPACES, 1)),
        charsmap=_bytes(normalizer.get(_CHARSMAP, b"")), unk_id=_int(trainer.get(_UNK_ID, 0)),
    )
    return SentencePieceModel(
        vocabulary, bos_id=_signed(trainer.get(_BOS_ID, 1)), eos_id=_signed(trainer.get(_EOS_ID, 2)),
        pad_id=_signed(trainer.get(_PAD_ID, -1)),
    )


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """``(field number, value)`` of one message: varints as int, everything else as its bytes. Raises ValueError or
    IndexError for what is no message: every length is checked against the data before it is used."""
    # Wire types: 0 varint, 1 fixed 64 bits, 2 length-delimited, 5 fixed 32 bits.
    at, size = 0, len(data)
    while at < size:
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == 2:
            length, at = _varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"unknown wire type {wire} at byte {at}")
        if at + length > size:
            raise ValueError(f"truncated at byte {at}")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError(f"a number is too long at byte {at}")


def _int(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("a number was expected")
    return value


def _signed(value: int | bytes) -> int:
    """A negative int32 field is written as a varint of its 64-bit two's complement."""
    number = _int(value)
    return number - 2**64 if number >= 2**63 else number


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("bytes were expected")
    return value
