"""Progress while the demo's processes load and compute: bars on a terminal, a line an event elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from kvd.cli.demo.events import Checked, Event, Loading
from kvd.cli.demo.render import describe
from kvd.cli.demo.workers import Worker

_NUM_STEPS_AFTER_LOADING = 3
"""Ready, Answered, Checked."""


class ActProgress:
    """One bar a process for the length of an act. A context manager; `seen` takes the events."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("process {task.fields[process]}"),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def seen(self, worker: Worker, event: Event) -> None:
        """Moves the process's bar, or prints a line where there is no terminal."""
        if not self._console.is_terminal:
            if isinstance(event, Loading) and event.num_done:
                return
            self._console.print(Text(f"   process {worker.name} (pid {worker.pid}): {describe(event)}", style="dim"))
            return
        task = self._tasks.get(worker.name)
        if task is None:
            task = self._progress.add_task("", total=None, process=worker.name)
            self._tasks[worker.name] = task
        if isinstance(event, Loading):
            total = event.num_stages + _NUM_STEPS_AFTER_LOADING
            self._progress.update(task, total=total, completed=event.num_done, description=describe(event))
        else:
            self._progress.update(task, advance=1, description=describe(event))
        if isinstance(event, Checked):
            self._progress.stop_task(task)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
