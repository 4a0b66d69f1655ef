"""Where KV bytes live: pools, page tables, the memory plan."""
