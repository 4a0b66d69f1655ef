"""Where prompts come from and what is written, over a model that repeats its prompt."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from headrace.base.errors import ConfigError
from headrace.base.messages import ErrorInfo, ModelFacts
from headrace.base.sampling import SamplingParams
from headrace.base.step import TokenLogprobs
from headrace.service.client.outputs import CompletionOutput, GenerationOutput
from headrace.service.tokenization import Tokenizer
from headrace.service.tokenization.tokenizer import TokenizerFacts
from headrace.serving.cli import generate
from headrace.serving.cli.commands import COMMANDS
from headrace.serving.cli.flags import parse_command


def new_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    return Tokenizer(backend, TokenizerFacts(chat_templates={"default": template}))


class EchoLLM:
    """Outputs the prompt, upper case; a prompt with ``!`` fails while it runs."""

    made: list[EchoLLM] = []  # noqa: RUF012 (what the tests look at)

    def __init__(self, model: str, **options: object):
        self.model, self.options, self.params = model, options, []
        self.tokenizer = new_tokenizer()
        self.facts = ModelFacts(
            model=model, architecture="A", family="f", dtype="float32", device="cpu", max_model_len=400, vocab_size=256,
            eos_ids=[0], num_parameters=0,
            page_size=16, num_kv_tokens=512, default_sampling={"temperature": 0.7},
        )
        EchoLLM.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def generate(
        self, *, prompt_token_ids: list[list[int]], sampling_params: list[SamplingParams], progress: bool, errors: str
    ) -> list[GenerationOutput]:
        assert errors == "return"
        self.params = sampling_params
        outputs = []
        for ids, params in zip(prompt_token_ids, sampling_params, strict=True):
            text = self.tokenizer.decode(ids).upper()
            error = ErrorInfo("step_failed", "boom") if "!" in text else None
            logprobs = None if params.logprobs is None else [TokenLogprobs(i, -0.5, 1, [i], [-0.5]) for i in ids]
            choices = [
                CompletionOutput(i, text, ids, "error" if error else "stop", logprobs=logprobs, error=error)
                for i in range(params.n)
            ]
            outputs.append(GenerationOutput("r", None, ids, choices, num_cached_tokens=1))
        return outputs


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(generate, "LLM", EchoLLM)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    EchoLLM.made.clear()

    def call(*argv: str, stdin: str | None = None) -> tuple[int, list[dict]]:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = generate.run(parse_command(COMMANDS["generate"], list(argv)))
        return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return call


def test_arguments(run):
    code, lines = run("one", "two", "--model", "m", "--page-size", "32", "--max-tokens", "9", "--stop", "x")
    assert code == 0
    assert [
        (line["prompt"], line["text"], line["finish_reason"]) for line in lines
    ] == [("one", "ONE", "stop"), ("two", "TWO", "stop")]
    assert lines[0]["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 1}
    llm = EchoLLM.made[0]
    assert (llm.model, llm.options, llm.is_closed) == ("m", {"page_size": 32}, True)
    assert (llm.params[0].temperature, llm.params[0].max_tokens, llm.params[0].stop) == (0.7, 9, ["x"])


def test_lines_of_text_from_stdin(run):
    _, lines = run(stdin="first é\n\n  second\r\n")
    assert [line["prompt"] for line in lines] == ["first é", "  second"]


@pytest.mark.parametrize("argv", [["--input", "-", "--input-format", "jsonl"], ["--input", "-"], []])
def test_json_lines_from_stdin(run, argv: list[str]):
    entries = [
        {"prompt": "a", "temperature": 0, "id": 7}, {"prompt": [65, 66], "logprobs": 1},
        {"messages": [{"role": "user", "content": "b"}], "n": 2}
    ]
    code, lines = run(*argv, stdin="\n".join(json.dumps(e) for e in entries))
    assert code == 0
    assert [(line["index"], line["choice"]) for line in lines] == [(0, 0), (1, 0), (2, 0), (2, 1)]
    assert (lines[0]["id"], lines[2]["text"]) == (7, "<USER>B")
    assert lines[1]["logprobs"][0] == {"token_id": 65, "logprob": -0.5, "top": {"65": -0.5}}
    assert EchoLLM.made[0].params[0].temperature == 0


def test_wrong_lines_fail_alone(run, tmp_path: Path):
    wrong = [
        "{", "[]", '{"prompt": 5}', '{"prompt": "a", "messages": []}', '{"prompt": "a", "temprature": 1}',
        '{"prompt": "a", "top_p": 7}', '{"prompt": "a", "n": "many"}', '{"prompt": ""}', '{"prompt": [300]}',
        '{"messages": []}', json.dumps({"prompt": "x" * 500})
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join([*wrong, '"fine"', '{"prompt": "boom!"}']))
    code, lines = run("--input", str(path))
    assert code == 1
    assert all("error" in line and line["error"]["message"] for line in lines[: len(wrong)])
    assert "line 1" in lines[0]["error"]["message"]
    assert "temprature" in lines[4]["error"]["message"]
    assert lines[len(wrong)]["text"] == "FINE"
    assert (lines[-1]["error"]["type"], lines[-1]["finish_reason"]) == ("step_failed", "error")


def test_chat_uses_the_template(run):
    _, lines = run("hi", "--chat", "--system", "be brief")
    assert lines[0]["text"] == "<SYSTEM>BE BRIEF<USER>HI"
    assert lines[0]["prompt"] == "hi"


def test_output_goes_to_a_file(run, tmp_path: Path):
    _, lines = run("a", "--output", str(tmp_path / "out"), "--n", "2")
    assert lines == []
    assert len((tmp_path / "out").read_text().splitlines()) == 2


@pytest.mark.parametrize("argv", [[], ["--input-format", "jsonl"]])
def test_input_that_is_no_text_is_refused(run, tmp_path: Path, argv: list[str]):
    (tmp_path / "in").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="in must be UTF-8 text"):
        run("--input", str(tmp_path / "in"), *argv)


def test_empty_input_is_refused(run):
    with pytest.raises(ConfigError, match="empty"):
        run(stdin="\n\n")
    with pytest.raises(ConfigError, match="cannot open"):
        run("a", "--output", "/no/such/folder/out")
