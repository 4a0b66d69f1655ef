"""Media in requests of every API: what reaches the engine, what is refused and in which words."""

from __future__ import annotations

import asyncio
import hashlib
import json

import msgspec
import pytest
from fake_apps import httpx
from fake_client import FakeClient
from media_desk import AUDIO, CAT, DOG, FACTS, IMAGE, VIDEO, Desk, b64, uri

from headrace.base.config import EngineConfig
from headrace.base.media import Base64Text
from headrace.base.media_config import MediaConfig
from headrace.base.pooling import PoolingFacts
from headrace.base.server_config import ServerConfig
from headrace.serving.http.app import create_app
from headrace.serving.media.sources import MediaReader


@pytest.fixture
def client() -> FakeClient:
    media = MediaConfig(limit_mm_per_prompt='{"image": 3}')
    return FakeClient(takes_media=FACTS, config=EngineConfig(media=media))


@pytest.fixture
def app(client):
    app = create_app(client, ServerConfig(responses_store=1))
    app.state.context.media = Desk(client.config)
    return app


@pytest.fixture
def desk(app) -> Desk:
    return app.state.context.media


@pytest.fixture
async def http(app):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as http:
        yield http


def seen(client: FakeClient) -> list[tuple[str, bytes, list[tuple[int, int]]]]:
    """Kind, digest and runs of each item of the last request."""
    return [(item.place.kind, item.place.digest, item.place.runs) for item in client.media[-1]]


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def text_of(ids: list[int]) -> str:
    """A prompt with placeholders as marks of one letter."""
    marks = {IMAGE: "I", AUDIO: "A", VIDEO: "V", 256: "^"}
    return "".join(marks.get(i) or chr(i) for i in ids)


def chat(*parts, **fields) -> dict:
    return {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 4, **fields}


def image(data: bytes, **fields) -> dict:
    return {"type": "image_url", "image_url": {"url": uri(data), **fields}}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


async def test_several_images_between_texts(http, client, desk):
    answer = await http.post("/v1/chat/completions", json=chat(text("a"), image(CAT), text("b"), image(DOG)))
    assert answer.status_code == 200, answer.text
    assert text_of(client.prompts[-1]) == "user: aIIIbIII\nassistant:"
    assert [(kind, name) for kind, name, _ in seen(client)] == [("image", digest(CAT)), ("image", digest(DOG))]
    assert [runs for *_, runs in seen(client)] == [[(7, 3)], [(11, 3)]]
    details = answer.json()["usage"]["prompt_tokens_details"]
    assert details["image_tokens"] == 6 and "audio_tokens" not in details
    assert answer.json()["usage"]["prompt_tokens"] == len(client.prompts[-1])


async def test_every_kind_of_part(http, client):
    parts = (
        {"type": "image_url", "image_url": uri(CAT)}, {"type": "video_url", "video_url": {"url": uri(b"film")}},
        {"type": "input_audio", "input_audio": {"data": b64(b"sound"), "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": uri(b"other sound")}}, text("?"),
    )
    answer = await http.post("/v1/chat/completions", json=chat(*parts))
    assert answer.status_code == 200, answer.text
    assert text_of(client.prompts[-1]) == "user: IIIVVVVVAAAA?\nassistant:"
    assert [kind for kind, *_ in seen(client)] == ["image", "video", "audio", "audio"]
    details = answer.json()["usage"]["prompt_tokens_details"]
    assert (details["image_tokens"], details["video_tokens"], details["audio_tokens"]) == (3, 5, 4)


async def test_sound_as_base64_and_as_a_data_uri(http, desk):
    for data in (b64(b"sound"), uri(b"sound")):
        part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
        answer = await http.post("/v1/chat/completions", json=chat(part))
        assert answer.status_code == 200, answer.text
    assert [job.decoded().data for job in desk.jobs] == [b"sound", b"sound"]


async def test_low_detail_is_another_item(http, desk):
    for detail in ("low", "high", "auto"):
        await http.post("/v1/chat/completions", json=chat(image(CAT, detail=detail)))
    assert [job.options for job in desk.jobs] == [{"detail": "low"}, {}, {}]


async def test_images_of_tool_results(http, client):
    body = {"max_tokens": 4, "messages": [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "shot", "arguments": "{}"}}
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": [text("here"), image(CAT)]},
    ]}
    assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
    assert "hereIII" in text_of(client.prompts[-1])


ANTHROPIC = {"type": "base64", "media_type": "image/png", "data": b64(CAT)}


