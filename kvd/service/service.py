"""`Service`: makes the parts, hands each request to the verb it is for, and says after each event who goes on."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvd.block import SessionId
from kvd.errors import DaemonRestarted, KvdError, PermissionRefused
from kvd.mover import Mover
from kvd.pool import Pool, Pools
from kvd.protocol import requests
from kvd.protocol.replies import Done, Reply, StatusReply
from kvd.service import status
from kvd.service.answers import Answers
from kvd.service.below import Below
from kvd.service.blob_verbs import BlobVerbs
from kvd.service.homes import Home, Homes
from kvd.service.identity import Identity
from kvd.service.idle import IdleRelease
from kvd.service.opening import Opening
from kvd.service.outbox import Outgoing
from kvd.service.pin_files import PinFiles
from kvd.service.pins import Pins
from kvd.service.places import Places
from kvd.service.pool_rules import PoolRules
from kvd.service.progress import Progress
from kvd.service.resizing import Resizing
from kvd.service.savings import Savings
from kvd.service.segments import SegmentTable
from kvd.service.sequence_verbs import SequenceVerbs
from kvd.service.sessions import Session
from kvd.service.settings import ServerFigures, ServiceSettings
from kvd.service.tier_verbs import TierVerbs
from kvd.service.upkeep_verbs import UpkeepVerbs
from kvd.status import Snapshot, WaitStatus


class Service:
    """All policy of the daemon; `kvd.service` says how to drive it. Loop thread only.

    Invariant: the pools know a session exactly while it is in `sessions`, or lingers in them; whatever arrives for one
    that is not in `sessions` is dropped and counted, so a late request of the dead creates nothing.
    """

    def __init__(
        self,
        *,
        pools: Pools,
        homes: Sequence[Home],
        epoch: int,
        mover: Mover | None = None,
        pin_files: PinFiles | None = None,
        settings: ServiceSettings | None = None,
        version: str = "",
        pid: int = 0,
        runtime_dir: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = epoch
        self.outbox: deque[Outgoing] = deque()
        self.server_figures: Callable[[], ServerFigures] = ServerFigures
        self.pools = pools
        self.homes = Homes(homes)
        self.settings = settings or ServiceSettings()
        self.version, self.pid, self.runtime_dir = version, pid, runtime_dir
        self.clock = clock
        self.pool_rules = self.settings.pool_rules
        self.started_s = clock()
        self.counters: Counter[str] = Counter(
            requests=0, late_requests=0, failed_requests=0, failed_releases=0, unexpected_closes=0
        )
        self.sessions: dict[SessionId, Session] = {}
        self.savings = Savings()
        self._last_session = 0
        self._answers = Answers(outbox=self.outbox, sessions=self.sessions, counters=self.counters, epoch=epoch)
        self._table = SegmentTable(self.homes, pools, self.outbox, epoch)
        self._progress = Progress(
            pools=pools,
            homes=self.homes,
            table=self._table,
            sessions=self.sessions,
            settings=self.settings,
            clock=clock,
            reply=self._answers.send,
            fail=self._answers.fail_attempt,
        )
        self.below: Below | None = None
        """What is done with the tiers below; None without any."""
        if mover is not None:
            self.below = Below(
                mover=mover,
                pools=pools,
                homes=self.homes,
                table=self._table,
                progress=self._progress,
                settings=self.settings.tiers,
                policy_of=lambda pool: self.pool_rules.policy(pool.name),
                counters=self.counters,
                clock=clock,
            )
        tiers = TierVerbs(self.below, pools, self._progress, self.settings, epoch, self._answers.send_late)
        places = Places(pools, self.homes, lambda: self.pool_rules)
        self.pins = Pins(
            pools=pools,
            below=self.below,
            files=pin_files,
            max_share=self.settings.pinned_share,
            max_uid_nbytes=self.settings.uid_quota_nbytes,
            may_touch=tiers.may_touch,
            pool_for=places.of_pin,
            clock=clock,
        )
        self.pins.load()
        blobs = BlobVerbs(self.below, self._progress, epoch)
        self._resizing = Resizing(
            pools=pools,
            spilling=None if self.below is None else self.below.spilling,
            apply=self.set_budget,
            bound_s=self.settings.tiers.drain_s,
            clock=clock,
        )
        upkeep = UpkeepVerbs(
            pins=self.pins,
            pools=pools,
            homes=self.homes,
            table=self._table,
            mover=mover,
            resizing=self._resizing,
            progress=self._progress,
            settings=self.settings,
            epoch=epoch,
            flush=tiers.flush,
            reply=self._answers.send_late,
        )
        self._idle = IdleRelease(
            homes=self.homes,
            pools=pools,
            sessions=self.sessions,
            spilling=None if self.below is None else self.below.spilling,
            may_be_mapped=self._table.may_be_mapped,
            settle=self._progress.settle,
            again=self._carry_out,
            fail=self._answers.fail,
            idle_s=self.settings.idle_release_s,
            bound_s=self.settings.tiers.drain_s,
            patience_s=self.settings.restore_wait_s,
            clock=clock,
        )
        opening = Opening(
            pools=pools,
            homes=self.homes,
            places=places,
            sessions=self.sessions,
            below=self.below,
            pins=self.pins,
            progress=self._progress,
            idle=self._idle,
            max_caches=self.settings.max_caches_per_session,
            epoch=epoch,
        )
        sequences = SequenceVerbs(
            progress=self._progress,
            below=self.below,
            pins=self.pins,
            savings=self.savings,
            homes=self.homes,
            table=self._table,
            settings=lambda: self.settings,
            epoch=epoch,
            clock=clock,
        )
        # Each returns its reply, or None when that comes later or never.
        self._verbs: dict[type[requests.Request], Callable[[Session, Any], Reply | None]] = {
            requests.OpenCache: opening.open_cache,
            requests.Begin: sequences.begin,
            requests.Reserve: sequences.reserve,
            requests.Seal: sequences.seal,
            requests.Retain: sequences.retain,
            requests.Release: sequences.release,
            requests.Match: tiers.match,
            requests.Prefetch: tiers.prefetch,
            requests.FindLast: blobs.find_last,
            requests.Forget: blobs.forget,
            requests.Pin: upkeep.pin,
            requests.Unpin: upkeep.unpin,
            requests.Flush: upkeep.flush,
            requests.Spill: tiers.spill,
            requests.Resize: upkeep.resize,
            requests.Status: self._status,
            requests.Verify: upkeep.verify,
            requests.Check: self._check,
        }
        self._idle.go_on()

    def open_session(self, identity: Identity, *, label: str = "", client_version: str = "") -> SessionId:
        """A session begins. `identity` is the kernel's word; `label` and `client_version` are claims, for display."""
        self._last_session += 1
        session_id = SessionId(self._last_session)
        self.pools.open_session(session_id, identity.uid)
        self.sessions[session_id] = Session(
            id=session_id,
            identity=identity,
            tenant=self.settings.tenant(identity),
            label=label,
            client_version=client_version,
            connected_s=self.clock(),
        )
        return session_id

    def end_session(self, session_id: SessionId, *, may_linger: bool = False) -> bool:
        """Everything it held goes back at once, its waits vanish, and those who waited for it go on. Idempotent.

        With `may_linger` its process may still work on a card: what it reserved there, and segments that it may map,
        stay until `process_ended`. Whether there are any is returned.
        """
        session = self.sessions.pop(session_id, None)
        if session is None:
            return False
        # Its waits first: what its end wakes must not find it in the queue.
        self._progress.forget(session)
        self.savings.ended(session)
        holds_blocks = self.pools.end_session(session_id, keep_on_cards=may_linger)
        maps_segments = may_linger and self._table.session_lingers(session)
        if not maps_segments:
            self._table.session_ended(session_id)
        self._idle.go_on()
        self._progress.blocks_came_back = True
        self._blocks_moved(*{cache.pool for cache in session.caches.values()})
        self._progress.settle()
        return holds_blocks or maps_segments

    def end_lingering(self, session_id: SessionId) -> bool:
        """What an ended session had reserved on a card goes back; whether there was any. What it may map stays."""
        if not self.pools.lingers(session_id):
            return False
        self.pools.end_session(session_id)
        self._progress.blocks_came_back = True
        self._progress.settle()
        return True

    def process_ended(self, session_id: SessionId) -> None:
        """The process of an ended session that lingered is gone: nothing is mapped or written by it any more."""
        self.end_lingering(session_id)
        self._table.session_ended(session_id)
        self._idle.go_on()
        self._progress.blocks_came_back = True
        self._progress.settle()

    def handle(self, session_id: SessionId, request: requests.Request) -> None:
        """Carries out one request; what must be sent for it is in the outbox now, or comes later if it has to wait."""
        session = self.sessions.get(session_id)
        if session is None:
            self.counters["late_requests"] += 1
            return
        self.counters["requests"] += 1
        session.num_requests += 1
        self._carry_out(session, request)
        self._progress.settle()

    def _carry_out(self, session: Session, request: requests.Request) -> None:
        try:
            if request.epoch != self.epoch:
                raise DaemonRestarted(f"the request names epoch {request.epoch}, this daemon's is {self.epoch}")
            reply = self._verbs[type(request)](session, request)
        except KvdError as error:
            self._answers.fail(session, request, error)
        else:
            if reply is not None:
                self._answers.send(session, reply)

    def segment_closed(self, session_id: SessionId, pool_id: int, segment: int) -> None:
        """A session says that it maps a revoked device segment no more. What it was not asked for is only counted."""
        try:
            memory_came_back = self._table.closed(session_id, pool_id, segment)
        except KeyError:
            self.counters["unexpected_closes"] += 1
            return
        if memory_came_back:
            self._progress.blocks_came_back = True
            self._idle.go_on()
            self._progress.settle()

    def on_memory_ready(self) -> None:
        """A stock has made something, or failed to."""
        self._progress.memory_ready()
        self._idle.go_on()
        self._progress.fail_lost()
        self._progress.settle()

    def on_mover_done(self) -> None:
        """The mover has carried something out, or heard of a flush by somebody else."""
        if self.below is not None:
            self.below.mover_done()
            self.pins.look()
        self._resizing.go_on()
        self._idle.go_on()
        self._progress.fail_lost()
        self._progress.settle()

    def tick(self, now_s: float) -> float | None:
        """Ends the waits that are over; the next moment at which this has something to do."""
        if self.below is not None:
            self.below.tick(now_s)
        self.pins.tick(now_s)
        self._resizing.go_on()
        self._idle.go_on()
        self._progress.tick(now_s)
        self._progress.settle()
        return self.next_deadline_s

    @property
    def next_deadline_s(self) -> float | None:
        """When `tick` has something to do; None while nothing waits."""
        deadlines = [
            self._progress.next_deadline_s,
            self.pins.next_deadline_s,
            self._resizing.next_deadline_s,
            self._idle.next_deadline_s,
        ]
        if self.below is not None:
            deadlines.append(self.below.next_deadline_s)
        return min((one for one in deadlines if one is not None), default=None)

    def drain(self, wait: Callable[[float], object]) -> None:
        """For a clean stop, when every session has ended: copies to the tiers what would be lost.

        `wait(seconds)` waits until the mover has something to give back, that long at most.
        """
        self.pins.release()
        if self.below is not None:
            self.below.drain(wait)

    def set_budget(self, budget_nbytes: int, device: str | None = None) -> None:
        """From now on at most this much of a device's memory; segments leave as soon as nobody holds a block of them.

        `device` None is the main one.
        """
        home = self.homes.main if device is None else self.homes.get(device)
        self.pools.set_budget(budget_nbytes, home.device)
        home.stock.set_budget(budget_nbytes)
        self.pins.look()
        self._progress.blocks_came_back = True
        self._progress.settle()

    def set_quotas(self, *, session_nbytes: int | None, uid_nbytes: int | None) -> None:
        """From now on nobody gets, or pins, more than this. Who has more keeps it."""
        self.pools.set_quotas(session_nbytes=session_nbytes, uid_nbytes=uid_nbytes)
        self.pins.max_uid_nbytes = uid_nbytes

    def set_waits(self, *, default_s: float, max_s: float) -> None:
        """For every begin from now on."""
        self.settings = replace(self.settings, default_wait_s=default_s, max_wait_s=max_s)

    def set_pool_rules(self, pool_rules: PoolRules) -> None:
        """From now on: pools follow the rule of their name; caches that are open stay in the pools they have."""
        self.pool_rules = pool_rules
        self._blocks_moved(*self.pools.all)
        self._progress.settle()

    def warn(self, text: str) -> None:
        """What the start had to settle for, found out after this was made; shown by every status."""
        self.settings = replace(self.settings, warnings=(*self.settings.warnings, text))

    def num_segments_to_close(self, session_id: SessionId) -> dict[int, int]:
        """By pool id: segments of a card that the session was told to close and has not."""
        return self._table.to_close(session_id)

    def snapshot(self, *, with_map: bool = False) -> Snapshot:
        """Everything at one moment; `with_map` with a picture of each pool's blocks."""
        return status.snapshot(self, with_map=with_map)

    def waits(self) -> list[WaitStatus]:
        """What requests wait for, in no particular order."""
        return self._progress.waits()

    def control_counters(self) -> dict[str, int]:
        """The figures of the control page, see `kvd.protocol.control_page.COUNTERS`."""
        return status.control_counters(self)

    def close(self) -> None:
        """Destroys every segment that belongs to a pool; nothing may be called after. The mover is closed before."""
        if self.below is not None:
            self.below.close()
        self._table.close()

    def _status(self, session: Session, request: requests.Status) -> Reply:
        viewer = session if self.settings.is_walled(session.identity) else None
        snapshot = status.snapshot(self, viewer, with_map=request.with_map)
        return StatusReply(request.request_id, self.epoch, snapshot)

    def _check(self, session: Session, request: requests.Check) -> Reply:
        # It looks at every block there is while all others wait.
        if not self.settings.is_admin(session.identity):
            raise PermissionRefused("only root and the daemon's own user may have the pools checked")
        self.pools.check_integrity()
        return Done(request.request_id, self.epoch)

    def _blocks_moved(self, *pools: Pool) -> None:
        if self.below is not None:
            self.below.blocks_moved(pools)
