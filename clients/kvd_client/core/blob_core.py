"""The verbs of blobs, whatever drives them. `kvd.blobs` has the format."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import xxhash

from kvd.blobs import HEAD_NBYTES, MAX_BLOCKS, BlobHead, head_hash
from kvd.block import HOST, BlockId, ChainHash, NamespaceDigest
from kvd.errors import CorruptBlock, EngineUnsupported, InvalidRequest, OutOfMemory
from kvd.hashing import Namespace, pack_hashes
from kvd.protocol.replies import Begun, Forgotten, FoundLast, Matched, Reserved, Sealed
from kvd.protocol.requests import Begin, FindLast, Forget, Match, Reserve, Seal
from kvd.protocol.wire import pack_block_ids, unpack_block_ids
from kvd_client.arguments import seconds
from kvd_client.core import verbs
from kvd_client.core.verb import Verb, expect
from kvd_client.memory.address_range import HUGE_PAGE_NBYTES
from kvd_client.memory.mapped_storage import MappedStorage, has_room_for
from kvd_client.memory.segments import PoolMemory
from kvd_client.session.landing import Landing
from kvd_client.session.link import Holdings, Link
from kvd_client.session.opened_cache import CacheSpec, OpenedCache
from kvd_client.session.releases import releases

Buffer: TypeAlias = bytes | bytearray | memoryview
_MAX_WRITE_NBYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Spaces:
    """The two namespaces of one set of blobs."""

    heads: Namespace
    bodies: Namespace

    @property
    def block_nbytes(self) -> int:
        """Of a body's blocks."""
        return self.bodies.layout.block_nbytes


def buffers(data: Buffer | Iterable[Buffer]) -> list[memoryview]:
    """The content as flat bytes, part after part. Raises `InvalidRequest` for what is no buffer."""
    parts = [data] if isinstance(data, (bytes, bytearray, memoryview)) else list(data)
    try:
        return [memoryview(part).cast("B") for part in parts]
    except TypeError as error:
        raise InvalidRequest(f"a blob is contiguous bytes, or several such parts ({error})") from error


