"""Where a caller computes, in torch's words, and whether the pool's memory is there.

What is elsewhere is copied, through host memory: a process that computes on one card gets at another card's pool by way
of the host pool beside that one, whether or not it sees both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.errors import EngineUnsupported, InvalidRequest
from kvd_client.memory import device_imports
from kvd_client.memory.device_views import find_torch_device
from kvd_client.memory.tensors import CPU, import_torch

if TYPE_CHECKING:
    import torch


def device_name(device: torch.device | str | None) -> str:
    """Its name as torch counts in this process, "cpu" or "cuda:N"; "" for None.

    Raises `EngineUnsupported` for other kinds of device, `InvalidRequest` for what is none.
    """
    if device is None:
        return ""
    module = import_torch()
    try:
        named = module.device(device)
    except (RuntimeError, TypeError) as error:
        raise InvalidRequest(f"computes_on must be a torch device, not {device!r}") from error
    if named.type == CPU:
        return CPU
    if named.type != "cuda":
        raise EngineUnsupported(f"kvd shares KV with what computes on the CPU or on CUDA cards, not on {named}")
    return f"cuda:{module.cuda.current_device() if named.index is None else named.index}"


def shown_on(device_uuid: str) -> str | None:
    """Where torch in this process shows memory of that card, without a copy: "cuda:N", "cpu", None for nowhere.

    Raises `CudaUnavailable` where there is no driver.
    """
    device = device_imports.shared_driver().find(device_uuid)
    return find_torch_device(device_uuid) or (CPU if device is not None and device.is_cpu_touchable else None)


def is_elsewhere(computes_on: str, shown: str | None) -> bool:
    """Whether who computes there (a `device_name`; "" for wherever the pool is) cannot use memory `shown` there."""
    return shown is None or computes_on not in {"", shown}
