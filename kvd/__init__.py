"""kvd: a daemon that owns KV-cache memory and shares it between inference processes."""

__version__ = "0.1.0"
