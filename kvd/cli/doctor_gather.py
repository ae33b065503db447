"""Gathers what `kvd doctor` looks at. Nothing here judges or raises: what cannot be found out stays unknown."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import pwd
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import kvd_client
from kvd import __version__
from kvd.cli.doctor_facts import UNLIMITED, Card, DaemonFacts, Facts, TorchBuild
from kvd.cli.options import loaded
from kvd.config.keys import KEYS
from kvd.config.paths import find_runtime_dir
from kvd.cuda import Driver, pid_namespace, unproven
from kvd.errors import (
    ConnectionFailed,
    DaemonRestarted,
    KvdError,
    PermissionRefused,
    RequestTimeout,
    StateError,
    TierUnavailable,
)

TIMEOUT_S = 5.0
TORCH_TIMEOUT_S = 120.0
_ASK_TORCH = "import json, torch; print(json.dumps([torch.version.cuda or '', torch.cuda.get_arch_list()]))"


def gather(runtime_dir: str | None, config_path: str | None, *, verify: bool, root: Path = Path("/")) -> Facts:
    """Everything, as this process sees it. `root` is where /proc, /sys and /etc are."""
    values: dict[str, Any] = {"uid": os.geteuid(), "version": __version__, "pid_namespace": pid_namespace()}
    values |= _daemon(runtime_dir, verify=verify, proc=root / "proc")
    values |= kernel(root)
    values |= _shm(root / "dev/shm")
    values |= _cards(root)
    values |= _configured(config_path)
    with contextlib.suppress(OSError, ValueError):
        values["max_descriptors"] = _limit(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        values["memlock_nbytes"] = _limit(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    values["torch"] = _torch(ask=bool(values.get("cards")))
    daemon: DaemonFacts | None = values.get("daemon")
    uid = daemon.uid if daemon is not None and daemon.uid is not None else values["uid"]
    values |= login(root, uid)
    return Facts(**values)


def kernel(root: Path) -> dict[str, Any]:
    """What the kernel is set to."""
    found: dict[str, Any] = {}
    for name, path in (
        ("max_map_count", "proc/sys/vm/max_map_count"),
        ("overcommit_memory", "proc/sys/vm/overcommit_memory"),
    ):
        with contextlib.suppress(OSError, ValueError):
            found[name] = int((root / path).read_text())
    with contextlib.suppress(OSError):
        chosen = re.search(r"\[(\w+)\]", (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text())
        found["transparent_huge_pages"] = chosen[1] if chosen else ""
    with contextlib.suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            key, _, number = line.partition(":")
            if key == "HugePages_Total":
                found["num_huge_pages"] = int(number)
            elif key == "HugePages_Free":
                found["num_huge_pages_free"] = int(number)
    with contextlib.suppress(OSError):
        # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  ..."
        text = (root / "proc/driver/nvidia/version").read_text()
        found["has_nvidia_module"] = True
        if version := re.search(r"\b(\d{3})\.\d+", text):
            found["driver_branch"] = int(version[1])
    return found


def login(root: Path, uid: int) -> dict[str, Any]:
    """What systemd-logind does when a user's last session ends."""
    if not (root / "run/systemd/system").is_dir():
        return {}
    found: dict[str, Any] = {"has_systemd": True, "remove_ipc": True}
    files = [root / "etc/systemd/logind.conf", *sorted((root / "etc/systemd/logind.conf.d").glob("*.conf"))]
    for path in files:
        with contextlib.suppress(OSError):
            for setting in re.findall(r"(?mi)^\s*RemoveIPC\s*=\s*(\S+)", path.read_text()):
                found["remove_ipc"] = setting.lower() in {"yes", "true", "1", "on"}
    with contextlib.suppress(KeyError):
        found["lingers"] = (root / "var/lib/systemd/linger" / pwd.getpwuid(uid).pw_name).exists()
    return found


def _limit(number: int) -> int:
    return UNLIMITED if number == resource.RLIM_INFINITY else number


