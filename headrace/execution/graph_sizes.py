"""Of which sizes steps are captured: `GraphSizes`, and how they are chosen.

Refuses: capturing (``graphs.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

DENSE_BUCKETS = (1, 2, 4)
"""Numbers of requests below 8 with a graph of their own: there a padded row costs as much as a real one. From 8 on
sizes are multiples of 8 (later 16, 32): padding attends to one key only, and tensor cores take as long for 130 rows as
for 144. Recording a size takes about 20 ms of the start."""

TOKEN_SIZES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
LAYER_FLOPS = 6e11
"""The most FLOPs of a layer of a captured step with prefill, estimated as 2 * tokens * parameters that a token is
multiplied with. A larger step keeps the device busy for longer than a layer's kernels take to launch one by one, some
0.9 ms, so a graph would gain nothing."""
MAX_SPAN = 1024
"""The most tokens of one span in a captured step. A longer one gains more from an attention kernel chosen for its
length than it loses by launching without a graph."""
PREFIX_SIZES, PREFIX_DISTANCE = (16, 32, 64, 96, 128), 64
"""Buckets of decodes that begin with the same pages, and the distance of those above: fewer than of the others, beside
which they are recorded."""


@dataclass(frozen=True)
class GraphSizes:
    """Bucket sizes: ``decodes`` in requests, for steps of decodes alone; ``tokens`` in tokens, for other steps."""

    decodes: list[int]
    tokens: list[int]

    @property
    def with_media(self) -> list[int]:
        """Bucket sizes in tokens of steps with placeholders, for models that have such steps."""
        return [size for size in self.tokens if size <= MAX_SPAN]

    @property
    def with_prefixes(self) -> list[int]:
        """Bucket sizes in requests of steps of decodes of which many begin with the same pages."""
        least, largest = PREFIX_SIZES[0], self.decodes[-1:]
        return [
            size for size in self.decodes
            if size in PREFIX_SIZES or size % PREFIX_DISTANCE == 0 or (size > least and size in largest)
        ]

    def __len__(self) -> int:
        return len(self.decodes) + len(self.tokens)


def bucket_sizes(max_requests: int) -> list[int]:
    """Bucket sizes in requests, ascending; the last is ``max_requests``, so that every decode step has a bucket."""
    sizes = [*DENSE_BUCKETS, *range(8, 128, 8), *range(128, 256, 16), *range(256, max_requests + 1, 32)]
    return sorted({*(size for size in sizes if size < max_requests), max_requests})


def step_sizes(max_tokens: int, num_parameters: int, num_layers: int) -> list[int]:
    """Bucket sizes in tokens, ascending, for steps of at most ``max_tokens`` in layers that have ``num_parameters`` of
    which a token needs all; empty for layers so large that `LAYER_FLOPS` allows none."""
    most = min(max_tokens, LAYER_FLOPS * num_layers / (2 * num_parameters))
    sizes = [size for size in TOKEN_SIZES if size <= most]
    # A ``max_tokens`` between two sizes gets its own bucket, unless FLOPs are the tighter bound.
    return [*sizes, max_tokens] if sizes and sizes[-1] < max_tokens == most else sizes
