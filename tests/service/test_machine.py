"""Random lives of several sessions: every request is answered within its bound, and the books always agree."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvd.protocol.replies import Begun, Failed, Reserved
from kvd.protocol.wire import unpack_block_ids
from tests.service.harness import Client, House, names

NUM_CLIENTS = 4
LONGEST_STAY_S = 60.0 + 3.0
"""max_wait_s of the house, then growth_wait_s: no stay of any kind follows another for longer."""
EXPECTED_ERRORS = {"out-of-blocks", "out-of-memory", "would-wait", "quota-exceeded"}
HASHES = names(*"abcdefgh")


class Life:
    """What the test knows of one session: what it asked, holds, and still waits for."""

    def __init__(self, client: Client, root: int) -> None:
        self.client = client
        self.hashes = HASHES[root:] + HASHES[:root]
        self.asked: dict[int, tuple[float, list[bytes]]] = {}
        self.references: list[int] = []
        self.reserved: list[tuple[int, bytes | None]] = []

    def note(self, wanted: list[bytes], now_s: float) -> None:
        self.asked[self.client.latest] = (now_s, wanted)

    def collect(self) -> None:
        for request_id, (_, wanted) in list(self.asked.items()):
            reply = self.client.answer(request_id)
            if reply is None:
                continue
            del self.asked[request_id]
            if isinstance(reply, Begun):
                blocks = list(unpack_block_ids(reply.blocks))
                self.client.may_map(blocks)
                self.client.may_map(blocks[reply.num_cached :], writable=True)
                self.references += blocks[: reply.num_cached]
                named = [*wanted[reply.num_cached :], *[None] * len(blocks)]
                self.reserved += zip(blocks[reply.num_cached :], named, strict=False)
            elif isinstance(reply, Reserved):
                blocks = list(unpack_block_ids(reply.blocks))
                self.client.may_map(blocks, writable=True)
                self.reserved += [(block, None) for block in blocks]
            else:
                assert isinstance(reply, Failed)
                assert reply.code in EXPECTED_ERRORS, reply


class ServiceMachine(RuleBasedStateMachine):
    longest_stay_s = LONGEST_STAY_S

    def __init__(self) -> None:
        super().__init__()
        self.house = self._new_house()
        self.lives = [self._new_life(index) for index in range(NUM_CLIENTS)]

    def _new_house(self) -> House:
        return House(3, session_quota_blocks=10)

    def _new_life(self, index: int) -> Life:
        client = self.house.client(gid=100 + index // 3)  # three share a tenant, one is alone
        client.open()
        return Life(client, 0)

    def teardown(self) -> None:
        self.house.stock.gives = True
        self.house.pass_time(self.longest_stay_s)
        for life in self.lives:
            life.collect()
            assert not life.asked, "somebody waits for ever"
            life.client.die()
        self._end_copies()
        self.house.check()
        assert self.house.pools.pool_statuses()[0].num_references == 0
        assert all(pool.num_reserved == 0 for pool in self.house.pools.pool_statuses())
        self.house.close()

    def _end_copies(self) -> None:
        """Nothing copies here."""

    clients = st.integers(0, NUM_CLIENTS - 1)

    @rule(
        index=clients,
        length=st.integers(0, 6),
        extra=st.integers(0, 3),
        start=st.integers(0, 2),
        wait_s=st.sampled_from([None, 0.0, 1.0, 30.0, 60.0]),
        announce=st.booleans(),
    )
    def begin(self, index: int, length: int, extra: int, start: int, wait_s: float | None, announce: bool) -> None:
        life = self.lives[index]
        wanted = life.hashes[start : start + length]
        life.client.try_begin(wanted, max(1, len(wanted) + extra), wait_s=wait_s, announce=announce)
        life.note(list(wanted), self.house.clock.now_s)

    @rule(index=clients, num_blocks=st.integers(1, 3))
    def reserve(self, index: int, num_blocks: int) -> None:
        life = self.lives[index]
        life.client.reserve(num_blocks)
        life.note([], self.house.clock.now_s)

    @rule(index=clients, count=st.integers(1, 4))
    def seal(self, index: int, count: int) -> None:
        life = self.lives[index]
        named = [(block, name) for block, name in life.reserved if name is not None][:count]
        if not named:
            return
        standing = life.client.seal([block for block, _ in named], [name for _, name in named])  # type: ignore[misc]
        life.references += standing
        for entry, now in zip(named, standing, strict=True):
            life.reserved.remove(entry)
            if now != entry[0]:
                life.reserved.append((entry[0], None))

    @rule(index=clients, count=st.integers(0, 4), ack=st.booleans(), withdraw=st.booleans())
    def release(self, index: int, count: int, ack: bool, withdraw: bool) -> None:
        life = self.lives[index]
        blocks, life.references = life.references[:count], life.references[count:]
        reserved, life.reserved = life.reserved[:count], life.reserved[count:]
        hashes = [name for _, name in reserved if name is not None] if withdraw else []
        life.client.release(blocks, [block for block, _ in reserved], hashes, ack=ack)  # type: ignore[arg-type]

    @rule(index=clients)
    def die(self, index: int) -> None:
        self.lives[index].client.die()
        self.lives[index] = self._new_life(index)

    @rule(gives=st.booleans())
    def memory_becomes_slow_or_quick(self, gives: bool) -> None:
        self.house.stock.gives = gives
        self.house.memory_ready()

    @rule()
    def memory_fails(self) -> None:
        self.house.stock.failed = "the machine is full"
        self.house.memory_ready()

    @precondition(lambda self: len(self.house.stock.ready) < 3 and self.house.stock.failed is None)
    @rule()
    def a_segment_is_made(self) -> None:
        self.house.stock.make(1)
        self.house.memory_ready()

    @rule(num_segments=st.integers(1, 4))
    def the_budget_changes(self, num_segments: int) -> None:
        self.house.service.set_budget(num_segments * self.house.stock.segment_nbytes)
        self.house.deliver()

    @rule(seconds=st.sampled_from([0.5, 2.0, 20.0, LONGEST_STAY_S]))
    def time_passes(self, seconds: float) -> None:
        self.house.pass_time(seconds)

    @invariant()
    def the_books_agree(self) -> None:
        self.house.check()
        now_s = self.house.clock.now_s
        for life in self.lives:
            life.collect()
            held = self.house.pools.session_figures(life.client.session)
            assert held.num_references == len(life.references)
            assert held.num_reserved == len(life.reserved)
            for asked_s, _ in life.asked.values():
                assert now_s - asked_s <= self.longest_stay_s, "somebody waits longer than any bound"

    @invariant()
    def who_waits_is_counted_and_has_a_deadline(self) -> None:
        waiting = sum(len(life.asked) for life in self.lives)
        assert sum(client.num_waiting for client in self.house.service.snapshot().clients) == waiting
        assert not waiting or self.house.service.next_deadline_s is not None


ServiceMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestServiceMachine = ServiceMachine.TestCase
