"""All layers of a decoder fused in one call, for steps of few tokens on a CPU, where waking threads and dispatching
operators takes as long as multiplying a small layer.

Decodes whose page tables begin with the same pages (a shared prefix) read these once, together. The records of `parts`
describe a layer; `table.LayerTable` encodes them for the kernel. The reference is the layers themselves, called one
after the other.
"""

MOST_TOKENS = 1024
"""The most tokens of a fused step. Above it one call per operator is as fast, and the scratch memory, which is never
freed, would grow."""