@pytest.mark.parametrize("path, body, prompt", [
    ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": [
        {"type": "image", "source": ANTHROPIC}, text("what?"),
    ]}]}, "IIIwhat?"),
    ("/v1/messages", {"max_tokens": 4, "messages": [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [
            text("see"), {"type": "image", "source": ANTHROPIC},
        ]}]},
    ]}, "seeIII"),
    ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "url", "url": uri(CAT)}},
    ]}]}, "III"),
    ("/v1/responses", {"input": [{"role": "user", "content": [
        {"type": "input_text", "text": "what"}, {"type": "input_image", "image_url": uri(CAT), "detail": "auto"},
    ]}]}, "whatIII"),
    ("/api/chat", {"model": "fake-model", "stream": False, "messages": [
        {"role": "user", "content": "what?", "images": [b64(CAT)]}
    ]}, "IIIwhat?"),
    ("/api/generate", {"model": "fake-model", "stream": False, "prompt": "what?", "images": [b64(CAT)]}, "IIIwhat?"),
    ("/generate", {"text": "a<image>b", "image_data": b64(CAT)}, "^aIIIb"),
    ("/generate", {"text": "a<image>b", "image_data": [uri(CAT)]}, "^aIIIb"),
    ("/generate", {"text": ["a", "<image>b"], "image_data": [None, uri(CAT)]}, "^IIIb"),
    ("/generate", {"input_ids": [65, *b"<image>", 66], "image_data": b64(CAT)}, "AIIIB"),
    ("/v1/completions", {"prompt": "a<image>b", "image_data": uri(CAT), "max_tokens": 2}, "^aIIIb"),
])
async def test_every_api(http, client, path, body, prompt):
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert prompt in text_of(client.prompts[-1])
    assert [(kind, name) for kind, name, _ in seen(client)] == [("image", digest(CAT))]


BIG_CAT = CAT * 300_000
"""Its requests are decoded in pieces."""


@pytest.mark.parametrize("path, body, stays_bytes", [
    ("/v1/chat/completions", chat(image(BIG_CAT)), True),
    ("/v1/chat/completions", chat({"type": "image_url", "image_url": uri(BIG_CAT)}), True),
    ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {**ANTHROPIC, "data": b64(BIG_CAT)}},
    ]}]}, True),
    ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "url", "url": uri(BIG_CAT)}},
    ]}]}, True),
    ("/api/chat", {"model": "fake-model", "stream": False, "messages": [
        {"role": "user", "content": "what?", "images": [b64(BIG_CAT)]}
    ]}, True),
    ("/generate", {"text": "a<image>b", "image_data": b64(BIG_CAT)}, True),
    ("/generate", {"text": "a<image>b", "image_data": [uri(BIG_CAT)]}, True),
    ("/v1/completions", {"prompt": "a<image>b", "image_data": uri(BIG_CAT), "max_tokens": 2}, True),
    ("/v1/responses", {"input": [{"role": "user", "content": [  # which may be stored
        {"type": "input_image", "image_url": uri(BIG_CAT), "detail": "auto"},
    ]}]}, False),
])
async def test_base64_of_large_bodies_stays_bytes(http, client, monkeypatch, path, body, stays_bytes):
    """As a text it would be copied with the GIL held, which holds up the streams of others."""
    data: list[object] = []
    found = MediaReader.read_url

    async def read(reader: MediaReader, url: str, param: str):
        data.append(url.data.obj if isinstance(url, Base64Text) else None)
        return await found(reader, url, param)

    monkeypatch.setattr(MediaReader, "read_url", read)
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert [name for _, name, _ in seen(client)] == [digest(BIG_CAT)]
    assert [isinstance(each, bytes) and b64(BIG_CAT).encode() in each for each in data] == [stays_bytes]


