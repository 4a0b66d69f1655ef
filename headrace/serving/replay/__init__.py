"""Requests written down while a server runs, and sent again to it or another one."""
