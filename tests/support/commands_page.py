"""COMMANDS.md: every example is run, in the order of the page, in one sandbox; what it prints stands on the page.

Bring the page up to date: .venv/bin/python -m tests.support.commands_page
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import kvd_client
from kvd.bench.writer import seal_prompt
from kvd.hashing import Namespace
from kvd.layout import KVLayout
from tests.support.daemon import Daemon, running_daemon
from tests.support.redis_servers import running_server
from tests.support.tmux import Tmux
from tests.support.wait import eventually

PAGE = Path(__file__).parents[2] / "COMMANDS.md"
BLOCK = re.compile(r"(?<=```console\n)(.*?)(?=```\n)", re.DOTALL)
LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64)
MODEL = "smollm2-135m@sha256:5d3f"
MANUAL = [1, *(7 * number % 49_000 for number in range(2_069))]
NOT_RUN = ("kvd demo",)
"""Takes minutes, and has a test of its own."""


class Sandbox:
    """A folder with files of the page's names, a daemon with a Redis below it, and a client that holds a prompt."""

    def __init__(self, folder: Path, daemon: Daemon) -> None:
        self.folder = folder
        self.daemon = daemon
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVD_", "LC_"))}
        self._environ = {
            **kept,
            "KVD_RUNTIME_DIR": str(daemon.folder),
            "KVD_CONFIG": str(folder / "kvd.toml"),
            "PATH": f"{Path(sys.executable).parent}:{kept.get('PATH', '')}",
            "COLUMNS": "80",
            "LC_ALL": "C.UTF-8",
        }

    def output(self, command: str) -> str:
        """What it prints, with names instead of this machine's folders."""
        if command.startswith("kvd serve"):
            text = self._served(command)
        elif command.startswith("kvd top"):
            text = self._screen(command)
        else:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder,
                env=self._environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=110,
            )
            text = done.stdout
        return self._named("".join(line.rstrip() + "\n" for line in text.splitlines()))

    def _served(self, command: str) -> str:
        """Until it is ready; then it is stopped as Ctrl-C does."""
        environ = self._environ | {"KVD_RUNTIME_DIR": str(self.folder / "other")}
        log = self.folder / "log"
        argv = ["bash", "-c", f"exec {command}"]
        with (
            log.open("w") as out,
            subprocess.Popen(argv, cwd=self.folder, env=environ, stdout=out, stderr=out) as daemon,
        ):
            eventually(lambda: "ready after" in log.read_text(), 60)
            daemon.send_signal(signal.SIGINT)
            daemon.wait(60)
        return log.read_text()

    def _screen(self, command: str) -> str:
        argv = [sys.executable, "-m", "kvd.cli", *command.split()[1:], "--runtime-dir", str(self.daemon.folder)]
        with Tmux(self.folder, argv, width=80, height=24, LC_ALL="C.UTF-8") as terminal:
            return terminal.shows("requests/s", "reader", "q quit")

    def _named(self, text: str) -> str:
        for real, name in (
            (str(self.folder / "other"), "/run/kvd"),
            (str(self.daemon.folder), "/run/kvd"),
            (str(self.folder), "/home/you"),
        ):
            text = text.replace(real, name)
        return re.sub(r"unix://\S*", "unix:///run/redis.sock", text)


@contextlib.contextmanager
def sandbox(folder: Path) -> Iterator[Sandbox]:
    """Everything that the page's examples name."""
    _write_files(folder)
    with (
        running_server() as server,
        running_daemon(
            folder,
            budget="128MiB",
            segment="8MiB",
            tiers={"redis": {"url": server.url}, "drain_s": 0.0},
            access={"isolation": "group"},
        ) as daemon,
        kvd_client.connect(daemon.folder, label="reader", reserve_ahead_tokens=0) as client,
    ):
        cache = client.cache(model=MODEL, layout=LAYOUT, engine="transformers/1")
        seal_prompt(cache, MANUAL, b"\1")
        with cache.sequence(MANUAL[:1000], max_tokens=1008):
            yield Sandbox(folder, daemon)


