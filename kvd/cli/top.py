"""`kvd top`."""

from __future__ import annotations

import io
import os
import queue
import sys
import threading
from collections.abc import Callable

import click
from rich.console import Console
from rich.text import Text

import kvd_client
from kvd.cli.console import console
from kvd.cli.options import runtime_dir_option
from kvd.cli.processes import Process, processes_of
from kvd.cli.render_top import render_top
from kvd.cli.status import TIMEOUT_S
from kvd.cli.text import one_line
from kvd.cli.top_state import TopState
from kvd.cli.top_terminal import Terminal, is_terminal
from kvd.errors import KvdError
from kvd.status import Snapshot

IDLE_S = 3600.0


class Feed(threading.Thread):
    """Asks the daemon again and again, so that a daemon which does not answer never keeps a key waiting.

    Puts a snapshot and its processes, or the reason why there is none, into `news` and calls `on_news`.
    """

    def __init__(self, runtime_dir: str | None, interval_s: float, on_news: Callable[[], None]) -> None:
        # A request that hangs must not keep the program from ending.
        super().__init__(name="kvd-top", daemon=True)
        self.news: queue.SimpleQueue[tuple[Snapshot, dict[int, Process]] | str] = queue.SimpleQueue()
        self.interval_s = interval_s
        self._runtime_dir = runtime_dir
        self._on_news = on_news
        self._is_over = threading.Event()

    def run(self) -> None:
        """Until `end`; connects anew after the daemon went away."""
        client: kvd_client.Client | None = None
        while not self._is_over.is_set():
            try:
                client = client or kvd_client.connect(self._runtime_dir, label="kvd top", timeout_s=TIMEOUT_S)
                snapshot = client.status(with_map=True)
                self.news.put((snapshot, processes_of(snapshot)))
            except KvdError as error:
                if client is not None:
                    client.close()
                    client = None
                self.news.put(one_line(str(error)))
            self._on_news()
            self._is_over.wait(self.interval_s)

    def end(self) -> None:
        """No further question."""
        self._is_over.set()


@click.command()
@runtime_dir_option
@click.option(
    "--interval", type=click.FloatRange(0.05, 3600), default=1.0, show_default=True, help="Seconds between two looks."
)
@click.pass_context
def top(ctx: click.Context, runtime_dir: str | None, interval: float) -> None:
    """Watch blocks, tiers and clients live, full screen.

    A map of each pool's blocks by state, what moves between memory and the tiers, the hit rate, the clients. Keys: s
    sorts, r reverses, / filters, p shows the next pool, space pauses, q quits, ? lists them all.
    """
    if not is_terminal():
        raise click.UsageError("kvd top needs a terminal; `kvd status --watch` does without")
    # A wrong folder is an error before the screen is taken; a daemon that goes away later is shown on it.
    kvd_client.connect(runtime_dir, label="kvd top", timeout_s=TIMEOUT_S).close()
    out = console()
    is_plain = not (sys.stdout.encoding or "").lower().replace("-", "").startswith("utf")
    state = TopState(interval_s=interval)
    try:
        with Terminal() as terminal:
            feed = Feed(runtime_dir, interval, terminal.wake)
            feed.start()
            try:
                _loop(state, terminal, feed, lambda line, width: _ansi(line, width, out), is_plain=is_plain)
            finally:
                feed.end()
    except KeyboardInterrupt:
        ctx.exit(0)


def _loop(state: TopState, terminal: Terminal, feed: Feed, ansi: Callable[[Text, int], str], *, is_plain: bool) -> None:
    while not state.is_over:
        width, height = terminal.size()
        lines = render_top(state, width, height, own_pid=os.getpid(), is_plain=is_plain)
        terminal.show([ansi(line, width) for line in lines])
        for key in terminal.keys(IDLE_S):
            state.press(key)
        feed.interval_s = state.interval_s
        while not feed.news.empty():
            news = feed.news.get()
            if isinstance(news, str):
                state.trouble = news
            else:
                state.take(*news)


def _ansi(line: Text, width: int, like: Console) -> str:
    """The line with the escape sequences for the colours that the terminal has."""
    made = Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        color_system=like.color_system,  # type: ignore[arg-type]
        no_color=like.no_color,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    with made.capture() as capture:
        made.print(line, end="", no_wrap=True, overflow="crop", crop=True)
    return capture.get()
