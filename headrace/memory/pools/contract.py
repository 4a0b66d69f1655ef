"""`Pool`: storage of one cache group. A kind of cache is one file beside this one and one line in `POOLS`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from headrace.base.cache import CacheGroup, CacheSpec
from headrace.base.cache_kinds import CACHE_POOLS
from headrace.base.registry import Registry


class Pool(ABC):
    """Pages of one cache group on one device. Every page reads as finite numbers before it is first written.
    Built as ``Class(group, page_size, device)``. ``supports_int8``: may keep int8 codes with their scales."""

    supports_int8: ClassVar[bool] = False
    num_bytes: int

    @abstractmethod
    def __init__(self, group: CacheGroup, page_size: int, device: torch.device): ...

    @staticmethod
    @abstractmethod
    def page_bytes(spec: CacheSpec, page_size: int) -> int:
        """Bytes of one page of one layer."""

    @abstractmethod
    def layer(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The page tensors of a model layer of this group; plain keys and values give ``(k, v)``, codes
        their scales, too."""


POOLS: Registry[type[Pool]] = CACHE_POOLS
"""By `CacheSpec.kind`."""


def group_page_bytes(group: CacheGroup, page_size: int) -> int:
    """Bytes of one page in all layers of a group."""
    return POOLS.load(group.spec.kind).page_bytes(group.spec, page_size) * len(group.layers)


def build_pool(group: CacheGroup, page_size: int, device: torch.device) -> Pool:
    """The pool that stores a group's kind."""
    return POOLS.load(group.spec.kind)(group, page_size, device)
