"""chain_hash_4096.

Timed: a list of 4096 Python ints -> 256 chain hashes (encoding included). Limit: 256 calls of hashlib.sha256 with
digest() on the very 96-byte inputs, built before.
"""

from __future__ import annotations

import hashlib
import random

from kvd.bench.row import Group, Row, Run, Target, interleaved, seconds
from kvd.block import NamespaceDigest
from kvd.hashing import TOKEN_NBYTES, chain_hashes, encode_tokens

NUM_TOKENS = 4096
BLOCK_TOKENS = 16
REPEAT = 20

TARGET = Target(name="chain_hash_4096", unit="us", text="<= 1.5x 256 calls of sha256", at_most=1.5)


def _measure(run: Run) -> list[Row]:
    choose = random.Random(4096)
    token_ids = [choose.randrange(49_152) for _ in range(NUM_TOKENS)]
    root = NamespaceDigest(hashlib.sha256(b"bench").digest())
    raw = encode_tokens(token_ids)
    hashes = chain_hashes(root, raw, BLOCK_TOKENS)
    nbytes = BLOCK_TOKENS * TOKEN_NBYTES
    inputs = [parent + raw[i * nbytes : (i + 1) * nbytes] for i, parent in enumerate([root, *hashes[:-1]])]
    sha256 = hashlib.sha256

    def limit() -> None:
        for data in inputs:
            sha256(data).digest()

    medians = interleaved(
        run,
        {
            "chain hashes": lambda: seconds(lambda: chain_hashes(root, encode_tokens(token_ids), BLOCK_TOKENS), REPEAT),
            "sha256": lambda: seconds(limit, REPEAT),
        },
    )
    return [TARGET.row(medians["chain hashes"] * 1e6, medians["sha256"] * 1e6)]


GROUP = Group((TARGET,), _measure)
