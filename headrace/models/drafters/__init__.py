"""Drafters that compute on the device: the registry of their kinds, and one module for each."""
