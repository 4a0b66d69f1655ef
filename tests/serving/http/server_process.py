"""A real server process over the fake client, for tests of signals and crashes: ``python server_process.py DELAY_S
DRAIN_S MODE [PORT]``.

SIGUSR1 lets it answer without delay."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys

from fake_client import FakeClient

from headrace.base.config import ServeConfig
from headrace.base.errors import EngineUnavailable, HeadraceError, ModelError
from headrace.base.messages import ErrorInfo
from headrace.base.server_config import ServerConfig
from headrace.serving.http.server import HttpServer


class StartingClient(FakeClient):
    """Starts at once; ``slow`` never gets ready, ``broken`` fails, ``crashing`` is given up a second later."""

    mode = "fine"

    async def start(self) -> None:
        self.state = "starting"
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, setattr, self, "delay_s", 0.0)
        if self.mode == "slow":
            await asyncio.sleep(600)

    async def wait_ready(self) -> None:
        if self.mode == "broken":
            raise ModelError("no such model")
        self.state = "ready"
        if self.mode == "crashing":
            asyncio.get_running_loop().call_later(1.0, setattr, self, "state", "stopped")

    def submit(self, prompt, params, **options):
        stream = super().submit(prompt, params, **options)
        self.streams = [*getattr(self, "streams", []), stream]
        return stream

    async def close(self, drain_s: float = 0.0) -> None:
        self.state = "stopped"
        for stream in getattr(self, "streams", []):
            stream.fail(ErrorInfo.of(EngineUnavailable("the server is shutting down")))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    StartingClient.mode = sys.argv[3]
    config = ServeConfig(server=ServerConfig(port=int((sys.argv[4:] or ["0"])[0]), drain_s=float(sys.argv[2])))
    try:
        asyncio.run(HttpServer(config, client=StartingClient(delay_s=float(sys.argv[1]))).run())
    except HeadraceError as error:
        sys.exit(f"error: {error}")
    finally:
        print("frozen objects:", gc.get_freeze_count())
