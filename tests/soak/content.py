"""The bytes that stand for a block's KV in the soak: a function of its chain hash, so that every reader can verify."""

from __future__ import annotations

import hashlib

from kvd.block import ChainHash
from kvd.layout import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=64, dtype="float16", block_tokens=16)
MODEL = "soak@1"


def block_bytes(chain_hash: ChainHash) -> bytes:
    """The one right content of the block that this hash names."""
    return hashlib.shake_128(chain_hash).digest(LAYOUT.block_nbytes)
