"""HTTP in front of the engine. Knows its messages, never a tensor, and loads no torch."""

VERSION = "0.1.0"  # as in pyproject.toml
