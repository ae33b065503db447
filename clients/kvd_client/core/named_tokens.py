"""The token ids of a sequence, as far as anybody has named them, and the chain hashes of their full blocks."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from kvd.block import ChainHash, NamespaceDigest
from kvd.errors import InvalidTokens
from kvd.hashing import TOKEN_NBYTES, chain_hashes, encode_tokens
from kvd_client.core.verb import Tokens


class NamedTokens:
    """Grows at the end, is cut at the end. Hashes are computed once, when they are first asked for."""

    def __init__(self, root: bytes, block_tokens: int, tokens: bytes = b"", hashes: Sequence[ChainHash] = ()) -> None:
        self._root = NamespaceDigest(root)
        self._block_tokens = block_tokens
        self._tokens = bytearray(tokens)
        self._hashes = list(hashes)

    def __len__(self) -> int:
        return len(self._tokens) // TOKEN_NBYTES

    def ids(self) -> list[int]:
        """As integers."""
        packed = array("I", bytes(self._tokens))
        if sys.byteorder == "big":
            packed.byteswap()
        return packed.tolist()

    def add(self, tokens: bytes) -> None:
        """Appends ids, as `encode_tokens` gives them."""
        self._tokens += tokens

    def rest_of(self, token_ids: Tokens) -> bytes:
        """What `token_ids`, which must begin with everything known, adds to it. Raises `InvalidTokens`."""
        tokens = encode_tokens(token_ids)
        if not tokens.startswith(self._tokens):
            place = self._num_matching(tokens)
            raise InvalidTokens(f"these token ids and the sequence's differ at token {place} of {len(self)}")
        return tokens[len(self._tokens) :]

    def num_matching(self, token_ids: Tokens) -> int:
        """Length of the common prefix."""
        return self._num_matching(encode_tokens(token_ids))

    def _num_matching(self, other: bytes) -> int:
        longest = min(len(other), len(self._tokens))
        if other[:longest] == self._tokens[:longest]:
            return longest // TOKEN_NBYTES
        return next(
            at
            for at in range(longest // TOKEN_NBYTES)
            if other[at * TOKEN_NBYTES : (at + 1) * TOKEN_NBYTES]
            != self._tokens[at * TOKEN_NBYTES : (at + 1) * TOKEN_NBYTES]
        )

    def hashes(self, first: int, stop: int) -> list[ChainHash]:
        """Chain hashes of blocks first .. stop, all of them full."""
        known = len(self._hashes)
        if stop > known:
            block_nbytes = self._block_tokens * TOKEN_NBYTES
            parent = self._hashes[-1] if known else self._root
            fresh = bytes(self._tokens[known * block_nbytes : stop * block_nbytes])
            self._hashes += chain_hashes(parent, fresh, self._block_tokens)
        return self._hashes[first:stop]

    def truncate(self, num_tokens: int) -> None:
        """Forgets the ids from `num_tokens` on."""
        del self._tokens[num_tokens * TOKEN_NBYTES :]
        del self._hashes[num_tokens // self._block_tokens :]

    def prefix(self, num_tokens: int) -> NamedTokens:
        """A copy of the first `num_tokens`, or of all when there are fewer."""
        copy = NamedTokens(self._root, self._block_tokens, bytes(self._tokens), self._hashes)
        copy.truncate(num_tokens)
        return copy
