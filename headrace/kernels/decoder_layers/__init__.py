"""All layers of a decoder in one call, for any step of few tokens: on a CPU, where waking threads and calling operators takes
as long as multiplying a small layer.

Requests with one new token each that begin with the same pages read these once, together. What a layer is made of is told
by the records of `parts`; `table.LayerTable` puts them where the kernel reads them. There is no reference here: the
layers themselves, called one after the other, are it.
"""

MOST_TOKENS = 256
"""In a step; with more of them the products take so long that one call for each operator costs nothing."""
