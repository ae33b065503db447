"""One card's primary context: memory, copies, streams, page-locking, handles for other processes.

Addresses are plain integers. What a method does not wait for it says.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from kvd.cuda.library import IpcHandle, Library
from kvd.cuda.results import INVALID_VALUE
from kvd.errors import CudaDeviceLost, CudaMisuse

HANDLE_NBYTES = 64
SEGMENT_GRANULE_NBYTES = 2 << 20
"""Smaller allocations share one of this size, and would be exported together."""

_OPEN_LAZY_PEER_ACCESS = 1
_REGISTER_PORTABLE = 1
_STREAM_NON_BLOCKING = 1
_POINTER_HOST_ADDRESS = 4


class Context:
    """Used from any thread. Each call makes the context current for itself and restores what the thread had.

    After a `CudaDeviceLost` every later call raises it again without troubling the driver, and `lost` tells why.
    """

    def __init__(self, library: Library, ordinal: int, device_uuid: str) -> None:
        """Retains the primary context. Raises `CudaError`."""
        self.device_uuid = device_uuid
        self.lost: str | None = None
        self._library = library
        self._device = ctypes.c_int()
        self._handle = ctypes.c_void_p()
        library.call("cuDeviceGet", ctypes.byref(self._device), ordinal)
        library.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._handle), self._device)
        self._closed = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes it current for this thread, and what was current before it afterwards.

        A thread that makes many calls holds it around all of them, which makes each one cheaper.
        """
        if self.lost is not None:
            raise CudaDeviceLost(self.lost)
        if self._closed:
            raise CudaMisuse("the context of this card was closed")
        try:
            before = ctypes.c_void_p()
            self._library.call("cuCtxGetCurrent", ctypes.byref(before))
            if before.value == self._handle.value:
                yield
                return
            self._library.call("cuCtxSetCurrent", self._handle)
            try:
                yield
            finally:
                # Restored, not left: torch in this thread takes the current context's card for its own.
                self._library.call("cuCtxSetCurrent", before)
        except CudaDeviceLost as error:
            self.lost = str(error)
            raise

    def call(self, name: str, *arguments: object) -> None:
        """One driver call in this context. Raises `CudaError`."""
        with self.active():
            self._library.call(name, *arguments)

    # Memory.

    def allocate(self, nbytes: int) -> int:
        """Device memory with whatever is in it. Raises `CudaOutOfMemory`."""
        address = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(address), nbytes)
        return address.value

    def free(self, address: int) -> None:
        """Gives back what `allocate` gave. Nobody else may have it mapped still: that is undefined."""
        self.call("cuMemFree_v2", address)

    def memory(self) -> tuple[int, int]:
        """Bytes free and bytes in all, of the whole card."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def fill(self, address: int, nbytes: int, value: int = 0) -> None:
        """Sets every byte; done when it returns."""
        with self.active():
            self._library.call("cuMemsetD8_v2", address, value, nbytes)
            # A memset returns before it is done.
            self._library.call("cuStreamSynchronize", None)

    def upload(self, address: int, source: int, nbytes: int) -> None:
        """Host to device; done when it returns, so that another process may be told of it."""
        with self.active():
            self._library.call("cuMemcpyHtoD_v2", address, source, nbytes)
            # For memory that is not page-locked the call returns when the bytes are staged, not when they are there.
            self._library.call("cuStreamSynchronize", None)

    def download(self, target: int, address: int, nbytes: int) -> None:
        """Device to host; done when it returns."""
        self.call("cuMemcpyDtoH_v2", target, address, nbytes)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Within the device; done when it returns."""
        with self.active():
            self._library.call("cuMemcpyDtoD_v2", target, source, nbytes)
            # Copies within a device do not wait for themselves.
            self._library.call("cuStreamSynchronize", None)

    def host_address(self, address: int) -> int | None:
        """Where the CPU can touch this memory, as managed or unified memory allows; None for plain device memory."""
        found, name = ctypes.c_void_p(), "cuPointerGetAttribute"
        with self.active():
            result = self._library.try_call(name, ctypes.byref(found), _POINTER_HOST_ADDRESS, address)
            if result not in {0, INVALID_VALUE}:
                raise self._library.error(name, result)
        return None if result else found.value

    # Handles for other processes.

    def export(self, address: int) -> bytes:
        """64 bytes by which another process opens the whole allocation, whichever address in it is given."""
        handle = IpcHandle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle.reserved)

    def open_handle(self, handle: bytes) -> int:
        """Maps another process's allocation; the address of its base. Raises `CudaError`."""
        if len(handle) != HANDLE_NBYTES:
            raise CudaMisuse(f"a handle of {len(handle)} bytes is none; they have {HANDLE_NBYTES}")
        address = ctypes.c_uint64()
        self.call(
            "cuIpcOpenMemHandle_v2", ctypes.byref(address), IpcHandle.from_buffer_copy(handle), _OPEN_LAZY_PEER_ACCESS
        )
        return address.value

    def close_handle(self, address: int) -> None:
        """Unmaps it. Nothing may use the memory any more, on any stream."""
        self.call("cuIpcCloseMemHandle", address)

    # Page-locked host memory and streams.

    def register(self, address: int, nbytes: int) -> None:
        """Page-locks host memory for every context, so that copies run by themselves and at full speed."""
        self.call("cuMemHostRegister_v2", address, nbytes, _REGISTER_PORTABLE)

    def unregister(self, address: int) -> None:
        """Undoes `register` of the range that begins here."""
        self.call("cuMemHostUnregister", address)

    def new_stream(self) -> Stream:
        """A queue of copies beside all others. Close it."""
        return Stream(self)

    def synchronize(self) -> None:
        """Waits for the default stream, and so for every stream that is not `new_stream`'s."""
        self.call("cuStreamSynchronize", None)

    def close(self) -> None:
        """Releases the context; with the process's last release all its memory on the card goes. Idempotent.

        Raises `CudaError`, but not for a card that is lost.
        """
        if self._closed:
            return
        self._closed = True
        result = self._library.try_call("cuDevicePrimaryCtxRelease", self._device)
        if result and self.lost is None:
            raise self._library.error("cuDevicePrimaryCtxRelease", result)

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stream:
    """Copies that run in their order, beside everything else. Done is only what `synchronize` waited for.

    Host memory that is not page-locked may be used, but then a call waits for its own copy.
    """

    def __init__(self, context: Context) -> None:
        self.context = context
        self._handle = ctypes.c_void_p()
        context.call("cuStreamCreate", ctypes.byref(self._handle), _STREAM_NON_BLOCKING)

    def upload(self, address: int, source: int, nbytes: int) -> None:
        """Host to device; `source` stays as it is until `synchronize`."""
        self.context.call("cuMemcpyHtoDAsync_v2", address, source, nbytes, self._handle)

    def download(self, target: int, address: int, nbytes: int) -> None:
        """Device to host; `target` means nothing until `synchronize`."""
        self.context.call("cuMemcpyDtoHAsync_v2", target, address, nbytes, self._handle)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Within the device."""
        self.context.call("cuMemcpyDtoDAsync_v2", target, source, nbytes, self._handle)

    def synchronize(self) -> None:
        """Waits for everything given to this stream so far. Raises the error of any of it."""
        self.context.call("cuStreamSynchronize", self._handle)

    def close(self) -> None:
        """Idempotent. What was not waited for may still run."""
        if self._handle.value is None:
            return
        handle, self._handle = self._handle, ctypes.c_void_p()
        if self.context.lost is None and not self.context.closed:
            self.context.call("cuStreamDestroy_v2", handle)
