"""Which card the pools live on, and why: one choice, with a sentence for the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvd.cuda import Device, Driver, unproven
from kvd.cuda.driver import SHARED_COMPUTE_MODE
from kvd.errors import ConfigError, CudaUnavailable

CPU = "cpu"
AUTO = "auto"
_PREFIX = "cuda:"


@dataclass(frozen=True, slots=True)
class Choice:
    """`driver` and `device` are None for host memory."""

    driver: Driver | None
    device: Device | None
    reason: str
    """One sentence for the log and for status."""


def choose_device(wanted: str, open_driver: Callable[[], Driver] = Driver) -> Choice:
    """What "cpu", "auto", "cuda:0" or "cuda:GPU-xxxxxxxx-…" (or the beginning of a UUID) comes to on this machine.

    "auto" takes the card with the most memory that drives no display, and host memory where there is none. Raises
    `ConfigError` for another word, `CudaUnavailable` when a card that was named cannot be used.
    """
    if wanted == CPU:
        return Choice(None, None, "blocks live in host memory, as configured")
    if wanted == AUTO:
        return _choose_automatically(open_driver)
    if not wanted.startswith(_PREFIX) or len(wanted) == len(_PREFIX):
        raise ConfigError(f'a device is "cpu", "auto", "cuda:0" or "cuda:GPU-…", not {wanted!r}')
    name = wanted.removeprefix(_PREFIX)
    try:
        driver = open_driver()
    except CudaUnavailable as error:
        raise CudaUnavailable(
            f'device "{wanted}" was asked for, but {error}; "auto" would fall back to host memory',
            call=error.call,
            result=error.result,
        ) from error
    device = _named(name, driver)
    reason = _unusable(device)
    if reason is not None:
        raise CudaUnavailable(f'device "{wanted}" cannot be used: {reason}')
    return Choice(driver, device, f"blocks live on {device}, as configured")


def _choose_automatically(open_driver: Callable[[], Driver]) -> Choice:
    try:
        driver = open_driver()
    except CudaUnavailable as error:
        return Choice(None, None, f"blocks live in host memory: {error}")
    passed_over: list[str] = []
    fit: list[Device] = []
    for device in driver.devices:
        reason = "it drives a display" if device.drives_display else _unusable(device)
        if reason is None:
            fit.append(device)
        else:
            passed_over.append(f"cuda:{device.ordinal} {device.name} ({reason})")
    if not fit:
        return Choice(
            None, None, f"blocks live in host memory: {', '.join(passed_over)} is not taken unless device names it"
        )
    best = max(fit, key=lambda device: (device.total_nbytes, -device.ordinal))
    rest = "" if not passed_over else f"; passed over {', '.join(passed_over)}"
    return Choice(driver, best, f"blocks live on {best}, the most memory that drives no display{rest}")


def _named(name: str, driver: Driver) -> Device:
    if name.isdecimal():
        if int(name) < len(driver.devices):
            return driver.devices[int(name)]
    else:
        wanted = name.lower().removeprefix("gpu-")
        found = [device for device in driver.devices if device.uuid.removeprefix("GPU-").startswith(wanted)]
        if len(found) == 1:
            return found[0]
    raise CudaUnavailable(f'no card "cuda:{name}" here; there is {", ".join(map(str, driver.devices))}')


def _unusable(device: Device) -> str | None:
    if device.compute_mode != SHARED_COMPUTE_MODE:
        return "only one process may use it (compute mode; set it back with nvidia-smi -c DEFAULT)"
    return unproven(device)
