"""Keeps prompts resident: the daemon holds a reference on each block of a pinned prompt as soon as there is one.

A pin names hashes, not blocks. Whatever of them becomes resident, computed by a client or brought up from a tier, is
held; what a flush takes away is let go of at once and held again when somebody computes it anew. So is what a smaller
budget has no room for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvd.block import ChainHash, NamespaceDigest
from kvd.errors import InvalidRequest, KvdError, PermissionRefused, QuotaExceeded
from kvd.hashing import pack_hashes, unpack_hashes
from kvd.layout import KVLayout
from kvd.pool import NamespaceWords, Pool, Pools
from kvd.service.below import Below
from kvd.service.pin_files import PinFiles, PinRecord
from kvd.service.sessions import Cache, Session
from kvd.status import PinStatus

MAX_PINS = 1024
MAX_LABEL_LENGTH = 128
LOOK_EVERY_S = 0.5
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
NAME_LENGTH = 12
_log = logging.getLogger(__name__)


class Pin:
    """One pinned prompt. When it last looked, its namespace's counters were `stamp`, `num_lost` blocks had gone from
    there unevicted, and `num_allowed` is how many of its first blocks it might hold.
    """

    __slots__ = (
        "cache",
        "hashes",
        "hold",
        "num_allowed",
        "num_held",
        "num_lost",
        "record",
        "retry_after_s",
        "retry_at_s",
        "stamp",
    )

    def __init__(self, record: PinRecord, cache: Cache, hashes: list[ChainHash]) -> None:
        self.record = record
        self.cache = cache
        self.hashes = hashes
        self.hold = 0
        self.num_held = 0
        self.num_allowed = 0
        self.stamp: tuple[int, ...] = ()
        self.num_lost = 0
        self.retry_at_s = 0.0
        self.retry_after_s = MIN_RETRY_S

    @property
    def nbytes(self) -> int:
        """Of all its blocks, resident or not."""
        return len(self.hashes) * self.cache.pool.block_nbytes


class Pins:
    """All pins. Loop thread only; nothing here waits for a tier or a disk.

    Invariant: a pin's hold is over the longest resident prefix of its hashes, as of the last `look`, and all holds
    together are within the share of the budget: where that shrank, the older pins hold theirs and the newest wait.
    """

    def __init__(
        self,
        *,
        pools: Pools,
        below: Below | None,
        files: PinFiles | None,
        max_share: float,
        max_uid_nbytes: int | None,
        may_touch: Callable[[Session, str], bool],
        pool_for: Callable[[PinRecord, KVLayout], Pool],
        clock: Callable[[], float],
    ) -> None:
        """`max_share` of the budget is what all pins together may take.

        `pool_for(record, layout)` is the pool that serves such a cache.
        """
        self._pools = pools
        self._below = below
        self._files = files
        self._max_share = max_share
        self.max_uid_nbytes = max_uid_nbytes
        """Of one user's pins; may be changed at any time."""
        self._may_touch = may_touch
        self._pool_for = pool_for
        self._clock = clock
        self._pins: dict[str, Pin] = {}
        self._look_at_s = clock()

    @property
    def next_deadline_s(self) -> float | None:
        """When `tick` has something to do."""
        return self._look_at_s if self._pins else None

    def pin(self, session: Session, cache: Cache, hashes: list[ChainHash], label: str) -> Pin:
        """Keeps this prompt from now on; once more is the same pin. Raises `InvalidRequest`, `QuotaExceeded`."""
        if not hashes:
            raise InvalidRequest(f"a prompt shorter than a block ({cache.block_tokens} tokens) is never cached")
        name = hashes[-1].hex()[:NAME_LENGTH]
        found = self._pins.get(name)
        if found is not None:
            if found.hashes[-1] != hashes[-1] or found.record.tenant != session.tenant:
                raise InvalidRequest(f"there is another pin {name}; remove it first")
            return found
        self._require_room(session, cache.pool, len(hashes))
        words, layout = cache.namespace.words, cache.namespace.words.layout
        if layout is None:
            raise InvalidRequest("only what a model's layout is known of can be pinned")
        record = PinRecord(
            pin=name,
            label="".join(char for char in label if char.isprintable())[:MAX_LABEL_LENGTH],
            uid=session.identity.uid,
            tenant=session.tenant,
            digest=cache.digest,
            hashes=pack_hashes(hashes),
            model=words.model,
            engine=words.engine,
            positional=words.positional,
            adapter=words.adapter,
            has_salt=words.has_salt,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            dtype=layout.dtype,
            block_tokens=layout.block_tokens,
        )
        made = self._pins[name] = Pin(record, cache, hashes)
        if self._files is not None:
            self._files.save(record)
        self.look()
        self._bring_up(made, self._clock())
        return made

    def unpin(self, session: Session, name: str) -> None:
        """Raises `InvalidRequest` for a pin that is not there, or not to be seen; `PermissionRefused` for another's."""
        found = self._pins.get(name)
        may_touch = found is not None and self._may_touch(session, found.record.tenant)
        if found is None or not (found.record.tenant == session.tenant or may_touch):
            raise InvalidRequest(f"there is no pin {name!r}; `kvd pin --list` names them")
        if found.record.uid != session.identity.uid and not may_touch:
            raise PermissionRefused(f"pin {name} is another user's: that user, root or the daemon's user may remove it")
        del self._pins[name]
        self._end_hold(found)
        if self._files is not None:
            self._files.remove(name)

    def load(self) -> None:
        """At the start, before anybody is served: takes up the pins of earlier daemons."""
        for record in self._files.load()[:MAX_PINS] if self._files is not None else ():
            try:
                pin = self._restored(record)
            except KvdError as error:
                _log.warning("the pin %s (%s) cannot be taken up: %s", record.pin, record.label, error)
                continue
            self._pins[record.pin] = pin
            _log.info("pin %s (%s): %d blocks are to be resident", record.pin, record.label, len(pin.hashes))

    def look(self) -> None:
        """After whatever may have sealed, brought up or flushed a block, or set a budget. O(pins) unless something of a
        pin changed.
        """
        left_nbytes: dict[str, int] = {}
        for pin in self._pins.values():
            pool = pin.cache.pool
            if pool.device not in left_nbytes:
                left_nbytes[pool.device] = self._allowed_nbytes(pool)
            num_allowed = min(len(pin.hashes), left_nbytes[pool.device] // pool.block_nbytes)
            left_nbytes[pool.device] -= num_allowed * pool.block_nbytes
            self._look(pin, num_allowed)

    def tick(self, now_s: float) -> None:
        """Looks, and asks the tiers for what is missing, less and less often while they do not have it."""
        if now_s < self._look_at_s:
            return
        self._look_at_s = now_s + LOOK_EVERY_S
        self.look()
        for pin in self._pins.values():
            self._bring_up(pin, now_s)

    def release(self) -> None:
        """For a clean stop: their blocks are idle then, and are copied down like all others."""
        for pin in self._pins.values():
            self._end_hold(pin)
        self._pins.clear()

    def namespaces(self) -> set[NamespaceDigest]:
        """Those that must not be forgotten."""
        return {pin.cache.digest for pin in self._pins.values()}

    def statuses(self) -> list[PinStatus]:
        """One a pin, in the order in which they were made."""
        return [self.status(pin) for pin in self._pins.values()]

    def status(self, pin: Pin) -> PinStatus:
        """Of one pin."""
        record, block_tokens = pin.record, pin.record.block_tokens
        return PinStatus(
            pin=record.pin,
            label=record.label,
            uid=record.uid,
            tenant=record.tenant,
            model=record.model,
            pool=pin.cache.pool.pool_id,
            num_tokens=len(pin.hashes) * block_tokens,
            num_tokens_resident=pin.num_held * block_tokens,
            held_nbytes=pin.num_held * pin.cache.pool.block_nbytes,
            is_lasting=self._files is not None and self._files.is_saved(record.pin),
        )

    def _restored(self, record: PinRecord) -> Pin:
        layout = KVLayout(
            num_layers=record.num_layers,
            num_kv_heads=record.num_kv_heads,
            head_dim=record.head_dim,
            dtype=record.dtype,
            block_tokens=record.block_tokens,
        )
        digest = NamespaceDigest(record.digest)
        pool = self._pool_for(record, layout)
        words = NamespaceWords(
            model=record.model,
            engine=record.engine,
            adapter=record.adapter,
            has_salt=record.has_salt,
            block_tokens=layout.block_tokens,
            positional=record.positional,
            layout=layout,
        )
        cache = Cache(0, pool, digest, pool.namespace(digest, words), layout.block_tokens)
        if self._below is not None:
            self._below.open(cache, layout)
        return Pin(record, cache, unpack_hashes(record.hashes))

    def _require_room(self, session: Session, pool: Pool, num_blocks: int) -> None:
        # So that nobody takes them all, whoever has many leaves as many to others.
        num_own = sum(pin.record.uid == session.identity.uid for pin in self._pins.values())
        num_free = MAX_PINS - len(self._pins)
        if num_own >= num_free:
            raise QuotaExceeded(
                f"uid {session.identity.uid} has {num_own} pins, {num_free} of {MAX_PINS} are free, and a "
                f"user may have as many as stay free for others; `kvd pin --remove` ends one"
            )
        wanted = num_blocks * pool.block_nbytes
        pinned = sum(pin.nbytes for pin in self._pins.values() if pin.cache.pool.device == pool.device)
        allowed = self._allowed_nbytes(pool)
        if pinned + wanted > allowed:
            raise QuotaExceeded(
                f"this pin wants {wanted} bytes, and the other pins leave less than that of the {allowed} that "
                f"limits.pinned allows all of them together"
            )
        own = sum(pin.nbytes for pin in self._pins.values() if pin.record.uid == session.identity.uid)
        if self.max_uid_nbytes is not None and own + wanted > self.max_uid_nbytes:
            raise QuotaExceeded(
                f"the pins of uid {session.identity.uid} take {own} bytes, this one wants {wanted} more, and "
                f"limits.uid_nbytes allows {self.max_uid_nbytes}"
            )

    def _allowed_nbytes(self, pool: Pool) -> int:
        """What all pins on the pool's device may take."""
        return int(self._max_share * self._pools.usage(pool.device).budget_nbytes)

    def _look(self, pin: Pin, num_allowed: int) -> None:
        namespace = pin.cache.namespace
        # Whatever makes one of its hashes findable, or takes it away, changes one of these.
        stamp = (namespace.seals, namespace.fills, namespace.flushed, namespace.num_sealed)
        # Held blocks are never evicted, so a pin that holds all it may has lost none while this stays the same.
        num_lost = namespace.seals + namespace.fills - namespace.evictions - namespace.num_sealed
        is_whole = pin.num_held == num_allowed and num_lost == pin.num_lost
        if num_allowed == pin.num_allowed and (is_whole or stamp == pin.stamp):
            return
        pin.stamp, pin.num_lost, pin.num_allowed = stamp, num_lost, num_allowed
        pool, before, num_before = pin.cache.pool, pin.hold, pin.num_held
        # The new references first, so that nothing is evictable in between.
        allowed = pin.hashes[:num_allowed]
        pin.hold = pool.hold(allowed)
        pin.num_held = pool.match(allowed)
        pool.end_hold(before)
        if pin.num_held > num_before and self._below is not None:
            pin.retry_after_s = MIN_RETRY_S
            self._below.spilling.copy_soon(pool, pin.cache.digest, pin.hashes[: pin.num_held])

    def _bring_up(self, pin: Pin, now_s: float) -> None:
        if pin.num_held == pin.num_allowed or self._below is None or now_s < pin.retry_at_s:
            return
        pin.retry_at_s = now_s + pin.retry_after_s
        pin.retry_after_s = min(MAX_RETRY_S, 2 * pin.retry_after_s)
        self._below.prefetch(pin.cache, pin.hashes[: pin.num_allowed])

    @staticmethod
    def _end_hold(pin: Pin) -> None:
        pin.cache.pool.end_hold(pin.hold)
        pin.hold, pin.num_held, pin.stamp = 0, 0, ()


def check_name(name: str) -> str:
    """A pin's name as a client wrote it. Raises `InvalidRequest` for what cannot be one."""
    if len(name) != NAME_LENGTH or set(name) - set("0123456789abcdef"):
        raise InvalidRequest(f"a pin's name is {NAME_LENGTH} hex digits; `kvd pin --list` names them")
    return name
