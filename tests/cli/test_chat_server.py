"""``chat --url`` with servers of any make: models, keys, reasoning, errors in the middle of a stream."""

from __future__ import annotations

import asyncio
import io
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from headrace.base.errors import ConfigError
from headrace.serving.cli.answers import ServerModel
from headrace.serving.cli.chat import Conversation, Terminal
from headrace.serving.cli.options import SamplingOptions

MODELS = {"data": [{"id": "base"}, {"id": "pirate", "parent": "base"}]}


def event(delta: dict | None = None, finish: str | None = None, **more: object) -> bytes:
    chunk = {"choices": [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}], **more}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


ROLE, DONE = event({"role": "assistant", "content": ""}), b"data: [DONE]\n\n"
USAGE = event(usage={"prompt_tokens": 3, "completion_tokens": 7})


class Server:
    """Answers ``/v1/models`` with ``models``, and each question with the next of ``answers``: pieces of a stream, or a
    status with a body."""

    def __init__(self, *answers: list[bytes] | tuple[int, bytes], models: object = MODELS, status: int = 200):
        self.answers, self.models, self.status, self.requests = list(answers), models, status, []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if head.startswith("GET"):
            self._write(writer, self.status, json.dumps(self.models).encode())
        else:
            length = next(int(line.split(":")[1]) for line in head.split("\r\n") if line.startswith("Content-Length"))
            self.requests.append(json.loads(await reader.readexactly(length)))
            answer = self.answers.pop(0)
            if isinstance(answer, tuple):
                self._write(writer, *answer)
            else:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
                for piece in answer:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
        writer.close()

    @staticmethod
    def _write(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(body), body))


def talk(server: Server, lines: list[str], model: str | None = None, **options: object) -> SimpleNamespace:
    out, waiting = io.StringIO(), iter(lines)

    def read_line() -> str:
        try:
            return next(waiting)
        except StopIteration:
            raise EOFError from None

    with asyncio.Runner() as runner:
        listening = runner.run(start(server))
        remote = ServerModel(f"127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1/", api_key="k", model=model)
        try:
            runner.run(remote.join())
            conversation = Conversation()
            console = Console(file=out, width=80)
            Terminal(remote, SamplingOptions(**options), conversation, console, read_line).run(runner)
        finally:
            runner.run(remote.close())
            listening.close()
    return SimpleNamespace(text=out.getvalue(), turns=conversation.turns, title=remote.title)


async def start(server: Server) -> asyncio.Server:
    return await asyncio.start_server(server.serve, "127.0.0.1", 0)


def test_answers_stream_and_only_given_options_are_sent():
    server = Server(
        [ROLE, event({"content": "Bon"}), event({"content": "jour"}, "stop"), USAGE, DONE],
        [event({"content": "x"}, "length"), DONE]
    )
    talked = talk(server, ["Hi", "Again"], temperature=0.0, top_k=5)
    assert "Bonjour\n7 tokens" in talked.text and "cut at --max-tokens" in talked.text
    assert talked.title.startswith("base at http://127.0.0.1:")
    assert server.requests[0] == {
        "model": "base", "messages": [{"role": "user", "content": "Hi"}], "stream": True,
        "stream_options": {"include_usage": True}, "temperature": 0.0, "top_k": 5, "max_tokens": 256,
    }
    assert [turn["content"] for turn in server.requests[1]["messages"]] == ["Hi", "Bonjour", "Again"]


def test_tokens_a_step_are_asked_of_this_server_alone():
    end = event({"content": "jour"}, "stop", timings={"accepted_tokens": 4})
    pieces = [event({"content": "Bon"}), end, USAGE, DONE]
    ours = Server(pieces, models={"data": [{"id": "base", "owned_by": "headrace"}]})
    assert ", 2.3 a step\n" in talk(ours, ["Hi"]).text and ours.requests[0]["return_timings"] is True
    models = {"data": [{"id": "base", "owned_by": "vllm"}]}
    other = Server([event({"content": "x"}, "stop"), USAGE, DONE], models=models)
    assert "a step" not in talk(other, ["Hi"]).text and "return_timings" not in other.requests[0]


def test_fields_that_other_servers_leave_empty():
    pieces = [
        event({"role": "assistant", "content": None}), event({"content": "x"}),
        b'data: {"choices": [{"delta": null, "finish_reason": "stop"}], "usage": {"completion_tokens": null}}\n\n',
        b'data: {"choices": null, "usage": {"completion_tokens": 1}}\r\n\r\n', b": comment\n\n", DONE,
    ]
    talked = talk(Server(pieces), ["Hi"])
    assert "x\n1 tokens" in talked.text and "error" not in talked.text


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_shown_and_not_sent_back(name: str):
    pieces = [ROLE, event({name: "Let me "}), event({name: "see."}), event({"content": "Yes."}, "stop"), DONE]
    talked = talk(Server(pieces), ["Is it?"])
    assert "Let me see.\n\nYes.\n" in talked.text
    assert talked.turns[-1] == {"role": "assistant", "content": "Yes."}


@pytest.mark.parametrize(("answer", "words"), [
    ((400, b'{"error": {"message": "too long"}}'), "400: too long"),
    ((503, b'{"message": "loading"}'), "503: loading"),
    ((502, b"<html>bad gateway</html>"), "502: <html>bad gateway"),
    ([ROLE, event({"content": "a"}), event(error={"message": "engine died"})], "engine died"),
    ([ROLE, event({"content": "a"})], "before the answer was complete"),
    ([ROLE, b"data: {broken\n\n"], "no chat completion"),
])
def test_a_failed_answer_leaves_the_conversation_usable(answer: list[bytes] | tuple[int, bytes], words: str):
    server = Server(answer, [event({"content": "fine"}, "stop"), DONE])
    talked = talk(server, ["one", "two"])
    assert words in talked.text and "fine" in talked.text
    assert server.requests[1]["messages"] == [{"role": "user", "content": "two"}]


@pytest.mark.parametrize(("models", "status", "words"), [
    ({"data": [{"id": "a"}, {"id": "b"}]}, 200, "--model: a, b"),
    ({"data": []}, 200, "has no model"), ({"object": "odd"}, 200, "lists no models"),
    ({"error": {"message": "who are you?"}}, 401, "401: who are you? (give --api-key"),
    ({"detail": "Not Found"}, 404, "404: "),
])
def test_a_server_that_cannot_be_joined_says_why(models: object, status: int, words: str):
    with pytest.raises(ConfigError) as caught:
        talk(Server(models=models, status=status), [])
    assert words in str(caught.value)


def test_a_model_can_be_named():
    server = Server([event({"content": "Arr"}, "stop"), DONE], models={"data": [{"id": "a"}, {"id": "b"}]})
    talk(server, ["Hi"], model="b")
    assert server.requests[0]["model"] == "b"
