"""`Link`: one session with one daemon, whatever transport carries its requests.

It knows what the session has been granted, what is still mapped, and whether the daemon is still there. When the daemon
is gone the link is *lost* for good; a client makes a new one. Mappings outlive it.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvd.block import HOST, BlockId
from kvd.config.paths import find_runtime_dir
from kvd.cuda import DeviceExport
from kvd.errors import (
    ClientClosed,
    ConnectionFailed,
    DaemonRestarted,
    DaemonUnavailable,
    ForkedClient,
    KvdError,
    StateError,
    from_wire,
)
from kvd.polling import readable
from kvd.protocol.replies import CacheOpened
from kvd.protocol.requests import Request
from kvd.protocol.session import (
    DeviceSegmentGranted,
    Farewell,
    Goodbye,
    SegmentClosed,
    SegmentGranted,
    SegmentRevoked,
)
from kvd.protocol.wire import pack_block_ids
from kvd_client.memory.attendant import attendant
from kvd_client.memory.device_imports import ImportedSegment
from kvd_client.memory.device_segments import DevicePoolMemory, DeviceSegmentTable
from kvd_client.memory.lifetimes import Guard
from kvd_client.memory.segments import PoolMemory, SegmentTable
from kvd_client.memory.storage import Storage
from kvd_client.options import Options
from kvd_client.session.opened_cache import CacheSpec, OpenedCache
from kvd_client.session.releases import releases
from kvd_client.session.session_socket import Arrival, SessionSocket

if TYPE_CHECKING:
    from kvd_client.session.landing import Landing

_GRANT_BOUND_S = 5.0
_LOOK_AGAIN_S = 0.02
"""Another thread may take in what this one waits for."""
_CONFIRM_AGAIN_S = 0.2
_SETTLE_BOUND_S = 5.0


_viewed: set[Storage] = set()
"""Storages of closed sequences over which views live. Nothing else may keep them, nor their link and its session."""


@dataclass(slots=True, eq=False)
class Holdings:
    """What goes back to the daemon once none of `storages` is mapped any more. Unmap comes before release, always."""

    cache: int
    storages: list[Storage]
    references: list[BlockId] = field(default_factory=list)
    reservations: list[BlockId] = field(default_factory=list)


T = TypeVar("T")


class OpenSequence(Protocol):
    """What a client closes when it is closed itself."""

    def close(self) -> None:
        """Idempotent."""


class Link:
    """Safe to use from several threads. `guard` protects mappings; it is never held while waiting for the daemon."""

    def __init__(self, options: Options) -> None:
        """Opens the session. Raises what `SessionSocket` raises."""
        self.runtime_dir: Path = find_runtime_dir(options.runtime_dir)
        self.session = SessionSocket(self.runtime_dir, label=options.label, timeout_s=options.timeout_s)
        self.opened_s = time.monotonic()
        welcome = self.session.welcome
        self.epoch = welcome.epoch
        self.session_id = welcome.session
        self.token = welcome.token
        self.credits = welcome.credits
        self.guard = Guard()
        self.caches: dict[CacheSpec, OpenedCache] = {}
        self.reserve_ahead_tokens = options.reserve_ahead_tokens
        self.post: Callable[[Request], None] = _nobody_to_post_to
        """Sends a request that needs no reply: from any thread, from finalizers, never blocking, never raising."""
        self.when_lost: Callable[[], None] = lambda: None
        """Called once when the link is lost: whoever waits for a reply should look up."""
        self.when_forked: Callable[[], None] = lambda: None
        """Called in a forked child: the transport drops its descriptors."""
        self.landings: dict[int, Landing] = {}
        """By request id: where the reply to a request for blocks comes down."""
        self._fate: dict[str, tuple[KvdError]] = {}
        self._ids = itertools.count(1)
        self._segments = SegmentTable()
        self._device_segments = DeviceSegmentTable(self.epoch)
        self._arrivals = threading.Lock()
        self._open: set[OpenSequence] = set()
        self._retiring: set[Holdings] = set()
        """What sequences have left and a view keeps mapped."""
        self._close_when_unmapped = False
        self._end_on_card: weakref.finalize[..., Link] | None = None
        """What ends a session with a cache on a card; when the link is dropped, too."""
        self._forked = False

    def next_id(self) -> int:
        """A request id never used before on this link."""
        return next(self._ids)

    @property
    def lost(self) -> KvdError | None:
        """Why no request can be made any more."""
        fate = self._fate.get("lost")
        return None if fate is None else fate[0]

    def require_alive(self) -> None:
        """Raises why the session is over, if it is."""
        lost = self.lost
        if lost is not None:
            raise type(lost)(*lost.args)

    def lose(self, reason: KvdError) -> None:
        """Every later request raises `reason`, and the daemon takes everything back as soon as nothing is mapped.

        Not sooner: it would give to others what sequences of ours still show, and write. Idempotent, from any thread,
        and from finalizers.
        """
        if self._is_fate(reason):
            self.guard.later(self._end_once_unmapped)
            self.when_lost()

    def _ended(self, reason: KvdError) -> None:
        """The daemon ended the session, or itself: what it will has gone back already, whatever is mapped here."""
        is_first = self._is_fate(reason)
        self.session.close()
        # A mapping may be under way in another thread, with one of these descriptors.
        self.guard.later(self._segments.close)
        self._close_device_segments()
        if is_first:
            self.when_lost()

    def _close_device_segments(self) -> None:
        # What no storage uses is closed by the attendant, since this may be a finalizer. Without any there is none.
        if self._device_segments.has_any:
            attendant().put(self._device_segments.close)

    def _is_fate(self, reason: KvdError) -> bool:
        """Makes `reason` why the link is lost, unless there is another; true for one caller only."""
        # One atomic step instead of a lock: a finalizer may come here while its own thread is here already.
        mine = (reason,)
        return self._fate.setdefault("lost", mine) is mine

    @property
    def is_forked(self) -> bool:
        """Whether this is the copy in a forked child, where nothing is mapped."""
        return self._forked

    def drain_session(self) -> None:
        """Takes in what has arrived on the session socket, without waiting."""
        # One thread at a time reads and applies, so a grant is never overtaken by a look at the table.
        with self._arrivals:
            try:
                for arrival in self.session.receive():
                    self._take_in(arrival)
            except BaseException:
                # A descriptor that was read and is not in the table would be missed for as long as the session lasts.
                self.lose(ConnectionFailed("the client was interrupted as descriptors came; the session was closed"))
                raise

    def _take_in(self, arrival: Arrival | None) -> None:
        if arrival is None:
            self._ended(DaemonRestarted("the daemon ended the session; close what is open, then use the client again"))
            return
        message, fd = arrival.message, arrival.fd
        if isinstance(message, SegmentGranted):
            if fd is None:
                # The kernel drops what finds no room, and the daemon grants a segment once.
                self.lose(_no_descriptor_left())
            else:
                self._segments.granted(message, fd)
            return
        if fd is not None:
            os.close(fd)
        if isinstance(message, DeviceSegmentGranted):
            self._device_segments.granted(message.pool, message.segment, _export(message))
        elif isinstance(message, SegmentRevoked):
            self._revoked(message)
        elif isinstance(message, Goodbye):
            self._ended(from_wire(message.code, message.message))

    def _revoked(self, message: SegmentRevoked) -> None:
        if (message.pool, message.segment) in self._device_segments:
            closed = SegmentClosed(pool=message.pool, segment=message.segment)
            when_closed = partial(self._confirm, closed)
            attendant().put(partial(self._device_segments.revoked, message.pool, message.segment, when_closed))
        else:
            self._segments.revoked(message)

    def _confirm(self, closed: SegmentClosed) -> None:
        """Tells the daemon; once it reads again, if it does not now. On the attendant's thread, or where one closes."""
        # Also after the client was closed: its session lives on as long as tensors do.
        if not self.session.send(closed, wait_s=_CONFIRM_AGAIN_S):
            attendant().put(partial(self._confirm, closed))

    def _descriptor(self, pool: int, segment: int, writable: bool) -> int:
        kind = "writable" if writable else "read-only"
        return self._once_granted(
            lambda: self._segments.find(pool, segment, writable=writable),
            f"segment {segment} of pool {pool} {kind}",
        )

    def _device_segment(self, pool: int, segment: int) -> ImportedSegment:
        return self._once_granted(
            lambda: self._device_segments.acquire(pool, segment), f"device segment {segment} of pool {pool}"
        )

    def _once_granted(self, find: Callable[[], T | None], what: str) -> T:
        found = find()
        if found is not None:
            return found
        # Granted before the reply that names the block, so it has arrived already, or is about to.
        deadline = time.monotonic() + _GRANT_BOUND_S
        while True:
            self.drain_session()
            found = find()
            if found is not None:
                return found
            self.require_alive()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise StateError(f"the daemon never granted {what}")
            self._await_arrival(min(left_s, _LOOK_AGAIN_S))

    def _await_arrival(self, bound_s: float) -> None:
        try:
            readable(self.session.fileno(), bound_s=bound_s)
        except (OSError, ValueError):
            # Closed meanwhile: the caller looks at `lost` again.
            return

    def opened(self, spec: CacheSpec, reply: CacheOpened) -> OpenedCache:
        """Remembers the handle of a namespace. The pool is one that this process can map, as far as is known."""
        block_nbytes = spec.namespace.layout.block_nbytes
        memory: PoolMemory | DevicePoolMemory
        if reply.device == HOST:
            memory = PoolMemory(reply.pool, block_nbytes, reply.blocks_per_segment, self._descriptor)
        else:
            memory = DevicePoolMemory(
                reply.device, reply.pool, block_nbytes, reply.blocks_per_segment, self._device_segment
            )
            # The daemon frees no segment before this session has let go of it, however idle its owner is, or dropped.
            attendant().watch(self.session.fileno(), self.drain_session)
            if self._end_on_card is None:
                end = weakref.finalize(self, _end_later, self._device_segments, self.session)
                end.atexit, self._end_on_card = False, end
        cache = OpenedCache(spec, reply.cache, reply.digest, memory, reply.device, reply.staged_from)
        self.caches[spec] = cache
        return cache

    @property
    def can_be_replaced(self) -> bool:
        """Whether a client may connect again: the daemon is gone, and no sequence of the old session is open."""
        return not self._open and not isinstance(self.lost, ClientClosed)

    def gone_again(self) -> DaemonUnavailable:
        """What to raise when the daemon went away right after a client that holds nothing had connected again."""
        return DaemonUnavailable(f"the daemon in {self.runtime_dir} ended as this client connected to it; try again")

    def sequence_opened(self, sequence: OpenSequence) -> None:
        """A sequence holds blocks from now on. Under the guard."""
        self._open.add(sequence)

    def sequence_closed(self, sequence: OpenSequence) -> None:
        """A sequence is used no more. Under the guard."""
        self._open.discard(sequence)
        self._end_when_unmapped()

    def close_sequences(self) -> bool:
        """Closes every open sequence; True when nothing is mapped any more, so that nothing keeps the session."""
        for sequence in list(self._open):
            sequence.close()
        return self._is_unmapped

    def retire(self, holdings: Holdings) -> None:
        """Unmaps and gives back, each storage as soon as no view over it lives. Under the guard."""
        mapped = set(holdings.storages)
        self._retiring.add(holdings)

        def unmap(storage: Storage) -> None:
            _viewed.discard(storage)
            if not self._forked:
                storage.close()
            mapped.discard(storage)
            if not mapped:
                self._give_back(holdings)

        if not mapped:
            self._give_back(holdings)
        for storage in holdings.storages:
            if not storage.has_live_views():
                unmap(storage)
            else:
                _viewed.add(storage)
                storage.when_unused(partial(self.guard.later, partial(unmap, storage)))

    def _give_back(self, holdings: Holdings) -> None:
        self._retiring.discard(holdings)
        if self._close_when_unmapped:
            # The end of the session gives everything back at once.
            self._end_when_unmapped()
        elif self.lost is None and (holdings.references or holdings.reservations):
            for request in releases(
                self.next_id,
                self.epoch,
                holdings.cache,
                blocks=pack_block_ids(holdings.references),
                reserved=pack_block_ids(holdings.reservations),
            ):
                self.post(request)

    def close_when_unmapped(self) -> bool:
        """No request will be made any more: ends the session now, or when the last view dies. True if now.

        Idempotent.
        """
        if self._is_fate(ClientClosed("the client was closed")):
            self.when_lost()
        return self.guard.run(self._close_guarded)

    def _close_guarded(self) -> bool:
        self._end_once_unmapped()
        return self._is_unmapped

    def _end_once_unmapped(self) -> None:
        self._close_when_unmapped = True
        self._end_when_unmapped()

    @property
    def _is_unmapped(self) -> bool:
        return not self._open and not self._retiring

    def _end_when_unmapped(self) -> None:
        if self._close_when_unmapped and self._is_unmapped:
            self._end()

    def _end(self) -> None:
        if self._end_on_card is None:
            self.session.close()
        else:
            self._end_on_card()
        self._segments.close()

    @property
    def is_on_card(self) -> bool:
        """Whether a cache of this session is in a card's memory."""
        return any(cache.device != HOST for cache in self.caches.values())

    def await_device_memory(self) -> None:
        """Returns when what nobody views is closed, so that the daemon can free it. Some milliseconds a segment."""
        if self.is_on_card:
            attendant().settle(_SETTLE_BOUND_S)

    def forget_in_child(self) -> None:
        """In a forked child: drops descriptors, so that the parent's session is the parent's alone.

        See `kvd_client.session.fork`.
        """
        self._forked = True
        forked = ForkedClient("this process is a fork of the one that connected: connect again in the child")
        self._fate = {"lost": (forked,)}
        self.guard = Guard()
        self._arrivals = threading.Lock()
        self.session.close()
        self._segments.close()
        self._device_segments.forget_in_child()
        self.when_forked()


def _end_later(segments: DeviceSegmentTable, session: SessionSocket) -> None:
    # By the attendant, after what it was given before: the daemon may free what was mapped once it hears this.
    attendant().put(partial(_end_on_card, segments, session))


def _end_on_card(segments: DeviceSegmentTable, session: SessionSocket) -> None:
    segments.close()
    session.send(Farewell(), wait_s=_CONFIRM_AGAIN_S)
    session.close()


def _export(message: DeviceSegmentGranted) -> DeviceExport:
    return DeviceExport(
        device=message.device,
        handle=message.handle,
        nbytes=message.nbytes,
        pid_namespace=message.pid_namespace,
        pid=message.pid,
        epoch=message.epoch,
    )


def _no_descriptor_left() -> ConnectionFailed:
    return ConnectionFailed(
        "this process had no file descriptor left for a segment (ulimit -n), so the session was closed; raise the limit"
    )


def _nobody_to_post_to(_request: Request) -> None:
    raise ClientClosed("the link has no transport yet")