def _write_files(folder: Path) -> None:
    namespace = Namespace(model=MODEL, layout=LAYOUT, engine="transformers/1")
    other = dataclasses.replace(namespace, layout=dataclasses.replace(LAYOUT, dtype="bfloat16"))
    for name, space, tokens in (
        ("manual.json", namespace, MANUAL),
        ("question.json", namespace, [*MANUAL[:500], 11, *MANUAL[500:900]]),
        ("bf16.json", other, MANUAL),
    ):
        (folder / name).write_text(json.dumps({"namespace": dataclasses.asdict(space), "token_ids": tokens}))
    (folder / "Llama-3-8B").mkdir()
    (folder / "Llama-3-8B/config.json").write_text(
        json.dumps(
            {
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_hidden_layers": 32,
                "num_key_value_heads": 8,
                "max_position_embeddings": 8192,
                "torch_dtype": "float16",
            }
        )
    )
    (folder / "kvd.toml").write_text('[memory]\nbudget = "64MiB"\n\n[tiers.redis]\nurl = "off"\n')


def examples(page: str) -> list[tuple[str, str]]:
    """(command, what the page says that it prints), in the page's order."""
    found = []
    for block in BLOCK.findall(page):
        for part in re.split(r"(?m)^\$ ", block)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def is_run(command: str) -> bool:
    """Whether the page's examples of it are run."""
    return not command.startswith(NOT_RUN)


def steady(text: str) -> str:
    """The text without what differs from run to run: numbers of processes, times, speeds, memory that is free."""
    text = re.sub(r"\bpid \d+", "pid PID", text)
    text = re.sub(r"\d+ (?:s|min \d\d s)\b", "TIME", text)
    text = re.sub(r"[\d.]+ [KMGT]i?B(?=(?:/s| ready| more available))", "SIZE", text)
    text = re.sub(r"\b0 B(?=(?:/s| ready))", "SIZE", text)
    text = re.sub(r"\d[\d,]* requests/s", "N requests/s", text)
    text = re.sub(r"after [\d.]+ s", "after TIME", text)
    text = re.sub(r"gid:\d+", "gid:GID", text)
    text = re.sub(r"(?m)^ *\d+ +\d+ .*reader.*$", _client_row, text)
    text = re.sub(r"(?m)^ *pid +uid.*$", lambda m: " ".join(m[0].split()), text)
    text = re.sub(r"(?m)^(chain_hash_4096) .*$", r"\1", text)
    text = re.sub(r"of \d+ keys", "of N keys", text)
    text = re.sub(r" {2,}#", "  #", text)
    # A table's columns are as wide as their widest figure.
    text = re.sub(r"(?m)^(row|redis|tier) .*$", lambda m: " ".join(m[0].split()), text)
    text = re.sub(r"(?m)^redis up .*$", lambda m: re.sub(r"[\d.]+ [KM]iB|\bup -|\b0 B", "SIZE", m[0]), text)
    text = re.sub(r"(?m)^speed: .*\n", "", text)
    text = re.sub(r"(?m)^copying: .*\n", "", text)
    return re.sub(r"vm.max_map_count is \d+|torch [\w.+]+|transparent huge pages: \w+|\d+ (?:notes|well)\b", "X", text)


def _client_row(row: re.Match[str]) -> str:
    words = row[0].split()
    return f"PID UID {' '.join(words[4:])}".split("reader")[0] + "reader"


def updated(page: str, box: Sandbox) -> str:
    """The page with what its commands print now."""

    def run(block: re.Match[str]) -> str:
        made = ""
        for command, output in examples(f"```console\n{block[1]}```\n"):
            made += f"$ {command}\n" + (box.output(command) if is_run(command) else output)
        return made

    return BLOCK.sub(run, page)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, sandbox(Path(folder)) as box:
        PAGE.write_text(updated(PAGE.read_text(), box))
