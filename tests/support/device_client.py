"""A bare client that also opens device segments, and answers when they are revoked: what the library does, by hand.

The test's own process must be on the fake machine (fixture `machine`). Run as a program it obeys the lines on its
stdin, as `tests.support.raw_client` does.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from kvd.cuda import Context, DeviceExport, address_of
from kvd.layout import KVLayout
from kvd.protocol.replies import CacheOpened
from kvd.protocol.session import DeviceSegmentGranted, SegmentClosed, SegmentGranted, SegmentRevoked, encode
from kvd.protocol.wire import unpack_block_ids
from kvd_client.memory import device_imports
from kvd_client.memory.device_segments import DeviceSegmentTable
from tests.support.raw_client import LAYOUT, RawClient, hashes


class DeviceClient(RawClient):
    """Every segment is opened when a block of it is touched for the first time."""

    num_confirmed = 0

    def __init__(self, folder: Path, **more: Any) -> None:
        self.host_segments: dict[tuple[int, int], int] = {}
        super().__init__(folder, **more)

    def open_on(self, device: str = "", *, staged: bool = False, model: str = "m", layout: KVLayout = LAYOUT) -> int:
        self.open_cache(model, device=device, staged=staged, layout=layout)
        return self.take_opened(self.opened, layout)

    def take_opened(self, opened: CacheOpened, layout: KVLayout = LAYOUT) -> int:
        """From now on blocks are meant to be in that cache's pool."""
        self.opened, self.layout = opened, layout
        if not hasattr(self, "table"):
            self.table = DeviceSegmentTable(self.epoch)
        return opened.cache

    def grants(self) -> dict[tuple[int, int], DeviceSegmentGranted]:
        """Of what was granted and not revoked since."""
        found: dict[tuple[int, int], DeviceSegmentGranted] = {}
        for message in self.drain():
            if isinstance(message, DeviceSegmentGranted):
                assert (message.pool, message.segment) not in found, "granted twice"
                found[message.pool, message.segment] = message
            elif isinstance(message, SegmentRevoked):
                found.pop((message.pool, message.segment), None)
        return found

    def revoked(self) -> list[SegmentRevoked]:
        return [message for message in self.drain() if isinstance(message, SegmentRevoked)]

    def _place(self, block: int) -> tuple[int, int]:
        """(segment, offset)."""
        segment, index = divmod(block, self.opened.blocks_per_segment)
        return segment, index * self.layout.block_nbytes

    def _address(self, block: int) -> tuple[Context, int]:
        segment, offset = self._place(block)
        opened = self.table.acquire(self.opened.pool, segment)
        if opened is None:
            grant = self.grants()[self.opened.pool, segment]
            export = DeviceExport(
                device=grant.device,
                handle=grant.handle,
                nbytes=grant.nbytes,
                pid_namespace=grant.pid_namespace,
                pid=grant.pid,
                epoch=grant.epoch,
            )
            self.table.granted(self.opened.pool, segment, export)
            opened = self.table.acquire(self.opened.pool, segment)
            assert opened is not None
        # The table goes on using it.
        device_imports.release(opened)
        return opened.context, opened.address + offset

    def next_datagram(self) -> object:
        message = super().next_datagram()
        if isinstance(message, SegmentGranted):
            self.host_segments[message.pool, message.segment] = self.descriptors[-1]
        return message

    def _host_segment(self, segment: int) -> int:
        self.drain()
        return self.host_segments[self.opened.pool, segment]

    def write_block(self, block: int, data: bytes) -> None:
        if self.opened.device == "host":
            segment, offset = self._place(block)
            assert os.pwrite(self._host_segment(segment), data, offset) == len(data)
            return
        context, address = self._address(block)
        source = bytearray(data)
        context.upload(address, address_of(source), len(source))

    def read_block(self, block: int) -> bytes:
        if self.opened.device == "host":
            segment, offset = self._place(block)
            return os.pread(self._host_segment(segment), self.layout.block_nbytes, offset)
        context, address = self._address(block)
        target = bytearray(self.layout.block_nbytes)
        context.download(address_of(target), address, len(target))
        return bytes(target)

    def publish(self, cache: int, *words: str) -> list[int]:
        """Computes what is missing of a prompt, one block for each word; its blocks, all referenced."""
        begun = self.begin(cache, hashes(*words), num_blocks=len(words))
        blocks = list(unpack_block_ids(begun.blocks))
        missing = blocks[begun.num_cached :]
        for block, word in zip(missing, words[begun.num_cached :], strict=True):
            self.write_block(block, content(word, self.layout))
        if missing:
            packed = begun.blocks[4 * begun.num_cached :]
            blocks[begun.num_cached :] = unpack_block_ids(self.seal(cache, packed, hashes(*words[begun.num_cached :])))
        return blocks

    def leave(self, num_blocks: int) -> list[int]:
        """A sequence of so many words, let go of again, though all of it is mapped."""
        blocks = self.publish(1, *words(num_blocks))
        assert self.read_block(blocks[-1]) == content(f"word {num_blocks - 1}", self.layout)
        self.release(1, blocks)
        return blocks

    def confirm_closes(self) -> int:
        """Lets go of every segment that was revoked since the last time, and says so; how many."""
        fresh = [(one.pool, one.segment) for one in self.revoked()][self.num_confirmed :]
        self.num_confirmed += len(fresh)
        for place in fresh:
            answer = encode(SegmentClosed(*place))
            self.table.revoked(*place, lambda answer=answer: self.session_socket.send(answer))
        return len(fresh)

    def close(self) -> None:
        if hasattr(self, "table"):
            self.table.close()
        super().close()


class Puppet:
    """{"publish": n}: words 0 to n, referenced; {"leave": n}: the same, let go of but mapped; {"reserve": n}: blocks to
    write; {"hang_up": 0}: its session socket closes, and it lives on; {"misbehave": 0}: it is sent away.
    """

    def __init__(self, folder: Path) -> None:
        self.raw = DeviceClient(folder, label="subprocess")
        self.raw.open_on()

    def obey(self, todo: dict[str, int]) -> None:
        for verb, argument in todo.items():
            getattr(self, verb)(argument)
        os.write(1, b"done %d\n" % os.getpid())

    def publish(self, num_blocks: int) -> None:
        blocks = self.raw.publish(1, *words(num_blocks))
        assert [self.raw.read_block(block) for block in blocks] == [content(word) for word in words(num_blocks)]

    def leave(self, num_blocks: int) -> None:
        self.raw.leave(num_blocks)

    def reserve(self, num_blocks: int) -> None:
        self.raw.reserve(1, num_blocks)

    def hang_up(self, _argument: int) -> None:
        self.raw.session_socket.close()

    def misbehave(self, _argument: int) -> None:
        self.raw.session_socket.send(b"?")


def words(num_blocks: int) -> list[str]:
    return [f"word {number}" for number in range(num_blocks)]


def content(word: str, layout: KVLayout = LAYOUT) -> bytes:
    """What the block of that word holds, and no other."""
    return word.encode().ljust(32, b"~") * (layout.block_nbytes // 32)


if __name__ == "__main__":
    puppet = Puppet(Path(sys.argv[1]))
    for line in sys.stdin:
        puppet.obey(json.loads(line))
