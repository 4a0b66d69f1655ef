"""Records of prefill-decode disaggregation: what a request says of its transfer, what peers compare, and the messages
between an engine, its transfer agent and the agent of a peer.

A *lease* is a range of bytes of an engine's region, in which the pages of one request lie: those of cache group 0 in
rising order, then those of group 1, and so on, as `Extent` counts them. A ticket names a lease; an epoch names one life
of an agent, so that nothing said to one life is taken for the next.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from headrace.base import VERSION
from headrace.base.cache import CacheSpec
from headrace.base.sampling import TransferSpec
from headrace.base.step import TokenLogprobs
from headrace.base.token_ids import TokenIds

Span = tuple[int, int]
"""``(begin, num_bytes)`` within a lease."""


class Extent(msgspec.Struct, frozen=True, array_like=True):
    """The bytes of a lease: of cache group g the pages ``[firsts[g], num_pages)``, ``page_bytes[g]`` each (one page of
    all layers of the group), from byte ``offsets[g]`` on."""

    num_pages: int
    firsts: list[int]
    page_bytes: list[int]
    offsets: list[int]
    num_bytes: int

    @classmethod
    def of(cls, num_pages: int, firsts: list[int], page_bytes: list[int]) -> Extent:
        """The extent of these pages, without gaps."""
        offsets, end = [], 0
        for first, size in zip(firsts, page_bytes, strict=True):
            offsets.append(end)
            end += (num_pages - first) * size
        return cls(num_pages, firsts, page_bytes, offsets, end)

    def span(self, group: int, begin: int, end: int) -> Span:
        """Where pages ``[begin, end)`` of a group lie."""
        size = self.page_bytes[group]
        return self.offsets[group] + (begin - self.firsts[group]) * size, (end - begin) * size


class GroupShape(msgspec.Struct, frozen=True, array_like=True):
    """A cache group as peers compare it: with the kv heads of all ranks."""

    spec: CacheSpec
    num_layers: int
    page_bytes: int


class PeerFacts(msgspec.Struct, frozen=True, array_like=True):
    """What two engines must have in common to exchange pages. ``model``: a digest of the configuration, of how the
    weights were loaded, and of the longest context where positions depend on it."""

    model: str
    page_size: int
    groups: list[GroupShape]

    def find_differences(self, other: PeerFacts) -> str:
        """Why pages of ``other`` are of no use here, as one line; empty if they are."""
        found = []
        if self.page_size != other.page_size:
            found.append(f"page_size is {self.page_size} here and {other.page_size} there")
        if self.groups != other.groups and not found:
            found += self._compare_groups(other)
        if self.model != other.model and not found:
            found.append(
                "the models, or how their weights are quantized, differ, or max_model_len, on which their rotary "
                "positions depend (longrope, dynamic)"
            )
        return "; ".join(found)

    def _compare_groups(self, other: PeerFacts) -> list[str]:
        dtypes = [[group.spec.dtype for group in facts.groups] for facts in (self, other)]
        if dtypes[0] != dtypes[1]:
            here, there = (", ".join(dict.fromkeys(names)) for names in dtypes)
            return [f"kv_dtype is {here} here and {there} there"]
        return ["the models cache other layers or shapes"]


class FirstTokens(msgspec.Struct, frozen=True, array_like=True):
    """What the prefill engine sampled."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None


def digest_prompt(token_ids: TokenIds, namespace: str) -> bytes:
    """Names a prompt: pages are only taken where both sides computed the same one."""
    # Hashed, as a key has 64 bytes at most: the name of an adapter alone is as long.
    return blake2b(token_ids, digest_size=16, key=blake2b(namespace.encode()).digest()).digest()


def rooms_like(room: str) -> tuple[str, str]:
    """A room, and that of its HTTP request: further prompts have ``ROOM.PROMPT``, and choices of each ``…/CHOICE``."""
    return room, room.partition("/")[0].partition(".")[0]


LEASE_S = 30.0
"""How long complete pages wait for somebody who wants them."""


class AgentOptions(msgspec.Struct, frozen=True):
    """How an engine starts its transfer agent: on its command line, as JSON. ``descriptor``: of the region of
    ``num_bytes``, in memory of GPU number ``device``, or of the host (-1); ``port`` 0: any free one; ``host`` empty: it
    listens nowhere, as in a decode engine. ``lease_s``: seconds that complete pages wait for a peer."""

    facts: PeerFacts
    backend: str
    num_bytes: int
    host: str = ""
    port: int = 0
    descriptor: int = -1
    epoch: int = 0
    device: int = -1
    lease_s: float = LEASE_S


