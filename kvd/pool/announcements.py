"""Single flight: who is computing which hash, and which hashes somebody waits for."""

from __future__ import annotations

from collections.abc import Iterable

from kvd.block import ChainHash, SessionId
from kvd.pool.leases import Lease


class Announcements:
    """The announcements of one pool. A hash is announced by one session at a time.

    Nobody who waits holds anything; the pool only remembers that a hash is wanted, so that it can say when to look
    again.
    """

    __slots__ = ("_pool_id", "_wanted", "_woken", "by_hash")

    def __init__(self, pool_id: int, woken: list[tuple[int, ChainHash]]) -> None:
        self._pool_id = pool_id
        self._woken = woken
        self._wanted: set[ChainHash] = set()
        """Hashes a `WaitFor` named that are still announced or filling; each leaves through `wake` only."""
        self.by_hash: dict[ChainHash, Lease] = {}
        """Invariant: `h in by_hash[h].announced`, and the other way round."""

    def is_announced_by_another(self, chain_hash: ChainHash, lease: Lease) -> bool:
        """Whether a session other than the lease's is computing it."""
        return self.by_hash.get(chain_hash, lease) is not lease

    def announce(self, lease: Lease, hashes: Iterable[ChainHash]) -> None:
        """The session computes `hashes`, none of which another session announced."""
        for chain_hash in hashes:
            self.by_hash[chain_hash] = lease
            lease.announced[chain_hash] = None

    def want(self, chain_hash: ChainHash) -> None:
        """Somebody waits for a hash that is announced or filling."""
        self._wanted.add(chain_hash)

    def want_anothers(self, chain_hash: ChainHash, session: SessionId) -> bool:
        """Whether a session other than this one computes the hash here; if so, somebody waits for it from now on."""
        lease = self.by_hash.get(chain_hash)
        if lease is None or lease.session_id == session:
            return False
        self.want(chain_hash)
        return True

    def wake(self, chain_hash: ChainHash) -> None:
        """What made somebody wait for the hash is over, well or not."""
        if chain_hash in self._wanted:
            self._wanted.remove(chain_hash)
            self._woken.append((self._pool_id, chain_hash))

    def end(self, chain_hash: ChainHash) -> None:
        """The hash was sealed by whomever: its announcement is over, and every waiter looks again."""
        lease = self.by_hash.pop(chain_hash, None)
        if lease is not None:
            del lease.announced[chain_hash]
        self.wake(chain_hash)

    def withdraw(self, lease: Lease, hashes: Iterable[ChainHash]) -> None:
        """The session will not compute these. What it no longer announces is passed over: a seal may be first."""
        for chain_hash in hashes:
            if self.by_hash.get(chain_hash) is lease:
                self.end(chain_hash)

    def wanted(self) -> frozenset[ChainHash]:
        """The hashes somebody was told to wait for."""
        return frozenset(self._wanted)
