"""Redis's protocol (RESP 2) over a socket of our own, for values that should never be copied.

A value is sent from the block's memory and received into it. Small answers go through a buffer of one page; the part of
a value that comes along with its length line is at most that, and copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvd.errors import StateError, TierRefused
from kvd.tiers.bulk_socket import Buffer, BulkSocket

_BUFFER_NBYTES = 4096
_MAX_LINE_NBYTES = 2048
_MAX_SMALL_NBYTES = 16 << 10
"""Above any generation's record: three texts of `names.MAX_TEXT_NBYTES`, each byte of which JSON may write as six."""
_MAX_STRAY_NBYTES = 1 << 20
_SKIP_NBYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """A `-CODE message` answer: the command failed, the connection is well."""

    text: str


Reply = bytes | int | None | ErrorReply


def command(*parts: bytes) -> bytes:
    """The bytes of one command whose parts are all small."""
    return b"*%d\r\n" % len(parts) + b"".join([b"$%d\r\n%s\r\n" % (len(part), part) for part in parts])


class RespConnection:
    """One connection, used by one thread at a time. After any exception it must be closed.

    The caller keeps count of what he asked: one answer is read for each command, in order.
    """

    def __init__(self, sock: BulkSocket, where: str) -> None:
        self.where = where
        self.value_left = 0
        """Bytes of the value being read that `read_into` has not given yet."""
        self._sock = sock
        self._buffer = memoryview(bytearray(_BUFFER_NBYTES))
        self._start = self._end = 0

    def set_timeout(self, seconds: float) -> None:
        """Bounds each send and each receive."""
        self._sock.set_timeout(seconds)

    def send(self, *parts: Buffer) -> None:
        """Send bytes from where they lie."""
        self._sock.send(parts)

    def read_reply(self) -> Reply:
        """A small answer: status, integer, error, or a value of at most 16 KiB.

        A longer value is none of ours: it is read past, and an `ErrorReply` stands for it.
        """
        kind, text = self._read_line()
        if kind == b"+":
            return text
        if kind == b"-":
            return ErrorReply(text.decode("utf-8", "replace"))
        if kind == b":":
            return self._integer(text)
        if kind != b"$":
            raise self._not_redis()
        nbytes = self._integer(text)
        if nbytes < 0:
            return None
        if nbytes > _MAX_STRAY_NBYTES:
            raise self._not_redis()
        self.value_left = nbytes
        if nbytes > _MAX_SMALL_NBYTES:
            self.finish_value()
            return ErrorReply(f"WRONGTYPE a value of {nbytes} bytes lies where a small one is expected")
        value = bytearray(nbytes)
        self.read_into(memoryview(value))
        self.finish_value()
        return bytes(value)

    def read_value_length(self) -> int | ErrorReply | None:
        """The beginning of a value: its length, None if there is no value.

        The caller then reads as much of it as he wants by `read_into`, and ends with `finish_value`.
        """
        kind, text = self._read_line()
        if kind == b"-":
            return ErrorReply(text.decode("utf-8", "replace"))
        if kind != b"$":
            raise self._not_redis()
        nbytes = self._integer(text)
        self.value_left = max(0, nbytes)
        return None if nbytes < 0 else nbytes

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes of the value: what is buffered, then straight from the socket."""
        if len(view) > self.value_left:
            raise StateError(f"{len(view)} bytes wanted of a value that has {self.value_left} left")
        buffered = min(len(view), self._end - self._start)
        view[:buffered] = self._buffer[self._start : self._start + buffered]
        self._start += buffered
        if buffered < len(view) and self._sock.receive(view[buffered:], fill=True) == 0:
            raise ConnectionResetError("the server closed the connection within a value")
        self.value_left -= len(view)

    def finish_value(self) -> None:
        """Read past what nobody wanted of the value, and the line end after it."""
        if self.value_left:
            waste = memoryview(bytearray(min(self.value_left, _SKIP_NBYTES)))
            while self.value_left:
                self.read_into(waste[: self.value_left])
        while self._end - self._start < 2:
            self._fill()
        if bytes(self._buffer[self._start : self._start + 2]) != b"\r\n":
            raise self._not_redis()
        self._start += 2

    def is_idle(self) -> bool:
        """Whether it may be used again: no answer is left over and the server has not hung up."""
        return self._start == self._end and self._sock.is_idle()

    def close(self) -> None:
        """Idempotent."""
        self._sock.close()

    def _read_line(self) -> tuple[bytes, bytes]:
        searched = self._start
        while True:
            # The page is searched as bytes: memoryview has no find, and a line is short.
            seen = bytes(self._buffer[searched : self._end])
            if (at := seen.find(b"\n")) >= 0:
                line = bytes(self._buffer[self._start : searched + at + 1])
                self._start = searched + at + 1
                if len(line) < 3 or line[-2:] != b"\r\n":
                    raise self._not_redis()
                return line[:1], line[1:-2]
            if self._end - self._start >= _MAX_LINE_NBYTES:
                raise self._not_redis()
            kept = self._end - self._start
            self._fill()
            searched = self._start + kept

    def _fill(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == _BUFFER_NBYTES:
            kept = self._end - self._start
            self._buffer[:kept] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, kept
        count = self._sock.receive(self._buffer[self._end :], fill=False)
        if count == 0:
            raise ConnectionResetError("the server closed the connection")
        self._end += count

    def _integer(self, text: bytes) -> int:
        try:
            return int(text)
        except ValueError:
            raise self._not_redis() from None

    def _not_redis(self) -> TierRefused:
        return TierRefused(f"{self.where} is not a Redis: its answer is not Redis's protocol", cause="not-redis")


def log_in(connection: RespConnection, *, user: str, password: str, db: int) -> Sequence[ErrorReply]:
    """Authenticate and choose the database in one round trip; the errors, if any."""
    commands = []
    if password:
        names = (user.encode(), password.encode()) if user else (password.encode(),)
        commands.append(command(b"AUTH", *names))
    if db:
        commands.append(command(b"SELECT", b"%d" % db))
    if commands:
        connection.send(*commands)
    replies = [connection.read_reply() for _ in commands]
    return [reply for reply in replies if isinstance(reply, ErrorReply)]
