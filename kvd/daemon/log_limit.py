"""Keeps one sentence that is logged again and again from filling the log, and counts what it leaves out."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

BURST = 20
"""Records of one sentence that are written within `PERIOD_S`."""
PERIOD_S = 30.0
MAX_SENTENCES = 512


class LogLimit(logging.Filter):
    """For a handler. A sentence is a format string of one logger: what is filled in does not make it another one.

    The first record after the period says how many were left out. Any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()
        """Sentence -> (when its period began, records since), the latest last."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write it. The record that is written after others were left out says so."""
        key, now_s = (record.name, str(record.msg)), self._clock()
        with self._lock:
            began_s, number = self._seen.pop(key, (now_s, 0))
            left_out = 0
            if now_s - began_s >= PERIOD_S:
                left_out = max(0, number - BURST)
                began_s, number = now_s, 0
            self._seen[key] = (began_s, number + 1)
            while len(self._seen) > MAX_SENTENCES:
                self._seen.popitem(last=False)
        if number >= BURST:
            return False
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more like it were left out)", None
        elif number == BURST - 1:
            record.msg, record.args = f"{record.getMessage()} (more like it are left out for {PERIOD_S:g} s)", None
        return True
