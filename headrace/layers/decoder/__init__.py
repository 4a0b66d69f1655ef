"""The decoder-only transformer that most families are: one spec, one set of blocks, one table of checkpoint names.

Importing this package imports no torch, so that ``spec`` can be read anywhere.
"""
