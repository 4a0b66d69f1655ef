"""A pause over a live server: a stream stands still and goes on with the same tokens; deadlines and aborts still work."""

from __future__ import annotations

import asyncio
import json

import httpx
from live import LiveServer

BODY = {"prompt": "The mill", "max_tokens": 300, "temperature": 0, "ignore_eos": True}


async def test_pause_and_continue(tiny_server: LiveServer):
    async with httpx.AsyncClient(base_url=tiny_server.url, timeout=60) as http:
        expected = (await http.post("/v1/completions", json=BODY)).json()["choices"][0]["text"]
        text, pieces = "", 0

        async def read() -> None:
            nonlocal text, pieces
            async with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                        pieces += 1

        reading = asyncio.create_task(read())
        while not pieces:
            await asyncio.sleep(0.002)
        paused = await http.post("/pause_generation", json={"mode": "in_place"})
        assert paused.status_code == 200
        await asyncio.sleep(0.3)
        seen = pieces
        late = await http.post("/v1/completions", json={**BODY, "deadline_s": 0.2})
        assert late.status_code == 504 and pieces == seen
        assert (await http.get("/v1/loads")).json()["loads"][0]["num_running_reqs"] in (0, 1)
        assert (await http.post("/freeze_gc")).status_code == 200
        assert (await http.post("/continue_generation")).status_code == 200
        await reading
        assert text == expected
        assert (await http.get("/ready")).status_code == 200
