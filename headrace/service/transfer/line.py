"""`AgentLine`: an engine's end of the line to its transfer agent, with the region that both map: starts the agent, and
starts it anew, with an empty region, when it has died or hangs.
"""

from __future__ import annotations

import logging
import secrets
import socket
import subprocess
import time
from collections.abc import Callable

import msgspec

from headrace.base.errors import ConfigError
from headrace.base.spawn import spawn_process
from headrace.base.transfer import AgentOptions, FromAgent, Listening, ToAgent, decode_from_agent
from headrace.memory.transfer.contract import AnyRegion, Region
from headrace.memory.transfer.device_region import DeviceRegion
from headrace.service.framing import READ_BYTES, Frames, frame

logger = logging.getLogger(__name__)

AGENT_MODULE = "headrace.service.transfer.agent"
HANG_S = 6.0
"""An agent says something every second; one that does not for so long hangs and is started anew."""
FIRST_START_S = 120.0
"""Most seconds until the first agent listens: imports take half a minute on a machine that is busy elsewhere."""
SEND_S, SEND_PAUSE_S = 1.0, 0.0005
LEAST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""From one start to the next at least; twice as long after each agent that has not come to listen."""


class AgentLine:
    """``attach`` is called with every new region and its epoch, before anything is sent, and with None when a region is
    given up. All calls come from the engine's thread, and none blocks but `start`, and `send` for a large message."""

    def __init__(self, options: AgentOptions, attach: Callable[[AnyRegion | None, int], None]):
        self.is_up = False
        self.epoch = 0
        self.num_restarts = 0
        self._options, self._attach = options, attach
        self._process: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._region: AnyRegion | None = None
        self._frames: Frames[FromAgent] = Frames(decode_from_agent)
        self._began_at = self._heard_at = self._silent_s = 0.0
        self._pause_s = LEAST_PAUSE_S

    @property
    def num_bytes(self) -> int:
        """Of the region."""
        return self._options.num_bytes

    @property
    def pid(self) -> int | None:
        """Of the agent."""
        return None if self._process is None else self._process.pid

    @property
    def silent_s(self) -> float:
        """Seconds for which the agent had said nothing at the last `poll`."""
        return self._silent_s

    @property
    def descriptor(self) -> socket.socket | None:
        """Readable when the agent has said something, or has died; None while there is no agent."""
        return self._line

    def start(self) -> None:
        """Start the first agent and wait until it listens; raises `ConfigError` when it cannot."""
        self._spawn()
        limit = time.monotonic() + FIRST_START_S
        while not self.is_up:
            if self._process is None or self._process.poll() is not None or time.monotonic() > limit:
                self.close()
                raise ConfigError(
                    "the transfer agent did not start, its last lines say why; see disaggregation_transfer_backend and "
                    "disaggregation_bootstrap_port", param="disaggregation_bootstrap_port"
                )
            self.poll()
            time.sleep(0.01)

    def send(self, message: ToAgent) -> None:
        """Send; an agent that cannot take it is given up, which `poll` notices. Waits for one that is slow, as first
        tokens with all their logprobs are more than a socket's buffer holds."""
        data, limit = memoryview(frame(message)), time.monotonic() + SEND_S
        while data and self._line is not None:
            try:
                data = data[self._line.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                if time.monotonic() > limit:
                    self._give_up("it takes no messages")
                time.sleep(SEND_PAUSE_S)
            except OSError:
                self._give_up("it takes no messages")

    def poll(self) -> list[FromAgent]:
        """What the agent said since the last call. Notices an agent that has died or hangs, and starts another one."""
        messages: list[FromAgent] = []
        while self._line is not None:
            try:
                data = self._line.recv(READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._give_up("it has died")
                break
            self._heard_at = time.monotonic()
            messages += self._frames.feed(data)
        if any(isinstance(message, Listening) for message in messages):
            self.is_up, self._pause_s = True, LEAST_PAUSE_S
        now = time.monotonic()
        self._silent_s = now - self._heard_at
        if self._line is not None and self.is_up and self._silent_s > HANG_S:
            self._give_up(f"it has said nothing for {HANG_S:g} s")
        if self._line is None and self._process is None and now - self._began_at > self._pause_s:
            self.num_restarts += 1
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._restart()
        return messages

    def close(self) -> None:
        """End the agent."""
        self.is_up = False
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._region is not None:
            self._attach(None, 0)
            self._region.close()
            self._region = None

    def _restart(self) -> None:
        try:
            self._spawn()
        except (ConfigError, OSError) as error:  # no memory now: peers may still hold that of the last region
            logger.warning("the transfer agent cannot start yet: %s", error)
            self.close()

    def _create_region(self) -> AnyRegion:
        size, device = self._options.num_bytes, self._options.device
        return Region.create(size) if device < 0 else DeviceRegion.create(size, device)

    def _spawn(self) -> None:
        self._began_at = self._heard_at = time.monotonic()
        region = self._region = self._create_region()
        self.epoch = secrets.randbits(63)
        options = msgspec.structs.replace(self._options, descriptor=region.descriptor, epoch=self.epoch)
        self._frames = Frames(decode_from_agent)
        self._attach(region, self.epoch)
        self._process, self._line = spawn_process(
            AGENT_MODULE, [msgspec.json.encode(options).decode()], [region.descriptor]
        )

    def _give_up(self, reason: str) -> None:
        logger.warning("the transfer agent is started anew: %s", reason)
        self.close()
