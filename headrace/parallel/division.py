"""`Division`: among how many ranks a model is to be divided, and what speaks against that; `Divisible`: specs that ask.
Torch-free.

What is asked here follows from a model's configuration, before ranks are started; layers are divided by the same rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from headrace.base.errors import ConfigError
from headrace.base.parallel import ParallelConfig
from headrace.parallel.placement import check_copies
from headrace.parallel.share import share_experts, share_heads, share_units


@dataclass(frozen=True)
class Division:
    """Of each layer among ``tensor`` ranks, and of experts, whole ones, among ``experts`` of them (1: experts are
    divided as layers are). ``copies`` of experts there are besides; None where experts do not move. The methods raise
    `ConfigError` where a rank would get nothing."""

    tensor: int = 1
    experts: int = 1
    copies: int | None = None

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Division:
        """The one that the options ask for."""
        tensor = parallel.tensor_parallel_size
        experts = tensor * parallel.data_parallel_size if parallel.enable_expert_parallel else 1
        copies = parallel.balancing.num_redundant_experts if parallel.enable_eplb else None
        return cls(tensor, experts, copies)

    def check_heads(self, num_heads: int, num_kv_heads: int) -> None:
        """Of attention."""
        for rank in range(self.tensor):
            share_heads(num_heads, num_kv_heads, self.tensor, rank)

    def check_dims(self, size: int) -> None:
        """Of an MLP between its products."""
        share_units(size, self.tensor, 0, noun="intermediate dims")

    def check_vocabulary(self, size: int) -> None:
        """Of embedding and head."""
        share_units(size, self.tensor, 0, noun="tokens of the vocabulary")

    def check_experts(self, count: int, size: int) -> None:
        """Of a mixture of ``count`` experts with ``size`` dims each."""
        if self.experts == 1:
            share_units(size, self.tensor, 0, noun="intermediate dims of experts")
            return
        share_experts(count, self.experts, 0)
        if self.copies is not None:
            check_copies(count, self.copies, self.experts)

    def check_has_experts(self, count: int) -> None:
        """A model with ``count`` mixtures."""
        if self.experts > 1 and not count:
            raise ConfigError(
                "enable_expert_parallel divides experts among ranks, and this model has none; leave it out: "
                "tensor_parallel_size alone divides its layers, data_parallel_size alone runs whole copies",
                param="enable_expert_parallel",
            )


@runtime_checkable
class Divisible(Protocol):
    """A spec of a model, or of a part, that knows what ranks divide of it. Others are left to the layers that are built
    from them."""

    def check_division(self, division: Division) -> None:
        """Raise `ConfigError` where a rank would get nothing."""
