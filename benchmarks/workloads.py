"""The four fixed offline workloads, shared with ``headrace bench offline``."""

from headrace.serving.bench.offline import ALL, draw_latency1, draw_offline256, draw_prefill16x8k, draw_sharedprefix

__all__ = ["ALL", "draw_latency1", "draw_offline256", "draw_prefill16x8k", "draw_sharedprefix"]
