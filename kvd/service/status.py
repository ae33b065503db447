"""Builds the snapshot that `kvd status` shows, and the warnings in it with what to do about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.pool import BudgetUsage
from kvd.service.visibility import of_tenant, tier_warnings
from kvd.status import ClientStatus, MemoryStatus, Snapshot

if TYPE_CHECKING:
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
    usage = service.pools.usage()
    now_s = service.clock()
    namespaces = service.pools.namespace_statuses(tenant=tenant, limit=MAX_NAMESPACES)
    full = Snapshot(
        version=service.version,
        pid=service.pid,
        epoch=service.epoch,
        uptime_s=now_s - service.started_s,
        runtime_dir=service.runtime_dir,
        memory=MemoryStatus(
            device="host",
            budget_nbytes=usage.budget_nbytes,
            used_nbytes=usage.used_nbytes,
            ready_nbytes=service.stock.ready_nbytes,
            available_nbytes=service.stock.available_nbytes(),
        ),
        pools=service.pools.pool_statuses(with_map=with_map),
        namespaces=namespaces,
        num_namespaces_omitted=service.pools.num_namespaces_of(tenant) - len(namespaces),
        clients=[
            _client(service, session, now_s, stalled=session.id in figures.stalled)
            for session in service.sessions.values()
        ],
        counters={**service.counters, **figures.counters},
        warnings=[*service.settings.warnings, *_warnings(service, usage, len(figures.stalled))],
        tiers=[] if service.below is None else service.below.statuses(),
        mover=None if service.below is None else service.below.mover_status(),
        savings=service.savings.total(list(service.sessions.values())),
        waits=service.waits(),
        pins=service.pins.statuses(),
    )
    return full if viewer is None else of_tenant(full, service, viewer)


def control_counters(service: Service) -> dict[str, int]:
    """What the control page counts."""
    namespaces = service.pools.namespace_statuses()
    return {
        "num_sessions": len(service.sessions),
        "num_requests": service.counters["requests"],
        "num_hit_blocks": sum(namespace.counters["hits"] for namespace in namespaces),
        "num_miss_blocks": sum(namespace.counters["misses"] for namespace in namespaces),
        "num_evicted_blocks": sum(namespace.counters["evictions"] for namespace in namespaces),
        "used_nbytes": service.pools.usage().used_nbytes,
    }


def _client(service: Service, session: Session, now_s: float, *, stalled: bool) -> ClientStatus:
    held = service.pools.session_figures(session.id)
    saved = service.savings.of(session)
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
        mapped_nbytes=sum(map(len, session.granted.values())) * service.stock.segment_nbytes,
        prefill_s_saved=saved.prefill_s if saved.num_tokens_rated else None,
    )


def _warnings(service: Service, usage: BudgetUsage, num_stalled: int) -> list[str]:
    found = []
    failed = service.stock.failed
    if failed is not None:
        found.append(f"No more memory can be had, so blocks are evicted instead: {failed}.")
    if usage.used_nbytes > usage.budget_nbytes:
        found.append(
            f"{(usage.used_nbytes - usage.budget_nbytes) >> 20} MiB above the budget are still held by clients; they "
            f"go back when those close their sequences."
        )
    if num_stalled:
        found.append(f"{num_stalled} client(s) do not read their replies; `kvd status` marks them stalled.")
    if service.below is not None:
        found += tier_warnings(service.below.statuses())
    return found
