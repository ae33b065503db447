"""`Blobs`: byte strings of any length under a key, in the memory and the tiers that blocks have.

    blobs = client.blobs("llama.cpp state of smollm2@sha256:...")
    blobs.put(key, data)                       # False when somebody has put it already
    view = blobs.get(key)                      # a memoryview over the shared memory, or None
    blobs.latest([key_of_100_tokens, key_of_200_tokens, ...])

All or nothing: a blob that lost a block anywhere is not found, and what is left of it is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvd.blobs import DEFAULT_BLOCK_NBYTES, namespaces
from kvd.errors import InvalidRequest
from kvd_client.core import blob_core
from kvd_client.core.blob_core import Buffer, Spaces
from kvd_client.transport.blocking import Runner


class BlobNames:
    """What both clients' `Blobs` know without asking the daemon."""

    def __init__(self, name: str, *, salt: str = "", block_nbytes: int = DEFAULT_BLOCK_NBYTES) -> None:
        self._spaces = Spaces(*namespaces(name, salt=salt, block_nbytes=block_nbytes))

    @property
    def name(self) -> str:
        """What must be equal for the blobs to be exchangeable; `kvd status` and `kvd flush` call it the model."""
        return self._spaces.heads.model

    @property
    def block_nbytes(self) -> int:
        """Bytes of the blocks that hold the content."""
        return self._spaces.block_nbytes


class Blobs(BlobNames):
    """The blobs of one name. Made by `Client.blobs`; holds nothing, needs no closing, safe from several threads."""

    def __init__(self, runner: Runner, name: str, *, salt: str = "", block_nbytes: int = DEFAULT_BLOCK_NBYTES) -> None:
        super().__init__(name, salt=salt, block_nbytes=block_nbytes)
        self._runner = runner

    def put(
        self, key: bytes, data: Buffer | Iterable[Buffer], *, also: Sequence[bytes] = (), replace: bool = False
    ) -> bool:
        """Stores `data` (bytes-like, or several such parts) under `key`; True when it is found there from now on.

        False when the key has a blob already, which is left as it is; with `replace` the new one takes its place.
        Under the keys of `also` the same content is found too, without being stored again; those that exist are
        passed over, or replaced. Copies `data` once. Raises `OutOfBlocks`, `QuotaExceeded`, `OutOfMemory`, and then
        nothing was stored; `InvalidRequest` for a key that is not 1 to 4096 bytes.
        """
        parts = blob_core.buffers(data)
        head = blob_core.head_of(parts)
        keys = [key, *also]
        return self._runner.run(lambda link: blob_core.put(link, self._spaces, keys, parts, head, replace=replace))

    def get(
        self, key: bytes, into: bytearray | memoryview | None = None, *, wait_s: float | None = None
    ) -> memoryview | None:
        """The whole content, its checksum compared; None when there is none, or it is not whole any more.

        A read-only view over the shared memory, which the daemon keeps until the view and all slices of it are gone.
        With `into` the content is copied there, and the view is one of `into`. `wait_s` bounds the wait for what comes
        up from tiers below: None gives up early on a tier that shows no progress, 0 never waits.

        Raises `CorruptBlock` for content that is not what its writer gave; the blob is forgotten by then.
        """
        target = None if into is None else _writable(into)
        return self._runner.run(lambda link: blob_core.get(link, self._spaces, key, target, wait_s))

    def size(self, key: bytes) -> int | None:
        """Length of the content in bytes, None when there is none. Promises nothing about the content."""
        return self._runner.run(lambda link: blob_core.size(link, self._spaces, key))

    def latest(self, keys: Sequence[bytes]) -> int | None:
        """Place of the last of `keys` that has a blob, in memory or in a tier below; None for none of them.

        One round trip, at most 65,536 keys. Pins nothing, promises nothing: `get` says whether it is whole.
        """
        return self._runner.run(lambda link: blob_core.latest(link, self._spaces, keys))

    def delete(self, key: bytes) -> bool:
        """Forgets the blob here and in the tiers below; whether there was one.

        Its content is forgotten under every key it was put under. A tier that is down keeps its copy: `Client.flush` is
        what reaches those.
        """
        return self._runner.run(lambda link: blob_core.delete(link, self._spaces, key))


def _writable(into: bytearray | memoryview) -> memoryview:
    view = memoryview(into).cast("B")
    if view.readonly:
        raise InvalidRequest("into must be writable")
    return view
