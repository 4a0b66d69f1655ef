"""Configuration, messages, errors and registries: what every room shares. ``VERSION`` is the package's."""

VERSION = "0.1.0"
