"""The `kvd demo` command."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click
from rich.console import Console
from rich.text import Text

import kvd_client
from kvd.cli.console import console
from kvd.cli.demo.acts import Result, after_a_restart, at_the_same_moment, one_after_the_other
from kvd.cli.demo.daemon import PrivateDaemon, clean_environ, private_daemon
from kvd.cli.demo.model import INSTALL, missing_modules
from kvd.cli.demo.progress import ActProgress
from kvd.cli.demo.render import render_results, render_title
from kvd.cli.text import one_line

OPTIONS = (
    *("--memory-budget", "1GiB", "--tiers-redis-budget", "1GiB"),
    *("--tiers-redis-persistence", "{folder}/blocks"),
)
"""Several times what both documents take; a quarter of the machine, the default, would be made ready for nothing."""


@click.command()
def demo() -> None:
    """Watch processes share a real model's KV cache.

    Starts a daemon of its own and, one after another, five processes with SmolLM2-135M. Each answers a question about a
    document of some 2,000 tokens and then computes the same without kvd, to compare times and tokens. Before the last
    one the daemon is stopped and started again. Takes a minute or two, 3 GiB of memory and 540 MB under $TMPDIR for the
    unpacked model; nothing is left behind.
    """
    missing = missing_modules()
    if missing:
        raise click.ClickException(f"the demo needs {', '.join(missing)}: {INSTALL}")
    out = console()
    with _terminated_as_interrupt(), private_daemon(*OPTIONS) as daemon:
        out.print(f"A daemon (pid {daemon.process.pid}) owns the KV memory. Processes with SmolLM2-135M share it.\n")
        results = _share(out, daemon.folder, daemon.runtime_dir)
        results += _restart(out, daemon)
    if not all(result.checked.is_equal for result in results):
        raise click.ClickException("a process generated other tokens than without kvd: this is a defect")


def _share(out: Console, folder: Path, runtime_dir: Path) -> list[Result]:
    out.print(render_title(1, "Process A reads a manual and exits; process B, started afterwards, asks about it too"))
    with ActProgress(out) as progress:
        first = one_after_the_other(folder, runtime_dir, progress.seen)
    out.print(render_results(first))
    out.print(render_title(2, "Processes C and D ask about another manual at the same moment: it is computed once"))
    status: list[str] = []
    with ActProgress(out) as progress:
        second = at_the_same_moment(
            folder, runtime_dir, progress.seen, lambda: status.append(_status(out, runtime_dir))
        )
    out.print(render_results(second))
    _print_status(out, status[0])
    return first + second


def _restart(out: Console, daemon: PrivateDaemon) -> list[Result]:
    with kvd_client.connect(daemon.runtime_dir, label="kvd demo") as client:
        snapshot = client.status()
    out.print()
    out.print(render_title(3, "The daemon is stopped and started again; process E asks about the first manual"))
    if not snapshot.tiers:
        out.print(Text(f"   left out, {one_line(' '.join(snapshot.warnings))}", style="yellow"))
        return []
    old_pid = daemon.process.pid
    daemon.restart()
    out.print(
        f"   Daemon {old_pid} left its blocks to Redis and is gone, and so is its memory; {daemon.process.pid} is new."
    )
    with ActProgress(out) as progress:
        results = after_a_restart(daemon.folder, daemon.runtime_dir, progress.seen)
    out.print(render_results(results))
    _print_status(out, _status(out, daemon.runtime_dir))
    return results


def _print_status(out: Console, page: str) -> None:
    out.print(Text("$ kvd status", style="bold"))
    click.echo(page, nl=False)


def _status(out: Console, runtime_dir: Path) -> str:
    """What the command prints, as wide and as colourful as here."""
    environ = clean_environ() | {"COLUMNS": str(out.width)}
    if out.is_terminal and out.color_system is not None:
        environ["FORCE_COLOR"] = "1"
    command = [sys.executable, "-m", "kvd.cli", "status", "--runtime-dir", str(runtime_dir)]
    done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"kvd status failed: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C meanwhile, so that the processes are ended and the folder is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
