"""Runs of shared blocks in host memory, copied to and from tensors of any strides on any device.

By preadv and pwritev on the segments' descriptors, in pieces, through memory of this process (`scratch`). Each copy is
complete when the call returns: torch waits for one between a card and host memory unless told otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from kvd.errors import StateError
from kvd.layout import KVLayout
from kvd_client.memory.device_views import card_of
from kvd_client.memory.scratch import SCRATCH_NBYTES, scratch_of
from kvd_client.memory.segments import Run
from kvd_client.memory.tensors import import_torch

if TYPE_CHECKING:
    import torch


def load_blocks(layout: KVLayout, run: Run, tokens: torch.Tensor) -> None:
    """Reads a run into `tokens` [run.num_blocks * block_tokens, num_layers, 2, num_kv_heads, head_dim]."""

    def move(scratch: torch.Tensor, part: torch.Tensor, buffer: memoryview, at: int) -> None:
        transfer(os.preadv, run.fd, at, buffer)
        part.copy_(scratch)

    _by_scratch(layout, run, tokens, move)


def store_blocks(layout: KVLayout, run: Run, tokens: torch.Tensor) -> None:
    """Writes `tokens`, of the same shape, into a run."""

    def move(scratch: torch.Tensor, part: torch.Tensor, buffer: memoryview, at: int) -> None:
        scratch.copy_(part)
        transfer(os.pwritev, run.fd, at, buffer)

    _by_scratch(layout, run, tokens, move)


def _by_scratch(
    layout: KVLayout,
    run: Run,
    tokens: torch.Tensor,
    move: Callable[[torch.Tensor, torch.Tensor, memoryview, int], None],
) -> None:
    block_nbytes, block_tokens = layout.block_nbytes, layout.block_tokens
    step = max(1, min(run.num_blocks, SCRATCH_NBYTES // block_nbytes))
    with _scratch_beside(tokens, step * block_nbytes) as scratch:
        for done in range(0, run.num_blocks, step):
            count = min(step, run.num_blocks - done)
            buffer = scratch[: count * block_nbytes]
            part = tokens[done * block_tokens : (done + count) * block_tokens]
            move(_token_major(layout, buffer), part, buffer, run.offset + done * block_nbytes)


def _scratch_beside(tokens: torch.Tensor, nbytes: int) -> AbstractContextManager[memoryview]:
    if tokens.is_cuda:
        return scratch_of(card_of(tokens.get_device())).lent(nbytes)
    return nullcontext(memoryview(bytearray(nbytes)))


def token_bytes(layout: KVLayout, tokens: torch.Tensor) -> memoryview:
    """A copy in host memory of `tokens` [n, num_layers, 2, num_kv_heads, head_dim], in the order of the blocks."""
    copy = bytearray(tokens.shape[0] * layout.token_nbytes)
    if copy:
        _token_major(layout, copy).copy_(tokens)
    return memoryview(copy)


def _token_major(layout: KVLayout, raw: bytearray | memoryview) -> torch.Tensor:
    module = import_torch()
    typed: torch.Tensor = module.frombuffer(raw, dtype=getattr(module, layout.dtype))
    return typed.view(-1, layout.num_layers, 2, layout.num_kv_heads, layout.head_dim)


def transfer(call: Callable[[int, list[memoryview], int], int], fd: int, offset: int, buffer: memoryview) -> None:
    """Preadv or pwritev until all is done; the kernel moves at most 2 GiB a call. Raises `StateError`."""
    done = 0
    while done < len(buffer):
        moved = call(fd, [buffer[done:]], offset + done)
        if not moved:
            raise StateError("a segment ended before its last block")
        done += moved
