"""When work on a card is done. Another process may read a block once it is sealed and may write it once it is free.

No events are shared between processes: whoever tells the daemon of a block has waited for the work on it before.
"""

from __future__ import annotations

import logging
from typing import Protocol

from kvd.cuda import Context, DeviceExport
from kvd.errors import CudaDeviceLost, CudaError
from kvd_client.memory.device_imports import ImportedSegment
from kvd_client.memory.device_views import find_torch_device
from kvd_client.memory.tensors import import_torch

_log = logging.getLogger(__name__)


class Stream(Protocol):
    """A queue of work on a card: `torch.cuda.Stream` is one."""

    def synchronize(self) -> None:
        """Returns when everything given to it is done."""


def wait_for_stream(segment: ImportedSegment, stream: Stream | None) -> None:
    """Returns when all work of `stream`, or of torch's current one on the segment's card, is done.

    Raises `CudaDeviceLost` when that work failed, `CudaError`.
    """
    torch_device = find_torch_device(segment.export.device)
    try:
        if stream is not None:
            stream.synchronize()
        elif torch_device is not None:
            import_torch().cuda.current_stream(torch_device).synchronize()
        else:
            segment.context.synchronize()
    except RuntimeError as error:
        # torch's own errors; ours are none.
        raise CudaDeviceLost(f"work on {segment.export.device} failed: {error}") from error


class OnCard(Protocol):
    """A segment of a card that this process has open."""

    @property
    def export(self) -> DeviceExport: ...
    @property
    def context(self) -> Context: ...


def wait_for_device(segment: OnCard) -> None:
    """Returns when nothing of this process runs on the segment's card any more. Never raises.

    Whatever stream a view was used on: when the last one has died, nobody can tell any more.
    """
    if segment.context.lost is not None:
        # Nothing runs on a card that is gone, and it was told already.
        return
    torch_device = find_torch_device(segment.export.device)
    try:
        if torch_device is not None:
            import_torch().cuda.synchronize(torch_device)
        else:
            segment.context.synchronize()
    except (CudaError, RuntimeError) as error:
        # What failed runs no more either.
        _log.warning("work on %s failed: %s", segment.export.device, error)
