"""The verbs of a client and of a cache. Those of a sequence are methods of `SequenceCore`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvd.block import HOST, ChainHash, NamespaceDigest
from kvd.errors import CorruptBlock, CudaImportRefused, OutOfBlocks, SequenceTooLong
from kvd.hashing import TOKEN_NBYTES, chain_hashes, pack_hashes
from kvd.protocol.replies import Begun, CacheOpened, Done, Matched, Reserved, StatusReply, Verified
from kvd.protocol.requests import Begin, Check, Match, OpenCache, Release, Reserve, Status, Verify
from kvd.protocol.wire import unpack_block_ids
from kvd.status import Snapshot
from kvd_client.arguments import MAX_TOKENS, seconds, whole_number
from kvd_client.core.named_tokens import NamedTokens
from kvd_client.core.sequence_core import SequenceCore
from kvd_client.core.sequence_state import SequenceOptions
from kvd_client.core.verb import Verb, expect
from kvd_client.memory.compute_device import is_elsewhere
from kvd_client.memory.tensors import CPU
from kvd_client.options import DEFAULT_GROWTH_TOKENS
from kvd_client.session.landing import Landing
from kvd_client.session.link import Link
from kvd_client.session.opened_cache import CacheSpec, OpenedCache, tell_copied, tell_staged, why_not_mapped


@dataclass(frozen=True, slots=True)
class VerifyOutcome:
    """What a verification of every sealed block found."""

    num_verified: int
    num_unchecked: int
    """Blocks whose writers gave no checksum."""
    corrupt: tuple[str, ...]
    """Hashes of the blocks that differ; they were dropped."""


def status(link: Link, *, with_map: bool = False) -> Verb[Snapshot]:
    """What `kvd status` shows."""
    link.require_alive()
    return expect((yield Status(link.next_id(), link.epoch, with_map)), StatusReply).snapshot


def check(link: Link) -> Verb[None]:
    """Has the daemon verify its pools."""
    link.require_alive()
    expect((yield Check(link.next_id(), link.epoch)), Done)


def verify(link: Link) -> Verb[VerifyOutcome]:
    """Has the daemon compare every sealed block with its checksum, step by step."""
    link.require_alive()
    num_verified = num_unchecked = cursor = 0
    corrupt: list[str] = []
    while True:
        step = expect((yield Verify(link.next_id(), link.epoch, cursor)), Verified)
        num_verified += step.num_verified
        num_unchecked += step.num_unchecked
        corrupt += step.corrupt
        cursor = step.cursor
        if not cursor:
            return VerifyOutcome(num_verified, num_unchecked, tuple(corrupt))


def settle(link: Link) -> Verb[None]:
    """Returns when the daemon has taken in everything posted before."""
    for cache in list(link.caches.values())[:1]:
        if link.lost is None:
            expect((yield Release(link.next_id(), link.epoch, cache.handle, ack=True)), Done)


def open_cache(link: Link, spec: CacheSpec) -> Verb[OpenedCache]:
    """The session's handle on a namespace; asks once per link.

    Where the pool is on a card that this process cannot map, or does not compute on, the host pool beside it.
    """
    link.require_alive()
    known = link.caches.get(spec)
    if known is not None:
        return known
    reply = expect((yield _open_request(link, spec, staged=spec.staged)), CacheOpened)
    reason = None if spec.ask_only else why_not_mapped(reply, spec.computes_on)
    if reason is not None:
        tell_staged(reply.device, reason)
        reply = expect((yield _open_request(link, spec, staged=True)), CacheOpened)
    elif reply.device == HOST and is_elsewhere(spec.computes_on, CPU):
        tell_copied(spec.computes_on)
    return link.opened(spec, reply)


def _open_request(link: Link, spec: CacheSpec, *, staged: bool) -> OpenCache:
    namespace, layout = spec.namespace, spec.namespace.layout
    return OpenCache(
        link.next_id(),
        link.epoch,
        model=namespace.model,
        engine=namespace.engine,
        positional=namespace.positional,
        adapter=namespace.adapter,
        salt=namespace.salt,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        dtype=layout.dtype,
        block_tokens=layout.block_tokens,
        block_nbytes=layout.block_nbytes,
        device=spec.device,
        staged=staged,
    )


def match(link: Link, spec: CacheSpec, tokens: bytes) -> Verb[int]:
    """How many leading tokens are resident; `tokens` as `encode_tokens` gives them."""
    cache = yield from open_cache(link, spec)
    hashes = _hashes(cache, tokens)
    reply = yield Match(link.next_id(), link.epoch, cache.handle, pack_hashes(hashes))
    return expect(reply, Matched).num_resident * spec.namespace.layout.block_tokens


def allocate(
    link: Link, spec: CacheSpec, num_tokens: int, *, max_tokens: int | None, options: SequenceOptions
) -> Verb[SequenceCore]:
    """A sequence without token ids, all of it reserved."""
    num_tokens = whole_number("num_tokens", num_tokens, least=1, most=MAX_TOKENS)
    most = _max_tokens(num_tokens, num_tokens if max_tokens is None else max_tokens)

    def reserve(cache: OpenedCache) -> Verb[SequenceCore]:
        num_blocks = spec.namespace.layout.num_blocks(num_tokens)
        core = SequenceCore(link, cache, _names(cache), max_tokens=most, options=options)
        landing = Landing(link)
        try:
            request = Reserve(link.next_id(), link.epoch, cache.handle, num_blocks)
            reserved = expect((yield landing.awaits(request)), Reserved)
            core.start(0, unpack_block_ids(reserved.blocks), num_announced=0)
        except BaseException:
            core.abandon(landing)
            raise
        return core

    return (yield from _mapped_or_staged(link, spec, reserve))


def _mapped_or_staged(
    link: Link, spec: CacheSpec, attach: Callable[[OpenedCache], Verb[SequenceCore]]
) -> Verb[SequenceCore]:
    """What `attach` makes of the cache, or of the host pool beside it where the driver refuses to map a segment."""
    cache = yield from open_cache(link, spec)
    try:
        return (yield from attach(cache))
    except CudaImportRefused as error:
        # It was let go of, so nothing is held. Other sequences lie in other segments, so they try for themselves.
        tell_staged(cache.device, str(error))
    staged = yield from open_cache(link, replace(spec, staged=True))
    return (yield from attach(staged))


def begin(
    link: Link,
    spec: CacheSpec,
    tokens: bytes,
    *,
    max_tokens: int | None,
    wait_s: float | None,
    verify: bool,
    announce: bool,
    attach_all: bool,
    only_stores: bool,
    options: SequenceOptions,
) -> Verb[SequenceCore]:
    """The longest cached prefix attached, the rest reserved and announced: one round trip.

    `tokens` as `encode_tokens` gives them.
    """
    layout = spec.namespace.layout
    num_tokens = len(tokens) // TOKEN_NBYTES
    most = _max_tokens(num_tokens, num_tokens + DEFAULT_GROWTH_TOKENS if max_tokens is None else max_tokens)
    bound_s = None if wait_s is None else seconds("wait_s", wait_s)
    needed = layout.num_blocks(num_tokens)
    ahead = layout.num_blocks(min(most, num_tokens + link.reserve_ahead_tokens))

    def attach(cache: OpenedCache) -> Verb[SequenceCore]:
        hashes = _hashes(cache, tokens)
        packed = pack_hashes(hashes)

        def ask(num_blocks: int) -> Begin:
            return Begin(
                link.next_id(),
                link.epoch,
                cache.handle,
                packed,
                # One token at least is left to compute: engines need the logits of the last one.
                max_cached=max(0, num_tokens - (not attach_all)) // layout.block_tokens,
                num_blocks=num_blocks,
                announce=announce,
                wait_s=bound_s,
                with_checksums=verify,
                only_stores=only_stores,
            )

        core = SequenceCore(link, cache, _names(cache, tokens, hashes), max_tokens=most, options=options)
        if not ahead:
            # Nothing is asked for, and there is nothing to find: it gets its blocks when it grows.
            core.start(0, [], num_announced=0)
            return core
        landing = Landing(link)
        try:
            try:
                reply = yield landing.awaits(ask(ahead))
            except OutOfBlocks:
                if ahead == needed:
                    raise
                # What is reserved ahead is a convenience; the prompt itself may still fit.
                if not needed:
                    core.start(0, [], num_announced=0)
                    return core
                reply = yield landing.awaits(ask(needed))
            begun = expect(reply, Begun)
            core.start(begun.num_cached, unpack_block_ids(begun.blocks), num_announced=begun.num_announced)
        except BaseException:
            core.abandon(landing)
            raise
        if verify:
            _verify(core, begun)
        return core

    return (yield from _mapped_or_staged(link, spec, attach))


def _verify(core: SequenceCore, begun: Begun) -> None:
    try:
        place = core.first_corrupt(begun.checksums)
    except BaseException:
        core.close()
        raise
    if place is not None:
        block = core.block_at(place)
        core.close()
        raise CorruptBlock(
            f"block {block} (tokens {place * core.layout.block_tokens} on) differs from the checksum its writer gave"
        )


def _max_tokens(num_tokens: int, max_tokens: int) -> int:
    max_tokens = whole_number("max_tokens", max_tokens, most=MAX_TOKENS)
    if num_tokens > max_tokens:
        raise SequenceTooLong(f"{num_tokens} tokens do not fit max_tokens={max_tokens}")
    return max_tokens


def _hashes(cache: OpenedCache, tokens: bytes) -> list[ChainHash]:
    return chain_hashes(NamespaceDigest(cache.digest), tokens, cache.namespace.layout.block_tokens)


def _names(cache: OpenedCache, tokens: bytes = b"", hashes: Sequence[ChainHash] = ()) -> NamedTokens:
    return NamedTokens(cache.digest, cache.namespace.layout.block_tokens, tokens, hashes)
