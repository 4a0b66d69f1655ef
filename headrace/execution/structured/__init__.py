"""Structured outputs: grammars compiled off the hot path, matchers by row, masks filled while the device computes."""
