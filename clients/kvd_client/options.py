"""What a caller may choose for a whole client."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kvd_client.arguments import MAX_TOKENS, seconds, whole_number

DEFAULT_GROWTH_TOKENS = 1024
"""Room beyond the prompt that `max_tokens` leaves when the caller names none."""

LONGEST_DEFAULT_WAIT_S = 600.0
"""The greatest `waits.default_s` that a daemon can be configured with; a begin without `wait_s` may take as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Arguments of `connect`; see there."""

    runtime_dir: str | os.PathLike[str] | None = None
    label: str = ""
    timeout_s: float = 30.0
    reserve_ahead_tokens: int = 64

    def __post_init__(self) -> None:
        seconds("timeout_s", self.timeout_s)
        whole_number("reserve_ahead_tokens", self.reserve_ahead_tokens, most=MAX_TOKENS)


DEFAULT_OPTIONS = Options()
