"""One segment of device memory: allocated, zeroed and exported before anybody hears of it."""

from __future__ import annotations

import logging
import os
from types import TracebackType
from typing import Self

from kvd.cuda import SEGMENT_GRANULE_NBYTES, Context, DeviceExport, address_of, pid_namespace
from kvd.errors import CudaDeviceLost, CudaError, CudaMisuse, InvalidLayout

_log = logging.getLogger(__name__)


class DeviceSegment:
    """`nbytes` on a card at `address`, with the `handle` by which other processes open it.

    Every byte is zero when the constructor returns: what another tenant left there is gone. A context manager;
    `close()` is idempotent. It must not be closed while another process maps it: nobody can ask the driver who does, so
    the caller counts. Used from any thread.
    """

    def __init__(self, context: Context, nbytes: int) -> None:
        """Raises `InvalidLayout` for a size that is not whole 2 MiB, `CudaError`; nothing is left behind then."""
        if nbytes <= 0 or nbytes % SEGMENT_GRANULE_NBYTES:
            raise InvalidLayout(
                f"a device segment of {nbytes} bytes is not a whole number of {SEGMENT_GRANULE_NBYTES >> 20} MiB; "
                f"smaller allocations would share one handle"
            )
        self.nbytes = nbytes
        self.context = context
        self.address = context.allocate(nbytes)
        try:
            context.fill(self.address, nbytes)
            self.handle = context.export(self.address)
        except BaseException:
            self.close()
            raise

    def export(self, epoch: int) -> DeviceExport:
        """What another process needs to open it."""
        return DeviceExport(
            device=self.context.device_uuid,
            handle=self.handle,
            nbytes=self.nbytes,
            pid_namespace=pid_namespace(),
            pid=os.getpid(),
            epoch=epoch,
        )

    def place(self, offset: int, nbytes: int) -> int:
        """The address of a part. Raises `CudaMisuse` when it does not lie in the segment."""
        if not self.address:
            raise CudaMisuse("the device segment was closed")
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise CudaMisuse(f"{nbytes} bytes at {offset} are not within a segment of {self.nbytes}")
        return self.address + offset

    def write(self, offset: int, source: memoryview | bytearray) -> None:
        """Copies bytes in; they are there for every process when it returns. `CopyEngine` is faster for many."""
        nbytes = len(source)
        self.context.upload(self.place(offset, nbytes), address_of(source), nbytes)

    def read(self, offset: int, target: memoryview | bytearray) -> None:
        """Copies bytes out."""
        nbytes = len(target)
        self.context.download(address_of(target), self.place(offset, nbytes), nbytes)

    def close(self) -> None:
        """Gives the memory back. Never raises: memory that the driver does not take back is lost until the end."""
        address, self.address = self.address, 0
        if not address or self.context.closed:
            return
        try:
            self.context.free(address)
        except CudaDeviceLost:
            return
        except CudaError as error:
            _log.error("a device segment of %d MiB was not given back: %s", self.nbytes >> 20, error)

    def let_go(self) -> None:
        """Leaves the memory to the end of the process: who still maps it keeps its bytes. Idempotent; never raises."""
        self.address = 0

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return not self.address

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