async def test_base64_with_escapes_in_large_bodies(http, client):
    """Some JSON writers put a backslash before each slash."""
    data = b"\xff\xff\xff" * 200_000  # in base64 slashes alone
    whole = json.dumps(chat(image(data))).replace("/", "\\/").encode()
    answer = await http.post("/v1/chat/completions", content=whole, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text
    assert [name for _, name, _ in seen(client)] == [digest(data)]


@pytest.mark.parametrize("url, status", [
    ("data:;base64," + "!" * 600_000, 400), ("data:a,b;base64," + "Y" * 600_000, 200), ("Y" * 600_000, 400),
    ("data:text/plain," + "Y" * 600_000, 200), ("data:" + "x" * 600_000, 400),
])
async def test_other_addresses_in_large_bodies(http, url, status):
    answer = await http.post("/v1/chat/completions", json=chat({"type": "image_url", "image_url": {"url": url}}))
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["param"] == "messages[0].content[0].image_url.url" and len(answer.text) < 1000


async def test_counting_counts_media(http):
    messages = [{"role": "user", "content": [image(CAT), text("ab")]}]
    with_image = (await http.post("/tokenize", json={"messages": messages})).json()
    without = (await http.post("/tokenize", json={"messages": [{"role": "user", "content": "ab"}]})).json()
    assert with_image["count"] == without["count"] + 3 == len(with_image["tokens"])
    body = {"messages": [{"role": "user", "content": [{"type": "image", "source": ANTHROPIC}]}]}
    answer = await http.post("/v1/messages/count_tokens", json=body)
    assert answer.json()["input_tokens"] == len("user: \nassistant:") + 3
    body = {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": uri(CAT)}]}]}
    answer = await http.post("/v1/responses/input_tokens", json=body)
    assert answer.json()["input_tokens"] == len("user: \nassistant:") + 3


REFUSED = [
    (chat(image(b"bad")), "messages[0].content[0].image_url.url", "no image that can be read"),
    (chat(text("x"), {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}),
     "messages[0].content[1].image_url.url", "not public"),
    (chat({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
     "messages[0].content[0].image_url.url", "--allowed-local-media-path"),
    (chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,%%%"}}),
     "messages[0].content[0].image_url.url", "base64"),
    (chat(*[image(CAT)] * 4), "messages[0].content[3].image_url.url", "at most 3 images"),
    (chat(image(CAT), text("and <image>")), "messages", "once for each"),
    (
        chat({"type": "input_file", "file_id": "x"}), "messages[0].content[0]",
        "it must be one of text, input_text, output_text, refusal, image_url"
    ),
    ({"messages": [{"role": "system", "content": [image(CAT)]}]}, "messages[0].content", "user's"),
    ({"messages": [{"role": "assistant", "content": [image(CAT)]}]}, "messages[0].content", "user's"),
    (chat(image(CAT), truncate_prompt_tokens=5), "truncate_prompt_tokens", "truncated"),
    (chat(image(CAT, detail="tiny")), "messages[0].content[0].image_url", ""),
]


@pytest.mark.parametrize("body, param, message", REFUSED)
async def test_what_is_wrong_is_named(http, client, body, param, message):
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"] and error["param"].startswith(param), error
    assert not client.submitted, "nothing reaches the engine"


@pytest.mark.parametrize("path, body, param", [
    ("/v1/messages", {"max_tokens": 4, "system": "s", "messages": [{"role": "user", "content": [
        text("x"), {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64(b"bad")}},
    ]}]}, "messages[0].content[1].source.data"),
    ("/v1/responses", {"instructions": "s", "input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": uri(b"bad")},
    ]}]}, "input[0].content[0].image_url"),
    ("/api/chat", {"model": "fake-model", "messages": [{"role": "user", "images": [b64(CAT), b64(b"bad")]}]},
     "messages[0].images[1]"),
    ("/generate", {"text": ["<image>", "<image>"], "image_data": [uri(CAT), [uri(b"bad")]]}, "image_data[1][0]"),
])
async def test_errors_name_the_place_in_each_api(http, path, body, param):
    answer = await http.post(path, json=body)
    assert answer.status_code == 400 and f"{param} is no image" in answer.text, answer.text


async def test_a_model_of_text_says_which_models_take_media(http, client, app):
    client.facts = FakeClient().facts
    answer = await http.post("/v1/chat/completions", json=chat(image(CAT)))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "messages[0].content[0].image_url.url"
    assert "takes text alone" in error["message"] and "multimodal.md" in error["message"]
    assert (await http.get("/v1/models")).json()["data"][0]["input_modalities"] == ["text"]


async def test_models_say_what_they_take(http):
    assert (await http.get("/v1/models")).json()["data"][0]["input_modalities"] == ["text", "image", "video", "audio"]
    info = (await http.get("/model_info")).json()
    assert info["has_image_understanding"] and info["has_audio_understanding"]
    assert "vision" in (await http.post("/api/show", json={"model": "fake-model"})).json()["capabilities"]


async def test_models_do_not_say_what_the_server_refuses(client, http):
    client.config = EngineConfig(media=MediaConfig(limit_mm_per_prompt='{"video": 0, "audio": 0}'))
    assert (await http.get("/v1/models")).json()["data"][0]["input_modalities"] == ["text", "image"]
    info = (await http.get("/model_info")).json()
    assert info["has_image_understanding"] and not info["has_audio_understanding"]


