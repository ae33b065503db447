"""Memory of every device in a status snapshot, and which client maps how much of it, as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvd.cli.tables import plain_table
from kvd.cli.text import count, printable, size
from kvd.status import ClientStatus, MemoryStatus

BAR_WIDTH = 24
SHORT_BAR_WIDTH = 12
"""Beside a card's name."""
_NUM_SHOWN = len("GPU-00000000")
"""Characters of a UUID that tell the cards of one machine apart."""


def device_name(device: str) -> str:
    """A device in few characters: host, or the beginning of a card's UUID."""
    return printable(device)[:_NUM_SHOWN]


def render_memory(memories: Sequence[MemoryStatus]) -> list[RenderableType]:
    """A bar for each device, and a line about each card."""
    grid = Table.grid(padding=(0, 2))
    cards: list[RenderableType] = []
    width = SHORT_BAR_WIDTH if any(memory.name for memory in memories) else BAR_WIDTH
    for memory in memories:
        grid.add_row(
            Text(f"memory {device_name(memory.device)}"),
            ProgressBar(total=max(1, memory.budget_nbytes), completed=memory.used_nbytes, width=width),
            Text(f"{size(memory.used_nbytes)} of {size(memory.budget_nbytes)} in pools"),
        )
        if memory.state != "serving":
            grid.add_row("", "", Text(memory.state, style="bold red" if memory.state == "lost" else "dim"))
        grid.add_row("", "", Text(f"{size(memory.ready_nbytes)} ready, {size(memory.available_nbytes)} more available"))
        if memory.draining_nbytes:
            grid.add_row("", "", Text(f"{size(memory.draining_nbytes)} not closed yet by clients"))
        if memory.name:
            free = f"{size(memory.free_nbytes)} of {size(memory.total_nbytes)} free"
            grid.add_row("", "", Text(f"{free}, {size(memory.reserved_nbytes)} left to others"))
            cards.append(
                Text(
                    f"card {printable(memory.device)}, compute {printable(memory.compute_capability)}, "
                    f"{printable(memory.name)}"
                )
            )
    return [grid, *cards]


def render_maps(clients: Sequence[ClientStatus]) -> RenderableType:
    """Who maps what: one line for each client and pool."""
    table = plain_table(
        ("pid", "r"), ("pool", "r"), ("maps", "l"), ("segments", "r"), ("memory", "r"), ("to close", "r"),
        ("device", "rest"),
    )  # fmt: skip
    for client in clients:
        for one in client.maps:
            table.add_row(
                str(client.pid),
                str(one.pool),
                one.mode,
                count(one.num_segments),
                size(one.nbytes),
                count(one.num_to_close) if one.num_to_close else "-",
                Text(device_name(one.device)),
            )
    return table
