"""What machine this is."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

from gpu_checks.bench import MIB, Bench
from gpu_checks.table import Row, Verdict
from kvd.cuda import pid_namespace


def check(bench: Bench) -> Iterator[Row]:
    """The card, the driver, the namespace."""
    device = bench.device
    free_nbytes, total_nbytes = bench.context.memory()
    major, minor = bench.driver.cuda_version
    for what, found in {
        "card": f"{device.name}, compute capability {'.'.join(map(str, device.compute_capability))}",
        "uuid": device.uuid,
        "memory": f"{total_nbytes // MIB} MiB, {free_nbytes // MIB} MiB free, ECC {'on' if device.has_ecc else 'off'}",
        "pci": f"{device.pci_address}{', drives a display' if device.drives_display else ''}",
        "driver": f"{_driver_version()}, CUDA up to {major}.{minor}, {bench.driver.library.path}",
        "cards": ", ".join(map(str, bench.driver.devices)),
        "chosen": bench.reason,
        "pid namespace": pid_namespace(),
        "machine": f"{platform.release()}, Python {platform.python_version()}",
    }.items():
        yield Row("facts", what, Verdict.TOLD, found)


def _driver_version() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].removeprefix("NVRM version: ").strip()
    except OSError:
        return "no NVIDIA kernel module"