async def test_others_are_not_delayed_and_a_client_that_leaves_drops_its_work(http, desk, client):
    slow = asyncio.create_task(http.post("/v1/chat/completions", json=chat(image(b"slow"))))
    while not desk.jobs:
        await asyncio.sleep(0.01)
    answer = await asyncio.wait_for(http.post("/v1/chat/completions", json=chat(text("quick"))), 2)
    assert answer.status_code == 200
    slow.cancel()
    for _ in range(100):
        if desk.num_dropped:
            break
        await asyncio.sleep(0.01)
    assert desk.num_dropped == 1


async def test_a_request_with_many_images_leaves_turns_to_others(http, desk, monkeypatch):
    monkeypatch.setattr("headrace.serving.media.intake.MOST_OF_ONE", 2)
    many = asyncio.create_task(http.post("/v1/chat/completions", json=chat(*[image(b"slow")] * 3)))
    while not desk.jobs:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert len(desk.jobs) == 2
    many.cancel()
    for _ in range(100):
        if desk.num_dropped == 2:
            break
        await asyncio.sleep(0.01)
    assert desk.num_dropped == len(desk.jobs) == 2


async def test_one_bad_item_drops_the_others(http, desk):
    answer = await asyncio.wait_for(
        http.post("/v1/chat/completions", json=chat(image(b"slow"), image(b"bad"))), 5
    )
    assert answer.status_code == 400 and desk.num_dropped == 1


async def test_a_stored_response_with_an_image_goes_on(http, client):
    body = {"max_output_tokens": 8, "input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": uri(CAT)}]}
    ]}
    first = (await http.post("/v1/responses", json=body)).json()
    more = {"input": "and?", "previous_response_id": first["id"], "max_output_tokens": 8}
    answer = await http.post("/v1/responses", json=more)
    assert answer.status_code == 200, answer.text
    assert [name for _, name, _ in seen(client)] == [digest(CAT)]
    items = (await http.get(f"/v1/responses/{first['id']}/input_items")).json()["data"]
    assert items[0]["content"][0]["type"] == "input_image"


ALONE = msgspec.structs.replace(FACTS, is_alone=True, texts={"image": "<image>"}, token_ids={"image": IMAGE})


async def embed(messages: list, *, media=ALONE, **fields):
    """The answer of an embedding model, and its client."""
    client = FakeClient(takes_media=media, pooling=PoolingFacts("embed", 4))
    app = create_app(client, ServerConfig())
    app.state.context.media = Desk(client.config)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as http:
        return await http.post("/v1/embeddings", json={"messages": messages, **fields}), client


def user(*parts) -> dict:
    return {"role": "user", "content": list(parts)}


async def test_an_image_is_embedded_alone_where_the_model_says_so():
    answer, client = await embed([user(image(CAT))], encoding_format="float")
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["data"][0]["embedding"]) == 4
    assert text_of(client.prompts[-1]) == "III" and seen(client)[0][:2] == ("image", digest(CAT))
    answer, client = await embed([{"role": "user", "content": "a cat"}])
    assert answer.status_code == 200 and text_of(client.prompts[-1]).endswith("a cat")
    for messages in ([user(image(CAT), text("what?"))], [user(image(CAT)), user(image(DOG))], [user()]):
        answer, _ = await embed(messages)
        assert answer.status_code == 400 and "a text or an image at a time" in answer.json()["error"]["message"]


async def test_conversations_with_images_are_embedded_in_the_chat_template():
    answer, client = await embed([user(text("a"), image(CAT))], media=FACTS)
    assert answer.status_code == 200, answer.text
    assert text_of(client.prompts[-1]) == "user: aIII\n" and seen(client)[0][2] == [(7, 3)]


async def test_a_conversation_with_images_is_not_cut_through_them():
    messages = [user(text("a"), image(CAT))]
    answer, client = await embed(messages, media=FACTS, truncate_prompt_tokens=5)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "truncate_prompt_tokens"
    answer, client = await embed(messages, media=FACTS, truncate_prompt_tokens=-1)
    assert answer.status_code == 200 and len(client.prompts) == 1


@pytest.mark.parametrize("fields", [{}, {"input": "a", "messages": [user(text("a"))]}])
async def test_embeddings_are_of_input_or_messages(http, fields):
    client = FakeClient(pooling=PoolingFacts("embed", 4))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app=create_app(client, ServerConfig())), base_url="http://server"
    ) as http:
        answer = await http.post("/v1/embeddings", json=fields)
    assert answer.status_code == 400 and "one of input and messages" in answer.json()["error"]["message"]
