"""The verbs about what lies below memory: how far a prefix reaches, bring it up, copy down, forget."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.block import NamespaceDigest
from kvd.errors import InvalidRequest
from kvd.hashing import chain_hashes, pack_hashes
from kvd.protocol import replies
from kvd.protocol.replies import Done, Flushed, Matched, Resized, Spilling
from kvd.protocol.requests import Flush, Match, Pin, Prefetch, Resize, Spill, Unpin
from kvd_client.core import verbs
from kvd_client.core.verb import Verb, expect
from kvd_client.session.link import Link
from kvd_client.session.opened_cache import CacheSpec


@dataclass(frozen=True, slots=True)
class Reach:
    """How far a prefix is cached, in tokens, multiples of block_tokens."""

    num_resident: int
    """In memory."""
    by_tier: dict[str, int]
    """Tier name, nearest first -> how far memory, that tier and those before it reach together.

    Empty when there is no tier below, or none answered in time.
    """


@dataclass(frozen=True, slots=True)
class FlushOutcome:
    """What a flush did."""

    num_namespaces: int
    num_blocks: int
    """That left memory."""
    untold: tuple[str, ...]
    """Tiers that are down; they are told before anything else is asked of them."""
    unlisted: tuple[str, ...] = ()
    """Tiers that could not say what they hold: of namespaces nobody opened here, nothing was flushed in them."""


@dataclass(frozen=True, slots=True)
class ResizeOutcome:
    """How a change of a device's budget stands."""

    device: str
    """"host", or the card's UUID."""
    budget_nbytes: int
    """The budget that holds now: the one asked for once `num_left` is 0."""
    used_nbytes: int
    """Of the pools; what is above the budget clients still hold."""
    draining_nbytes: int
    """Of a card: left the pools, and not closed by every client yet."""
    num_left: int
    """Blocks that are copied down before memory goes."""


def reach(link: Link, spec: CacheSpec, tokens: bytes) -> Verb[Reach]:
    """Asks memory and every tier; `tokens` as `encode_tokens` gives them, here and below."""
    handle, hashes = yield from _named(link, spec, tokens)
    matched = expect((yield Match(link.next_id(), link.epoch, handle, hashes)), Matched)
    block_tokens = spec.namespace.layout.block_tokens
    by_tier = {name: length * block_tokens for name, length in zip(matched.tiers, matched.reach, strict=True)}
    return Reach(matched.num_resident * block_tokens, by_tier)


def reach_in(link: Link, digest: bytes, block_tokens: int, tokens: bytes) -> Verb[Reach]:
    """The same in a namespace of the own tenant that is known by its digest alone."""
    link.require_alive()
    hashes = pack_hashes(chain_hashes(NamespaceDigest(digest), tokens, block_tokens))
    matched = expect((yield Match(link.next_id(), link.epoch, 0, hashes, digest)), Matched)
    by_tier = {name: length * block_tokens for name, length in zip(matched.tiers, matched.reach, strict=True)}
    return Reach(matched.num_resident * block_tokens, by_tier)


def prefetch(link: Link, spec: CacheSpec, tokens: bytes) -> Verb[None]:
    """Returns when the daemon knows of it."""
    handle, hashes = yield from _named(link, spec, tokens)
    expect((yield Prefetch(link.next_id(), link.epoch, handle, hashes)), Done)


@dataclass(frozen=True, slots=True)
class Pinned:
    """A prompt that the daemon keeps resident."""

    pin: str
    """Its name, for `Client.unpin`."""
    num_tokens: int
    """Of its full blocks."""
    num_tokens_resident: int
    """Held now; the rest is held as soon as it is computed, or has come up from a tier."""


def pin(link: Link, spec: CacheSpec, tokens: bytes, *, label: str) -> Verb[Pinned]:
    """Returns when the daemon knows of it."""
    handle, hashes = yield from _named(link, spec, tokens)
    pinned = expect((yield Pin(link.next_id(), link.epoch, handle, hashes, label)), replies.Pinned)
    block_tokens = spec.namespace.layout.block_tokens
    return Pinned(pinned.pin, pinned.num_blocks * block_tokens, pinned.num_resident * block_tokens)


def unpin(link: Link, name: str) -> Verb[None]:
    """Returns when it is gone."""
    link.require_alive()
    expect((yield Unpin(link.next_id(), link.epoch, name)), Done)


def flush(link: Link, *, namespace: bytes | None, model: str | None, tier: str | None) -> Verb[FlushOutcome]:
    """Returns when every tier was told, or could not be."""
    for what, given in (("namespace", namespace), ("model", model), ("tier", tier)):
        # On the wire an empty one means all: a caller's empty variable must not widen what is forgotten.
        if given is not None and not given:
            raise InvalidRequest(f"{what} is empty; leave it out to flush every one")
    link.require_alive()
    request = Flush(link.next_id(), link.epoch, namespace=namespace or b"", model=model or "", tier=tier or "")
    flushed = expect((yield request), Flushed)
    return FlushOutcome(flushed.num_namespaces, flushed.num_blocks, tuple(flushed.untold), tuple(flushed.unlisted))


def spill(link: Link) -> Verb[int]:
    """Returns at once."""
    link.require_alive()
    return expect((yield Spill(link.next_id(), link.epoch)), Spilling).num_left


def resize(link: Link, nbytes: int, device: str) -> Verb[ResizeOutcome]:
    """Returns at once."""
    link.require_alive()
    resized = expect((yield Resize(link.next_id(), link.epoch, nbytes, device)), Resized)
    return ResizeOutcome(
        resized.device, resized.budget_nbytes, resized.used_nbytes, resized.draining_nbytes, resized.num_left
    )


def _named(link: Link, spec: CacheSpec, tokens: bytes) -> Verb[tuple[int, bytes]]:
    cache = yield from verbs.open_cache(link, spec)
    hashes = chain_hashes(NamespaceDigest(cache.digest), tokens, spec.namespace.layout.block_tokens)
    return cache.handle, pack_hashes(hashes)
