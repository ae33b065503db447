"""`Snapshots`: opaque states of token sequences, found by the longest prefix they have in common with a prompt.

A state of n tokens can serve every prompt that begins like them: the engine cuts off what does not fit. So it is put
under the chain hash of each whole step of its tokens, all of which name one content. The last key of a prompt that
exists is the longest common prefix there is, to within a step; a state that was saved later takes the place of earlier
ones, since it is the one that will be evicted last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

from kvd.block import ChainHash
from kvd.errors import CorruptBlock
from kvd.hashing import TOKEN_NBYTES, chain_hashes
from kvd_client.blobs import Blobs
from kvd_client.core.blob_core import Buffer

STEP_TOKENS: Final = 32
MAX_TRIES: Final = 8
"""How many states that turn out to be gone are looked for, before computing is quicker."""
_ROOT: Final = ChainHash(hashlib.sha256(b"kvd llama.cpp snapshot 1").digest())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state that has `num_tokens` tokens in common with the prompt, perhaps up to a step more."""

    num_tokens: int
    state: memoryview


class Snapshots:
    """States of one model, build and options. Blocking; safe from several threads.

    Token ids are given as `kvd.hashing.encode_tokens` makes them.
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    def longest(self, tokens: bytes) -> int:
        """How many of the first tokens some state has; promises nothing. One round trip."""
        place = self._blobs.latest(_keys(tokens))
        return 0 if place is None else (place + 1) * STEP_TOKENS

    def find(
        self,
        tokens: bytes,
        *,
        more_than: int = 0,
        is_worth: Callable[[int, int], bool] | None = None,
        wait_s: float | None = None,
    ) -> Snapshot | None:
        """The state with the longest common prefix, if that is longer than `more_than` tokens.

        `is_worth(num_tokens, nbytes)` may decline one before its bytes are brought up. `wait_s`: see `Blobs.get`.
        A state whose bytes are not what was saved is forgotten, and the next one taken.
        """
        first = more_than // STEP_TOKENS
        keys = _keys(tokens)[first:]
        for number in range(MAX_TRIES):
            place = self._blobs.latest(keys)
            if place is None:
                return None
            num_tokens = (first + place + 1) * STEP_TOKENS
            try:
                if is_worth is not None:
                    nbytes = self._blobs.size(keys[place])
                    if nbytes is not None and not is_worth(num_tokens, nbytes):
                        return None
                state = self._blobs.get(keys[place], wait_s=wait_s)
            except CorruptBlock:
                state = None
            if state is not None:
                return Snapshot(num_tokens, state)
            # Its keys before this one most likely named the same content.
            del keys[max(place // 4, place + 1 - 2**number) :]
        return None

    def save(self, tokens: bytes, state: Buffer | list[Buffer], *, at_least: int = STEP_TOKENS) -> bool:
        """Keeps the state of these tokens; False when it would add fewer than `at_least` tokens to what is there.

        Raises what `Blobs.put` raises.
        """
        keys = _keys(tokens)
        if not keys or len(keys) * STEP_TOKENS - self.longest(tokens) < at_least:
            return False
        self._blobs.put(keys[-1], state, also=keys[-2::-1], replace=True)
        return True


def _keys(tokens: bytes) -> list[bytes]:
    return cast("list[bytes]", chain_hashes(_ROOT, tokens, STEP_TOKENS))


def num_common_tokens(one: bytes | memoryview, other: bytes | memoryview) -> int:
    """How many encoded token ids two sequences have in common from the start."""
    one, other = memoryview(one), memoryview(other)
    low, high = 0, min(len(one), len(other)) // TOKEN_NBYTES
    while low < high:
        middle = (low + high + 1) // 2
        # What lies before `low` is known to be equal.
        if one[low * TOKEN_NBYTES : middle * TOKEN_NBYTES] == other[low * TOKEN_NBYTES : middle * TOKEN_NBYTES]:
            low = middle
        else:
            high = middle - 1
    return low
