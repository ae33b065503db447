"""Builds the snapshot that `kvd status` shows, and the warnings in it with what to do about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from kvd.service.visibility import of_tenant, tier_warnings
from kvd.status import ClientStatus, MapStatus, MemoryStatus, Snapshot

if TYPE_CHECKING:
    from kvd.service.homes import Home
    from kvd.service.service import Service
    from kvd.service.sessions import Session

MAX_NAMESPACES = 512
"""In one snapshot. Clients may open as many as they like, and a reply that names them all would stop the loop."""


def snapshot(service: Service, viewer: Session | None = None, *, with_map: bool = False) -> Snapshot:
    """Everything at one moment; O(pools + namespaces + sessions + pins + waiting requests).

    With `viewer` only what its tenant may see.
    """
    tenant = "" if viewer is None else viewer.tenant
    figures = service.server_figures()
    memories = [_memory(service, home) for home in service.homes]
    now_s = service.clock()
    namespaces = service.pools.namespace_statuses(tenant=tenant, limit=MAX_NAMESPACES)
    full = Snapshot(
        version=service.version,
        pid=service.pid,
        epoch=service.epoch,
        uptime_s=now_s - service.started_s,
        runtime_dir=service.runtime_dir,
        memory=memories[0],
        memories=memories,
        pools=service.pools.pool_statuses(with_map=with_map),
        namespaces=namespaces,
        num_namespaces_omitted=service.pools.num_namespaces_of(tenant) - len(namespaces),
        clients=[
            _client(service, session, now_s, stalled=session.id in figures.stalled)
            for session in service.sessions.values()
        ],
        counters={**service.counters, **figures.counters},
        warnings=[*service.settings.warnings, *_warnings(service, memories, len(figures.stalled))],
        tiers=[] if service.below is None else service.below.statuses(),
        mover=None if service.below is None else service.below.mover_status(),
        savings=service.savings.total(list(service.sessions.values())),
        waits=service.waits(),
        pins=service.pins.statuses(),
    )
    return full if viewer is None else of_tenant(full, service, viewer)


def control_counters(service: Service) -> dict[str, int]:
    """What the control page counts."""
    counted = service.pools.namespace_totals()
    return {
        "num_sessions": len(service.sessions),
        "num_requests": service.counters["requests"],
        "num_hit_blocks": counted["hits"],
        "num_miss_blocks": counted["misses"],
        "num_evicted_blocks": counted["evictions"],
        "used_nbytes": sum(service.pools.usage(home.device).used_nbytes for home in service.homes),
    }


def _memory(service: Service, home: Home) -> MemoryStatus:
    usage = service.pools.usage(home.device)
    status = MemoryStatus(
        device=home.device,
        budget_nbytes=usage.budget_nbytes,
        used_nbytes=usage.used_nbytes,
        ready_nbytes=home.stock.ready_nbytes,
        available_nbytes=home.stock.available_nbytes(),
        draining_nbytes=usage.num_segments_draining * home.stock.segment_nbytes,
    )
    card = home.card
    if card is None:
        return status
    return msgspec.structs.replace(
        status,
        name=card.device.name,
        compute_capability="{}.{}".format(*card.device.compute_capability),
        total_nbytes=card.stock.total_nbytes,
        free_nbytes=card.stock.free_nbytes,
        reserved_nbytes=card.stock.reserve,
        state="lost" if home.lost is not None else "serving" if card.stock.is_open else "released",
        reason=home.lost or "",
    )


def _client(service: Service, session: Session, now_s: float, *, stalled: bool) -> ClientStatus:
    held = service.pools.session_figures(session.id)
    saved = service.savings.of(session)
    maps = _maps(service, session)
    return ClientStatus(
        session=session.id,
        pid=session.identity.pid,
        uid=session.identity.uid,
        label=session.label,
        client_version=session.client_version,
        connected_s=now_s - session.connected_s,
        num_references=held.num_references,
        num_reserved=held.num_reserved,
        held_nbytes=held.held_nbytes,
        num_announced=held.num_announced,
        num_waiting=len(session.parked),
        tokens_saved=session.tokens_saved,
        num_requests=session.num_requests,
        stalled=stalled,
        maps=maps,
        mapped_nbytes=sum(one.nbytes for one in maps),
        mode="staged" if {one.mode for one in maps} == {"staged"} else "mapped",
        prefill_s_saved=saved.prefill_s if saved.num_tokens_rated else None,
    )


def _maps(service: Service, session: Session) -> list[MapStatus]:
    found = []
    to_close = service.num_segments_to_close(session.id)
    for pool_id in sorted({pool_id for pool_id, granted in session.granted.items() if granted} | to_close.keys()):
        pool = service.pools.get(pool_id)
        num_segments = len(session.granted[pool_id])
        found.append(
            MapStatus(
                pool=pool_id,
                device=pool.device,
                mode="mapped" if pool.source is None else "staged",
                num_segments=num_segments,
                nbytes=num_segments * service.pools.segment_nbytes(pool.device),
                num_to_close=to_close.get(pool_id, 0),
            )
        )
    return found


def _warnings(service: Service, memories: Sequence[MemoryStatus], num_stalled: int) -> list[str]:
    found = []
    for home, memory in zip(service.homes, memories, strict=True):
        where = "" if home.card is None else f" on {memory.name} ({home.device})"
        if home.lost is not None:
            found.append(
                f"The card {memory.name} ({home.device}) is lost, and every block on it: {home.lost}. Restart the "
                f"daemon to try it again."
            )
            continue
        failed = home.stock.failed
        if failed is not None:
            found.append(f"No more memory can be had{where}, so blocks are evicted instead: {failed}.")
        if memory.used_nbytes > memory.budget_nbytes:
            found.append(
                f"{(memory.used_nbytes - memory.budget_nbytes) >> 20} MiB above the budget{where} are still held by "
                f"clients; they go back when those close their sequences."
            )
    if num_stalled:
        found.append(f"{num_stalled} client(s) do not read their replies; `kvd status` marks them stalled.")
    if service.below is not None:
        found += tier_warnings(service.below.statuses())
    return found
