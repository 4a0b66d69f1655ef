"""`Ranks`: a rank's place, groups and neighbours; `join_ranks` meets the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from headrace.base.errors import PeerFailed
from headrace.parallel.experts import ExpertRanks
from headrace.parallel.group import TIMEOUT, Group, TorchGroup, join_group
from headrace.parallel.layout import Layout
from headrace.parallel.links import StageLinks, TorchLinks
from headrace.parallel.push import compile_early, open_push_group


@dataclass(frozen=True)
class Ranks:
    """``world``: all ranks of the engine. ``tensor``: those of this rank's stage, which divide its layers. ``links``:
    to the stages before and behind. By default one rank. ``experts``: the ranks of all replicas, where these divide
    experts among them."""

    layout: Layout = field(default_factory=Layout)
    world: Group = field(default_factory=Group)
    tensor: Group = field(default_factory=Group)
    links: StageLinks = field(default_factory=StageLinks)
    experts: ExpertRanks | None = None

    @contextlib.contextmanager
    def muted(self) -> Iterator[None]:
        """See `Group.muted`."""
        with self.world.muted(), self.tensor.muted(), self.links.muted(), self.apart():
            yield

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """All ranks run the body, or none has: raises `PeerFailed` where the body ended well here alone. Waits for all
        of them, also when it raises."""
        is_done = False
        try:
            yield
            is_done = True
        finally:
            have_all = self.world.agree([int(is_done)])[0]
        if not have_all:
            raise PeerFailed("another rank failed")

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """While the body runs, this replica waits for no other; see `Group.muted`."""
        with contextlib.nullcontext() if self.experts is None else self.experts.group.muted():
            yield

    def close(self) -> None:
        """Leave all groups."""
        self.tensor.close()
        self.world.close()
        if self.experts is not None:
            self.experts.group.close()


def join_ranks(layout: Layout, device: torch.device, store: Any) -> Ranks:
    """Meet the others in a store; waits for all of them. On GPUs those of a stage have own collectives for small
    tensors, where all of them can. Raises `ConfigError` where this process is in a group already."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    compile_early(device, layout.tensor)
    world = join_group(layout.rank, layout.size, device, store)
    if layout.pipeline == 1:
        world = open_push_group(world, device)
        return Ranks(layout, world, world)
    tensor = Group()
    if layout.tensor > 1:
        # all ranks make all groups, in the same order
        groups = [dist.new_group(layout.tensor_ranks(stage)) for stage in range(layout.pipeline)]
        own = TorchGroup(layout.tensor_rank, layout.tensor, device, groups[layout.stage])
        tensor = open_push_group(own, device)
    return Ranks(layout, world, tensor, TorchLinks(layout))


def join_replicas(layout: Layout, replica: int, num_replicas: int, device: torch.device, store: Any) -> Ranks:
    """As `join_ranks`, with the ranks of all replicas, which divide experts; each replica has one stage."""
    assert layout.pipeline == 1, "the configuration refuses stages"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    compile_early(device, layout.size)
    everybody = join_group(replica * layout.size + layout.rank, num_replicas * layout.size, device, store)
    tensor = Group()
    if layout.size > 1:  # all ranks make all groups, in the same order
        members = [list(range(r * layout.size, (r + 1) * layout.size)) for r in range(num_replicas)]
        groups = [dist.new_group(ranks, timeout=TIMEOUT) for ranks in members]
        tensor = open_push_group(TorchGroup(layout.rank, layout.size, device, groups[replica]), device)
    return Ranks(layout, tensor, tensor, experts=ExpertRanks(everybody, num_replicas))
