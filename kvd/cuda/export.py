"""How a segment of device memory is told to another process, and whether that process can open it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvd.cuda.driver import Device


class DeviceExport(msgspec.Struct, frozen=True):
    """One segment of device memory in a message. `handle` names its base; blocks lie at offsets from there."""

    device: str
    """UUID of the card, never an ordinal."""
    handle: bytes
    nbytes: int
    pid_namespace: str
    """Of the exporter: handles do not cross PID namespaces."""
    pid: int
    """Of the exporter, in its own namespace."""
    epoch: int
    """Of the daemon."""


def pid_namespace() -> str:
    """This process's, as "pid:[4026531836]"; "" where /proc is not mounted."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def unproven(device: Device, environ: Mapping[str, str] | None = None, proc: Path = Path("/proc")) -> str | None:
    """Why memory of this card is not shared between processes here until that was seen to work; None when it is.

    MIG slices, WSL2, MPS before Volta, and integrated GPUs.
    """
    environ = os.environ if environ is None else environ
    if " MIG " in f"{device.name} ":
        return f"{device.name} is a MIG slice, whose memory kvd does not share between processes yet"
    if device.is_integrated:
        return f"{device.name} is an integrated GPU, whose memory cannot be exported to other processes"
    try:
        release = (proc / "sys/kernel/osrelease").read_text()
    except OSError:
        release = ""
    if "microsoft" in release.lower():
        return "this is WSL2, where kvd does not share device memory between processes yet"
    pipes = environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # noqa: S108 - where the MPS daemon listens
    if device.compute_capability < (7, 0) and Path(pipes, "control").exists():
        return f"an MPS server runs in {pipes}, and before Volta its clients share one address space; stop it"
    return None
