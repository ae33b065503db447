"""One client process of the soak: random sequences over shared prefixes until it is told to stop, or killed.

Every cached block it is given is compared with the content its hash stands for; every block it computes is written
with that content. Prints one JSON line at the end; exits with 1 at the first wrong byte.
"""

from __future__ import annotations

import json
import random
import select
import sys

import kvd_client
from kvd.errors import OutOfBlocks, SequenceTooLong
from kvd.hashing import chain_hashes, encode_tokens
from tests.soak.content import LAYOUT, MODEL, block_bytes

MAX_TOKENS = 40 * LAYOUT.block_tokens


def prompt(choose: random.Random, num_prefixes: int) -> list[int]:
    """A shared prefix of random depth (the same for every process), then a tail of this process's own."""
    prefix = random.Random(choose.randrange(num_prefixes))
    shared = [prefix.randrange(50_000) for _ in range(24 * LAYOUT.block_tokens)]
    keep = choose.randrange(len(shared))
    return shared[:keep] + [choose.randrange(50_000) for _ in range(choose.randrange(1, 8 * LAYOUT.block_tokens))]


def expected(cache: kvd_client.Cache, tokens: list[int]) -> bytes:
    """The right bytes of all full blocks of `tokens`."""
    hashes = chain_hashes(cache.digest, encode_tokens(tokens), LAYOUT.block_tokens)
    return b"".join(map(block_bytes, hashes))


def verify(seq: kvd_client.Sequence, right: bytes, num_tokens: int) -> int:
    """Number of bytes compared. Raises SystemExit at the first difference."""
    nbytes = num_tokens * LAYOUT.token_nbytes
    if bytes(seq.buffer(0, num_tokens)) != right[:nbytes]:
        print(json.dumps({"wrong": True, "num_tokens": num_tokens}), flush=True)
        raise SystemExit(1)
    return nbytes


def fill(seq: kvd_client.Sequence, right: bytes, num_tokens: int) -> None:
    """Writes the tokens from the cached prefix up to `num_tokens`, all layers at once, as an engine's prefill would."""
    start = seq.num_tokens
    seq.extend(num_tokens)
    data = (right + bytes(LAYOUT.block_nbytes))[start * LAYOUT.token_nbytes : num_tokens * LAYOUT.token_nbytes]
    seq.buffer(start, num_tokens)[:] = data
    seq.advance(num_tokens - start)


def main(folder: str, seed: str, num_prefixes: int) -> None:
    """Runs until standard input is closed."""
    choose = random.Random(seed)
    totals = {"sequences": 0, "verified_nbytes": 0, "cached_tokens": 0, "out_of_blocks": 0}
    with kvd_client.connect(folder, label=f"soak {seed}") as client:
        cache = client.cache(model=MODEL, layout=LAYOUT)
        print(json.dumps({"ready": True}), flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            tokens = prompt(choose, num_prefixes)
            try:
                with cache.sequence(tokens, max_tokens=MAX_TOKENS) as seq:
                    totals["sequences"] += 1
                    totals["cached_tokens"] += seq.num_cached_tokens
                    right = expected(cache, tokens)
                    totals["verified_nbytes"] += verify(seq, right, seq.num_cached_tokens)
                    if choose.random() < 0.15:
                        continue  # an abort: reserved, announced, nothing sealed
                    fill(seq, right, len(tokens))
                    seq.commit()
                    full = len(tokens) - len(tokens) % LAYOUT.block_tokens
                    totals["verified_nbytes"] += verify(seq, right, full)
                    if choose.random() < 0.3:
                        branch(seq, cache, tokens, choose)
            except OutOfBlocks:
                totals["out_of_blocks"] += 1
            except SequenceTooLong:
                print(json.dumps({"wrong": True, "too_long": len(tokens)}), flush=True)
                raise
        print(json.dumps(totals), flush=True)


def branch(seq: kvd_client.Sequence, cache: kvd_client.Cache, tokens: list[int], choose: random.Random) -> None:
    """Forks, cuts the fork inside a sealed block, continues it differently, and checks both."""
    with seq.fork() as other:
        keep = choose.randrange(1, len(tokens) + 1)
        other.truncate(keep)
        changed = tokens[:keep] + [choose.randrange(50_000) for _ in range(choose.randrange(1, 40))]
        right = expected(cache, changed)
        other.add_tokens(changed[keep:])
        first = keep - keep % LAYOUT.block_tokens
        if keep != first:
            # The cut block gets a new hash, hence new content: its kept rows are written again.
            other.truncate(first)
            other.add_tokens(changed[first:keep] + changed[keep:])
        fill(other, right, len(changed))
        other.commit()
        verify(other, right, len(changed) - len(changed) % LAYOUT.block_tokens)
    whole = expected(cache, tokens)
    verify(seq, whole, len(tokens) - len(tokens) % LAYOUT.block_tokens)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
