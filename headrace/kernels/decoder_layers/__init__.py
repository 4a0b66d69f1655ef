"""All layers of a decoder in one call, for any step of few tokens: on a CPU, where waking threads and calling operators
takes as long as multiplying a small layer.

Requests with one new token each that begin with the same pages read these once, together. What a layer is made of is
told by the records of `parts`; `table.LayerTable` puts them where the kernel reads them. There is no reference here:
the layers themselves, called one after the other, are it.
"""

MOST_TOKENS = 1024
"""In a step. One call for each operator costs as little with more of them, but what is computed in between would lie in
memory for good."""
