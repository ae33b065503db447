"""A status snapshot as text for people. Pure functions: no clock, no processes, no terminal.

Fits 80 columns: what is long (a model's name, a command) stands last and is cut, numbers never are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from kvd.cli.processes import UNKNOWN, Process
from kvd.cli.render_memory import device_name, render_maps, render_memory
from kvd.cli.render_tiers import render_tiers
from kvd.cli.tables import Column, FittedTable, plain_table
from kvd.cli.text import count, duration, percent, printable, size
from kvd.status import ClientStatus, NamespaceStatus, PinStatus, PoolStatus, SavingsStatus, Snapshot

MAX_NAMESPACES = 20
"""Shown; `--json` has more of them."""


def render_status(snapshot: Snapshot, processes: Mapping[int, Process], own_pid: int | None = None) -> RenderableType:
    """The whole page. `processes` is by pid; the session of `own_pid`, which only asks for this page, is left out."""
    clients = [client for client in snapshot.clients if client.pid != own_pid]
    # Whoever only asked whether something is cached has made a namespace known, and nothing more.
    namespaces = [one for one in snapshot.namespaces if one.num_sealed or any(one.counters.values())]
    memories = snapshot.memories or [snapshot.memory]
    has_card = any(memory.name for memory in memories)
    parts: list[RenderableType] = [_head(snapshot), *render_memory(memories)]
    if snapshot.tenant:
        parts.append(Text(f"only what is yours ({printable(snapshot.tenant)}): access.isolation is uid", style="dim"))
    if snapshot.savings.num_tokens:
        parts.append(Text(f"saved  {saved_sentence(snapshot.savings)}"))
    if snapshot.pools:
        parts += [Text(), render_pools(snapshot.pools, has_card=has_card)]
    if snapshot.tiers:
        parts += [Text(), *render_tiers(snapshot.tiers, snapshot.mover)]
    if namespaces:
        shown = _most_filled(namespaces)
        parts += [Text(), _namespaces(shown, has_tiers=bool(snapshot.tiers))]
        if num_more := len(namespaces) - len(shown) + snapshot.num_namespaces_omitted:
            parts.append(Text(f"... {count(num_more)} more", style="dim"))
    if snapshot.pins:
        parts += [Text(), render_pins(snapshot.pins)]
    parts += [Text(), render_clients(clients, processes) if clients else Text("no clients", style="dim")]
    if has_card and any(client.maps for client in clients):
        parts += [Text(), render_maps(clients)]
    if waits := render_waits(snapshot):
        parts += [Text(), *waits]
    if snapshot.warnings:
        parts += [Text(), *(Text(f"! {printable(warning)}", style="yellow") for warning in snapshot.warnings)]
    return Group(*parts)


def saved_sentence(savings: SavingsStatus) -> str:
    """Tokens, and seconds as far as somebody has reported a speed."""
    text = f"{count(savings.num_tokens)} tokens"
    if savings.num_tokens_rated:
        text += f", {duration(savings.prefill_s)} of prefill"
        if savings.num_tokens_rated < savings.num_tokens:
            text += f" for {count(savings.num_tokens_rated)} of them"
    return text


def _head(snapshot: Snapshot) -> RenderableType:
    return Text.assemble(
        (f"kvd {printable(snapshot.version)}", "bold green"),
        f"  pid {snapshot.pid}  up {duration(snapshot.uptime_s)}  {printable(snapshot.runtime_dir)}",
    )


def render_pools(pools: list[PoolStatus], *, has_card: bool = False) -> RenderableType:
    """One row a pool."""
    rest = ["tenant"]
    rest += ["rule"] if any(pool.name for pool in pools) else []
    rest += ["device"] if has_card else []
    table = plain_table(
        ("pool", "r"), ("block", "r"), ("segments", "r"), ("in use", "r"), ("cached", "r"), ("free", "r"),
        ("evicted", "r"), (", ".join(rest), "rest"),
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
            Text(printable(", ".join(filter(None, (pool.tenant, pool.name, _device(pool) if has_card else ""))))),
        )
    return table


def _device(pool: PoolStatus) -> str:
    name = device_name(pool.device)
    return f"{name} beside {device_name(pool.staged_from)}" if pool.staged_from else name


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


def render_pins(pins: Sequence[PinStatus]) -> RenderableType:
    """One row a pinned prompt. "yes" under lasting: it outlives the daemon."""
    table = plain_table(
        ("pin", "l"), ("tokens", "r"), ("resident", "r"), ("holds", "r"), ("lasting", "l"), ("prompt", "rest")
    )
    for pin in pins:
        table.add_row(
            Text(printable(pin.pin)),
            count(pin.num_tokens),
            percent(pin.num_tokens_resident, pin.num_tokens),
            size(pin.held_nbytes),
            "yes" if pin.is_lasting else "no",
            Text(printable(f"{pin.label}  {pin.model}".strip())),
        )
    return table


_CLIENT_COLUMNS = (
    Column("pid", "r"),
    Column("uid", "r", 2),
    Column("memory", "r", 5),
    Column("refs", "r", 3),
    Column("holds", "r", 7),
    Column("mapped", "r", 1),
    Column("mode", "l", 4),
    Column("saved", "r"),
    Column("prefill", "r"),
    Column("connected", "r", 6),
    Column("client", "rest"),
)


def render_clients(clients: Sequence[ClientStatus], processes: Mapping[int, Process]) -> RenderableType:
    """One row a session. `saved` are tokens, `prefill` the seconds those would have taken, where a speed is known."""
    rows = []
    for client in clients:
        process = processes.get(client.pid, UNKNOWN)
        private = process.private_nbytes
        name = printable(": ".join(filter(None, (client.label, process.command)))) or f"uid {client.uid}"
        rows.append(
            (
                str(client.pid),
                str(client.uid),
                "-" if private is None else size(private),
                count(client.num_references + client.num_reserved),
                size(client.held_nbytes),
                size(client.mapped_nbytes),
                Text(printable(client.mode)),
                count(client.tokens_saved),
                "-" if client.prefill_s_saved is None else duration(client.prefill_s_saved),
                duration(client.connected_s),
                Text(("stalled: " if client.stalled else "") + name),
            )
        )
    return FittedTable(_CLIENT_COLUMNS, rows)


_WAITING_FOR = {
    "computation": "block {hash} of pool {pool}, which {writer} computes",
    "promotion": "block {hash} of pool {pool}, on its way up from a tier",
    "answer": "the answer of a tier below",
    "blocks": "blocks of pool {pool}: others hold all of them",
    "memory": "memory that is being made",
}


def render_waits(snapshot: Snapshot) -> list[RenderableType]:
    """A line for whatever somebody waits for."""
    pids = {client.session: client.pid for client in snapshot.clients}
    lines: list[RenderableType] = []
    for wait in snapshot.waits:
        what = _WAITING_FOR.get(wait.what, wait.what).format(
            hash=wait.hash[:8], pool=wait.pool, writer=f"pid {pids[wait.writer]}" if wait.writer in pids else "another"
        )
        who = ", ".join(str(pids.get(session, "?")) for session in wait.waiting[:4])
        more = f" and {count(len(wait.waiting) - 4)} more" if len(wait.waiting) > 4 else ""
        lines.append(Text(f"waiting: {who}{more} for {printable(what)}, {duration(wait.left_s + 0.999)} at most"))
    return lines