def _daemon(runtime_dir: str | None, *, verify: bool, proc: Path) -> dict[str, Any]:
    try:
        folder = str(find_runtime_dir(runtime_dir))
        with kvd_client.connect(runtime_dir, label="kvd doctor", timeout_s=TIMEOUT_S) as client:
            return {"runtime_dir": folder, "daemon": _daemon_facts(client, verify=verify, proc=proc)}
    except PermissionRefused as error:
        return {"runtime_dir_problem": str(error)}
    except (ConnectionFailed, DaemonRestarted, RequestTimeout) as error:
        return {"daemon_problem": str(error)}
    except KvdError as error:
        return {"daemon_problem": f"it cannot be looked for: {error}"}


def _daemon_facts(client: kvd_client.Client, *, verify: bool, proc: Path) -> DaemonFacts:
    snapshot = client.status()
    values: dict[str, Any] = {"snapshot": snapshot}
    own = proc / str(snapshot.pid)
    with contextlib.suppress(OSError):
        values["uid"] = own.stat().st_uid
        values["pid_namespace"] = str((own / "ns/pid").readlink())
    with contextlib.suppress(OSError, ValueError):
        limits = (own / "limits").read_text()
        values["memlock_nbytes"] = _of_proc(limits, "Max locked memory")
        values["max_descriptors"] = _of_proc(limits, "Max open files")
    try:
        client.check()
        values["integrity_was_checked"] = True
        if verify:
            outcome = client.verify()
            values["num_verified"] = outcome.num_verified
            values["num_unchecked"] = outcome.num_unchecked
            values["num_corrupt"] = len(outcome.corrupt)
    except StateError as error:
        values["integrity"] = str(error)
    except PermissionRefused:
        pass
    return DaemonFacts(**values)


def _of_proc(limits: str, name: str) -> int | None:
    found = re.search(rf"^{name} +(\S+)", limits, re.MULTILINE)
    if found is None:
        return None
    return UNLIMITED if found[1] == "unlimited" else int(found[1])


def _shm(folder: Path) -> dict[str, Any]:
    if not os.access(folder, os.W_OK | os.X_OK):
        return {"shm_problem": f"{folder} is not there, or not writable"}
    with contextlib.suppress(OSError):
        seen = os.statvfs(folder)
        return {"shm_free_nbytes": seen.f_bavail * seen.f_frsize}
    return {}


def _cards(root: Path) -> dict[str, Any]:
    try:
        driver = Driver()
    except KvdError as error:
        return {"driver_problem": str(error)}
    return {
        "has_nvidia_module": True,
        "cards": tuple(
            Card(
                name=device.name,
                uuid=device.uuid,
                total_nbytes=device.total_nbytes,
                compute_capability=device.compute_capability,
                drives_display=device.drives_display,
                unproven=unproven(device, proc=root / "proc") or "",
            )
            for device in driver.devices
        ),
    }


def _torch(*, ask: bool) -> TorchBuild | None:
    if importlib.util.find_spec("torch") is None:
        return None
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    if not ask:
        return TorchBuild(version=version)
    # In a process of its own: it takes seconds, and starts CUDA.
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, timeout=TORCH_TIMEOUT_S, check=True, text=True
        )
        cuda, arches = json.loads(done.stdout.splitlines()[-1])
        return TorchBuild(version=version, cuda=cuda, arches=tuple(arches))
    return TorchBuild(version=version)


def _configured(config_path: str | None) -> dict[str, Any]:
    from kvd.tiers.embedded_config import find_server

    found: dict[str, Any] = {}
    try:
        config = loaded(config_path, dict.fromkeys((name.replace(".", "__") for name in KEYS), None))[0].config
        found["redis_url"] = KEYS["tiers.redis.url"].format(config.tiers.redis.url)
    except KvdError as error:
        found["config_problem"] = str(error)
    try:
        found["redis_server"] = str(find_server())
    except TierUnavailable as error:
        found["redis_server_problem"] = str(error)
    return found
