"""`kvd demo`: a private daemon and a few processes with a real model that share its KV cache.

`command` is the click command, `acts` the story, `daemon` and `workers` the processes, `worker` what runs in each of
them, `events` what they say, `model` and `documents` what they work on, `render` what is seen of it.
"""

from __future__ import annotations

from kvd.cli.demo.command import demo

__all__ = ["demo"]
