"""The printable spelling of bytes in byte-level vocabularies: each of the 256 bytes is one visible character.

Bytes that are printable in Latin-1 stand for themselves, the others are numbered from U+0100 on (GPT-2's scheme).
"""

from __future__ import annotations


def _spelling() -> dict[int, str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        table.setdefault(byte, chr(256 + len(table) - len(printable)))
    return table


CHAR_OF_BYTE: dict[int, str] = _spelling()
BYTE_OF_CHAR: dict[str, int] = {char: byte for byte, char in CHAR_OF_BYTE.items()}


def bytes_of_spelling(token: str) -> bytes:
    """The bytes a byte-level token stands for; a token with any other character (an added one) is plain UTF-8."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8", "replace")


def spelling_of_bytes(raw: bytes) -> str:
    """The spelling of bytes in a byte-level vocabulary."""
    return "".join([CHAR_OF_BYTE[byte] for byte in raw])
