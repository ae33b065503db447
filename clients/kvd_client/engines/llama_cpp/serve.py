"""Runs a llama-server with snapshots: process, proxy and slot keeper together, until one of them ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import ssl
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from aiohttp import web

from kvd.errors import EngineUnsupported, InvalidRequest
from kvd_client.engines.llama_cpp.arguments import Arguments, parse
from kvd_client.engines.llama_cpp.child import Child, find_server, private_folder
from kvd_client.engines.llama_cpp.identity import build_digest, options_digest, set_name, weights_digest
from kvd_client.engines.llama_cpp.keeper import Keeper
from kvd_client.engines.llama_cpp.proxy import Proxy
from kvd_client.engines.llama_cpp.slots import Slots
from kvd_client.engines.llama_cpp.store import Store

FAMILY = "llama-server/1"
LOOK_EVERY_S = 0.1
_log = logging.getLogger(__name__)


def serve(
    arguments: Sequence[str],
    *,
    binary: str | None = None,
    snapshot_dir: str | None = None,
    runtime_dir: str | None = None,
    environ: Mapping[str, str] | None = None,
    on_listening: Callable[[str], None] = lambda _url: None,
) -> int:
    """Blocks until the server has ended, by itself or after SIGTERM or SIGINT; its exit code, 0 after those signals.

    Raises `InvalidRequest` for arguments that cannot be right, `EngineUnsupported` without a llama-server.
    """
    parsed = parse(arguments, os.environ if environ is None else environ)
    command = find_server(binary)
    with private_folder(snapshot_dir) as folder:
        return asyncio.run(_serve(parsed, command, folder, runtime_dir, on_listening))


async def _serve(
    arguments: Arguments,
    command: Sequence[str],
    folder: Path,
    runtime_dir: str | None,
    on_listening: Callable[[str], None],
) -> int:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    socket_path = folder / "server.sock"
    save_folder = Path(arguments.slot_save_path) if arguments.slot_save_path else folder
    proxy = Proxy(socket_path, arguments)
    runner = web.AppRunner(proxy.app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
    await runner.setup()
    try:
        url = await _listen(runner, arguments)
        child = await Child.start(command, arguments.for_server, socket_path, f"{save_folder}/")
        on_listening(url)
        identifying = asyncio.create_task(_begin_keeping(proxy, arguments, child, save_folder, runtime_dir))
        ended, asked = asyncio.create_task(child.wait()), asyncio.create_task(stopped.wait())
        await asyncio.wait((ended, asked), return_when=asyncio.FIRST_COMPLETED)
        identifying.cancel()
        await asyncio.gather(identifying, return_exceptions=True)
        keeper = proxy.keeper
        if keeper is not None and stopped.is_set():
            await keeper.drain()
        code = await child.stop()
        asked.cancel()
        if keeper is not None:
            await asyncio.to_thread(keeper.close)
        return 0 if stopped.is_set() else code
    finally:
        await runner.cleanup()
        await proxy.close()


async def _listen(runner: web.AppRunner, arguments: Arguments) -> str:
    """Where clients connect."""
    tls = _tls(arguments)
    try:
        if arguments.host.endswith(".sock"):
            await web.UnixSite(runner, arguments.host, ssl_context=tls).start()
            return arguments.host
        await web.TCPSite(runner, arguments.host, arguments.port, ssl_context=tls).start()
    except OSError as error:
        raise InvalidRequest(f"cannot listen on {arguments.host}:{arguments.port}: {error.strerror}") from error
    host, port = runner.addresses[0][:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _tls(arguments: Arguments) -> ssl.SSLContext | None:
    if not arguments.ssl_cert_file:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(arguments.ssl_cert_file, arguments.ssl_key_file or None)
    except OSError as error:
        raise InvalidRequest(f"--ssl-cert-file, --ssl-key-file: {error}") from error
    return context


async def _begin_keeping(
    proxy: Proxy, arguments: Arguments, child: Child, folder: Path, runtime_dir: str | None
) -> None:
    """As soon as the server says which model it has loaded; until then requests pass through."""
    if arguments.why_not:
        _log.warning("no snapshots: %s", arguments.why_not)
        return
    props = await _props(proxy)
    try:
        # Minutes for a large model that is new here.
        name = await asyncio.to_thread(_name, props, arguments, child.pid)
    except EngineUnsupported as error:
        proxy.why_not = str(error)
        _log.warning("no snapshots: %s", error)
        return
    except Exception as error:  # noqa: BLE001 - requests are served on
        proxy.why_not = f"{type(error).__name__}: {error}"
        _log.exception("no snapshots")
        return
    if proxy.are_adapters_changed:
        return
    proxy.slots = Slots(int(props["total_slots"]))
    proxy.keeper = Keeper(store=Store(name, runtime_dir), slots=proxy.slots, ask=proxy.ask, folder=folder)
    proxy.why_not = ""
    _log.info("snapshots of %s", name)


async def _props(proxy: Proxy) -> dict[str, Any]:
    """What the server says of itself once its model is loaded."""
    told = 0
    while True:
        status, props = await proxy.answer("/props")
        if status == 200 and isinstance(props, dict):
            return props
        if status not in (0, 503, told):
            told = status
            proxy.why_not = f"the server answers {status} when asked for /props; is its API key right?"
            _log.warning("no snapshots: %s", proxy.why_not)
        await asyncio.sleep(LOOK_EVERY_S)


def _name(props: dict[str, Any], arguments: Arguments, pid: int) -> str:
    path, slots = props.get("model_path"), props.get("total_slots")
    if not isinstance(path, str) or not Path(path).is_file() or not isinstance(slots, int) or slots < 1:
        raise EngineUnsupported(f"the server does not say which file its model is ({path}), or how many slots it has")
    model = Path(path)
    options = options_digest([*arguments.identity, f"total_slots={slots}"])
    return set_name(FAMILY, model, weights=weights_digest(model), build=build_digest(pid), options=options)
