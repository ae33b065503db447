"""The NVIDIA driver as kvd uses it, daemon and client alike: no CUDA toolkit, no torch, no kernel of our own.

`library` calls libcuda and maps its errors, `driver` lists the cards, `context` works on one, `export` is the message
by which processes share its memory. Importing this loads nothing of NVIDIA's; making a `Driver` does.
"""

from kvd.cuda.buffers import address_of
from kvd.cuda.context import HANDLE_NBYTES, SEGMENT_GRANULE_NBYTES, Context, Stream
from kvd.cuda.driver import Device, Driver
from kvd.cuda.export import DeviceExport, pid_namespace, unproven

__all__ = [
    "HANDLE_NBYTES",
    "SEGMENT_GRANULE_NBYTES",
    "Context",
    "Device",
    "DeviceExport",
    "Driver",
    "Stream",
    "address_of",
    "pid_namespace",
    "unproven",
]
