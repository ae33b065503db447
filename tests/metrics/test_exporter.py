"""The endpoint: where it may listen, what it answers, and that the loop never waits for a scraper."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import kvd_client
from kvd.errors import ConfigError, RuntimeFolderError
from kvd.metrics import exporter as exporter_module
from kvd.metrics import parse_address
from kvd.metrics.exporter import Exporter
from tests.cli.snapshots import FULL
from tests.support.daemon import Daemon, descriptors_of, running_daemon
from tests.support.wait import eventually


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("127.0.0.1:9464", "http://127.0.0.1:9464"),
        ("localhost:0", "http://127.0.0.1:0"),
        ("127.8.8.8:1", "http://127.8.8.8:1"),
        ("[::1]:9464", "http://[::1]:9464"),
        ("unix:///run/kvd/metrics.sock", "unix:///run/kvd/metrics.sock"),
    ],
)
def test_addresses(text, shown):
    assert str(parse_address(text)) == shown


@pytest.mark.parametrize(
    "text",
    ["0.0.0.0:9464", "[::]:9464", "192.168.0.1:1", "9464", ":9464", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000",
     "127.0.0.1:-1", "host.example:1", "unix://relative.sock", "unix://", "unix:///" + "a" * 120, "tcp://127.0.0.1:1"],
)  # fmt: skip
def test_addresses_that_are_none_or_that_others_could_reach(text):
    with pytest.raises(ConfigError, match=r"metrics\.listen"):
        parse_address(text)


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    made = Exporter(parse_address("127.0.0.1:0"))
    yield made
    made.close()


@pytest.fixture
def loop(exporter: Exporter) -> Iterator[None]:
    """Offers figures as the daemon's loop does: when they are wanted."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            if exporter.is_wanted:
                exporter.offer(FULL)
            over.wait(0.001)

    thread = threading.Thread(target=run)
    thread.start()
    yield
    over.set()
    thread.join()


def fetch(address: object, path: str = "/metrics") -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(f"{address}{path}", timeout=30) as reply:
            return reply.status, reply.headers["Content-Type"], reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "", ""


def test_metrics_are_served_as_prometheus_text(exporter, loop):
    status, kind, text = fetch(exporter.address)
    assert status == 200
    assert kind.startswith("text/plain; version=")
    assert "kvd_sessions" in {family.name for family in text_string_to_metric_families(text)}


def test_other_paths_are_not_found(exporter, loop):
    assert fetch(exporter.address, "/")[0] == 404
    assert fetch(exporter.address, "/../../etc/passwd")[0] == 404


def test_nobody_asks_the_loop_for_figures_that_nobody_fetches(exporter):
    assert not exporter.is_wanted


def test_a_loop_that_hangs_is_told_by_the_age_of_its_figures(exporter, monkeypatch):
    monkeypatch.setattr(exporter_module, "PATIENCE_S", 0.05)
    assert fetch(exporter.address)[0] == 503
    exporter.offer(FULL)
    monkeypatch.setattr(exporter_module, "FRESH_S", -1.0)
    text = fetch(exporter.address)[2]
    (age,) = [
        s.value for f in text_string_to_metric_families(text) for s in f.samples if f.name.endswith("_age_seconds")
    ]
    assert age >= 0.05


def test_a_scraper_that_says_nothing_keeps_no_other_out_for_long(exporter, loop, monkeypatch):
    host, port = exporter.address.host, exporter.address.port
    monkeypatch.setattr(exporter_module, "CLIENT_TIMEOUT_S", 0.1)
    with socket.create_connection((host, port)) as silent:
        assert exporter._server.RequestHandlerClass.timeout <= 5.0
        exporter._server.RequestHandlerClass.timeout = 0.1
        silent.sendall(b"GET /met")
        assert fetch(exporter.address)[0] == 200


def test_an_address_that_is_taken_is_an_error(exporter):
    with pytest.raises(RuntimeFolderError, match="cannot be served"):
        Exporter(exporter.address)


class Unix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=30)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self._path)


def test_a_unix_socket_has_the_mode_it_was_given_and_goes_at_the_end(tmp_path):
    path = tmp_path / "m.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))  # left by a daemon that was killed
    exporter = Exporter(parse_address(f"unix://{path}"), mode=0o660, gid=os.getgid())
    assert path.stat().st_mode & 0o777 == 0o660
    exporter.offer(FULL)
    connection = Unix(path)
    connection.request("GET", "/metrics")
    assert b"kvd_sessions 1.0" in connection.getresponse().read()
    connection.close()
    with pytest.raises(RuntimeFolderError):
        Exporter(parse_address(f"unix://{path}"))
    assert path.exists(), "the first one's socket is unharmed"
    exporter.close()
    exporter.close()
    assert not path.exists()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path):
    (path := tmp_path / "m.sock").write_text("mine")
    with pytest.raises(RuntimeFolderError):
        Exporter(parse_address(f"unix://{path}"))
    assert path.read_text() == "mine"


def test_the_daemon_serves_them_where_it_is_asked_to(tmp_path):
    path = tmp_path / "m.sock"
    with running_daemon(tmp_path, metrics={"listen": f"unix://{path}"}) as daemon:

        def figure(name: str) -> float:
            connection = Unix(path)
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
            connection.close()
            return next(s.value for f in text_string_to_metric_families(text) for s in f.samples if s.name == name)

        assert figure("kvd_sessions") == 0
        with kvd_client.connect(daemon.folder):
            eventually(lambda: figure("kvd_sessions") == 1)
        assert figure("kvd_snapshot_age_seconds") < 60
        os.kill(daemon.pid, signal.SIGSTOP)
        os.kill(daemon.pid, signal.SIGCONT)
        assert figure("kvd_uptime_seconds") > 0
    assert not path.exists()


def test_without_being_asked_it_serves_nothing(tmp_path):
    with running_daemon(tmp_path) as daemon:
        threads = [path.read_text().strip() for path in Path(f"/proc/{daemon.pid}/task").glob("*/comm")]
        assert "kvd-metrics" not in threads
        listening = Path(f"/proc/{daemon.pid}/net/tcp").read_text()
        own = descriptors_of(daemon.pid)
        assert not any(f"socket:[{line.split()[9]}]" in own for line in listening.splitlines()[1:])


def test_a_port_that_is_taken_is_a_warning_and_no_reason_not_to_serve(tmp_path, exporter):
    listen = f"127.0.0.1:{exporter.address.port}"
    with running_daemon(tmp_path, metrics={"listen": listen}) as daemon, kvd_client.connect(daemon.folder) as client:
        assert any("metrics cannot be served" in text for text in client.status().warnings)


def test_behind_walls_only_the_daemons_user_may_fetch_them(tmp_path):  # case F1
    access = {"isolation": "uid"}
    path = tmp_path / "m.sock"
    with running_daemon(tmp_path, access=access, metrics={"listen": f"unix://{path}"}):
        assert path.stat().st_mode & 0o777 == 0o600
    daemon = Daemon(tmp_path / "port", access=access, metrics={"listen": "127.0.0.1:0"})
    assert daemon.spawn().wait(60) == ConfigError.exit_code
    assert "every user of this machine can read" in daemon.log()
