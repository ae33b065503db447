"""The daemon's objects: put together in the order in which they need each other, taken apart in the reverse one."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvd import __version__
from kvd.build.homes import BuiltHomes, build_homes
from kvd.build.pool_rules import pool_rules
from kvd.build.sizes import Sizes, session_capacity
from kvd.build.tiers import LowerTiers, build_tiers
from kvd.config.schema import Config
from kvd.errors import ConfigError, RuntimeFolderError
from kvd.memory import ControlPage, available_memory_nbytes
from kvd.metrics import parse_address
from kvd.metrics.exporter import Exporter
from kvd.mover import Mover
from kvd.polling import readable
from kvd.pool import Pools
from kvd.protocol.control_page import DaemonState
from kvd.server.endpoints import SocketAccess
from kvd.server.limits import Limits
from kvd.server.server import Server
from kvd.service import Service, ServiceSettings
from kvd.service.pin_files import PinFiles
from kvd.service.settings import TierSettings
from kvd.tiers.stack import Stack

HEARTBEAT_S = 0.5
"""How long the drain of a stop goes without one."""
COUNTERS_EVERY_S = 1.0
"""The control page's counters are summed over all namespaces, which may be thousands: not at every heartbeat."""


@dataclass(frozen=True, slots=True)
class Assembly:
    """What the daemon's life is about. Everything is closed by the `ExitStack` given to `assemble`."""

    server: Server
    service: Service
    control_page: ControlPage
    sizes: Sizes
    devices: Mapping[str, str]
    """Those in use, by the words that pool rules have for them."""


def assemble(
    config: Config,
    access: SocketAccess,
    closing: contextlib.ExitStack,
    *,
    on_heartbeat: Callable[[], None] = lambda: None,
    on_used: Callable[[int], None] = lambda _nbytes: None,
) -> Assembly:
    """Makes the first segment, the control page and the sockets; nobody is served before `Assembly.server` runs.

    `on_used` is told every `COUNTERS_EVERY_S` how many bytes the pools have.

    Raises `OutOfMemory`, `RuntimeFolderError` and other `KvdError`s; what was made by then is on `closing`.
    """
    available_nbytes = available_memory_nbytes()
    memory_ready, mover_ready = _eventfd(closing), _eventfd(closing)
    built = build_homes(
        config.memory, config.pools, available_nbytes, closing, on_ready=lambda: os.eventfd_write(memory_ready, 1)
    )
    sizes = built.main
    tiers = build_tiers(
        config.tiers,
        # What is left of host memory is what the pools there leave; a block may be as large as any pool's segment.
        Sizes(built.host.budget_nbytes, built.max_segment_nbytes),
        runtime_dir=Path(config.runtime_dir),
        available_nbytes=available_nbytes,
        environ=os.environ,
    )
    mover = _mover(tiers, mover_ready, closing, has_card=built.has_card)

    max_sessions, warnings = _max_sessions(config, built.host, has_tiers=mover is not None)
    # Random, so that no two daemons on this machine ever share one, restored snapshots and clocks set back included.
    epoch = secrets.randbits(62) + 1
    control_page = closing.enter_context(ControlPage(epoch=epoch))
    pin_files, pin_warnings = _pin_files(config, closing)
    service = Service(
        pools=_pools(config, built),
        homes=[home for home, _ in built.homes],
        mover=mover,
        pin_files=pin_files,
        epoch=epoch,
        settings=ServiceSettings(
            isolation=config.access.isolation,
            # Whoever may connect is a member of that group, or root, or the daemon's user; all share one tenant.
            shared_gid=os.getegid() if access.gid is None else access.gid,
            default_wait_s=config.waits.default_s,
            max_wait_s=config.waits.max_s,
            checksums=config.memory.checksums,
            idle_release_s=config.memory.idle_release_s,
            pinned_share=config.limits.pinned,
            uid_quota_nbytes=config.limits.uid_nbytes or None,
            tiers=_tier_settings(config),
            pool_rules=pool_rules(config, built.devices),
            warnings=warnings + built.warnings + tiers.warnings + pin_warnings,
        ),
        version=__version__,
        pid=os.getpid(),
        runtime_dir=config.runtime_dir,
    )
    closing.callback(service.close)
    if mover is not None:
        # Before the segments go: a copy that runs reads or writes them.
        closing.callback(mover.close)
        mover.start()

    # Every session maps the same page: behind walls it must not tell what goes on in the other rooms.
    is_public = config.access.isolation != "uid"
    exporter, metrics_warning = _exporter(config, access, closing)
    if metrics_warning:
        service.warn(metrics_warning)
    counters = service.control_counters()
    counted_at_s = time.monotonic()

    def heartbeat() -> None:
        nonlocal counters, counted_at_s
        if time.monotonic() - counted_at_s >= COUNTERS_EVERY_S:
            counters, counted_at_s = service.control_counters(), time.monotonic()
            on_used(counters["used_nbytes"])
        control_page.write(DaemonState.SERVING, counters if is_public else None)
        if exporter is not None and exporter.is_wanted:
            exporter.offer(service.snapshot())
        on_heartbeat()

    def wait_for_mover(seconds: float) -> None:
        control_page.write(DaemonState.STOPPING, counters if is_public else None)
        on_heartbeat()
        if readable(mover_ready, bound_s=min(seconds, HEARTBEAT_S)):
            on_mover_ready()

    def on_mover_ready() -> None:
        os.eventfd_read(mover_ready)
        service.on_mover_done()

    if mover is not None:
        # After the server has closed: what its clients held is idle then.
        closing.callback(service.drain, wait_for_mover)
    server = Server(
        service,
        folder=Path(config.runtime_dir),
        access=access,
        control_page_fd=control_page.read_only_fd,
        epoch=epoch,
        version=__version__,
        limits=Limits(
            credits=config.limits.credits,
            sessions=max_sessions,
            uid_sessions=config.limits.uid_sessions or None,
            uid_requests=config.limits.uid_requests or None,
        ),
        on_heartbeat=heartbeat,
    )
    closing.callback(server.close)

    def on_memory_ready() -> None:
        os.eventfd_read(memory_ready)
        service.on_memory_ready()

    server.watch_descriptor(memory_ready, on_memory_ready)
    server.watch_descriptor(mover_ready, on_mover_ready)
    return Assembly(server, service, control_page, sizes, built.devices)


