"""Tiny pools with literal ids, and verbs short enough for a test to read like a ledger."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from kvd.block import HOST, BlockId, ChainHash, NamespaceDigest, SessionId
from kvd.pool import Begun, Grow, Pool, Pools, WaitFor
from kvd.status import PoolStatus

BLOCK = 4096
ALICE, BOB, CAROL = SessionId(1), SessionId(2), SessionId(3)
UID = {ALICE: 1000, BOB: 1001, CAROL: 1001}


def h(name: str) -> ChainHash:
    return ChainHash(hashlib.sha256(name.encode()).digest())


def hashes(names: str | Iterable[str]) -> list[ChainHash]:
    """ "a b c" -> three hashes."""
    return [h(name) for name in (names.split() if isinstance(names, str) else names)]


def ids(*block_ids: int) -> list[BlockId]:
    return [BlockId(block_id) for block_id in block_ids]


class Tiny:
    """One pool with all its segments already there, and three open sessions."""

    def __init__(
        self,
        num_blocks: int = 4,
        *,
        per_segment: int | None = None,
        spare_segments: int = 0,
        session_quota: int | None = None,
        uid_quota: int | None = None,
        device: str = HOST,
    ) -> None:
        per_segment = per_segment or num_blocks
        num_segments = num_blocks // per_segment
        self.pools = Pools(
            budget_nbytes=(num_segments + spare_segments) * per_segment * BLOCK,
            segment_nbytes=per_segment * BLOCK,
            session_quota_nbytes=None if session_quota is None else session_quota * BLOCK,
            uid_quota_nbytes=None if uid_quota is None else uid_quota * BLOCK,
            device=device,
        )
        for session, uid in UID.items():
            self.pools.open_session(session, uid)
        self.pool: Pool = self.pools.pool("tenant", BLOCK)
        self.namespace = self.pool.namespace(NamespaceDigest(h("namespace")))
        for _ in range(num_segments):
            self.pool.add_segment()

    def ask(
        self,
        session: SessionId,
        names: str,
        *,
        max_cached: int | None = None,
        num_blocks: int | None = None,
        announce: bool = False,
        may_wait: bool = False,
    ) -> Begun | WaitFor | Grow:
        wanted = hashes(names)
        return self.pool.begin(
            session,
            self.namespace,
            wanted,
            max_cached=len(wanted) if max_cached is None else max_cached,
            num_blocks=len(wanted) if num_blocks is None else num_blocks,
            announce=announce,
            may_wait=may_wait,
        )

    def begin(self, session: SessionId, names: str, **options: int | bool | None) -> Begun:
        outcome = self.ask(session, names, **options)  # type: ignore[arg-type]
        assert isinstance(outcome, Begun), outcome
        self.check()
        return outcome

    def reserve(self, session: SessionId, num_blocks: int) -> list[BlockId]:
        outcome = self.pool.reserve(session, num_blocks)
        assert isinstance(outcome, list), outcome
        self.check()
        return outcome

    def seal(self, session: SessionId, blocks: Sequence[BlockId], names: str) -> list[BlockId]:
        standing = self.pool.seal(session, self.namespace, blocks, hashes(names))
        self.check()
        return standing

    def release(self, session: SessionId, blocks: Sequence[BlockId] = (), reserved: Sequence[BlockId] = ()) -> None:
        self.pool.release(session, blocks=blocks, reserved=reserved)
        self.check()

    def keep(self, names: str, session: SessionId = ALICE) -> list[BlockId]:
        """Computes a sequence and closes it: its blocks stay, idle."""
        begun = self.begin(session, names)
        new = begun.blocks[begun.num_cached :]
        self.seal(session, new, " ".join(names.split()[begun.num_cached :]))
        self.release(session, begun.blocks)
        return begun.blocks

    def resident(self, names: str) -> str:
        """Those of the names that have a sealed block now."""
        return " ".join(name for name in names.split() if self.pool.match([h(name)]))

    @property
    def status(self) -> PoolStatus:
        return self.pools.pool_statuses()[self.pool.pool_id]

    @property
    def states(self) -> tuple[int, int, int, int]:
        """(free, reserved, filling, sealed)"""
        status = self.status
        return (status.num_free, status.num_reserved, status.num_filling, status.num_sealed)

    def check(self) -> None:
        self.pools.check_integrity()
