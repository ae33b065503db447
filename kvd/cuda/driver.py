"""Which cards this process sees, and what they are."""

from __future__ import annotations

import ctypes
import uuid
from dataclasses import dataclass
from pathlib import Path

from kvd.cuda.context import Context
from kvd.cuda.library import Library, Uuid
from kvd.errors import CudaUnavailable

_KERNEL_EXEC_TIMEOUT = 17
_INTEGRATED = 18
_COMPUTE_MODE = 20
_ECC_ENABLED = 32
_PCI_BUS_ID = 33
_PCI_DEVICE_ID = 34
_PCI_DOMAIN_ID = 50
_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76
_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST = 101
SHARED_COMPUTE_MODE = 0
"""The only compute mode in which several processes may use a card at once."""


@dataclass(frozen=True, slots=True)
class Device:
    """One card, as the driver describes it."""

    ordinal: int
    """Its number in this process; another process may count otherwise (CUDA_VISIBLE_DEVICES)."""
    uuid: str
    """`GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx`, as nvidia-smi prints it: the same in every process."""
    name: str
    total_nbytes: int
    compute_capability: tuple[int, int]
    pci_address: str
    """`0000:65:00.0`."""
    drives_display: bool
    is_integrated: bool
    has_ecc: bool
    compute_mode: int
    is_cpu_touchable: bool
    """Whether the CPU can touch the card's memory without migration, as with coherent links; then perhaps this too."""

    def __str__(self) -> str:
        return f"cuda:{self.ordinal} ({self.name}, {self.total_nbytes >> 20} MiB, {self.uuid})"


class Driver:
    """The NVIDIA driver, started in this process. Safe to use from several threads; useless in a forked child."""

    def __init__(self, path: str | None = None) -> None:
        """Raises `CudaUnavailable`: no driver, or no card that this process may see. See `Library` for `path`."""
        self.library = Library(path)
        version, count = ctypes.c_int(), ctypes.c_int()
        self.library.call("cuDriverGetVersion", ctypes.byref(version))
        self.cuda_version = (version.value // 1000, version.value % 1000 // 10)
        """The newest CUDA that the driver serves; the driver's own number is not to be had here."""
        self.library.call("cuDeviceGetCount", ctypes.byref(count))
        self.devices = tuple(self._describe(ordinal) for ordinal in range(count.value))
        """By ordinal."""
        if not self.devices:
            raise CudaUnavailable("the NVIDIA driver shows no card to this process; see CUDA_VISIBLE_DEVICES")

    def find(self, device_uuid: str) -> Device | None:
        """The card of that UUID, None when this process does not see it."""
        return next((device for device in self.devices if device.uuid == device_uuid), None)

    def open(self, device: Device) -> Context:
        """Its primary context, the one that torch uses too. Close it. Raises `CudaError`."""
        return Context(self.library, device.ordinal, device.uuid)

    def _describe(self, ordinal: int) -> Device:
        call, number = self.library.call, ctypes.c_int()
        name, total, raw_uuid = ctypes.create_string_buffer(256), ctypes.c_size_t(), Uuid()
        call("cuDeviceGet", ctypes.byref(number), ordinal)
        device = number.value
        call("cuDeviceGetName", name, len(name), device)
        call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
        call("cuDeviceGetUuid", ctypes.byref(raw_uuid), device)

        def attribute(which: int) -> int:
            value = ctypes.c_int()
            call("cuDeviceGetAttribute", ctypes.byref(value), which, device)
            return value.value

        pci_address = f"{attribute(_PCI_DOMAIN_ID):04x}:{attribute(_PCI_BUS_ID):02x}:{attribute(_PCI_DEVICE_ID):02x}.0"
        return Device(
            ordinal=ordinal,
            uuid=f"GPU-{uuid.UUID(bytes=bytes(raw_uuid.bytes))}",
            name=name.value.decode(errors="replace"),
            total_nbytes=total.value,
            compute_capability=(attribute(_COMPUTE_CAPABILITY_MAJOR), attribute(_COMPUTE_CAPABILITY_MINOR)),
            pci_address=pci_address,
            # The driver limits the run time of kernels where a display server uses the card. A Wayland session may not
            # say so, but then a monitor is plugged in.
            drives_display=bool(attribute(_KERNEL_EXEC_TIMEOUT)) or has_monitor(pci_address),
            is_integrated=bool(attribute(_INTEGRATED)),
            has_ecc=bool(attribute(_ECC_ENABLED)),
            compute_mode=attribute(_COMPUTE_MODE),
            is_cpu_touchable=bool(attribute(_DIRECT_MANAGED_MEM_ACCESS_FROM_HOST)),
        )


def has_monitor(pci_address: str, devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether the kernel sees a monitor at one of the card's connectors (needs nvidia-drm's mode setting)."""
    for status in (devices / pci_address).glob("drm/card*/card*-*/status"):
        try:
            if status.read_text().strip() == "connected":
                return True
        except OSError:
            continue
    return False
