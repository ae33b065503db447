"""Sealing a prompt, in this process or in one of its own, so that the reader is another process than the writer.

`python -m kvd.bench.writer RUNTIME_DIR NUM_BLOCKS`: seals so many 2 MiB blocks of ones, then ends.
"""

from __future__ import annotations

import sys

import kvd_client
from kvd.bench.shapes import TWO_MIB, prompt

MODEL = "bench"
READ_SEED = 3


def seal_prompt(cache: kvd_client.Cache, token_ids: list[int], fill: bytes | None = None) -> None:
    """Leaves every full block of the prompt sealed and unreferenced; `fill` is what each byte holds."""
    with cache.sequence(token_ids, max_tokens=len(token_ids) + cache.layout.block_tokens) as seq:
        start = seq.num_tokens
        if fill is not None:
            target = seq.buffer(start, len(token_ids))
            target[:] = fill * len(target)
            target.release()
        seq.advance(len(token_ids) - start)
        seq.commit()


def main(runtime_dir: str, num_blocks: int) -> None:
    """Seals the prompt that `kvd.bench.mapping` reads."""
    with kvd_client.connect(runtime_dir, label="kvd bench writer") as client:
        cache = client.cache(model=MODEL, layout=TWO_MIB)
        seal_prompt(cache, prompt(READ_SEED, num_blocks * TWO_MIB.block_tokens + 1), b"\1")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
