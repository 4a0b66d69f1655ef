"""Inputs of custom tools, taken out of JSON that comes in pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.service.parsing.inputs import InputReader, schema_of_input


def read(pieces: list[str], *, is_complete: bool = True) -> list[str]:
    reader = InputReader()
    return [*map(reader.push, pieces), reader.finish(is_complete=is_complete)]


def divide(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in pairwise(places)]


@given(st.text(), st.booleans(), st.sampled_from([", ", " ,\n"]), st.lists(st.integers(0, 999), max_size=9))
def test_any_text_in_any_pieces(text: str, is_ascii: bool, space: str, cuts: list[int]):
    arguments = json.dumps({"input": text, "more": "x"}, ensure_ascii=is_ascii, separators=(space, " : "))
    assert "".join(read(divide(arguments, cuts))) == text


@pytest.mark.parametrize("inside, text", [
    (r"\ud83d\ude00", "😀"), (r"\\ud83d", r"\ud83d"), (r"\ud83d!", "\ufffd!"), (r"\ud83d\n", "\ufffd\n"),
    (r"\ud83d\ud83d\ude00", "\ufffd😀"), (r"\/\b\u0041", "/\bA"), (r"\ude00", "\ufffd"),
])
def test_escapes(inside: str, text: str):
    arguments = f'{{"input": "{inside}"}}'
    assert "".join(read([arguments])) == "".join(read(list(arguments))) == text


def test_text_comes_as_it_is_written():
    assert read(['{"inp', 'ut": "a', 'b\\', 'nc', '"}']) == ["", "a", "b", "\nc", "", ""]


@pytest.mark.parametrize("arguments, text", [
    ('{"patch": "a\\nb", "n": 1}', "a\nb"), ('{"a": "b", "c": "d"}', '{"a": "b", "c": "d"}'), ("{}", "{}"),
    (json.dumps({"n" * 99: 1, "input": "late"}), "late"), ('{"input": 3}', '{"input": 3}'),
])
def test_arguments_of_another_form(arguments: str, text: str):
    assert "".join(read([arguments])) == "".join(read(list(arguments))) == text


def test_calls_that_break_off():
    assert "".join(read(['{"input": "ab\\u00'], is_complete=False)) == "ab"
    assert "".join(read(['{"other": "ab'], is_complete=False)) == ""


def test_schema():
    assert schema_of_input("a|b")["properties"]["input"] == {"type": "string", "pattern": "^(?:a|b)$"}
