"""Random requests, deaths, budgets, flushes and completions against the plain model; every invariant after every step.

Deterministic by default. `KVD_POOL_EXAMPLES=5000 pytest tests/pool/test_state_machine.py` runs that many, at random.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvd.block import BlockId, ChainHash, NamespaceDigest, SegmentId, SessionId
from kvd.errors import NotOwned, OutOfBlocks, OutOfMemory, QuotaExceeded, StateError
from kvd.pool import Begun, FillTicket, Grow, Pool, Pools, SpillTicket, WaitFor
from kvd.pool.blocks import SegmentState
from tests.pool.model import Model, ModelPool, ModelSession

BLOCK = 4096
SEGMENT = 4 * BLOCK
SESSION_QUOTA = 12 * BLOCK
UID_QUOTA = 14 * BLOCK
MAX_SESSIONS = 4
MAX_COPIES = 3
MAX_SEQUENCES = 5
MIN_STEPS = 10_000
ANY = st.integers(0, 1 << 16)
"""Picks from whatever list there is, modulo its length."""
PATHS = st.text("01", min_size=1, max_size=5)
NUM_POOLS = 3
POOL_IDS = st.sampled_from([0, 0, 1, 2])
FEW = st.integers(0, 3)
MOSTLY = st.sampled_from([True, True, True, False])
GRANT = st.sampled_from([True] * 15 + [False])
"""Whether the memory that a pool asks for can be had."""
NAMESPACE = st.sampled_from([0, 0, 0, 1])
BUDGETS = st.sampled_from([3, 4, 5, 6, 4, 3, 2, 1, 0])


def digest(*parts: str) -> bytes:
    return hashlib.sha256("/".join(parts).encode()).digest()


def path_hashes(namespace: bytes, path: str) -> list[ChainHash]:
    """One hash a token; paths with a common start share their first hashes."""
    return [ChainHash(digest(namespace.hex(), path[: end + 1])) for end in range(len(path))]


@dataclass
class Sequence:
    """What a client would hold."""

    session: SessionId
    pool: int
    namespace: bytes
    hashes: list[ChainHash]
    sealed: list[BlockId]
    written: list[BlockId]
    copies: list[BlockId] = field(default_factory=list)
    """Own copies of blocks that somebody else sealed first."""


class PoolMachine(RuleBasedStateMachine):
    num_steps = 0

    def __init__(self) -> None:
        super().__init__()
        self.pools = Pools(
            budget_nbytes=3 * SEGMENT,
            segment_nbytes=SEGMENT,
            session_quota_nbytes=SESSION_QUOTA,
            uid_quota_nbytes=UID_QUOTA,
        )
        self.model = Model(
            segment_nbytes=SEGMENT, num_segments=3, floor=1, session_quota=SESSION_QUOTA, uid_quota=UID_QUOTA
        )
        self.real: list[Pool] = []
        for tenant, block_nbytes, name in (("one", BLOCK, ""), ("two", 2 * BLOCK, ""), ("one", BLOCK, "named")):
            pool = self.pools.pool(tenant, block_nbytes, name)
            self.real.append(pool)
            self.model.pools.append(ModelPool(pool.pool_id, block_nbytes, pool.blocks_per_segment))
        self.namespaces = [NamespaceDigest(digest("namespace", name)) for name in "AB"]
        for pool in self.real:
            for namespace in self.namespaces:
                pool.namespace(namespace)
        self.sequences: list[Sequence] = []
        self.tickets: list[FillTicket | SpillTicket] = []
        """Open and completed ones: any may be completed (again)."""
        self.next_session = 1
        self.known: set[tuple[int, ChainHash]] = set()
        self.open_session()

    # Helpers that no rule is.

    def pick_session(self, any_number: int) -> SessionId:
        sessions = sorted(self.model.sessions)
        return sessions[any_number % len(sessions)]

    def pick_sequence(self, any_number: int) -> Sequence:
        return self.sequences[any_number % len(self.sequences)]

    def gone(self, pool_id: int) -> set[ChainHash]:
        """Hashes the model has and the pool does not find any more."""
        return {h for h in self.model.pools[pool_id].found if not self.real[pool_id].match([h])}

    def check_refusal(
        self, error: OutOfBlocks | OutOfMemory, pool: ModelPool, num_new: int, keep: list[BlockId]
    ) -> None:
        assert not self.model.may_be_served(pool, num_new, keep), "refuses only what cannot be served"
        assert isinstance(error, OutOfBlocks) or (self.model.refused_at is not None and not pool.segments)

    def on_grow(self, grow: Grow, pool: ModelPool, num_new: int, keep: list[BlockId], grant: bool) -> None:
        """Checks a `Grow` and what it took from others, then gives the memory or says that there is none."""
        model = self.model
        missing = num_new - len(model.free(pool))
        assert missing > 0
        assert model.may_be_served(pool, num_new, keep)
        own = [pool.age[block][0] for block in model.idle(pool)]
        enough_of_own = missing <= len(model.idle(pool).keys() - set(keep))
        for dropped in self.pools.take_dropped():
            other = model.pools[dropped.pool_id]
            idle = model.idle(other)
            ages = [other.age[b][0] for b in other.blocks_of(dropped.segment_id) if b in idle]
            if ages and own and enough_of_own:
                assert max(ages) < max(own), "a younger segment of another pool does not go for us"
            model.reclaimed(pool, other, dropped.segment_id)
        assert 1 <= grow.num_segments <= model.room
        assert (grow.num_segments - 1) * pool.per_segment < missing
        assert not any(self.gone(pool_id) for pool_id in range(NUM_POOLS))
        assert not (enough_of_own and model.refused_at is not None), "it evicts where the machine gives no more"
        if grant:
            for _ in range(grow.num_segments):
                model.add_segment(pool, self.real[pool.pool_id].add_segment())
        else:
            self.pools.growth_failed(pool.pool_id, "the test has no memory")
            model.refused_at = sum(len(p.segments) for p in model.pools)

    # Sessions.

    @precondition(lambda self: len(self.model.sessions) < MAX_SESSIONS)
    @rule()
    def open_session(self) -> None:
        session = SessionId(self.next_session)
        self.next_session += 1
        self.pools.open_session(session, uid=session % 2)
        self.model.sessions[session] = ModelSession(uid=session % 2)

    # Sequences.

    @rule(
        who=ANY,
        pool_id=POOL_IDS,
        namespace=NAMESPACE,
        path=PATHS,
        extra=st.sampled_from([0, 0, 0, 1, 2]),
        whole=st.booleans(),
        announce=MOSTLY,
        may_wait=MOSTLY,
        grant=GRANT,
        then=st.sampled_from(["leave open", "seal", "seal and close", "seal and close"]),
    )
    def begin(
        self,
        who: int,
        pool_id: int,
        namespace: int,
        path: str,
        extra: int,
        whole: bool,
        announce: bool,
        may_wait: bool,
        grant: bool,
        then: str,
    ) -> None:
        model, pool, real = self.model, self.model.pools[pool_id], self.real[pool_id]
        session, root = self.pick_session(who), self.namespaces[namespace]
        if len(self.sequences) >= MAX_SEQUENCES:
            self.give_back(self.sequences[who % MAX_SEQUENCES], 0, close=True)
        hashes = path_hashes(root, path)
        self.known |= {(pool_id, chain_hash) for chain_hash in hashes}
        max_cached = len(hashes) if whole else len(hashes) - 1
        num_blocks = len(hashes) + extra
        while True:
            cached = model.prefix(pool, hashes, max_cached)
            num_new = num_blocks - len(cached)
            waits_for = hashes[len(cached)] if len(cached) < max_cached else None
            must_wait = may_wait and waits_for is not None and model.must_wait(session, pool, waits_for)
            over_quota = model.over_quota(session, pool, cached, num_new)
            try:
                outcome = real.begin(
                    session,
                    real.namespace(root),
                    hashes,
                    max_cached=max_cached,
                    num_blocks=num_blocks,
                    announce=announce,
                    may_wait=may_wait,
                )
            except QuotaExceeded:
                assert over_quota
                assert not must_wait
                return
            except (OutOfBlocks, OutOfMemory) as error:
                self.check_refusal(error, pool, num_new, cached)
                return
            assert must_wait == isinstance(outcome, WaitFor)
            assert must_wait or not over_quota
            if not isinstance(outcome, Grow):
                break
            self.on_grow(outcome, pool, num_new, cached, grant)
        if isinstance(outcome, WaitFor):
            assert outcome.hash == waits_for
            model.wanted.add((pool_id, outcome.hash))
            return
        assert outcome.num_cached == len(cached)
        assert outcome.blocks[: outcome.num_cached] == cached
        assert [pool.content[block] for block in cached] == hashes[: len(cached)], "the bytes are those of the hash"
        new = outcome.blocks[outcome.num_cached :]
        assert len(new) == num_new
        model.evicted(pool, self.gone(pool_id), num_new, cached)
        model.reference(session, pool, cached)
        model.reserve(session, pool, new)
        if announce:
            self.check_announced(session, pool, hashes, outcome)
        else:
            assert outcome.num_announced == 0
        sequence = Sequence(session, pool_id, root, hashes, cached, new)
        self.sequences.append(sequence)
        if then != "leave open":
            self.seal_some(sequence, len(hashes), twice=False)
        if then == "seal and close":
            self.give_back(sequence, 0, close=True)

    def check_announced(self, session: SessionId, pool: ModelPool, hashes: list[ChainHash], begun: Begun) -> None:
        announced = hashes[len(hashes) - begun.num_announced :]
        others = {named for sid, other in self.model.sessions.items() if sid != session for named in other.announced}
        assert others.isdisjoint((pool.pool_id, h) for h in announced), "one session announces a hash"
        if announced:
            assert announced[0] not in pool.found
        before = hashes[begun.num_cached : len(hashes) - begun.num_announced]
        last = max((i for i, h in enumerate(before) if (pool.pool_id, h) in others), default=-1)
        assert all(h in pool.found for h in before[last + 1 :]), "announces as much as it may"
        mine = self.model.sessions[session].announced
        mine |= {(pool.pool_id, h) for h in announced if h not in pool.found}

    @precondition(lambda self: self.sequences)
    @rule(which=ANY, num_blocks=st.integers(0, 4), fork=st.booleans(), grant=GRANT)
    def extend_or_fork(self, which: int, num_blocks: int, fork: bool, grant: bool) -> None:
        sequence = self.pick_sequence(which)
        model, pool, real = self.model, self.model.pools[sequence.pool], self.real[sequence.pool]
        shared = list(sequence.sealed) if fork else []
        while True:
            over_quota = model.over_quota(sequence.session, pool, [], num_blocks)
            try:
                if fork:
                    outcome = real.retain(sequence.session, shared, num_blocks)
                else:
                    outcome = real.reserve(sequence.session, num_blocks)
            except QuotaExceeded:
                assert over_quota
                return
            except (OutOfBlocks, OutOfMemory) as error:
                self.check_refusal(error, pool, num_blocks, [])
                return
            assert not over_quota
            if not isinstance(outcome, Grow):
                break
            self.on_grow(outcome, pool, num_blocks, [], grant)
        model.evicted(pool, self.gone(sequence.pool), num_blocks, [])
        model.reserve(sequence.session, pool, outcome)
        model.reference(sequence.session, pool, shared)
        if fork:
            copy = Sequence(sequence.session, sequence.pool, sequence.namespace, sequence.hashes, shared, outcome)
            self.sequences.append(copy)
        else:
            sequence.written += outcome

    @precondition(lambda self: self.sequences)
    @rule(which=ANY, num_blocks=st.integers(1, 5), twice=st.booleans())
    def seal(self, which: int, num_blocks: int, twice: bool) -> None:
        self.seal_some(self.pick_sequence(which), num_blocks, twice)

    def seal_some(self, sequence: Sequence, num_blocks: int, twice: bool) -> None:
        pool, real = self.model.pools[sequence.pool], self.real[sequence.pool]
        position = len(sequence.sealed)
        hashes = sequence.hashes[position : position + num_blocks]
        if twice and hashes and len(sequence.written) > len(hashes):
            hashes = [*hashes, hashes[-1]]
        blocks = sequence.written[: len(hashes)]
        hashes = hashes[: len(blocks)]
        standing = real.seal(sequence.session, real.namespace(NamespaceDigest(sequence.namespace)), blocks, hashes)
        self.model.seal(sequence.session, pool, sequence.namespace, blocks, hashes, standing)
        del sequence.written[: len(blocks)]
        sequence.sealed += standing
        stand = set(standing)
        sequence.copies += [block for block in blocks if block not in stand]

    @precondition(lambda self: self.sequences)
    @rule(which=ANY, to_keep=FEW, close=st.booleans())
    def truncate_or_close(self, which: int, to_keep: int, close: bool) -> None:
        self.give_back(self.pick_sequence(which), to_keep, close)

    def give_back(self, sequence: Sequence, to_keep: int, close: bool) -> None:
        pool, keep = self.model.pools[sequence.pool], 0 if close else to_keep
        blocks = sequence.sealed[keep:]
        reserved = sequence.written[max(0, keep - len(sequence.sealed)) :] + sequence.copies
        hashes = sequence.hashes if close else []
        self.real[sequence.pool].release(sequence.session, blocks=blocks, reserved=reserved, hashes=hashes)
        self.model.release(sequence.session, pool, blocks, reserved)
        self.model.withdraw(sequence.session, pool, hashes)
        sequence.copies = []
        sequence.written = [block for block in sequence.written if block not in reserved]
        del sequence.sealed[keep:]
        if close:
            self.sequences.remove(sequence)

    # case B3
    def ask_for_what_is_not_held(self, which: int, blocks: list[int]) -> None:
        pool_id = which % NUM_POOLS
        session, real = self.pick_session(which // NUM_POOLS), self.real[pool_id]
        record, named = self.model.sessions[session], [BlockId(block) for block in blocks]
        if any(named.count(block) > record.refs[pool_id, block] for block in named):
            try:
                real.release(session, blocks=named)
            except NotOwned:
                pass
            else:
                raise AssertionError("released what is not referenced")
        if any((pool_id, block) not in record.reserved for block in named) or len(set(named)) < len(named):
            hashes = [ChainHash(digest("never", str(block))) for block in named]
            try:
                real.seal(session, real.namespace(self.namespaces[0]), named, hashes)
            except NotOwned:
                pass
            else:
                raise AssertionError("sealed what is not reserved")

    # Budget.

    @rule(
        what=st.sampled_from(["budget", "budget", "flush", "forget", "death", "retry", "wrong", "wrong"]),
        which=ANY,
        num_segments=BUDGETS,
        blocks=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    )
    def something_rare(self, what: str, which: int, num_segments: int, blocks: list[int]) -> None:
        if what == "budget":
            self.set_budget(num_segments)
        elif what == "flush":
            pool_id, namespace = which % NUM_POOLS, self.namespaces[which // NUM_POOLS % 2]
            self.real[pool_id].drop_namespaces([namespace])
            self.model.flush(self.model.pools[pool_id], namespace)
        elif what == "forget" and self.known:
            pool_id, chain_hash = sorted(self.known)[which % len(self.known)]
            self.forget_one(self.model.pools[pool_id], self.real[pool_id], chain_hash)
        elif what == "death" and len(self.model.sessions) > 1:
            session = self.pick_session(which)
            self.pools.end_session(session)
            self.model.end_session(session)
            self.sequences = [s for s in self.sequences if s.session != session]
        elif what == "wrong":
            self.ask_for_what_is_not_held(which, blocks)
        elif what == "retry":
            self.pools.memory_retry()
            self.model.refused_at = None

    def forget_one(self, pool: ModelPool, real: Pool, chain_hash: ChainHash) -> None:
        number = 0
        for namespace in self.namespaces:
            number += real.forget(real.namespace(namespace), [chain_hash, chain_hash])
        assert number == (chain_hash in pool.found) + (chain_hash in pool.filling)
        self.model.forget_one(pool, chain_hash)

    def set_budget(self, num_segments: int) -> None:
        model = self.model
        active_before = sum(model.num_active(pool) for pool in model.pools)
        self.pools.set_budget(num_segments * SEGMENT)
        model.budget_segments = num_segments
        pinned_ones = False
        for pool, real in zip(model.pools, self.real, strict=True):
            unpinned = model.unpinned_segments(pool)
            for segment in [s for s, active in pool.segments.items() if active]:
                state = real.store.segments.get(segment)
                if state is None or state.state is SegmentState.RETIRING:
                    pinned_ones |= segment not in unpinned
                    model.retire(pool, segment)
        assert sum(model.num_active(pool) for pool in model.pools) == min(active_before, num_segments)
        if pinned_ones:
            spared = [p for p in model.pools if model.num_active(p) > model.floor and model.unpinned_segments(p)]
            assert not spared, "unpinned segments retire before pinned ones"

    # Copies.

    @precondition(lambda self: len(self.model.fills) < MAX_COPIES)
    @rule(pool_id=POOL_IDS, namespace=NAMESPACE, path=PATHS, grant=GRANT)
    def begin_fill(self, pool_id: int, namespace: int, path: str, grant: bool) -> None:
        model, pool, real = self.model, self.model.pools[pool_id], self.real[pool_id]
        root = self.namespaces[namespace]
        chain_hash = path_hashes(root, path)[-1]
        self.known.add((pool_id, chain_hash))
        here_or_coming = chain_hash in pool.found or chain_hash in pool.filling
        while isinstance(outcome := real.begin_fill(real.namespace(root), chain_hash), Grow):
            assert not here_or_coming
            self.on_grow(outcome, pool, 1, [], grant)
        if outcome is None:
            assert here_or_coming or not model.may_be_served(pool, 1, [])
            return
        assert not here_or_coming
        model.evicted(pool, self.gone(pool_id), 1, [])
        model.begin_fill(pool, root, chain_hash, outcome.block, outcome.generation)
        self.tickets.append(outcome)

    @precondition(lambda self: len(self.model.spills) < MAX_COPIES and any(pool.found for pool in self.model.pools))
    @rule(pool_id=POOL_IDS, which=ANY)
    def begin_spill(self, pool_id: int, which: int) -> None:
        model, pool, real = self.model, self.model.pools[pool_id], self.real[pool_id]
        candidates = real.spill_candidates(100)
        assert set(candidates) == model.idle(pool).keys() - pool.copied
        held = sorted(model.referenced(pool))
        if held and which % 3 == 0:  # one that a session holds, or that cannot be spilled
            block = held[which % len(held)]
            by_hash = {found: chain_hash for chain_hash, found in pool.found.items()}
            spilling = {b for (p, _), (b, _) in model.spills.items() if p == pool_id}
            if block not in by_hash or block in pool.copied or block in spilling:
                try:
                    real.begin_spill(block)
                except StateError:
                    return
                raise AssertionError("spilled what cannot be")
        elif candidates:
            block = candidates[which % len(candidates)]
        else:
            return
        ticket = real.begin_spill(block)
        assert ticket.block == block
        model.begin_spill(pool, block, ticket.generation, ticket.hash)
        self.tickets.append(ticket)

    # case B11
    @precondition(lambda self: self.tickets)
    @rule(which=ANY, ok=st.booleans(), forget=st.booleans())
    def complete(self, which: int, ok: bool, forget: bool) -> None:
        ticket = self.tickets[which % len(self.tickets)]
        if forget:
            self.tickets.remove(ticket)
        pool, real = self.model.pools[ticket.pool_id], self.real[ticket.pool_id]
        if isinstance(ticket, FillTicket):
            real.complete_fill(ticket, ok)
            self.model.complete_fill(pool, ticket.generation, ok)
        else:
            real.complete_spill(ticket, ok)
            self.model.complete_spill(pool, ticket.generation, ok)

    # After every step.

    @invariant()
    def pools_and_model_agree(self) -> None:
        type(self).num_steps += 1
        model = self.model
        self.pools.check_integrity()
        dropped = {(d.pool_id, SegmentId(d.segment_id)) for d in self.pools.take_dropped()}
        assert dropped == model.leaving(), "a segment leaves when it is wholly free, at once"
        assert set(self.pools.take_woken()) == model.woken
        model.woken.clear()
        for pool, status in zip(model.pools, self.pools.pool_statuses(), strict=True):
            sealed, referenced = model.sealed(pool), model.referenced(pool)
            assert status.num_free == len(model.free(pool))
            assert status.num_reserved == len(model.reserved(pool))
            assert status.num_filling == len(model.filled(pool))
            assert status.num_sealed == len(sealed)
            assert status.num_referenced == len(referenced)
            assert status.num_references == sum(model.refs(pool, block) for block in referenced)
            assert (status.num_segments, status.num_segments_retiring) == (
                len(pool.segments),
                len(pool.segments) - model.num_active(pool),
            )
            found = {h for pool_id, h in self.known if pool_id == pool.pool_id and self.real[pool_id].match([h])}
            assert found == pool.found.keys()
            assert all(pool.content[block] == chain_hash for chain_hash, block in pool.found.items())
        for session, record in model.sessions.items():
            figures = self.pools.session_figures(session)
            assert figures.num_references == record.refs.total()
            assert figures.num_reserved == len(record.reserved)
            assert figures.num_announced == len(record.announced)
            assert figures.held_nbytes == model.held_nbytes(record)
            assert self.pools.has_announcements(session) == bool(record.announced)
        assert self.pools.num_segments_room() == model.room

    def teardown(self) -> None:
        """Nothing leaks: once everybody is gone and every copy ended, nothing is held."""
        for session in list(self.model.sessions):
            self.pools.end_session(session)
        for ticket in self.tickets:
            real = self.real[ticket.pool_id]
            if isinstance(ticket, FillTicket):
                real.complete_fill(ticket, True)
            else:
                real.complete_spill(ticket, False)
        self.pools.check_integrity()
        for status in self.pools.pool_statuses():
            assert (status.num_reserved, status.num_references, status.num_referenced) == (0, 0, 0)


@pytest.mark.timeout(600)
def test_random_steps_agree_with_the_plain_model() -> None:
    wanted = int(os.environ.get("KVD_POOL_EXAMPLES", "0"))
    PoolMachine.num_steps = 0
    run_state_machine_as_test(
        PoolMachine,
        settings=settings(
            max_examples=wanted or 400,
            stateful_step_count=60,
            derandomize=not wanted,
            database=None,
            deadline=None,
            phases=(Phase.explicit, Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert PoolMachine.num_steps >= MIN_STEPS
