"""A status snapshot as text for people. Pure functions: no clock, no processes, no terminal.

Fits 80 columns: what is long (a model's name, a command) stands last and is cut, numbers never are.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvd.cli.processes import UNKNOWN, Process
from kvd.cli.render_tiers import render_tiers
from kvd.cli.tables import plain_table
from kvd.cli.text import count, duration, percent, printable, size
from kvd.status import ClientStatus, MemoryStatus, NamespaceStatus, PoolStatus, Snapshot

BAR_WIDTH = 24
MAX_NAMESPACES = 20
"""Shown; `--json` has more of them."""


def render_status(snapshot: Snapshot, processes: Mapping[int, Process], own_pid: int | None = None) -> RenderableType:
    """The whole page. `processes` is by pid; the session of `own_pid`, which only asks for this page, is left out."""
    clients = [client for client in snapshot.clients if client.pid != own_pid]
    parts: list[RenderableType] = [_head(snapshot), _memory(snapshot.memory)]
    if snapshot.tenant:
        parts.append(Text(f"only what is yours ({printable(snapshot.tenant)}): access.isolation is uid", style="dim"))
    if snapshot.pools:
        parts += [Text(), _pools(snapshot.pools)]
    if snapshot.tiers:
        parts += [Text(), *render_tiers(snapshot.tiers, snapshot.mover)]
    if snapshot.namespaces:
        shown = _most_filled(snapshot.namespaces)
        parts += [Text(), _namespaces(shown, has_tiers=bool(snapshot.tiers))]
        if num_more := len(snapshot.namespaces) - len(shown) + snapshot.num_namespaces_omitted:
            parts.append(Text(f"... {count(num_more)} more", style="dim"))
    parts += [Text(), _clients(clients, processes) if clients else Text("no clients", style="dim")]
    if snapshot.warnings:
        parts += [Text(), *(Text(f"! {printable(warning)}", style="yellow") for warning in snapshot.warnings)]
    return Group(*parts)


def _head(snapshot: Snapshot) -> RenderableType:
    return Text.assemble(
        (f"kvd {printable(snapshot.version)}", "bold green"),
        f"  pid {snapshot.pid}  up {duration(snapshot.uptime_s)}  {printable(snapshot.runtime_dir)}",
    )


def _memory(memory: MemoryStatus) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        Text(f"memory {printable(memory.device)}"),
        ProgressBar(total=max(1, memory.budget_nbytes), completed=memory.used_nbytes, width=BAR_WIDTH),
        Text(f"{size(memory.used_nbytes)} of {size(memory.budget_nbytes)} in pools"),
    )
    grid.add_row("", "", Text(f"{size(memory.ready_nbytes)} ready, {size(memory.available_nbytes)} more available"))
    return grid


def _pools(pools: list[PoolStatus]) -> RenderableType:
    table = plain_table(
        ("pool", "r"), ("block", "r"), ("segments", "r"), ("in use", "r"), ("cached", "r"), ("free", "r"),
        ("evicted", "r"), ("tenant, rule" if any(pool.name for pool in pools) else "tenant", "rest"),
    )  # fmt: skip
    for pool in pools:
        in_use = pool.num_referenced + pool.num_reserved + pool.num_filling
        retiring = f" (-{pool.num_segments_retiring})" if pool.num_segments_retiring else ""
        table.add_row(
            str(pool.pool),
            size(pool.block_nbytes),
            f"{count(pool.num_segments)}{retiring}",
            count(in_use),
            count(pool.num_sealed - pool.num_referenced),
            count(pool.num_free),
            count(pool.counters.get("evictions", 0)),
            Text(printable(", ".join(filter(None, (pool.tenant, pool.name))))),
        )
    return table


def _most_filled(namespaces: list[NamespaceStatus]) -> list[NamespaceStatus]:
    """All, in their order; beyond `MAX_NAMESPACES` only those with most cached tokens."""
    if len(namespaces) <= MAX_NAMESPACES:
        return namespaces
    most_first = sorted(namespaces, key=lambda one: -one.num_sealed * one.block_tokens)
    return most_first[:MAX_NAMESPACES]


def _namespaces(namespaces: list[NamespaceStatus], *, has_tiers: bool) -> RenderableType:
    """`hits` is the share of the asked blocks that were resident, `below` of the others that a tier below had."""
    below = [("below", "r")] if has_tiers else []
    table = plain_table(
        ("pool", "r"),
        ("cached tokens", "r"),
        ("reused", "r"),
        ("hits", "r"),
        *below,
        ("engine", "l"),
        ("model", "rest"),
    )
    for namespace in namespaces:
        counters = namespace.counters
        hits, misses = counters.get("hits", 0), counters.get("misses", 0)
        name = printable(namespace.model)
        name += f" + {printable(namespace.adapter)}" if namespace.adapter else ""
        name += " (salted)" if namespace.has_salt else ""
        table.add_row(
            str(namespace.pool),
            count(namespace.num_sealed * namespace.block_tokens),
            count(hits * namespace.block_tokens),
            percent(hits, hits + misses),
            *([percent(counters.get("found_below", 0), counters.get("asked_below", 0))] if has_tiers else []),
            Text(printable(namespace.engine)),
            Text(name),
        )
    return table


def _clients(clients: list[ClientStatus], processes: Mapping[int, Process]) -> RenderableType:
    table = plain_table(
        ("pid", "r"), ("memory", "r"), ("holds", "r"), ("waits", "r"), ("saved", "r"), ("connected", "r"),
        ("client", "rest"),
    )  # fmt: skip
    for client in clients:
        process = processes.get(client.pid, UNKNOWN)
        private = process.private_nbytes
        name = printable(": ".join(filter(None, (client.label, process.command)))) or f"uid {client.uid}"
        table.add_row(
            str(client.pid),
            "-" if private is None else size(private),
            size(client.held_nbytes),
            count(client.num_waiting) if client.num_waiting else "-",
            count(client.tokens_saved),
            duration(client.connected_s),
            Text(("stalled: " if client.stalled else "") + name),
        )
    return table
