"""How the blocks of a sequence are laid out in this process: the choice of a storage."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.block import BlockId
from kvd.errors import OutOfMemory
from kvd.layout import KVLayout
from kvd_client.memory.address_range import HUGE_PAGE_NBYTES
from kvd_client.memory.compute_device import is_elsewhere
from kvd_client.memory.copied_storage import CopiedStorage
from kvd_client.memory.device_segments import DevicePoolMemory
from kvd_client.memory.device_storage import DeviceStorage
from kvd_client.memory.mapped_storage import MappedStorage, RangeStorage, has_room_for
from kvd_client.memory.private_storage import PackedStorage, PrivateStorage
from kvd_client.memory.segments import PoolMemory
from kvd_client.memory.storage import Storage
from kvd_client.memory.tensors import CPU


def lay_out(
    layout: KVLayout,
    memory: PoolMemory | DevicePoolMemory,
    blocks: Sequence[BlockId],
    num_sealed: int,
    *,
    max_blocks: int,
    materialize: bool,
    populate: bool,
    computes_on: str,
) -> Storage:
    """A storage with these blocks in it, for who computes on `computes_on` (see `is_elsewhere`). Under the guard; the
    segments are granted. Raises `OutOfMemory`, `EngineUnsupported`.
    """

    def filled(storage: Storage) -> Storage:
        try:
            storage.fill(blocks, num_sealed, populate=populate)
        except BaseException:
            storage.close()
            raise
        return storage

    if isinstance(memory, DevicePoolMemory):
        return filled(DeviceStorage(layout, max_blocks, memory, packed=materialize))
    if is_elsewhere(computes_on, CPU):
        return filled(CopiedStorage(layout, max_blocks, memory, computes_on))
    phase = memory.phase(blocks) % HUGE_PAGE_NBYTES
    if materialize:
        return filled(PackedStorage(layout, max_blocks, memory, phase))
    if has_room_for(memory.num_runs(blocks)):
        try:
            return filled(MappedStorage(layout, max_blocks, memory, phase))
        except OutOfMemory:
            # So near vm.max_map_count the same result is had by copying, with one mapping.
            pass
    return filled(PrivateStorage(layout, max_blocks, memory, phase))


def attach_reserved(
    storage: Storage, first: int, more: Sequence[BlockId], *, num_tokens: int, populate: bool
) -> Storage:
    """Puts more reserved blocks at places `first` and on; the storage that has them, or another one to go on in.

    Another one holds a copy of the first `num_tokens` tokens: the mappings of a scattered sequence have run out. The
    first is the caller's to close then. Under the guard. Raises `OutOfMemory`.
    """
    if not isinstance(storage, RangeStorage) or storage.is_private:
        storage.attach(first, more, sealed=False, populate=populate)
        return storage
    if has_room_for(storage.memory.num_runs(more)):
        try:
            storage.attach(first, more, sealed=False, populate=populate)
        except OutOfMemory:
            pass
        else:
            return storage
    private = PrivateStorage(storage.layout, storage.max_blocks, storage.memory)
    private.num_copied_bytes += private.copy_tokens(storage, 0, num_tokens)
    private.attach(first, more, sealed=False, populate=populate)
    return private
