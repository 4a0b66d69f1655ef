"""The encoder that the BERT line of families shares: one spec, one set of blocks, tables of checkpoint names.

Importing this package imports no torch, so that ``spec`` can be read anywhere.
"""
