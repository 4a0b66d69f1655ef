"""A fake OpenAI server with known timing and known faults."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import web


class FakeServer:
    """Streams ``max_tokens`` pieces, ``gap_s`` apart. ``fault`` picks how a request with a given number of output
    tokens goes wrong. Bodies are kept in ``bodies``; ``most_running`` is the largest number under way at once."""

    def __init__(
        self, *, gap_s: float = 0.0, faults: dict[int, str] | None = None, key: str | None = None,
        with_usage: bool = True, metrics: str | None = None
    ):
        self.gap_s, self.faults, self.key, self.with_usage = gap_s, faults or {}, key, with_usage
        self.metrics = metrics  # with {n} for the number of requests so far
        self.bodies: list[dict[str, Any]] = []
        self.running = self.most_running = self.flushed = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/flush_cache", self._flush)
        if self.metrics is not None:
            app.router.add_get("/metrics", self._metrics)
        return app

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=(self.metrics or "").replace("{n}", str(len(self.bodies))))

    async def _models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return web.json_response({"data": [{"id": "fake-model"}, {"id": "other"}]})

    async def _flush(self, request: web.Request) -> web.Response:
        self.flushed = len(self.bodies)
        return web.Response()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._answer(request, body, self.faults.get(body["max_tokens"], ""))
        except ConnectionError:  # the client gave up first
            return web.Response()
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], fault: str) -> web.StreamResponse:
        if fault.isdigit():
            return web.json_response({"error": {"message": "refused"}}, status=int(fault))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        is_chat = "messages" in body
        if is_chat:
            await self._send(
                response, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
            )
        for i in range(body["max_tokens"]):
            if self.gap_s:
                await asyncio.sleep(self.gap_s)
            is_last = i == body["max_tokens"] - 1
            if is_last and fault == "cut":
                return response
            if is_last and fault == "event":
                await self._send(response, {"error": {"message": "engine died"}})
                return response
            if is_last and fault == "junk":
                await response.write(b"data: {broken\n\n")
                return response
            if is_last and fault == "drop":
                request.transport.close()
                return response
            reason = "length" if is_last else None
            choice = (
                {"delta": {"content": "é "}, "finish_reason": reason} if is_chat
                else {"text": "é ", "finish_reason": reason}
            )
            await self._send(response, {"choices": [choice]}, split=i % 2 == 0)
        if self.with_usage:
            prompt = body.get("prompt")
            count = len(prompt) if isinstance(prompt, list) else 7
            usage = {
                "prompt_tokens": count, "completion_tokens": body["max_tokens"],
                "prompt_tokens_details": {"cached_tokens": 2}
            }
            await self._send(response, {"choices": [], "usage": usage})
        await response.write(b": keep-alive\n\ndata: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, event: dict[str, Any], split: bool = False) -> None:
        data = b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\r\n\r\n"
        cut = data.index(b"\xc3") + 1 if split and b"\xc3" in data else len(data)
        await response.write(data[:cut])
        if cut < len(data):
            await asyncio.sleep(0)
            await response.write(data[cut:])
