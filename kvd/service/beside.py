"""Single flight between a card's pool and the host pools beside it."""

from __future__ import annotations

from kvd.block import ChainHash
from kvd.pool import Pool, Pools
from kvd.service.attempts import BeginAttempt


def computed_beside(pools: Pools, attempt: BeginAttempt, num_resident: int) -> tuple[Pool, ChainHash] | None:
    """The pool on the other side of the bus in which another session computes what the attempt would compute next, and
    the hash; `Pools.take_woken` names both when that is over. None where nobody does.

    What is sealed there is copied to this side: a host pool asks its card's for it, a card's pool gets it by itself.
    Copies to the card are best effort: where one has no block to go into, its prompt is computed twice after all.
    """
    pool, missing = attempt.cache.pool, attempt.wanted[num_resident:]
    if pool.source is not None:
        # What the card has already is no reason to wait, but what comes behind it may be.
        candidates = [(pool.source, missing[pool.source.match(missing) :])]
    else:
        candidates = [(other, missing) for other in pools.all if other.source is pool]
    for other, hashes in candidates:
        if hashes and other.announcements.want_anothers(hashes[0], attempt.session.id):
            return other, hashes[0]
    return None
