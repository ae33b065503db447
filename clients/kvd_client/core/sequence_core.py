"""The verbs of a sequence: extend, commit, truncate, fork, close. `sequence_state` has the invariants they keep."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from kvd.block import BlockId, ChainHash
from kvd.errors import CudaImportRefused, KvdError, OutOfBlocks, SequenceTooLong
from kvd.hashing import TOKEN_NBYTES, pack_hashes
from kvd.protocol.replies import Reserved, Sealed
from kvd.protocol.requests import COMPUTED_EARLIER_S, Reserve, Retain, Seal
from kvd.protocol.wire import pack_block_ids, unpack_block_ids
from kvd_client.arguments import MAX_TOKENS, whole_number
from kvd_client.core.named_tokens import NamedTokens
from kvd_client.core.sequence_state import SequenceOptions, SequenceState
from kvd_client.core.verb import Tokens, Verb, expect
from kvd_client.memory.attendant import attendant
from kvd_client.memory.checksum import pack_checksums
from kvd_client.memory.device_order import Stream
from kvd_client.memory.device_segments import DevicePoolMemory
from kvd_client.memory.laying_out import attach_reserved, lay_out
from kvd_client.memory.storage import Storage
from kvd_client.session.landing import Landing
from kvd_client.session.link import Holdings, Link
from kvd_client.session.opened_cache import OpenedCache
from kvd_client.session.releases import releases

MIN_PREFILL_TOKENS = 64
"""A step of fewer is bounded by other things than a prefill, and would make its rate look worse than it is."""


class SequenceCore(SequenceState):
    """A whole sequence, whatever drives it. Mappings change under the link's guard."""

    def __init__(
        self, link: Link, cache: OpenedCache, names: NamedTokens, *, max_tokens: int, options: SequenceOptions
    ) -> None:
        super().__init__(link, cache, names, max_tokens=max_tokens, options=options)
        self._announced = range(0)
        """Places whose hashes this session announced and has not sealed."""
        self._retired: list[Storage] = []
        """Storages this sequence has left, over which views still live."""
        self._computed_tokens, self._computed_s = 0, 0.0
        """What `computed` was told since the last seal."""
        self.has_started = False
        """Whether the blocks that `start` was given are this sequence's, to be given back by its end."""

    def start(self, num_cached: int, blocks: Sequence[BlockId], *, num_announced: int) -> None:
        """Attaches the blocks that begin, reserve or retain gave: `num_cached` sealed ones, then reserved ones.

        Once `has_started` says so they are this sequence's; when this fails then, everything goes back to the daemon.
        """
        self._num_sealed = num_cached
        num_hashes = len(self._names) // self.layout.block_tokens
        announced, own = range(num_hashes - num_announced, num_hashes), list(blocks)
        self.num_cached_tokens = num_cached * self.layout.block_tokens
        self._written = [self.num_cached_tokens] * self.layout.num_layers
        try:
            self.link.guard.run(lambda: self.link.sequence_opened(self))
            # No call between the stores, so that no signal is heeded there.
            self._blocks, self._announced, self.has_started = own, announced, True
            self._cache.memory.await_grants(own[:num_cached], writable=False)
            self._cache.memory.await_grants(own[num_cached:], writable=True)
            self.link.guard.run(self._lay_out)
        except BaseException:
            self.link.guard.run(self._close_guarded)
            raise

    def abandon(self, landing: Landing) -> None:
        """Whoever made it does not get it: its blocks go back, from here or from where they have come down."""
        if self.has_started:
            self.close()
        else:
            landing.give_up()

    def _lay_out(self) -> None:
        self._storage = lay_out(
            self.layout,
            self._cache.memory,
            self._blocks,
            self._num_sealed,
            max_blocks=max(len(self._blocks), self.layout.num_blocks(self.max_tokens), 1),
            materialize=self._options.materialize,
            populate=self._options.populate,
            computes_on=self._cache.spec.computes_on,
        )

    def extend(self, num_tokens: int) -> Verb[None]:
        """Room for `num_tokens` tokens in all; grows in steps so that a decode loop seldom asks."""
        self._require_open()
        num_tokens = whole_number("num_tokens", num_tokens)
        self._require_fits(num_tokens)
        held = self.capacity_tokens
        if num_tokens <= held:
            return
        roomy = max(num_tokens + self.link.reserve_ahead_tokens, held + held // 8)
        before, storage, landing = self._blocks, self._storage, Landing(self.link)
        try:
            more = yield from self._reserve(
                landing,
                self.layout.num_blocks(num_tokens) - len(before),
                self.layout.num_blocks(min(self.max_tokens, roomy)) - len(before),
                shared=[],
            )
            self._cache.memory.await_grants(more, writable=True)
            self.link.guard.run(lambda: self._attach_reserved(more))
            # The one step that makes them the sequence's: whoever is interrupted earlier gives them back right here,
            # and from now on the end of the sequence does.
            self._blocks = [*before, *more]
        except BaseException:
            if self._blocks is before:
                # Unmap comes before release, always: where this fails too, they stay reserved until the session ends.
                self.link.guard.run(lambda: self._take_back(storage))
                landing.give_up()
            raise

    def _take_back(self, storage: Storage) -> None:
        """Nothing of an extension that failed stays mapped, or writable through a storage that was left for it."""
        storage.detach(len(self._blocks))
        self._freeze_retired()

    def _freeze_retired(self) -> None:
        for storage in self._retired:
            storage.freeze()

    def _reserve(self, landing: Landing, needed: int, roomy: int, *, shared: list[BlockId]) -> Verb[list[BlockId]]:
        """New reservations, `roomy` of them or at least `needed`, and another reference on each of `shared`."""
        self.link.require_alive()
        for count in (roomy, needed):
            if not count and not shared:
                break
            handle = self._cache.handle
            request = (
                Retain(self.link.next_id(), self.link.epoch, handle, pack_block_ids(shared), count)
                if shared
                else Reserve(self.link.next_id(), self.link.epoch, handle, count)
            )
            try:
                return list(unpack_block_ids(expect((yield landing.awaits(request)), Reserved).blocks))
            except OutOfBlocks:
                # What is reserved ahead is a convenience; what is needed may still fit.
                if count == needed:
                    raise
        return []

    def _attach_reserved(self, more: list[BlockId]) -> None:
        before = self._storage
        after = attach_reserved(
            before,
            len(self._blocks),
            more,
            num_tokens=max(self._written),
            populate=self._options.populate,
        )
        if after is before:
            return
        num_copied_bytes = self._num_copied_bytes + before.num_copied_bytes
        left, retired = self._retired, [*self._retired, before]
        # No call between the stores, so that no signal is heeded there.
        self._storage, self._retired, self._num_copied_bytes = after, retired, num_copied_bytes
        if before.has_live_views():
            self._freeze_retired()
        else:
            before.close()
            self._retired = left

    def commit(self, token_ids: Tokens | None, stream: Stream | None = None) -> Verb[int]:
        """Seals every full block that is named and written; returns how many tokens are sealed.

        Waits first for what `stream` does, or torch's current one where the pool is on a card.
        """
        self._require_open()
        if token_ids is not None:
            rest = self._names.rest_of(token_ids)
            self._require_fits(len(self._names) + len(rest) // TOKEN_NBYTES)
            self._names.add(rest)
        first, stop = self._num_sealed, min(self.num_tokens, len(self._names)) // self.layout.block_tokens
        self.link.require_alive()
        if first < stop:
            yield from self._seal(first, stop, stream)
        self._let_go_of_copies()
        return self.num_sealed_tokens

    def _seal(self, first: int, stop: int, stream: Stream | None) -> Verb[None]:
        own = self._blocks[first:stop]
        # Whoever finds the blocks reads them at once, in another process, whose streams know nothing of ours.
        self._storage.synchronize(stream)
        checksums = b""
        if self._options.checksums:
            step = self.layout.block_tokens
            checksums = pack_checksums(
                self._storage.contents(place * step, (place + 1) * step) for place in range(first, stop)
            )
        request = Seal(
            self.link.next_id(),
            self.link.epoch,
            self._cache.handle,
            pack_block_ids(own),
            pack_hashes(self._names.hashes(first, stop)),
            checksums,
            self._computed_tokens,
            self._computed_s,
        )
        try:
            self.link.guard.run(lambda: self._storage.publish(first, own))
            standing = unpack_block_ids(expect((yield request), Sealed).blocks)
        except KvdError:
            self.link.guard.run(lambda: self._storage.unpublish(first, stop - first))
            raise
        self._blocks[first:stop] = standing
        self._own_copies |= {
            place: mine
            for place, (mine, theirs) in enumerate(zip(own, standing, strict=True), start=first)
            if mine != theirs
        }
        self._num_sealed = stop
        self._computed_tokens, self._computed_s = 0, 0.0
        self._announced = range(max(self._announced.start, stop), max(self._announced.stop, stop))

    def _let_go_of_copies(self) -> None:
        """Where another's block came first: maps that one in the place of our copy, then gives the copy back.

        Only while no view lives: a tensor over our copy goes on showing our copy.
        """
        if not self._own_copies or self._retired or self._storage.has_live_views():
            return
        standing = {place: self._blocks[place] for place in self._own_copies}
        try:
            self._cache.memory.await_grants(list(standing.values()), writable=False)
            if not self.link.guard.run(lambda: self._storage.replace(standing)):
                return
        except CudaImportRefused:
            # Ours serve as well.
            return
        self._post_release(reserved=list(self._own_copies.values()))
        self._own_copies = {}

    def computed(self, num_tokens: int, seconds: float) -> None:
        """So many tokens were computed in so many seconds; the next seal says so. Too few tell nothing of a prefill.

        What was computed before the session began is passed over: the daemon would refuse the seal.
        """
        num_tokens = whole_number("num_tokens", num_tokens)
        total_s = self._computed_s + seconds
        most_s = time.monotonic() - self.link.opened_s + COMPUTED_EARLIER_S
        if num_tokens >= MIN_PREFILL_TOKENS and 0 < seconds < math.inf and total_s <= most_s:
            self._computed_tokens += num_tokens
            self._computed_s = total_s

    def truncate(self, num_tokens: int) -> Verb[None]:
        """Forgets the tokens from `num_tokens` on."""
        self._require_open()
        num_tokens = whole_number("num_tokens", num_tokens, most=self.num_tokens)
        loses_bytes = num_tokens < max(self._written)
        if num_tokens < self.num_sealed_tokens or (loses_bytes and self._storage.has_live_views()):
            # Sealed blocks are immutable, and live tensors keep what they show: the sequence moves to other blocks.
            successor = yield from self._branch(num_tokens, self.max_tokens)
            self._become(successor)
        self._written = [min(written, num_tokens) for written in self._written]
        self._drop_announcements(num_tokens // self.layout.block_tokens)
        self._names.truncate(num_tokens)
        self.num_cached_tokens = min(self.num_cached_tokens, num_tokens)

    def fork(self, max_tokens: int | None) -> Verb[SequenceCore]:
        """Another sequence with the same tokens; see `Sequence.fork`."""
        max_tokens = self.max_tokens if max_tokens is None else whole_number("max_tokens", max_tokens, most=MAX_TOKENS)
        yield from self.commit(None)
        if max_tokens < max(self._written):
            raise SequenceTooLong(f"{max(self._written)} tokens do not fit max_tokens={max_tokens}")
        return (yield from self._branch(max(self._written), max_tokens))

    def _branch(self, num_tokens: int, max_tokens: int) -> Verb[SequenceCore]:
        """A sequence of the first `num_tokens`: sealed blocks shared by reference, everything behind them copied."""
        block_tokens = self.layout.block_tokens
        num_shared = min(self._num_sealed, num_tokens // block_tokens)
        shared = self._blocks[:num_shared]
        roomy = min(max_tokens, num_tokens + self.link.reserve_ahead_tokens)
        names = self._names.prefix(num_tokens)
        branch = SequenceCore(self.link, self._cache, names, max_tokens=max_tokens, options=self._options)
        landing = Landing(self.link)
        try:
            fresh = yield from self._reserve(
                landing,
                self.layout.num_blocks(num_tokens) - num_shared,
                self.layout.num_blocks(roomy) - num_shared,
                shared=shared,
            )
            branch.start(num_shared, shared + fresh, num_announced=0)
            branch.num_cached_tokens = min(self.num_cached_tokens, num_shared * block_tokens)
            num_copied_bytes = branch._storage.copy_tokens(self._storage, num_shared * block_tokens, num_tokens)
            branch._num_copied_bytes += num_copied_bytes
            branch._written = [min(written, num_tokens) for written in self._written]
        except BaseException:
            branch.abandon(landing)
            raise
        return branch

    def _become(self, successor: SequenceCore) -> None:
        """Takes the place of what this sequence was; its old mappings live as long as tensors over them do."""
        self.link.guard.run(lambda: self._give_way(successor))
        for name in ("_blocks", "_num_sealed", "_storage", "_written", "_own_copies", "_retired"):
            setattr(self, name, getattr(successor, name))
        self._num_copied_bytes += successor.num_copied_bytes

    def _give_way(self, successor: SequenceCore) -> None:
        self._retire_all([self._storage, *self._retired])
        self.link.sequence_closed(successor)

    def close(self) -> None:
        """Gives everything back, at once or when the last view dies. Idempotent."""
        if not self.is_closed and not self.link.is_forked:
            # So that little is left to wait for under the guard.
            self._storage.quiesce()
        self.link.guard.run(self._close_guarded)

    def close_when_collected(self, owner: object) -> None:
        """Closes when `owner`, which wraps this, is collected without having been closed."""
        close = self.link.guard.later
        if isinstance(self._cache.memory, DevicePoolMemory):
            # There it may have to wait for the card, which a finalizer must not.
            weakref.finalize(owner, _later_still, close, self._close_guarded).atexit = False
        else:
            weakref.finalize(owner, close, self._close_guarded).atexit = False

    def _close_guarded(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._drop_announcements(0)
        # One that failed to start has no storage yet.
        own = [self._storage] if hasattr(self, "_storage") else []
        self._retire_all([*own, *self._retired])
        self.link.sequence_closed(self)

    def _retire_all(self, storages: list[Storage]) -> None:
        holdings = Holdings(
            self._cache.handle,
            storages,
            references=self._blocks[: self._num_sealed],
            reservations=self._blocks[self._num_sealed :] + list(self._own_copies.values()),
        )
        self.link.retire(holdings)

    def _drop_announcements(self, place: int) -> None:
        """Whoever waits for the hashes from `place` on need wait no longer."""
        start = max(self._announced.start, place)
        places = range(start, self._announced.stop)
        self._announced = range(self._announced.start, min(start, self._announced.stop))
        if places:
            self._post_release(hashes=self._names.hashes(places.start, places.stop))

    def _post_release(self, *, reserved: Sequence[BlockId] = (), hashes: Sequence[ChainHash] = ()) -> None:
        link = self.link
        if link.lost is None:
            for request in releases(
                link.next_id,
                link.epoch,
                self._cache.handle,
                reserved=pack_block_ids(reserved),
                hashes=pack_hashes(hashes),
            ):
                link.post(request)


def _later_still(later: Callable[[Callable[[], None]], None], work: Callable[[], None]) -> None:
    attendant().put(partial(later, work))
