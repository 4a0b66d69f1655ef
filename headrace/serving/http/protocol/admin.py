"""Requests and answers of the admin routes, and of ``/v1/loads``."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class PauseRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """``abort`` ends all running requests first; ``in_place`` leaves them where they are."""

    mode: Literal["abort", "in_place"] | None = None


class AdminAnswer(Struct):
    """Whether it was done."""

    success: bool
    message: str


class Load(Struct):
    """What one engine has to do. ``token_usage`` is the share of the KV memory that running requests hold."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float


class Loads(Struct):
    """The load of all engines behind this server; ``timestamp`` in seconds."""

    timestamp: float
    version: str
    dp_rank_count: int
    loads: list[Load]
