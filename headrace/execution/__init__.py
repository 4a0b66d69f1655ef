"""Runs one plan: request state on the device, inputs, forward, sampling, results."""