def _eventfd(closing: contextlib.ExitStack) -> int:
    descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    closing.callback(os.close, descriptor)
    return descriptor


def _pools(config: Config, built: BuiltHomes) -> Pools:
    (main, _), *others = built.homes
    pools = Pools(
        budget_nbytes=built.main.budget_nbytes,
        segment_nbytes=main.stock.segment_nbytes,
        session_quota_nbytes=config.limits.session_nbytes or None,
        uid_quota_nbytes=config.limits.uid_nbytes or None,
        device=main.device,
    )
    for home, sizes in others:
        pools.add_device(home.device, budget_nbytes=sizes.budget_nbytes, segment_nbytes=home.stock.segment_nbytes)
    return pools


def _mover(tiers: LowerTiers, ready: int, closing: contextlib.ExitStack, *, has_card: bool) -> Mover | None:
    """Not started, and nothing to copy for yet; None without tiers and without pools to copy between."""
    stack = tiers.stack
    if stack is None:
        if not has_card:
            return None
        stack = Stack([])
    closing.callback(stack.close)
    return Mover(stack, on_ready=lambda: os.eventfd_write(ready, 1))


def _pin_files(config: Config, closing: contextlib.ExitStack) -> tuple[PinFiles | None, tuple[str, ...]]:
    """Where pins outlive the daemon: the service manager's state folder, else the embedded server's; None without."""
    folder = os.environ.get("STATE_DIRECTORY", "").split(":")[0] or config.tiers.redis.persistence
    if not folder:
        return None, ()
    try:
        files = PinFiles(Path(folder) / "pins")
    except RuntimeFolderError as error:
        return None, (f"pins do not outlive the daemon: {error}",)
    closing.callback(files.close)
    return files, ()


def _exporter(config: Config, access: SocketAccess, closing: contextlib.ExitStack) -> tuple[Exporter | None, str]:
    """Where metrics are served, if anywhere; an address that cannot be had is a warning, and no reason not to serve.

    Raises `ConfigError` for one that is none, or a library that is missing.
    """
    if not config.metrics.listen:
        return None, ""
    address = parse_address(config.metrics.listen)
    mode, gid = access.mode, access.gid
    if config.access.isolation == "uid":
        # Totals over all tenants tell each of them about the others.
        mode, gid = 0o600, None
        if address.path is None:
            raise ConfigError(
                "metrics.listen names a port, which every user of this machine can read; with access.isolation = uid "
                "use unix:///PATH, which then is the daemon's user's and root's alone"
            )
    try:
        exporter = Exporter(address, mode=mode, gid=gid)
    except RuntimeFolderError as error:
        return None, str(error)
    closing.callback(exporter.close)
    return exporter, ""


def _tier_settings(config: Config) -> TierSettings:
    tiers = config.tiers
    return TierSettings(
        low_watermark=tiers.low_watermark,
        high_watermark=tiers.high_watermark,
        drain_s=tiers.drain_s,
    )


def _max_sessions(config: Config, sizes: Sizes, *, has_tiers: bool) -> tuple[int, tuple[str, ...]]:
    """The configured number, or as many as there are descriptors for, with a warning."""
    max_descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    capacity = session_capacity(max_descriptors, sizes, has_tiers=has_tiers, host_tier_nbytes=config.tiers.host.budget)
    if config.limits.sessions <= capacity:
        return config.limits.sessions, ()
    return capacity, (
        f"{max_descriptors} file descriptors are enough for {capacity} sessions only, limits.sessions is "
        f"{config.limits.sessions}: raise LimitNOFILE",
    )
