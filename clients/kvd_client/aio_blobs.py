"""The asyncio twin of `kvd_client.blobs`: the same verbs, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from kvd.blobs import DEFAULT_BLOCK_NBYTES
from kvd_client.blobs import BlobNames, _writable
from kvd_client.core import blob_core
from kvd_client.core.blob_core import Buffer
from kvd_client.transport.aio_runner import AsyncRunner


class Blobs(BlobNames):
    """See `kvd_client.blobs.Blobs`. Copies and checksums happen on the event loop's thread, 5 ms for 35 MB or so, but
    for the checksum of a put.
    """

    def __init__(
        self, runner: AsyncRunner, name: str, *, salt: str = "", block_nbytes: int = DEFAULT_BLOCK_NBYTES
    ) -> None:
        super().__init__(name, salt=salt, block_nbytes=block_nbytes)
        self._runner = runner

    async def put(
        self, key: bytes, data: Buffer | Iterable[Buffer], *, also: Sequence[bytes] = (), replace: bool = False
    ) -> bool:
        """See `kvd_client.blobs.Blobs.put`."""
        parts = blob_core.buffers(data)
        head = await asyncio.to_thread(blob_core.head_of, parts)
        keys = [key, *also]
        return await self._runner.run(
            lambda link: blob_core.put(link, self._spaces, keys, parts, head, replace=replace)
        )

    async def get(
        self, key: bytes, into: bytearray | memoryview | None = None, *, wait_s: float | None = None
    ) -> memoryview | None:
        """See `kvd_client.blobs.Blobs.get`."""
        target = None if into is None else _writable(into)
        return await self._runner.run(lambda link: blob_core.get(link, self._spaces, key, target, wait_s))

    async def size(self, key: bytes) -> int | None:
        """See `kvd_client.blobs.Blobs.size`."""
        return await self._runner.run(lambda link: blob_core.size(link, self._spaces, key))

    async def latest(self, keys: Sequence[bytes]) -> int | None:
        """See `kvd_client.blobs.Blobs.latest`."""
        return await self._runner.run(lambda link: blob_core.latest(link, self._spaces, keys))

    async def delete(self, key: bytes) -> bool:
        """See `kvd_client.blobs.Blobs.delete`."""
        return await self._runner.run(lambda link: blob_core.delete(link, self._spaces, key))
