"""The log as journald wants it: a priority for each record, and fields beside the text.

systemd names the stream that stderr is connected to in $JOURNAL_STREAM (systemd.exec(5)). Where stderr is that stream,
records go to the journal's own socket (https://systemd.io/JOURNAL_NATIVE_PROTOCOL), with the place in the code and
whatever was given as `extra={"kvd": {...}}`. Where the socket cannot be had they are lines with "<N>" in front
(sd-daemon(3)). Anywhere else the log is plain lines.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
from collections.abc import Mapping
from typing import TextIO

JOURNAL_SOCKET = "/run/systemd/journal/socket"
IDENTIFIER = "kvd"
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG = 7
MAX_DATAGRAM_NBYTES = 128 << 10
"""A longer record is cut: the journal would want it in a file of its own."""
_MAX_TEXT_LENGTH = 16 << 10


def priority(level: int) -> int:
    """Syslog's number for a level of logging."""
    return next((number for at_least, number in _PRIORITIES if level >= at_least), _DEBUG)


def is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether the stream is the very one that the service manager connected to the journal."""
    named = environ.get("JOURNAL_STREAM", "")
    try:
        seen = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return named == f"{seen.st_dev}:{seen.st_ino}"


class JournalHandler(logging.Handler):
    """Sends each record to the journal without ever waiting for it; falls back to lines with priorities on `stream`."""

    def __init__(self, stream: TextIO | None = None, path: str = JOURNAL_SOCKET) -> None:
        super().__init__()
        self._stream = sys.stderr if stream is None else stream
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    def emit(self, record: logging.LogRecord) -> None:
        """Never raises."""
        try:
            text = self.format(record)
            try:
                self._socket.sendto(encode(fields_of(record, text)), self._path)
            except OSError:
                self._stream.write(f"<{priority(record.levelno)}>{one_line(text)}\n")
                self._stream.flush()
        except Exception:  # noqa: BLE001 - a log that fails must not take the daemon along
            self.handleError(record)

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()
        super().close()


def fields_of(record: logging.LogRecord, text: str) -> dict[str, str]:
    """The record's fields, in the journal's names (systemd.journal-fields(7)); ours begin with KVD_."""
    fields = {
        "MESSAGE": text[:_MAX_TEXT_LENGTH],
        "PRIORITY": str(priority(record.levelno)),
        "SYSLOG_IDENTIFIER": IDENTIFIER,
        "LOGGER": record.name,
        "CODE_FILE": record.pathname,
        "CODE_LINE": str(record.lineno),
        "CODE_FUNC": record.funcName or "",
        "THREAD_NAME": record.threadName or "",
    }
    more = getattr(record, "kvd", None)
    if isinstance(more, Mapping):
        for name, value in more.items():
            # The journal drops a field whose name has other characters.
            key = "".join(char if char.isascii() and char.isalnum() else "_" for char in str(name)).upper()
            fields[f"KVD_{key}"[:64]] = str(value)[:_MAX_TEXT_LENGTH]
    return fields


def encode(fields: Mapping[str, str]) -> bytes:
    """One datagram: NAME=value lines; a value with a line break as its name, a u64 length and the bytes."""
    parts = []
    for name, value in fields.items():
        data = value.encode("utf-8", "replace")
        if b"\n" in data:
            parts.append(name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n")
        else:
            parts.append(name.encode() + b"=" + data + b"\n")
    whole = b""
    for part in parts:
        if len(whole) + len(part) > MAX_DATAGRAM_NBYTES:
            break
        whole += part
    return whole


def one_line(text: str) -> str:
    """A client's text can never begin a line of its own, nor a priority."""
    return text.replace("\r", "\\r").replace("\n", "\\n")
