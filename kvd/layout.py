"""The shape of a block: how many bytes 16 tokens of a model take, and whether they are whole pages.

A block holds the keys and values of `block_tokens` consecutive tokens for all layers, contiguous and token-major:
`[block_tokens, num_layers, 2, num_kv_heads, head_dim]`. Token-major, so that adjacent blocks form one such array and
every layer of a whole sequence is one strided view of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvd.block import PAGE_NBYTES
from kvd.errors import InvalidLayout

ITEMSIZE_BY_DTYPE = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
MAX_BLOCK_NBYTES = 1 << 30
LAYOUT_VERSION = 1
"""Goes into the namespace: another arrangement of the same numbers is another layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Sizes of one model's KV cache. All counts are positive; `dtype` is torch's name without the prefix.

    Raises `InvalidLayout` when a block is not a whole number of 4 KiB pages; the message names the block_tokens that
    would be. `KVLayout.fit` picks them by itself.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float16"
    block_tokens: int = 16

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= 1 << 20:
                raise InvalidLayout(f"{name} must be an integer from 1 to {1 << 20}, not {value!r}")
        if self.dtype not in ITEMSIZE_BY_DTYPE:
            raise InvalidLayout(f"dtype {self.dtype!r} is not one of {', '.join(ITEMSIZE_BY_DTYPE)}")
        if self.block_nbytes % PAGE_NBYTES:
            fitting = self._fitting_step()
            nearest = math.ceil(self.block_tokens / fitting) * fitting
            raise InvalidLayout(
                f"a block of {self.block_tokens} tokens has {self.block_nbytes} bytes, which is not a whole number of "
                f"{PAGE_NBYTES}-byte pages; use block_tokens={nearest} (any multiple of {fitting})"
            )
        if self.block_nbytes > MAX_BLOCK_NBYTES:
            raise InvalidLayout(f"a block of {self.block_nbytes} bytes is over the limit of {MAX_BLOCK_NBYTES}")

    def _fitting_step(self) -> int:
        return PAGE_NBYTES // math.gcd(PAGE_NBYTES, self.token_nbytes)

    @classmethod
    def fit(
        cls, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: str = "float16", at_least: int = 16
    ) -> KVLayout:
        """The layout with the fewest block_tokens >= `at_least` that gives whole pages."""
        itemsize = ITEMSIZE_BY_DTYPE.get(dtype, 1)
        step = PAGE_NBYTES // math.gcd(PAGE_NBYTES, max(1, num_layers * 2 * num_kv_heads * head_dim * itemsize))
        return cls(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            block_tokens=math.ceil(at_least / step) * step,
        )

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return ITEMSIZE_BY_DTYPE[self.dtype]

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block; a multiple of 4096."""
        return self.block_tokens * self.token_nbytes

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, the last one perhaps partly."""
        return -(-num_tokens // self.block_tokens)
