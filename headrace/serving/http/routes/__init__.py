"""The routes, one module a topic. Each exports its ``ENDPOINTS``; handlers translate and do nothing else."""
