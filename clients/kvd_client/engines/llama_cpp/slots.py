"""What the proxy knows of a llama-server's slots: who has which, and the tokens that lie in it."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque

from kvd_client.engines.llama_cpp.snapshots import num_common_tokens


class Slot:
    """One sequence of the server. `tokens` are those it was last seen to hold (encoded), a prefix of what it holds.

    Only a guess: the server compares tokens itself, so a wrong one costs time and never an answer.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.tokens = b""
        self.is_taken = False
        self.last_used = 0
        self.saving: asyncio.Task[None] | None = None
        """The snapshot of its last request, until it is kept or given up."""
        self.is_being_written = False
        """The server was told to write it, or has done so: it will be kept."""


class Slots:
    """All of them, handed out one request each. Of one event loop."""

    def __init__(self, num_slots: int) -> None:
        self.all = [Slot(number) for number in range(num_slots)]
        self._turns = itertools.count(1)
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def num_taken(self) -> int:
        """Slots with a request."""
        return sum(slot.is_taken for slot in self.all)

    async def take(self, tokens: bytes) -> tuple[Slot, int]:
        """The free slot with the longest common prefix, else the one used longest ago, and the prefix's tokens.

        Waits while there is none, first come, first served, as the server would. Give it back with `release`.
        """
        while True:
            free = [slot for slot in self.all if not slot.is_taken]
            if free and not self._waiting:
                break
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except BaseException:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                else:
                    self._wake()  # it was our turn, and now it is the next one's
                raise
            free = [slot for slot in self.all if not slot.is_taken]
            if free:
                break
        common = {slot: num_common_tokens(slot.tokens, tokens) for slot in free}
        best = max(free, key=lambda slot: (common[slot], -slot.last_used))
        best.is_taken = True
        best.last_used = next(self._turns)
        return best, common[best]

    def release(self, slot: Slot) -> None:
        """Whoever waits longest is next."""
        slot.is_taken = False
        self._wake()

    def forget(self) -> None:
        """A request went past us, to a slot we don't know: any that was free."""
        for slot in self.all:
            if not slot.is_taken:
                slot.tokens = b""

    def _wake(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
