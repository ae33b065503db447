"""Real servers for tests: started on private sockets, killed, frozen and filled for real."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import redis

from kvd.tiers.embedded_config import find_server
from tests.support.wait import eventually

DEBIAN_REDIS = Path("/usr/bin/redis-server")
VALKEY = find_server()


class RealServer:
    """One server on a unix socket in a folder of its own, or on a TCP port of this machine."""

    def __init__(self, binary: Path = DEBIAN_REDIS, *arguments: str, port: int = 0) -> None:
        self.binary = binary
        self.port = port
        self.arguments = arguments
        self.folder = Path(tempfile.mkdtemp(prefix="kvd-redis-"))
        self.socket_path = self.folder / "s"
        self.process: subprocess.Popen[bytes] | None = None
        self.password = ""

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}" if self.port else f"unix://{self.socket_path}"

    def start(self) -> RealServer:
        where = ["--port", str(self.port), "--bind", "127.0.0.1"] if self.port else ["--port", "0"]
        self.process = subprocess.Popen(
            [
                self.binary,
                *where,
                "--unixsocket",
                self.socket_path,
                "--dir",
                self.folder,
                "--save",
                "",
                *self.arguments,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        eventually(self._answers)
        return self

    @contextlib.contextmanager
    def client(self, **options: object) -> Iterator[redis.Redis]:
        """The test's own view of the server."""
        client = redis.Redis(unix_socket_path=str(self.socket_path), **options)
        try:
            yield client
        finally:
            client.close()

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        if self.process is not None:
            self._end(signal.SIGKILL)
        shutil.rmtree(self.folder)

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process

    def _end(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        self._process.wait(10)
        self.process = None

    def _answers(self) -> bool:
        assert self._process.poll() is None, "the server ended at once"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1)
            try:
                probe.connect(str(self.socket_path))
                probe.sendall(b"PING\r\n")
                return probe.recv(16)[:1] in {b"+", b"-"}
            except OSError:
                return False


@contextlib.contextmanager
def running_server(binary: Path = DEBIAN_REDIS, *arguments: str, port: int = 0) -> Iterator[RealServer]:
    server = RealServer(binary, *arguments, port=port)
    try:
        yield server.start()
    finally:
        server.close()


@contextlib.contextmanager
def running_cluster(num_nodes: int = 3) -> Iterator[list[RealServer]]:
    """Masters that share all slots, and agree that they do."""
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(reserved_ports(2 * num_nodes))
        nodes, buses = ports[:num_nodes], ports[num_nodes:]
        servers = [
            stack.enter_context(
                running_server(
                    DEBIAN_REDIS,
                    *("--cluster-enabled", "yes", "--cluster-port", str(bus), "--cluster-node-timeout", "2000"),
                    *("--cluster-require-full-coverage", "no"),
                    port=port,
                )
            )
            for port, bus in zip(nodes, buses, strict=True)
        ]
        for index, server in enumerate(servers):
            first, last = 16384 * index // num_nodes, 16384 * (index + 1) // num_nodes - 1
            with server.client() as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
                client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0], buses[0])

        def agreed() -> bool:
            for server in servers:
                with server.client() as client:
                    info = client.execute_command("CLUSTER", "INFO")
                    if b"cluster_slots_ok:16384" not in info or b"cluster_state:ok" not in info:
                        return False
            return True

        eventually(agreed, 30)
        yield servers


@contextlib.contextmanager
def reserved_ports(count: int) -> Iterator[list[int]]:
    """TCP ports that the kernel gives to nobody else in the block; a server that asks for one by number can have it."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            # With this at both ends a port may be bound twice, until one of the two listens.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        yield [one.getsockname()[1] for one in sockets]
