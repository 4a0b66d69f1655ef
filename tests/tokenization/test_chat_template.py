"""Chat templates render as transformers renders them, within bounds, and failures name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from golden_ids import SMOLLM2
from templates import ALL, CHATML, HEADERS, PARTS_ONLY, TURNS
from tokenizer_samples import load_folder, load_model, package_path, write_folder
from tokenizers import Tokenizer as Backend
from tokenizers import models

from headrace.base.errors import ConfigError, RequestError, UnsupportedFeature
from headrace.models.source import ModelSource
from headrace.service.tokenization import chat_template, load_tokenizer
from headrace.service.tokenization.chat_template import ChatTemplates

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "  What is 2+2? <é> & 'q' "}
CHATS = [
    [USER],
    [{"role": "system", "content": "Be brief.\n"}, USER],
    [USER, {"role": "assistant", "content": "4\n\n"}, {"role": "user", "content": "日本語 🙂"}],
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "é <b>", "parameters": {"type": "object", "properties": {}}}
    }
]


def render(template: str, messages: list[dict], **options: object) -> str:
    return ChatTemplates({"default": template}, NAMES).render(messages, **options)


@pytest.fixture(scope="module")
def oracle():
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.BPE(vocab={"<s>": 0, "</s>": 1, "a": 2}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("prompt", [True, False])
def test_rendering_equals_transformers(oracle, name: str, messages: list[dict], prompt: bool):
    expected = oracle.apply_chat_template(
        messages, chat_template=ALL[name], tokenize=False, add_generation_prompt=prompt
    )
    assert render(ALL[name], messages, add_generation_prompt=prompt) == expected


@pytest.mark.parametrize("options", [{"tools": TOOLS}, {"date_string": "1 May"}, {"enable_thinking": False}])
@pytest.mark.parametrize("template", [HEADERS, CHATML])
def test_variables_equal_transformers(oracle, template: str, options: dict):
    expected = oracle.apply_chat_template(
        CHATS[1], chat_template=template, tokenize=False, add_generation_prompt=True, **options
    )
    tools = options.get("tools")
    assert render(
        template, CHATS[1], tools=tools, variables={k: v for k, v in options.items() if k != "tools"}
    ) == expected


@pytest.mark.parametrize("content", ["The answer", "The answer is ", "x\n", ""])
@pytest.mark.parametrize("template", [CHATML, HEADERS, TURNS])
def test_open_message_equals_transformers(oracle, template: str, content: str):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    if content:
        expected = oracle.apply_chat_template(
            messages, chat_template=template, tokenize=False, continue_final_message=True
        )
    else:
        expected = render(template, messages[:1])
    assert render(template, messages, add_generation_prompt=False, continue_final_message=True) == expected


@pytest.mark.real_weights
def test_smollm2_template_equals_transformers(oracle):
    package_path(SMOLLM2)
    tokenizer = load_model(SMOLLM2)
    for messages in CHATS:
        expected = oracle.apply_chat_template(
            messages, chat_template=tokenizer._facts.chat_templates["default"], tokenize=False,
            add_generation_prompt=True
        )
        assert tokenizer.render_chat(messages) == expected
    ids = tokenizer.encode(tokenizer.render_chat(CHATS[1]), add_special_tokens=False)
    assert ids[0] == tokenizer.special_id("<|im_start|>") == ids[ids.index(tokenizer.special_id("<|im_end|>")) + 2]


def test_content_parts_become_what_the_template_understands():
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert render(CHATML, parts) == render(CHATML, [{"role": "user", "content": "one\ntwo"}])
    assert render(TURNS, parts) == "<s><turn>user\nonetwo<end>\n<turn>model\n"
    assert render(PARTS_ONLY, parts) == "[user]onetwo[assistant]"
    assert render(PARTS_ONLY, [{"role": "user", "content": "one"}]) == "[user]one[assistant]"
    last = [{"role": "assistant", "content": [{"type": "text", "text": "so "}]}]
    assert render(
        PARTS_ONLY, [*parts, *last], add_generation_prompt=False, continue_final_message=True
    ) == "[user]onetwo[assistant]so "
    assert render(
        CHATML, [{"role": "assistant", "content": None}], add_generation_prompt=False
    ) == "<|im_start|>assistant\n<|im_end|>\n"


@pytest.mark.parametrize(("messages", "error", "message"), [
    ([], RequestError, "at least one"),
    (["hi"], RequestError, "role"),
    ([{"content": "x"}], RequestError, "role"),
    ([{"role": "user", "content": 5}], RequestError, "string or a list"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], UnsupportedFeature, "image_url"),
    ([{"role": "user", "content": [{"type": "text"}]}], RequestError, "text"),
    ([{"role": "assistant", "content": "x"}], RequestError, "roles must alternate"),
])
def test_wrong_messages_are_refused(messages: list, error: type, message: str):
    with pytest.raises(error, match=message) as caught:
        render(TURNS, messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(("template", "message"), [
    ("{% for m in messages %}", "not valid Jinja"),
    ("{{ messages[0].nothing.more }}", "nothing"),
    ("{{ messages[0] + 1 }}", "TypeError"),
    ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ("{{ messages.__class__.__mro__ }}", "unsafe"),
    ("{% set x = messages.append(1) %}", "not safely callable|unsafe"),
    ("{{ 'x' * 100000000 }}", "repetition"),
    ("{{ 9 ** 99999 }}", "power"),
    ("{{ range(10000000) | list }}", "(?i)range"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "Recursion"),
    ("{% include 'x' %}", "(?i)loader"),
    ("{{ raise_exception('no such role') }}", "no such role"),
])
def test_failing_templates_name_the_problem(template: str, message: str):
    with pytest.raises(RequestError, match=message):
        render(template, [USER])


def test_endless_templates_are_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 0.05)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match=r"more than 0\.05 seconds"):
        render(loops, [USER])
    monkeypatch.setattr(chat_template, "MAX_RENDER_SECONDS", 100.0)
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(RequestError, match="longer than 1000"):
        render("{% for a in range(500) %}{{ 'abcdef' }}{% endfor %}", [USER])


def test_an_open_message_must_be_shown():
    with pytest.raises(RequestError, match="does not show"):
        render(
            "{% for m in messages %}{{ m.role }}{% endfor %}", [USER], add_generation_prompt=False,
            continue_final_message=True
        )
    with pytest.raises(RequestError, match="add_generation_prompt"):
        render(CHATML, [USER], continue_final_message=True)


def test_named_templates():
    templates = ChatTemplates({"default": "plain", "tool_use": "with tools", "rag": "{{ documents | length }}"}, {})
    assert templates.render([USER]) == "plain"
    assert templates.render([USER], tools=TOOLS) == "with tools"
    assert templates.render([USER], template="rag", variables={"documents": [1, 2]}) == "2"
    assert templates.render([USER], template="{{ messages | length }}") == "1"
    with pytest.raises(RequestError, match="default, tool_use, rag"):
        templates.render([USER], template="rga")
    with pytest.raises(RequestError, match="no chat template"):
        ChatTemplates({}, {}).render([USER])


def new_backend() -> Backend:
    return Backend(models.BPE(vocab={"<s>": 0, "</s>": 1, "a": 2}, merges=[]))


def test_templates_are_found_in_folders(tmp_path: Path):
    folder = write_folder(
        tmp_path, new_backend(),
        chat_template=[{"name": "default", "template": "listed"}, {"name": "rag", "template": "rag"}]
    )
    assert load_folder(folder).render_chat([USER]) == "listed"
    assert load_folder(folder).render_chat([USER], template="rag") == "rag"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert load_folder(folder).render_chat([USER]) == "from json"
    (folder / "chat_template.jinja").write_text("from file {{ bos_token }}")
    assert load_folder(folder).render_chat([USER]) == "from file "
    write_folder(folder, new_backend(), bos_token="<s>")
    assert load_folder(folder).render_chat([USER]) == "from file <s>"
    (folder / "other.jinja").write_text("other")
    source = ModelSource("m", "folder", folder, {})
    assert load_tokenizer(source, chat_template=str(folder / "other.jinja")).render_chat([USER]) == "other"
    assert load_tokenizer(source, chat_template="{{ 1 + 1 }}").render_chat([USER]) == "2"
    with pytest.raises(ConfigError, match="chat_template"):
        load_tokenizer(source, chat_template="missing.jinja")


def test_begin_of_text_is_not_doubled(tmp_path: Path):
    folder = write_folder(
        tmp_path, new_backend(), bos_token="<s>", eos_token="</s>", add_bos_token=True,
        chat_template="{{ bos_token }}{{ messages[0].content }}"
    )
    tokenizer = load_folder(folder)
    rendered = tokenizer.render_chat([{"role": "user", "content": "aa"}])
    assert tokenizer.encode(rendered, add_special_tokens=False) == [0, 2, 2]
    assert tokenizer.encode("aa") == [0, 2, 2]


def test_arguments_of_earlier_calls_are_an_object_and_a_text():
    messages = [
        {
            "role": "assistant", "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b":1,  "a": "é"}'}}
            ]
        }
    ]
    call = "{% set c = messages[0].tool_calls[0] %}"
    for written, rendered in [
        ("{{ c.function.arguments | tojson }}", '{"b": 1, "a": "é"}'),
        ("{{ 'x' + c.function.arguments + 'y' }}", 'x{"b":1,  "a": "é"}y'),
        ("{{ c['function']['arguments'] }}", '{"b":1,  "a": "é"}'),
        ("{{ 'x' ~ c.function.arguments }}", 'x{"b":1,  "a": "é"}'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }} {% endfor %}", "b=1 a=é "),
        ("{{ c.function.arguments is string }} {{ c.function.arguments is mapping }}", "False True"),
    ]:
        assert ChatTemplates({"default": call + written}, {}).render(messages) == rendered


@pytest.mark.parametrize("calls", [{}, "f", [1], [{"id": "1"}], [{"function": {"arguments": "{}"}}],
                                   [{"function": {"name": "f", "arguments": "{"}}],
                                   [{"function": {"name": "f", "arguments": "[1]"}}], [
                                       {"function": {"name": "f", "arguments": "[" * 100_000}}
                                   ], [{"function": {"name": "f", "arguments": 5}}]])
def test_earlier_calls_that_are_none(calls):
    if calls:
        with pytest.raises(RequestError):
            ChatTemplates({"default": "{{ messages }}"}, {}).render([{"role": "assistant", "tool_calls": calls}])


def test_whether_a_template_shows_tools():
    assert ChatTemplates(
        {"default": "{% if tools %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}"}, {}
    ).takes_tools
    assert ChatTemplates(
        {
            "default": "{{ messages[0].content }}",
            "tool_use": "{% for t in tools %}{{ t.function.description }}{% endfor %}"
        },
        {}
    ).takes_tools
    assert not ChatTemplates(
        {"default": "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages[0].content }}"}, {}
    ).takes_tools
    assert not ChatTemplates({"default": "{{ messages[0].content }}"}, {}).takes_tools
    assert not ChatTemplates({}, {}).takes_tools
