"""The limit of the rows about Redis: the same bytes through the same socket by the shortest way there is.

One connection to the daemon's own server, eight commands under way, sendmsg from and recv_into ready buffers, and
xxh3-128 over each value: what any client must do that checks what it reads.
"""

from __future__ import annotations

import socket
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from kvd.bench.row import CannotMeasure

DEPTH = 8
_END = b"\r\n"


class RawRedis:
    """`num_values` values of `value_nbytes`, under names of their own. A context manager."""

    def __init__(self, path: Path, num_values: int, value_nbytes: int) -> None:
        self._value_nbytes = value_nbytes
        self._num_values = num_values
        self._round = 0
        self._names: list[bytes] = []
        self._source = memoryview(bytearray(b"\1" * (num_values * value_nbytes)))
        self._target = memoryview(bytearray(num_values * value_nbytes))
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(30)
        self._socket.connect(str(path))
        self._rest = bytearray()
        self.renew()
        self.put_all()

    def renew(self) -> None:
        """Deletes the values; the next ones have new names, as blocks do, so the server must find memory for them."""
        if self._names:
            parts = [b"*%d\r\n$6\r\nUNLINK\r\n" % (len(self._names) + 1)]
            parts += [b"$%d\r\n%b\r\n" % (len(name), name) for name in self._names]
            self._socket.sendall(b"".join(parts))
            self._line()
        self._round += 1
        self._names = [b"kvd-bench-raw:%d:%d" % (self._round, number) for number in range(self._num_values)]

    def put_all(self) -> None:
        """SET of every value."""
        for start in range(0, len(self._names), DEPTH):
            batch = range(start, min(start + DEPTH, len(self._names)))
            for number in batch:
                value = self._of(self._source, number)
                xxhash.xxh3_128_digest(value)
                name = self._names[number]
                head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(value))
                self._send([memoryview(head), value, memoryview(_END)])
            for _ in batch:
                if self._line() != b"+OK":
                    raise CannotMeasure("the server did not take a value")

    def get_all(self) -> None:
        """GET of every value."""
        for start in range(0, len(self._names), DEPTH):
            batch = range(start, min(start + DEPTH, len(self._names)))
            names = [self._names[number] for number in batch]
            self._socket.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) for name in names))
            for number in batch:
                if self._line() != b"$%d" % self._value_nbytes:
                    raise CannotMeasure("the server lost a value")
                value = self._of(self._target, number)
                self._read_into(value)
                xxhash.xxh3_128_digest(value)
                if self._line():
                    raise CannotMeasure("the server's answer has another length")

    def _of(self, buffer: memoryview, number: int) -> memoryview:
        return buffer[number * self._value_nbytes : (number + 1) * self._value_nbytes]

    def _send(self, parts: list[memoryview]) -> None:
        while parts:
            sent = self._socket.sendmsg(parts)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]

    def _line(self) -> bytes:
        while (end := self._rest.find(_END)) < 0:
            self._rest += self._received()
        line = bytes(self._rest[:end])
        del self._rest[: end + len(_END)]
        return line

    def _received(self) -> bytes:
        # Little at a time: what is read beyond a line must be copied into the value.
        data = self._socket.recv(64)
        if not data:
            raise CannotMeasure("the server ended the connection")
        return data

    def _read_into(self, value: memoryview) -> None:
        start = min(len(self._rest), len(value))
        value[:start] = self._rest[:start]
        del self._rest[:start]
        while start < len(value):
            num_read = self._socket.recv_into(value[start:])
            if not num_read:
                raise CannotMeasure("the server ended the connection")
            start += num_read

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
