"""torch tensors over device memory without a copy, and whether any of them still lives.

torch knows the card by its own number, which is found by UUID. Where torch has no CUDA but the CPU can touch the memory
(managed or unified memory), tensors are CPU tensors.
"""

from __future__ import annotations

import functools
import uuid
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvd.errors import CudaImportRefused, EngineUnsupported, OutOfMemory
from kvd_client.memory.device_imports import ImportedSegment
from kvd_client.memory.tensors import CPU, Views, import_torch

if TYPE_CHECKING:
    import torch


class DeviceArray:
    """What `torch.as_tensor` takes a view of: `__cuda_array_interface__`, version 3. Every such tensor holds it."""

    def __init__(self, address: int, nbytes: int, owner: object = None) -> None:
        """`owner` is what the memory belongs to, if it must live as long as a view does."""
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class DeviceViews:
    """Makes tensors over `nbytes` at a device address and knows whether any is alive; as `tensors.Views`."""

    def __init__(self, address: int, nbytes: int, torch_device: str, owner: object = None) -> None:
        """`owner`: see `DeviceArray`."""
        self._owner = owner
        self._address = address
        self._nbytes = nbytes
        self._torch_device = torch_device
        self._anchor: weakref.ref[DeviceArray] | None = None
        self._when_dead: Callable[[], None] | None = None

    def bytes(self) -> memoryview:
        """Raises `EngineUnsupported`: the CPU cannot touch the bytes."""
        raise EngineUnsupported("these bytes are on a GPU: use the tensors, or copy them with .cpu()")

    def tensor(self, dtype: str) -> torch.Tensor:
        """All bytes as a one-dimensional tensor on the card."""
        module = import_torch()
        # `device` is named: without it torch would copy to the card that is current, or to the CPU.
        with module.inference_mode(mode=False):
            flat: torch.Tensor = module.as_tensor(self._live_anchor(), device=self._torch_device)
            return flat.view(getattr(module, dtype))

    def _live_anchor(self) -> DeviceArray:
        anchor = self._anchor() if self._anchor is not None else None
        if anchor is None:
            anchor = DeviceArray(self._address, self._nbytes, self._owner)
            self._anchor = weakref.ref(anchor, self._anchor_died)
        return anchor

    def any_alive(self) -> bool:
        """Whether a view exists. False is final only while nobody asks for another."""
        return self._anchor is not None and self._anchor() is not None

    def when_dead(self, call: Callable[[], None]) -> None:
        """Calls once when the last view dies, perhaps now, perhaps in any thread."""
        self._when_dead = call
        if not self.any_alive():
            self._anchor_died(None)

    def _anchor_died(self, _reference: object) -> None:
        call, self._when_dead = self._when_dead, None
        if call is not None:
            call()


def device_views(segment: ImportedSegment, offset: int, nbytes: int) -> Views | DeviceViews:
    """Views over a part of an imported segment. Raises `CudaImportRefused` when torch cannot see the memory."""
    torch_device = find_torch_device(segment.export.device)
    if torch_device is not None:
        return DeviceViews(segment.address + offset, nbytes, torch_device)
    if segment.host_address is not None:
        return Views(segment.host_address + offset, nbytes)
    raise CudaImportRefused(unseen(segment.export.device))


def private_views(torch_device: str, nbytes: int) -> Views | DeviceViews:
    """Views over fresh memory of this process on "cpu" or "cuda:N"; it lives as long as they and their tensors do.

    Raises `OutOfMemory`.
    """
    module = import_torch()
    try:
        with module.inference_mode(mode=False):
            memory = module.empty(nbytes, dtype=module.uint8, device=torch_device)
    except RuntimeError as error:
        # torch.OutOfMemoryError on a card, a plain one of the CPU's allocator.
        raise OutOfMemory(f"no {nbytes >> 20} MiB of memory for a private copy: {error}") from error
    if torch_device == CPU:
        return Views(memory.data_ptr(), nbytes, memory)
    return DeviceViews(memory.data_ptr(), nbytes, torch_device, memory)


def unseen(device_uuid: str) -> str:
    """What to say where torch does not see a card."""
    return (
        f"this torch ({import_torch().__version__}) does not see the card {device_uuid}: install a build for CUDA "
        f"that has code for it"
    )


@functools.cache
def find_torch_device(device_uuid: str) -> str | None:
    """`cuda:N` as torch counts in this process, None when its build has no CUDA or does not see the card."""
    module = import_torch()
    if not module.cuda.is_available():
        return None
    for index in range(module.cuda.device_count()):
        if card_of(index) == device_uuid:
            return f"cuda:{index}"
    return None


def card_of(index: int) -> str:
    """The UUID, as `Device` has it, of the card that torch numbers so in this process."""
    number = str(import_torch().cuda.get_device_properties(index).uuid).removeprefix("GPU-")
    return f"GPU-{uuid.UUID(number)}"
