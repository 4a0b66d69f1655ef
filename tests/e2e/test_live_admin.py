"""A pause over a live server: a stream stands still and goes on with the same tokens; deadlines and aborts still
work."""

from __future__ import annotations

import asyncio
import json

import httpx
from live import LiveServer

BODY = {"prompt": "The mill", "max_tokens": 1900, "temperature": 0, "ignore_eos": True}


async def test_pause_and_continue(tiny_server: LiveServer):
    async with httpx.AsyncClient(base_url=tiny_server.url, timeout=120) as http:
        expected = (await http.post("/v1/completions", json=BODY)).json()["choices"][0]["text"]
        text, num_tokens = "", 0

        async def read() -> None:
            nonlocal text, num_tokens
            async with http.stream(
                "POST", "/v1/completions", json={**BODY, "stream": True, "return_token_ids": True}
            ) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        choice = json.loads(line[6:])["choices"][0]
                        text += choice["text"]
                        num_tokens += len(choice["token_ids"])

        async def count_sampled() -> int:
            return (await http.get("/server_info")).json()["stats"]["generation_tokens_total"]

        before = await count_sampled()
        reading = asyncio.create_task(read())
        while not num_tokens:
            await asyncio.sleep(0.002)
        paused = await http.post("/pause_generation", json={"mode": "in_place"})
        assert paused.status_code == 200
        while num_tokens < await count_sampled() - before:  # steps that were in flight, and their way to us
            await asyncio.sleep(0.01)
        seen = num_tokens
        late = await http.post("/v1/completions", json={**BODY, "deadline_s": 0.2})
        assert late.status_code == 504 and num_tokens == seen == await count_sampled() - before < BODY["max_tokens"]
        assert (await http.get("/v1/loads")).json()["loads"][0]["num_total_reqs"] == 1
        assert (await http.post("/freeze_gc")).status_code == 200
        assert (await http.post("/continue_generation")).status_code == 200
        await reading
        assert text == expected
        assert (await http.get("/ready")).status_code == 200
