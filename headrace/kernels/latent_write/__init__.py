"""What happens between the projections of latent attention and attention itself: rotate, write the latent to its
page."""

from headrace.kernels.operation import Operation

LATENT_WRITE = Operation("latent_write kernel")
"""``latent_write(q_rope [T, H, E], latent [T, L], k_rope [T, E], positions [T] int64, cos_sin [length, E] float32,
slots [T] int64, pages [P, page_size, 1, L + E], *, interleaved) -> q_rope [T, H, E]``.

Rotates ``q_rope`` and ``k_rope`` by ``cos_sin[positions]`` (first half cosines, second half sines) as `ROPE_WRITE`
does, and writes ``latent`` followed by the rotated ``k_rope`` at ``slots`` (page * page_size + offset). Several rows
may carry the same slot only in the null page. Returns the rotated ``q_rope``, which may be strided.
"""

LATENT_WRITE.add("reference", "headrace.kernels.latent_write.reference:latent_write", doc="plain torch")
