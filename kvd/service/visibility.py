"""What a tenant may see of a snapshot: its own things, and how the daemon is; no name and no count of another's."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from kvd.status import MemoryStatus, PoolStatus, Snapshot, TierStatus, WaitStatus

if TYPE_CHECKING:
    from kvd.service.service import Service
    from kvd.service.sessions import Session


def of_tenant(full: Snapshot, service: Service, viewer: Session) -> Snapshot:
    """The snapshot as the viewer's tenant may see it; `full.namespaces` are its own already.

    Made anew, field by field, so that whatever is added to a snapshot stays hidden until somebody decides.
    """
    own = {session.id: session for session in service.sessions.values() if session.tenant == viewer.tenant}
    pools = [pool for pool in full.pools if pool.tenant == viewer.tenant]
    clients = [client for client in full.clients if client.session in own]
    tiers = [_without_figures(tier) for tier in full.tiers]
    memories = [_own_memory(memory, service, pools) for memory in full.memories]
    return Snapshot(
        version=full.version,
        pid=full.pid,
        epoch=full.epoch,
        uptime_s=full.uptime_s,
        runtime_dir=full.runtime_dir,
        memory=memories[0],
        memories=memories,
        pools=pools,
        namespaces=full.namespaces,
        num_namespaces_omitted=full.num_namespaces_omitted,
        clients=clients,
        counters={"requests": sum(session.num_requests for session in own.values())},
        warnings=[*service.settings.warnings, *tier_warnings(tiers)],
        tiers=tiers,
        tenant=viewer.tenant,
        savings=service.savings.total(list(own.values()), {viewer.tenant}),
        pins=[pin for pin in full.pins if pin.tenant == viewer.tenant],
        waits=[_own_part(wait, own) for wait in full.waits if not own.keys().isdisjoint(wait.waiting)],
    )


def _own_part(wait: WaitStatus, own: Collection[int]) -> WaitStatus:
    """Sessions of one tenant wait for each other's computations only; for memory and blocks, beside everybody."""
    return WaitStatus(
        what=wait.what,
        pool=wait.pool,
        hash=wait.hash,
        waiting=[session for session in wait.waiting if session in own],
        writer=wait.writer if wait.writer in own else 0,
        left_s=wait.left_s,
    )


def tier_warnings(tiers: Iterable[TierStatus]) -> list[str]:
    """A sentence for each tier that is not well."""
    return [
        f"The {tier.name} tier is {tier.state}, memory serves on: {tier.reason}" for tier in tiers if tier.state != "up"
    ]


def _own_memory(memory: MemoryStatus, service: Service, pools: Iterable[PoolStatus]) -> MemoryStatus:
    """A device, with what the tenant's own pools have of it."""
    num_segments = sum(pool.num_segments for pool in pools if pool.device == memory.device)
    return MemoryStatus(
        device=memory.device,
        budget_nbytes=memory.budget_nbytes,
        used_nbytes=num_segments * service.pools.segment_nbytes(memory.device),
        # Budget less this would be what the others have.
        ready_nbytes=0,
        available_nbytes=memory.available_nbytes,
        name=memory.name,
        compute_capability=memory.compute_capability,
        total_nbytes=memory.total_nbytes,
        free_nbytes=memory.free_nbytes,
        reserved_nbytes=memory.reserved_nbytes,
        state=memory.state,
        reason=memory.reason,
    )


def _without_figures(tier: TierStatus) -> TierStatus:
    """Which tier, and how it is: what it holds and has moved is everybody's together."""
    return TierStatus(
        name=tier.name,
        kind=tier.kind,
        address=tier.address,
        state=tier.state,
        reason=tier.reason,
        retry_in_s=tier.retry_in_s,
        num_hits=0,
        num_misses=0,
        num_puts=0,
        num_deletes=0,
        read_nbytes=0,
        read_s=0.0,
        written_nbytes=0,
        write_s=0.0,
        errors={},
        usage=None,
        usage_age_s=0.0,
        details={},
    )
