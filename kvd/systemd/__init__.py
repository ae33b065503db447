"""What ties the daemon to systemd: sd_notify(3), and the unit files that `kvd install` writes.

`Notifier` is a no-op outside systemd. Only the messages that a unit of Type=notify with a watchdog needs; each is one
datagram to $NOTIFY_SOCKET.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping

__all__ = ["Notifier"]


class Notifier:
    """Sends to the socket that systemd (or a test) named when it started this process; sends nothing without one.

    Never raises: a manager that is gone, or slow, must not take the daemon along.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Reads NOTIFY_SOCKET and WATCHDOG_USEC; the latter only where WATCHDOG_PID, if set, is this process."""
        path = environ.get("NOTIFY_SOCKET", "")
        # "@name" is systemd's way to write a socket of the abstract namespace.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self.watchdog_interval_s = self._watchdog_interval_s(environ)
        """How often to call `alive`: half of what the manager allows; None when it does not watch."""
        self._status = ""

    @staticmethod
    def _watchdog_interval_s(environ: Mapping[str, str]) -> float | None:
        if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
            return None
        usec = environ.get("WATCHDOG_USEC", "")
        return int(usec) / 2e6 if usec.isascii() and usec.isdigit() and int(usec) else None

    def ready(self, status: str) -> None:
        """The daemon serves from now on, or again after `reloading`."""
        self._status = status
        self._send(f"READY=1\n{_status_line(status)}")

    def alive(self) -> None:
        """The loop turns."""
        self._send("WATCHDOG=1")

    def status(self, status: str) -> None:
        """One line for `systemctl status`; sent only when it is another than the last."""
        if status != self._status:
            self._status = status
            self._send(_status_line(status))

    def reloading(self) -> None:
        """The configuration is being read again; `ready` says when that is over."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str) -> None:
        """A clean stop has begun."""
        self._status = status
        self._send(f"STOPPING=1\n{_status_line(status)}")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(message.encode(errors="replace"), self._address)
        except OSError:
            return


def _status_line(status: str) -> str:
    # A line of its own would be another assignment.
    return f"STATUS={' '.join(status.split())}"
