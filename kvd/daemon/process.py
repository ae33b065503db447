"""What the process as a whole needs before it serves: file descriptors, log, garbage collector."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import resource
import sys

from kvd.daemon.log_limit import LogLimit
from kvd.systemd.journal import JournalHandler, is_journal

LOG_FORMAT = "%(levelname)s %(message)s"
SWITCH_INTERVAL_S = 0.0002
_GC_THRESHOLDS = (20_000, 50, 100)


def hand_over_quickly() -> None:
    """Lets the loop have the interpreter soon when a mover thread holds it.

    Movers hold it for tenths of a millisecond at a time (their copies run without), but with Python's own 5 ms a loop
    that wakes up beside them would wait that long: the tail of every begin.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def raise_descriptor_limit() -> None:
    """Takes all the descriptors the hard limit allows; `kvd.build.sizes` counts what they are needed for."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def start_log(level: str) -> None:
    """To the journal with priorities and fields where stderr is its stream; else one line a record, to stderr.

    Time and pid are the journal's, or whoever's keeps the lines.
    """
    handler: logging.Handler
    if is_journal(sys.stderr, os.environ):
        handler = JournalHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_OneLine(LOG_FORMAT))
    handler.addFilter(LogLimit())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def show_where_it_hangs() -> None:
    """At SIGABRT, which a service manager sends to a daemon that hangs, the log gets a line for each frame.

    Names of functions and lines of code, no values.
    """
    faulthandler.enable()


class _OneLine(logging.Formatter):
    """A client's text can never begin a line of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name logging calls
        return super().formatMessage(record).replace("\n", "\\n")


def calm_garbage_collector() -> None:
    """Keeps full collections, which stop the loop for as long as they walk over every object, rare and short.

    What exists after the start lives for ever, so it is frozen. Messages hold no cycles (`gc=False` structs) and die by
    reference count. What grows is the pools, see `GrowthFreezer`. Hence the high thresholds: the collector is there to
    find a leak of cycles, not to find garbage.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


class GrowthFreezer:
    """Takes the pools' tables out of the collector's sight as they grow.

    They are few objects with an entry a block each: a full collection that walks over a million entries stops the loop
    for some 40 ms. They live as long as their segments, and no cycle runs through them that nobody takes apart.
    """

    def __init__(self) -> None:
        self._frozen_nbytes = 0

    def look(self, used_nbytes: int) -> None:
        """Freezes what exists, at once, when the pools have more than twice the memory of the last time."""
        if used_nbytes > 2 * self._frozen_nbytes:
            self._frozen_nbytes = used_nbytes
            gc.freeze()