def head_of(parts: Sequence[memoryview]) -> BlobHead:
    """Length and checksum; reads everything once (about 10 GB/s)."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return BlobHead(sum(len(part) for part in parts), digest.digest())


def latest(link: Link, spaces: Spaces, keys: Sequence[bytes]) -> Verb[int | None]:
    """One round trip."""
    if len(keys) > MAX_BLOCKS:
        raise InvalidRequest(f"{len(keys)} keys at once; at most {MAX_BLOCKS} fit a message")
    heads = yield from _open(link, spaces.heads)
    names = [_name(heads, key) for key in keys]
    if not names:
        return None
    return (yield from _last(link, heads, names))


def put(
    link: Link, spaces: Spaces, keys: Sequence[bytes], parts: Sequence[memoryview], head: BlobHead, *, replace: bool
) -> Verb[bool]:
    """The body first, then the heads: nobody finds what is not whole."""
    heads = yield from _open(link, spaces.heads)
    bodies = yield from _open(link, spaces.bodies)
    names = list(dict.fromkeys(_name(heads, key) for key in keys))
    hashes = head.body_hashes(NamespaceDigest(bodies.digest), spaces.block_nbytes)
    if not replace and (yield from _last(link, heads, names[:1])) is not None:
        return False
    fresh = yield from _store(link, bodies, hashes, parts)
    if replace:
        yield from _forget(link, heads, names)
    page = spaces.heads.layout.block_nbytes
    pages = [memoryview(head.pack(name).ljust(page, b"\0")) for name in names]
    if names[0] in (yield from _store(link, heads, names, pages)):
        return True
    # Another writer of this key was faster. With the same content our blocks are its blocks; with another nobody will
    # ever ask for them.
    if (yield from _read_head(link, heads, names[0])) != head:
        yield from _forget(link, bodies, fresh)
    return False


def size(link: Link, spaces: Spaces, key: bytes) -> Verb[int | None]:
    """Reads the head alone."""
    heads = yield from _open(link, spaces.heads)
    head = yield from _read_head(link, heads, _name(heads, key))
    return None if head is None else head.nbytes


def get(
    link: Link, spaces: Spaces, key: bytes, into: memoryview | None, wait_s: float | None
) -> Verb[memoryview | None]:
    """Head, then body; whole or not at all."""
    heads = yield from _open(link, spaces.heads)
    bodies = yield from _open(link, spaces.bodies)
    name = _name(heads, key)
    head = yield from _read_head(link, heads, name, wait_s)
    if head is None:
        return None
    if into is not None and len(into) < head.nbytes:
        raise InvalidRequest(f"{len(into)} bytes are too few for a blob of {head.nbytes}")
    hashes = _body_hashes(head, bodies, spaces)
    blocks: Sequence[BlockId] = ()
    if hashes:
        blocks = yield from _attach(link, bodies, hashes, wait_s)
        if not blocks:
            yield from _forget_remains(link, heads, name, bodies, hashes)
            return None
    view = _content(link, bodies, blocks, head.nbytes, into)
    if xxhash.xxh3_128_digest(view) != head.checksum:
        view.release()
        yield from _forget(link, heads, [name])
        yield from _forget(link, bodies, hashes)
        raise CorruptBlock("the bytes of a blob differ from the checksum its writer gave; it was forgotten")
    return view


def delete(link: Link, spaces: Spaces, key: bytes) -> Verb[bool]:
    """The head first, so that nobody begins to read what is about to go."""
    heads = yield from _open(link, spaces.heads)
    bodies = yield from _open(link, spaces.bodies)
    name = _name(heads, key)
    head = yield from _read_head(link, heads, name)
    if head is None:
        return False
    yield from _forget(link, heads, [name])
    yield from _forget(link, bodies, _body_hashes(head, bodies, spaces))
    return True


def _open(link: Link, namespace: Namespace) -> Verb[OpenedCache]:
    # Bytes are read and written by the CPU, so on a daemon with a card they are in host memory beside it.
    return (yield from verbs.open_cache(link, CacheSpec(namespace, device=HOST)))


def _memory(cache: OpenedCache) -> PoolMemory:
    if not isinstance(cache.memory, PoolMemory):
        raise EngineUnsupported(f"blobs are in host memory, and this daemon has them on {cache.device}")
    return cache.memory


def _name(heads: OpenedCache, key: bytes) -> ChainHash:
    return head_hash(NamespaceDigest(heads.digest), key)


def _body_hashes(head: BlobHead, bodies: OpenedCache, spaces: Spaces) -> list[ChainHash]:
    try:
        return head.body_hashes(NamespaceDigest(bodies.digest), spaces.block_nbytes)
    except InvalidRequest as error:  # no writer of ours makes such a head
        raise CorruptBlock(f"the head of a blob names a length that none has: {error}") from error


def _last(link: Link, cache: OpenedCache, names: Sequence[ChainHash]) -> Verb[int | None]:
    request = FindLast(link.next_id(), link.epoch, cache.handle, pack_hashes(names))
    place = expect((yield request), FoundLast).place
    return None if place < 0 else place


def _attach(
    link: Link, cache: OpenedCache, hashes: Sequence[ChainHash], wait_s: float | None
) -> Verb[tuple[BlockId, ...]]:
    """References to all of them, or none."""
    num = len(hashes)
    request = Begin(
        link.next_id(),
        link.epoch,
        cache.handle,
        pack_hashes(hashes),
        max_cached=num,
        num_blocks=num,
        announce=False,
        wait_s=None if wait_s is None else seconds("wait_s", wait_s),
        whole=True,
    )
    landing = Landing(link)
    try:
        return unpack_block_ids(expect((yield landing.awaits(request)), Begun).blocks)
    except BaseException:
        landing.give_up()
        raise


def _read_head(link: Link, heads: OpenedCache, name: ChainHash, wait_s: float | None = None) -> Verb[BlobHead | None]:
    blocks = yield from _attach(link, heads, [name], wait_s)
    if not blocks:
        return None
    packed = bytearray(HEAD_NBYTES)
    try:
        _read(link, heads, blocks, memoryview(packed))
    finally:
        _release(link, heads, blocks=blocks)
    try:
        return BlobHead.unpack(bytes(packed), name)
    except CorruptBlock:
        yield from _forget(link, heads, [name])
        raise


def _store(
    link: Link, cache: OpenedCache, hashes: Sequence[ChainHash], parts: Sequence[memoryview]
) -> Verb[list[ChainHash]]:
    """Writes blocks and seals them in one request; returns the hashes that were not there before."""
    if not hashes:
        return []
    request = Reserve(link.next_id(), link.epoch, cache.handle, len(hashes))
    landing = Landing(link)
    try:
        own = unpack_block_ids(expect((yield landing.awaits(request)), Reserved).blocks)
    except BaseException:
        landing.give_up()
        raise
    try:
        _write(link, cache, own, parts)
        seal = Seal(link.next_id(), link.epoch, cache.handle, pack_block_ids(own), pack_hashes(hashes))
        standing = unpack_block_ids(expect((yield seal), Sealed).blocks)
    except BaseException:
        _release(link, cache, reserved=own)
        raise
    copies = [mine for mine, theirs in zip(own, standing, strict=True) if mine != theirs]
    _release(link, cache, blocks=standing, reserved=copies)
    return [one for one, mine, theirs in zip(hashes, own, standing, strict=True) if mine == theirs]


def _forget(link: Link, cache: OpenedCache, hashes: Sequence[ChainHash], *, below: bool = True) -> Verb[None]:
    if hashes:
        request = Forget(link.next_id(), link.epoch, cache.handle, pack_hashes(hashes), below)
        expect((yield request), Forgotten)


def _forget_remains(
    link: Link, heads: OpenedCache, name: ChainHash, bodies: OpenedCache, hashes: Sequence[ChainHash]
) -> Verb[None]:
    """A block is gone, and what is left of the blob is of no use to anybody.

    Below, only where the tiers themselves say that they have no more of it: one that is slow must not lose the blob.
    """
    matched = expect((yield Match(link.next_id(), link.epoch, bodies.handle, pack_hashes(hashes))), Matched)
    if max([matched.num_resident, *matched.reach]) == len(hashes):
        return  # it came up meanwhile
    below = bool(matched.tiers)
    yield from _forget(link, heads, [name], below=below)
    yield from _forget(link, bodies, hashes, below=below)


def _content(
    link: Link, bodies: OpenedCache, blocks: Sequence[BlockId], nbytes: int, into: memoryview | None
) -> memoryview:
    """The bytes of attached blocks: in `into`, else mapped, else copied. The blocks go back when none needs them."""
    if not blocks:
        return memoryview(b"") if into is None else into[:0]
    if into is None and has_room_for(_memory(bodies).num_runs(blocks)):
        try:
            return _mapped(link, bodies, blocks, nbytes)
        except OutOfMemory:
            pass  # near vm.max_map_count a copy does as well
        except BaseException:
            _release(link, bodies, blocks=blocks)
            raise
    view = memoryview(bytearray(nbytes)) if into is None else into[:nbytes]
    try:
        _read(link, bodies, blocks, view)
    finally:
        _release(link, bodies, blocks=blocks)
    return view


def _mapped(link: Link, bodies: OpenedCache, blocks: Sequence[BlockId], nbytes: int) -> memoryview:
    memory, layout = _memory(bodies), bodies.namespace.layout
    memory.await_grants(blocks, writable=False)

    def map_guarded() -> memoryview:
        storage = MappedStorage(layout, len(blocks), memory, memory.phase(blocks) % HUGE_PAGE_NBYTES)
        try:
            storage.attach(0, blocks, sealed=True, populate=True)
        except BaseException:
            storage.close()
            raise
        view = storage.bytes(0, len(blocks) * layout.block_tokens).toreadonly()[:nbytes]
        link.retire(Holdings(bodies.handle, [storage], references=list(blocks)))
        return view

    return link.guard.run(map_guarded)


def _read(link: Link, cache: OpenedCache, blocks: Sequence[BlockId], into: memoryview) -> None:
    """The first bytes of sealed blocks, as many as `into` takes."""
    start = 0
    for run in _memory(cache).runs(blocks, writable=False):
        piece = into[start : start + run.num_blocks * _memory(cache).block_nbytes]
        fd = _duplicate(link, run.fd)
        try:
            num_read = 0
            while num_read < len(piece):
                got = os.preadv(fd, [piece[num_read : num_read + _MAX_WRITE_NBYTES]], run.offset + num_read)
                if not got:
                    raise CorruptBlock("a segment is shorter than the daemon said")
                num_read += got
        finally:
            os.close(fd)
        start += len(piece)


def _write(link: Link, cache: OpenedCache, blocks: Sequence[BlockId], parts: Sequence[memoryview]) -> None:
    """Writes the parts one after the other into reserved blocks."""
    # Through the descriptor rather than a mapping: no page is mapped here, so none has to be made read-only again.
    left = [part for part in parts if len(part)]
    for run in _memory(cache).runs(blocks, writable=True):
        fd = _duplicate(link, run.fd)
        try:
            offset, stop = run.offset, run.offset + run.num_blocks * _memory(cache).block_nbytes
            while left and offset < stop:
                piece = left[0][: min(stop - offset, _MAX_WRITE_NBYTES)]
                written = os.pwrite(fd, piece, offset)
                offset += written
                left[0] = left[0][written:]
                if not len(left[0]):
                    del left[0]
        finally:
            os.close(fd)


def _duplicate(link: Link, fd: int) -> int:
    """A descriptor of our own: another thread may lose the link, which closes its descriptors, at any moment."""

    def duplicate_guarded() -> int:
        link.require_alive()
        try:
            return os.dup(fd)
        except OSError as error:
            raise OutOfMemory(f"no descriptor for a segment: {error}") from error

    return link.guard.run(duplicate_guarded)


def _release(
    link: Link, cache: OpenedCache, *, blocks: Sequence[BlockId] = (), reserved: Sequence[BlockId] = ()
) -> None:
    """Gives back what nothing maps. Where the session is over, the daemon has it already."""
    if link.lost is None:
        for request in releases(
            link.next_id,
            link.epoch,
            cache.handle,
            blocks=pack_block_ids(blocks),
            reserved=pack_block_ids(reserved),
        ):
            link.post(request)


__all__ = ["Buffer", "Spaces", "buffers", "delete", "get", "head_of", "latest", "put", "size"]
