"""Signals as events of the loop: the handler only takes note, the loop acts."""

from __future__ import annotations

import contextlib
import signal
import socket
from types import FrameType, TracebackType
from typing import Self

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Signals:
    """Catches `HANDLED` while it is entered, which must be on the main thread. `fileno()` is readable when one came."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._closing = contextlib.ExitStack()

    def fileno(self) -> int:
        """For the loop to watch."""
        return self._reader.fileno()

    def take(self) -> list[signal.Signals]:
        """The signals that came since the last call."""
        try:
            return [signal.Signals(number) for number in self._reader.recv(64)]
        except BlockingIOError:
            return []

    def __enter__(self) -> Self:
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._closing.callback(signal.set_wakeup_fd, before)
        for number in HANDLED:
            self._closing.callback(signal.signal, number, signal.signal(number, _note))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()
        self._reader.close()
        self._writer.close()


def _note(_number: int, _frame: FrameType | None) -> None:
    """Python writes the number to the wake-up descriptor; that is all there is to do here."""
