"""Policy: what each request means, in which order its effects happen, who waits for what. No sockets, no threads.

Everything here runs on the loop thread. The pool decides about blocks, the stock makes memory, the mover copies between
pools and the tiers below; the service says when, and what to tell whom. What it does with tiers is behind `below`:
`promotion` brings up, `spilling` copies down, `flushing` forgets for good, `lineage` knows the generations.

## API (what the server codes against)
    service = Service(pools=…, homes=…, epoch=…, mover=None, settings=ServiceSettings(…), version=…, pid=…, …)
    session = service.open_session(Identity(pid, uid, gid), label=…, client_version=…)      -> SessionId
    service.end_session(session)          every lease goes back; idempotent. With may_linger=True, and where it
                                          returns True: process_ended(session) when the process is gone, and
                                          before it, if that takes too long, end_lingering(session)
    service.handle(session, request)      one decoded `kvd.protocol.requests.Request`; never raises a KvdError
    service.on_memory_ready()             call when the stock's `on_ready` has fired (it fires on the stock's thread:
                                          let it write to an eventfd, and call this on the loop)
    service.on_mover_done()               call when the mover's `on_ready` has fired, likewise
    service.drain(wait)                   at a clean stop, once every session has ended and before the mover closes
    service.tick(now_s) -> float | None   call when a returned deadline (clock of `clock=`, time.monotonic) has passed
    service.next_deadline_s               the same figure, after any call
    service.outbox: deque[SendReply | SendGrant | SendRevoke]     drain it, in order, after every call
    service.server_figures = Callable[[], ServerFigures]          the server's counters and stalled sessions, for status
    service.snapshot() -> kvd.status.Snapshot; service.control_counters() -> what the control page counts
    service.set_budget(nbytes)            of pools and stock
    service.set_pool_rules(rules)         a reload of what differs from pool to pool
    service.close()                       lets go of every segment; the stock is closed by whoever made it

A reply may come much later than its request (a begin that waits, memory that is being made), or never when the session
ends first. `Release` without `ack` gets no reply. Items for a session that has ended may still be in the outbox: drop
them. An error inside one request becomes its `Failed` reply; a `StateError`, a defect of kvd itself, is logged too.
"""

from kvd.service.identity import Identity, Isolation, tenant_of
from kvd.service.outbox import Outgoing, SendGrant, SendReply, SendRevoke
from kvd.service.service import Service
from kvd.service.settings import ServerFigures, ServiceSettings

__all__ = [
    "Identity",
    "Isolation",
    "Outgoing",
    "SendGrant",
    "SendReply",
    "SendRevoke",
    "ServerFigures",
    "Service",
    "ServiceSettings",
    "tenant_of",
]
