"""However a text is cut into pieces, the events are the same; nothing a model can write raises or breaks the order."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import NESTED, PAIRS, REASONED, TWO_CALLS, VARIANTS, parser, plain, run, summary

from headrace.service.parsing.events import CallArguments, CallEnd, CallStart, TextDelta
from headrace.service.parsing.format import visible_texts
from headrace.service.parsing.known_formats import REASONING_FORMATS, TOOL_FORMATS

NOISE = [
    "Let me see.\n", " ", "\n", "\n\n", "é", "日本", "😀", "{", "}", "[", "]", "(", ")", '"', "'", "\\", '\\"',
    "\\u00e9",
    "1", "-2.5e3", "null", "get_weather", "noop", ",", ":", "="
]
SLOW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def pieces_of(name: str) -> st.SearchStrategy[str]:
    """Texts of whole calls, halves of calls, the format's markers and halves of those, and noise."""
    tools, reasoning = TOOL_FORMATS.load(name), REASONING_FORMATS.load(PAIRS[name])
    markers = visible_texts(tools, reasoning)
    texts = [TWO_CALLS[name], REASONED[PAIRS[name]], *(t for n, t in VARIANTS if n == name)]
    texts.append(
        TWO_CALLS[name].replace(
            '{"city": "Paris", "days": 3}', json.dumps(NESTED)
        ).replace("Paris", f'Pa"{markers[0]}\n')
    )
    cut = st.tuples(
        st.sampled_from(texts + markers), st.integers(0, 400), st.integers(0, 400)
    ).map(lambda t: t[0][t[1] % len(t[0]) :][: t[2]])
    return st.lists(
        st.one_of(st.sampled_from(markers), st.sampled_from(NOISE), st.sampled_from(texts), cut, st.text(max_size=4)),
        max_size=8
    ).map("".join)


def check_order(events: list) -> None:
    """Calls come whole, one after the other; complete ones have arguments that are JSON objects."""
    arguments, is_open, count = "", False, 0
    for event in events:
        match event:
            case CallStart(index, call_id, name):
                assert not is_open and index == count and call_id and name
                arguments, is_open = "", True
            case CallArguments(index, text):
                assert is_open and index == count and text
                arguments += text
            case CallEnd(index, is_complete):
                assert is_open and index == count
                assert not is_complete or type(json.loads(arguments)) is dict
                is_open, count = False, count + 1
            case TextDelta(text):
                assert not is_open and text
    assert not is_open


@pytest.mark.parametrize("name", PAIRS)
@SLOW
@given(data=st.data())
def test_any_text_in_any_pieces(name, data):
    text = data.draw(pieces_of(name))
    options = {
        "is_open": data.draw(st.booleans()), "separates": data.draw(st.booleans()),
        "max_calls": data.draw(st.sampled_from([1, 1024]))
    }
    reasoning = data.draw(st.sampled_from([None, PAIRS[name]]))
    options["is_open"] &= reasoning is not None
    whole = run(parser(name, reasoning, **options), [text])
    check_order(whole)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert plain(run(parser(name, reasoning, **options), parts)) == plain(whole)
    assert plain(run(parser(name, reasoning, **options), text)) == plain(whole)


@pytest.mark.parametrize("name, text", [*TWO_CALLS.items(), *VARIANTS])
def test_every_cut_and_every_end(name, text):
    text = f"Hm.\n{text}\nDone." if name not in ("llama3_json", "gpt_oss") else text
    whole = plain(run(parser(name), [text]))
    assert plain(run(parser(name), text)) == whole
    ended = parser(name)
    so_far: list = []
    for at in range(len(text)):
        assert plain(run(parser(name), [text[:at], text[at:]])) == whole
        check_order(run(parser(name), text[:at]))
        so_far += ended.push(text[at])
        content = "".join(e.text for e in so_far if isinstance(e, TextDelta))
        assert summary([e for e in run(parser(name), [text])])[1].startswith(content)


@pytest.mark.parametrize("name", REASONED)
def test_every_cut_of_reasoning(name):
    for text in (REASONED[name], REASONED[name] + REASONED[name]):
        for is_open in {False, name == "deepseek_r1"}:
            whole = run(parser(None, name, is_open=is_open), [text])
            for at in range(len(text)):
                assert run(parser(None, name, is_open=is_open), [text[:at], text[at:]]) == whole
            assert run(parser(None, name, is_open=is_open), text) == whole


@pytest.mark.parametrize("name", PAIRS)
def test_text_without_markers_is_passed_on_as_it_is(name):
    for text in (
        "", " ", "\n\n", "a\n b \n\n c\n", "x < y and [1, 2] {3}", "Hello (world)", "日本\u2028😀", "a\r\nb\t",
    ):
        assert summary(run(parser(name), text)) == ("", text, [])


@pytest.mark.parametrize("name", ["hermes", "kimi_k2", "mistral", "pythonic", "qwen3_coder", "gemma"])
def test_broken_calls_come_back_as_text(name):
    opening = visible_texts(TOOL_FORMATS.load(name), None)[0]
    for rest in (
        "", "no call", " {", '{"name": 3}', '{"name": "a b", "arguments": {}}', "\x00", "[[[", '{"arguments": {}}',
        "f(1, 2)"
    ):
        text = f"So: {opening}{rest}"
        assert summary(run(parser(name), text)) == ("", text, [])


@pytest.mark.parametrize("name", ["hermes", "deepseek_v31", "kimi_k2", "mistral", "glm45"])
def test_a_call_cut_short_keeps_what_was_written(name):
    text = TWO_CALLS[name]
    begun = text[: text.index("Paris") + 3]
    reasoning, content, ((called, arguments, is_complete),) = summary(run(parser(name), begun))
    assert (reasoning, content, called, is_complete) == ("", "", "get_weather", False)
    assert arguments == '{"city": "Par'


def test_long_output_of_the_worst_kind():
    call = '<tool_call>{"name": "f", "arguments": {"x": "' + "y" * 50_000 + '"}}</tool_call>'
    for text in (
        " \n" * 25_000, "<" * 50_000, "<tool_call" * 5_000, "[" * 50_000, "\n[" * 25_000, "{" * 50_000, call,
        '<tool_call>{"a": ' + "[" * 50_000
    ):
        for name in ("hermes", "pythonic", "llama3_json"):
            check_order(run(parser(name), [text[i : i + 50] for i in range(0, len(text), 50)]))
