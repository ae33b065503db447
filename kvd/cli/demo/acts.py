"""The story of the demo, act by act: which processes start when, and what is asked of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvd.cli.demo.events import Answered, Checked, Event, Ready
from kvd.cli.demo.workers import Worker, await_all


@dataclass(frozen=True, slots=True)
class Result:
    """One process's part: what it was asked and what it told."""

    name: str
    question: str
    ready: Ready
    answered: Answered
    checked: Checked


Seen = Callable[[Worker, Event], None]


def one_after_the_other(folder: Path, runtime_dir: Path, seen: Seen) -> list[Result]:
    """The first process reads the document and exits; the second one, started afterwards, asks about it too."""
    results = []
    for name, question in (("A", "How much does the pump weigh?"), ("B", "Where does the pump stand?")):
        with ExitStack() as stack:
            worker = _start(stack, folder, runtime_dir, name, "pump", question)
            results += _play([worker], seen)
    return results


def at_the_same_moment(folder: Path, runtime_dir: Path, seen: Seen, while_attached: Callable[[], None]) -> list[Result]:
    """Two processes ask about a new document at once; one computes it, the other waits for that.

    `while_attached` is called when both have answered and still hold its blocks.
    """
    with ExitStack() as stack:
        workers = [
            _start(stack, folder, runtime_dir, name, "oven", question)
            for name, question in (
                ("C", "How many chambers does the oven have?"),
                ("D", "What is the highest temperature?"),
            )
        ]
        results = _play(workers, seen)
        while_attached()
        return results


def after_a_restart(folder: Path, runtime_dir: Path, seen: Seen) -> list[Result]:
    """A process that starts when daemon and memory are new asks about the first document."""
    with ExitStack() as stack:
        worker = _start(stack, folder, runtime_dir, "E", "pump", "How often must the oil be changed?")
        return _play([worker], seen)


def _start(stack: ExitStack, folder: Path, runtime_dir: Path, name: str, document: str, question: str) -> Worker:
    return stack.enter_context(
        Worker(
            name=name,
            runtime_dir=runtime_dir,
            log=folder / f"worker-{name}.log",
            document=document,
            question=question,
            unpacked=folder / "model",
        )
    )


def _play(workers: list[Worker], seen: Seen) -> list[Result]:
    """Loads all, asks all at once, then checks one at a time so that no control run slows another."""
    ready = await_all(workers, Ready, seen)
    for worker in workers:
        worker.cue("ask")
    answered = await_all(workers, Answered, seen)
    checked: list[Checked] = []
    for worker in workers:
        worker.cue("check")
        checked += await_all([worker], Checked, seen)
    return [
        Result(worker.name, worker.question, *told)
        for worker, told in zip(workers, zip(ready, answered, checked, strict=True), strict=True)
    ]
