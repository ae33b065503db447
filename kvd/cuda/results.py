"""What the driver's result codes mean to kvd. Numbers from cuda.h; they never change."""

from __future__ import annotations

from kvd.errors import CudaDeviceLost, CudaError, CudaMisuse, CudaOutOfMemory, CudaUnavailable

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
INVALID_CONTEXT = 201

_UNAVAILABLE = frozenset(
    {
        NOT_INITIALIZED,
        4,  # DEINITIALIZED: the process is ending
        34,  # STUB_LIBRARY
        36,  # CALL_REQUIRES_NEWER_DRIVER
        46,  # DEVICE_UNAVAILABLE: exclusive mode, and somebody has it
        100,  # NO_DEVICE
        102,  # DEVICE_NOT_LICENSED
        802,  # SYSTEM_NOT_READY
        803,  # SYSTEM_DRIVER_MISMATCH
        804,  # COMPAT_NOT_SUPPORTED_ON_DEVICE
        805,  # MPS_CONNECTION_FAILED
        806,  # MPS_RPC_FAILURE
        807,  # MPS_SERVER_NOT_READY
        808,  # MPS_MAX_CLIENTS_REACHED
        809,  # MPS_MAX_CONNECTIONS_REACHED
    }
)
_LOST = frozenset(
    {
        214,  # ECC_UNCORRECTABLE
        220,  # NVLINK_UNCORRECTABLE
        700,  # ILLEGAL_ADDRESS
        702,  # LAUNCH_TIMEOUT
        709,  # CONTEXT_IS_DESTROYED
        710,  # ASSERT
        714,  # HARDWARE_STACK_ERROR
        715,  # ILLEGAL_INSTRUCTION
        716,  # MISALIGNED_ADDRESS
        717,  # INVALID_ADDRESS_SPACE
        718,  # INVALID_PC
        719,  # LAUNCH_FAILED
    }
)
"""Each says of itself in cuda.h that the process must be ended to go on."""
_MISUSE = frozenset(
    {
        INVALID_VALUE,
        101,  # INVALID_DEVICE
        INVALID_CONTEXT,
        400,  # INVALID_HANDLE
        712,  # HOST_MEMORY_ALREADY_REGISTERED
        713,  # HOST_MEMORY_NOT_REGISTERED
    }
)


def error_class(result: int) -> type[CudaError]:
    """The class of a code other than 0; one that is not listed is a plain `CudaError`."""
    if result == OUT_OF_MEMORY:
        return CudaOutOfMemory
    for codes, kind in ((_UNAVAILABLE, CudaUnavailable), (_LOST, CudaDeviceLost), (_MISUSE, CudaMisuse)):
        if result in codes:
            return kind
    return CudaError
