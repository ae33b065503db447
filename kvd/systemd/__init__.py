"""sd_notify(3): tells the service manager how the daemon is. A no-op outside systemd.

Only the three messages that a unit of Type=notify with a watchdog needs; each is one datagram to $NOTIFY_SOCKET.
"""

from __future__ import annotations

import os
import socket
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

    @staticmethod
    def _watchdog_interval_s(environ: Mapping[str, str]) -> float | None:
        if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
            return None
        usec = environ.get("WATCHDOG_USEC", "")
        return int(usec) / 2e6 if usec.isascii() and usec.isdigit() and int(usec) else None

    def ready(self, status: str) -> None:
        """The daemon serves from now on."""
        self._send(f"READY=1\nSTATUS={status}")

    def alive(self) -> None:
        """The loop turns."""
        self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """A clean stop has begun."""
        self._send("STOPPING=1")

    def _send(self, message: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
                sender.sendto(message.encode(), self._address)
        except OSError:
            return
