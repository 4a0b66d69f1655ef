"""All layers of a decoder in one call, for steps in which every request has one new token: on a CPU, where waking threads
and calling operators takes as long as multiplying a small layer.

What a layer is made of is told by the records of `parts`; `table.LayerTable` puts them where the kernel reads them. There
is no reference here: the layers themselves, called one after the other, are it.
"""

MOST_ROWS = 64
"""Requests in a step; with more of them the products take so long that one call for each operator costs nothing."""
