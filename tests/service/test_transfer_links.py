"""Parts of transfer agents, without their processes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.base.errors import TransferFailed
from headrace.base.transfer import Alive, Hello, Offer, PeerFacts, Want, decode_from_prefill, digest_prompt
from headrace.memory.transfer.contract import Region
from headrace.service.transfer.offering import Offers
from headrace.service.transfer.wire import LENGTH, PeerLine
from headrace.service.transport import frame


async def test_a_message_that_comes_in_two_parts_survives_a_time_limit_between_them():
    reader, data = asyncio.StreamReader(), frame(Alive(1.5))
    line = PeerLine(reader, cast(Any, None), "a peer")
    for end in (LENGTH.size, len(data) - 1):
        reader.feed_data(data[:end])
        with pytest.raises(TimeoutError):
            await line.receive(decode_from_prefill, 0.01)
        reader.feed_data(data[end:])
        assert await line.receive(decode_from_prefill, 1.0) == Alive(1.5)


def test_whatever_a_backend_raises_fails_the_transfer():
    def write(copies: object) -> None:
        raise RuntimeError("unplugged")

    region = Region.create(4096)
    offers = Offers(Hello(PeerFacts("m", 16, []), 1, "other", b""), region, cast(Any, None), print, lambda: 0.0)
    room, destination = SimpleNamespace(offer=Offer(1, "7", b"p", 0, 64)), SimpleNamespace(write=write)
    with pytest.raises(TransferFailed, match="RuntimeError: unplugged"):
        offers.write(cast(Any, room), cast(Any, destination), Want(1, "7", b"p", 0, 64), [(0, 64)])
    region.close()


def test_prompts_of_other_adapters_and_salts_are_others():
    adapter = "f" * 64
    names = ["", "salt", f"{adapter}/", f"{adapter}/one", f"{adapter}/two", "x" * 200, "x" * 200 + "y"]
    assert len({digest_prompt([1, 2], name) for name in names}) == len(names)
