"""Reads SentencePiece ``.model`` files: the few protobuf fields that a tokenizer needs, without a protobuf library.

Field numbers: sentencepiece_model.proto of the SentencePiece project.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.base.errors import ModelError
from headrace.service.tokenization.sentencepiece_vocabulary import NORMAL, PieceVocabulary

_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _UNK_ID, _BOS_ID, _EOS_ID, _PAD_ID = 3, 40, 41, 42, 43
_CHARSMAP, _ADD_DUMMY_PREFIX, _REMOVE_EXTRA_SPACES = 2, 3, 4
_ALGORITHMS = {1: "unigram", 2: "bpe"}


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
    """``(field number, value)`` of one message: varints as int, everything else as its bytes."""
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
    number = _int(value)
    return number - 2**64 if number >= 2**63 else number


def _bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("bytes were expected")
    return value
