"""Signals as events of the loop: the handler only takes note, the loop acts."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None


class Signals:
    """Catches `HANDLED` while it is entered, which must be on the main thread. `fileno()` is readable when one came.

    Afterwards signals do what they did before; but once SIGTERM or SIGINT was taken they are ignored, since the process
    is about to exit, and a second one in its last milliseconds must not turn a clean stop into a death by signal.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._closing = contextlib.ExitStack()
        self._is_last = False

    def fileno(self) -> int:
        """For the loop to watch."""
        return self._reader.fileno()

    def take(self) -> list[signal.Signals]:
        """The signals that came since the last call."""
        try:
            taken = [signal.Signals(number) for number in self._reader.recv(64)]
        except BlockingIOError:
            return []
        self._is_last |= signal.SIGTERM in taken or signal.SIGINT in taken
        return taken

    def __enter__(self) -> Self:
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._closing.callback(signal.set_wakeup_fd, before)
        for number in HANDLED:
            self._closing.callback(self._let_go, number, signal.signal(number, _note))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.close()
        self._reader.close()
        self._writer.close()

    def _let_go(self, number: signal.Signals, before: _Handler) -> None:
        signal.signal(number, signal.SIG_IGN if self._is_last else before)


def _note(_number: int, _frame: FrameType | None) -> None:
    """Python writes the number to the wake-up descriptor; that is all there is to do here."""