# -- engine to agent ---------------------------------------------------------------------------------------------------


class Offer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """Prefill: a request arrived, whose pages will be in the lease of ``num_bytes`` from byte ``begin`` of the region.
    """

    ticket: int
    room: str
    prompt: bytes
    begin: int
    num_bytes: int


class Filled(msgspec.Struct, frozen=True, array_like=True, tag="filled"):
    """Prefill: these spans of a lease hold their pages now."""

    ticket: int
    spans: list[Span]


class Completed(msgspec.Struct, frozen=True, array_like=True, tag="completed"):
    """Prefill: all spans are filled, and the first tokens are sampled."""

    ticket: int
    first: FirstTokens


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag="fetch"):
    """Decode: get the pages of a request into a lease; or, with ``num_bytes`` 0, have the prefill engine hear that they
    are of no use."""

    ticket: int
    spec: TransferSpec
    prompt: bytes
    begin: int
    num_bytes: int


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """The request of a lease has ended without its pages."""

    ticket: int
    reason: str


class Decline(msgspec.Struct, frozen=True, array_like=True, tag="decline"):
    """Prefill: nothing will be offered in a room, or in those of all prompts and choices of one HTTP request, which
    begin with its ``room``."""

    room: str
    reason: str


class Reclaim(msgspec.Struct, frozen=True, array_like=True, tag="reclaim"):
    """Prefill: requests wait for memory to leave by; complete pages that nobody will fetch any more are to go."""


ToAgent = Offer | Filled | Completed | Fetch | Cancel | Decline | Reclaim

# -- agent to engine ---------------------------------------------------------------------------------------------------


class Listening(msgspec.Struct, frozen=True, array_like=True, tag="listening"):
    """The agent has started; ``port`` is that of peers, 0 in a decode engine."""

    port: int


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag="arrived"):
    """Decode: a lease holds all pages, and their checksums are right."""

    ticket: int
    first: FirstTokens


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """Decode: the pages of a lease will not come. A peer may still write into it, until `Released`."""

    ticket: int
    reason: str


class Released(msgspec.Struct, frozen=True, array_like=True, tag="released"):
    """Nobody reads (prefill) or writes (decode) the lease any more. ``reason``: why nobody got the pages of an offer;
    empty if somebody did."""

    ticket: int
    reason: str = ""


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """Sent every second, to engine and peers. ``engine_silent_s``: for how long the sender's engine has done nothing,
    although somebody waits for it. ``writing_s``: how long the write to this peer takes that is under way."""

    engine_silent_s: float = 0.0
    writing_s: float = 0.0


FromAgent = Listening | Arrived | Lost | Released | Alive

# -- agent to agent ----------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First message in both directions. ``handle``: what ``backend`` needs to write into the sender's region."""

    facts: PeerFacts
    epoch: int
    backend: str
    handle: bytes
    version: str = VERSION


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """In place of `Hello`: why nothing can be exchanged."""

    reason: str


class Want(msgspec.Struct, frozen=True, array_like=True, tag="want"):
    """Decode to prefill: write the pages of a room into my lease; with ``num_bytes`` 0 none: the room may end."""

    ticket: int
    room: str
    prompt: bytes
    begin: int
    num_bytes: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Decode to prefill: write nothing more into a lease; answered by `Stopped`, after which nothing is written."""

    ticket: int


class Written(msgspec.Struct, frozen=True, array_like=True, tag="written"):
    """Prefill to decode: these spans were written; ``checksums`` are CRC-32 of each."""

    ticket: int
    spans: list[Span]
    checksums: list[int]


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Prefill to decode: everything was written."""

    ticket: int
    first: FirstTokens


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Prefill to decode: the rest will not come, and nothing more is written."""

    ticket: int
    reason: str


class Stopped(msgspec.Struct, frozen=True, array_like=True, tag="stopped"):
    """The answer to `Stop`."""

    ticket: int


FromDecode = Hello | Want | Stop
FromPrefill = Hello | Refusal | Written | Done | Failed | Stopped | Alive

encode = msgspec.msgpack.Encoder().encode
decode_to_agent = msgspec.msgpack.Decoder(ToAgent).decode
decode_from_agent = msgspec.msgpack.Decoder(FromAgent).decode
decode_from_decode = msgspec.msgpack.Decoder(FromDecode).decode
decode_from_prefill = msgspec.msgpack.Decoder(FromPrefill).decode
