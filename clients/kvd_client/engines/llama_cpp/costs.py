"""What computing a token costs here and what reading a byte of a snapshot does, learnt as requests go by."""

from __future__ import annotations

MIN_TOKENS_TIMED = 16
"""Of fewer tokens the time says more about the machine's mood than about a token."""
UNKNOWN_WAIT_S = 1.0
_WEIGHT = 0.3
_FIRST_RESTORE_S_PER_BYTE = 1e-9
_FIXED_RESTORE_S = 0.002


class Costs:
    """Moving averages. A restore is worth it when it costs at most half of the computation that it saves."""

    def __init__(self) -> None:
        self.prefill_s_per_token: float | None = None
        self.restore_s_per_byte = _FIRST_RESTORE_S_PER_BYTE

    def computed(self, num_tokens: int, seconds: float) -> None:
        """The server computed so many tokens of a prompt."""
        if num_tokens >= MIN_TOKENS_TIMED and seconds > 0:
            self.prefill_s_per_token = _average(self.prefill_s_per_token, seconds / num_tokens)

    def restored(self, nbytes: int, seconds: float) -> None:
        """A snapshot came up and into a slot."""
        if nbytes:
            self.restore_s_per_byte = _average(self.restore_s_per_byte, seconds / nbytes)

    def prefill_s(self, num_tokens: int) -> float | None:
        """What computing them takes; None while nothing was computed."""
        return None if self.prefill_s_per_token is None else num_tokens * self.prefill_s_per_token

    def transfer_s(self, nbytes: int) -> float:
        """What restoring a snapshot takes, or saving one."""
        return _FIXED_RESTORE_S + nbytes * self.restore_s_per_byte

    def is_worth(self, num_tokens: int, nbytes: int) -> bool:
        """Whether to restore so many bytes rather than compute so many tokens."""
        prefill_s = self.prefill_s(num_tokens)
        return prefill_s is None or 2 * self.transfer_s(nbytes) <= prefill_s

    def bound_s(self, num_tokens: int) -> float:
        """How long a request may wait for a snapshot that saves it so many tokens."""
        prefill_s = self.prefill_s(num_tokens)
        return UNKNOWN_WAIT_S if prefill_s is None else prefill_s


def _average(before: float | None, now: float) -> float:
    return now if before is None else before + _WEIGHT * (now - before)
