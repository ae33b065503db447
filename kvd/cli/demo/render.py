"""What is seen of the demo. Pure functions from results to text; no clock, no terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvd.cli.demo.acts import Result
from kvd.cli.demo.events import Answered, Checked, Event, Loading, Ready
from kvd.cli.text import count, one_line, size

NOTICEABLE_WAIT_S = 0.2
"""Attaching takes milliseconds; what is longer was a wait for another process."""


def render_title(number: int, title: str) -> RenderableType:
    """The heading of an act."""
    return Text(f"{number}. {title}", style="bold")


def render_results(results: Sequence[Result]) -> RenderableType:
    """One row a process, and below what each was asked and answered."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("process", no_wrap=True)
    for heading in ("prompt", "reused", "copied", "waited", "first token", "without kvd", "ratio", "same tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        table.add_row(result.name, *_cells(result.ready, result.answered, result.checked))
    answers = [
        Text.assemble(f"{result.name}: {one_line(result.question)} ", (one_line(result.answered.text), "green"))
        for result in results
    ]
    return Padding(Group(table, *answers), (0, 0, 1, 3), expand=False)


def _cells(ready: Ready, answered: Answered, checked: Checked) -> list[Text | str]:
    waited = answered.attach_s if answered.attach_s >= NOTICEABLE_WAIT_S else None
    return [
        count(ready.num_prompt_tokens),
        Text(count(answered.num_cached_tokens), style="bold green" if answered.num_cached_tokens else ""),
        size(answered.num_copied_bytes),
        "-" if waited is None else seconds(waited),
        seconds(answered.first_token_s),
        seconds(checked.first_token_s),
        f"{checked.first_token_s / answered.first_token_s:.1f}x",
        Text("yes") if checked.is_equal else Text("NO", style="bold red"),
    ]


def seconds(duration_s: float) -> str:
    """Three digits: 61 ms, 3.92 s."""
    return f"{duration_s * 1000:.0f} ms" if duration_s < 1 else f"{duration_s:.2f} s"


def describe(event: Event) -> str:
    """One event in words, for progress."""
    match event:
        case Loading():
            return event.stage
        case Ready():
            return f"loaded; its prompt has {count(event.num_prompt_tokens)} tokens"
        case Answered():
            return f"first token after {seconds(event.first_token_s)}, {count(event.num_cached_tokens)} tokens reused"
        case Checked():
            return f"first token after {seconds(event.first_token_s)} without kvd"
