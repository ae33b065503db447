"""`kvd size`."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click
import msgspec

import kvd_client
from kvd.cli.model_shape import ModelShape, model_shape
from kvd.cli.options import runtime_dir_option
from kvd.cli.render_memory import device_name
from kvd.cli.text import count, printable, size
from kvd.config.sizes import parse_size
from kvd.cuda import Driver
from kvd.errors import ConfigError, ConnectionFailed, CudaError, InvalidRequest, RequestTimeout
from kvd.layout import ITEMSIZE_BY_DTYPE, KVLayout


class Room(msgspec.Struct, frozen=True):
    """What fits where. `num_sequences` are whole contexts that share nothing."""

    where: str
    nbytes: int
    num_blocks: int
    num_tokens: int
    num_sequences: int


class Size(msgspec.Struct, frozen=True):
    """What `kvd size --json` prints."""

    model: ModelShape
    dtype: str
    block_tokens: int
    token_nbytes: int
    block_nbytes: int
    context_tokens: int
    context_nbytes: int
    rooms: list[Room]


@click.command(name="size")
@click.argument("model", type=click.Path(exists=True))
@runtime_dir_option
@click.option("--dtype", type=click.Choice(sorted(ITEMSIZE_BY_DTYPE)), help="Of the KV [default: the model's own].")
@click.option("--block-tokens", type=click.IntRange(1, 1 << 20), help="[default: the fewest from 16 up that fit].")
@click.option(
    "--context", type=click.IntRange(1), metavar="TOKENS", help="Length of a sequence [default: the model's longest]."
)
@click.option("--budget", metavar="SIZE", help="Say what fits in this much instead of asking a daemon.")
@click.option("--json", "as_json", is_flag=True, help="The same as an object; sizes in bytes.")
def size_command(
    model: str,
    runtime_dir: str | None,
    dtype: str | None,
    block_tokens: int | None,
    context: int | None,
    budget: str | None,
    as_json: bool,
) -> None:
    """Say how much memory a model's KV takes, and how many tokens fit.

    MODEL is a Hugging Face folder (its config.json is read) or a GGUF file (its header is).
    """
    shape = model_shape(Path(model))
    found = sized(shape, dtype or shape.dtype, block_tokens, context, _rooms(runtime_dir, budget))
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
    else:
        click.echo("\n".join(lines(found)))


def _rooms(runtime_dir: str | None, budget: str | None) -> list[tuple[str, int]]:
    """Where blocks may live, with its bytes: as given, else what the running daemon has, and each card as a whole."""
    if budget is not None:
        try:
            return [("budget", parse_size(budget))]
        except ConfigError as error:
            raise InvalidRequest(f"--budget: {error}") from error
    rooms: list[tuple[str, int]] = []
    with contextlib.suppress(ConnectionFailed, RequestTimeout):
        with kvd_client.connect(runtime_dir, label="kvd size", timeout_s=3.0) as client:
            snapshot = client.status()
        rooms += [(f"memory ({device_name(one.device)})", one.budget_nbytes) for one in snapshot.memories]
        rooms += [(tier.name, tier.usage.budget_nbytes) for tier in snapshot.tiers if tier.usage is not None]
    with contextlib.suppress(CudaError):
        rooms += [(f"all of {card.name}", card.total_nbytes) for card in Driver().devices]
    return rooms


def sized(
    shape: ModelShape, dtype: str, block_tokens: int | None, context: int | None, rooms: list[tuple[str, int]]
) -> Size:
    """The figures. Raises `InvalidLayout` for block_tokens that give no whole pages."""
    counts = {"num_layers": shape.num_layers, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}
    if block_tokens is None:
        layout = KVLayout.fit(**counts, dtype=dtype)
    else:
        layout = KVLayout(**counts, dtype=dtype, block_tokens=block_tokens)
    context_tokens = context or shape.max_positions or 4096
    blocks_a_context = layout.num_blocks(context_tokens)
    return Size(
        model=shape,
        dtype=dtype,
        block_tokens=layout.block_tokens,
        token_nbytes=layout.token_nbytes,
        block_nbytes=layout.block_nbytes,
        context_tokens=context_tokens,
        context_nbytes=blocks_a_context * layout.block_nbytes,
        rooms=[
            Room(
                where=where,
                nbytes=nbytes,
                num_blocks=(num_blocks := nbytes // layout.block_nbytes),
                num_tokens=num_blocks * layout.block_tokens,
                num_sequences=num_blocks // blocks_a_context,
            )
            for where, nbytes in rooms
            if nbytes
        ],
    )


def lines(found: Size) -> list[str]:
    """As text. Pure."""
    shape = found.model
    text = [
        f"{printable(shape.name)}: {shape.num_layers} layers, {shape.num_kv_heads} KV heads of {shape.head_dim}, "
        f"{found.dtype}",
        f"  a token    {size(found.token_nbytes)} ({count(found.token_nbytes)} bytes)",
        f"  a block    {size(found.block_nbytes)} ({found.block_tokens} tokens)",
        f"  a context  {size(found.context_nbytes)} ({count(found.context_tokens)} tokens)",
    ]
    text += [
        f"{printable(room.where)}, {size(room.nbytes)}: {count(room.num_tokens)} tokens in {count(room.num_blocks)} "
        f"blocks, {count(room.num_sequences)} whole contexts"
        for room in found.rooms
    ]
    if not found.rooms:
        text.append("no daemon and no card to fill; --budget SIZE says what fits in any amount of memory")
    if shape.note:
        text.append(shape.note)
    return text
