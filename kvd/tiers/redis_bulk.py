"""Moves values between blocks and one Redis node: pipelined, checked, never copied when stored raw.

At most `WINDOW` values are under way at a time: an unread answer sits in the server's memory, and more gains nothing.
Each job carries its own outcome; an exception from here means that the connection is lost, and with it all jobs that
have no answer yet.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from kvd.errors import BlockCorrupt, BlockMissing, TierError, TierUnavailable
from kvd.tiers import codecs
from kvd.tiers.base import Outcome, TierKey
from kvd.tiers.bulk_socket import connect
from kvd.tiers.codecs import Codec
from kvd.tiers.redis_errors import error_of_exception, error_of_reply
from kvd.tiers.redis_url import Node, RedisAddress
from kvd.tiers.resp_connection import ErrorReply, Reply, RespConnection, command, log_in
from kvd.tiers.value_format import HEADER_NBYTES, decode_header, encode_header

WINDOW = 8
_ASK_CHUNK = 4096
_MAX_SKIP_NBYTES = 64 << 20

UNANSWERED = TierUnavailable("no answer", cause="connection")


@dataclass(slots=True)
class ReadJob:
    """Fetch the value under `redis_key` into `into`."""

    redis_key: bytes
    key: TierKey
    into: memoryview
    outcome: Outcome = UNANSWERED


@dataclass(slots=True)
class WriteJob:
    """Store `data` under `redis_key`."""

    redis_key: bytes
    key: TierKey
    data: memoryview
    itemsize: int
    outcome: Outcome = UNANSWERED


class _ConnectionSpent(Exception):
    """The rest of the answer is not worth reading: drop the connection and ask the rest on a new one."""


class BulkPool:
    """Idle connections per node. Thread-safe; a connection in use belongs to one thread."""

    def __init__(self, address: RedisAddress, *, connect_timeout_s: float) -> None:
        self._address = address
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._idle: dict[Node, list[RespConnection]] = {}
        self._closed = False

    @contextmanager
    def connection(self, node: Node, *, timeout_s: float) -> Iterator[RespConnection]:
        """A connection that is logged in. It goes back for reuse, or is closed if anything was raised.

        Foreign exceptions leave as `TierUnavailable` or `TierRefused`.
        """
        connection = self._take_idle(node)
        try:
            if connection is None:
                connection = self._open(node)
            connection.set_timeout(timeout_s)
            yield connection
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, OSError):
                raise error_of_exception(str(node), error) from error
            raise
        with self._lock:
            if not self._closed:
                self._idle.setdefault(node, []).append(connection)
                return
        connection.close()

    def drop_idle(self) -> None:
        """Close every idle connection: the server behind them changed."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def close(self) -> None:
        """Idempotent. Connections in use are closed when they come back."""
        with self._lock:
            self._closed = True
        self.drop_idle()

    def _take_idle(self, node: Node) -> RespConnection | None:
        while True:
            with self._lock:
                connections = self._idle.get(node)
                if not connections:
                    return None
                connection = connections.pop()
            # The server may have restarted meanwhile; that is no failure of the call that finds out.
            if connection.is_idle():
                return connection
            connection.close()

    def _open(self, node: Node) -> RespConnection:
        address = self._address
        sock = connect(node, address, timeout_s=self._connect_timeout_s)
        connection = RespConnection(sock, str(node))
        try:
            connection.set_timeout(self._connect_timeout_s)
            refusals = log_in(connection, user=address.user, password=address.password.reveal(), db=address.db)
        except BaseException:
            connection.close()
            raise
        if refusals:
            connection.close()
            raise error_of_reply(str(address), refusals[0].text)
        return connection


def ask(connection: RespConnection, commands: Sequence[bytes]) -> list[Reply]:
    """Small commands with small answers, in one round trip (per few thousand)."""
    replies: list[Reply] = []
    for at in range(0, len(commands), _ASK_CHUNK):
        chunk = commands[at : at + _ASK_CHUNK]
        connection.send(b"".join(chunk))
        replies += [connection.read_reply() for _ in chunk]
    return replies


def fetch(
    pool: BulkPool, node: Node, jobs: Sequence[ReadJob], *, ttl_s: int, timeout_s: float, tail: Sequence[bytes]
) -> list[Reply]:
    """Run read jobs, then the small `tail` commands; the answers of the latter."""
    jobs = list(jobs)
    while True:
        try:
            with pool.connection(node, timeout_s=timeout_s) as connection:
                return _fetch(connection, jobs, ttl_s, tail)
        except _ConnectionSpent:
            jobs = [job for job in jobs if job.outcome is UNANSWERED]


def _fetch(connection: RespConnection, jobs: list[ReadJob], ttl_s: int, tail: Sequence[bytes]) -> list[Reply]:
    ttl = b"%d" % ttl_s
    # GETEX: a block's time to live counts from its last use.
    commands = [command(b"GETEX", job.redis_key, b"EX", ttl) for job in jobs]
    commands += tail
    connection.send(b"".join(commands[:WINDOW]))
    replies: list[Reply] = []
    for index in range(len(commands)):
        if index < len(jobs):
            _receive(connection, jobs[index])
        else:
            replies.append(connection.read_reply())
        if index + WINDOW < len(commands):
            connection.send(commands[index + WINDOW])
    return replies


def _receive(connection: RespConnection, job: ReadJob) -> None:
    """One value from the wire into its block."""
    nbytes = connection.read_value_length()
    if nbytes is None:
        job.outcome = BlockMissing("Redis does not hold the block")
        return
    if isinstance(nbytes, ErrorReply):
        job.outcome = error_of_reply(connection.where, nbytes.text)
        return
    try:
        _read_block(connection, job, nbytes)
        job.outcome = None
    except TierError as error:
        job.outcome = error
    if connection.value_left > _MAX_SKIP_NBYTES:
        raise _ConnectionSpent
    connection.finish_value()


def _read_block(connection: RespConnection, job: ReadJob, nbytes: int) -> None:
    payload_nbytes = nbytes - HEADER_NBYTES
    if payload_nbytes < 0:
        raise BlockCorrupt(f"the value has only {nbytes} bytes", cause="bad-length")
    head = bytearray(HEADER_NBYTES)
    connection.read_into(memoryview(head))
    header = decode_header(bytes(head), job.key, raw_nbytes=len(job.into))
    raw = header.codec == Codec.RAW
    # Encoding never makes a block longer, so a longer payload is damaged, and no memory is spent on it.
    if payload_nbytes > len(job.into) or (raw and payload_nbytes != len(job.into)):
        raise BlockCorrupt(f"the payload has {payload_nbytes} bytes", cause="bad-length")
    payload = job.into if raw else memoryview(bytearray(payload_nbytes))
    connection.read_into(payload)
    header.verify(payload)
    if not raw:
        codecs.decode(header.codec, header.shuffle, payload, job.into)


def store(
    pool: BulkPool,
    node: Node,
    jobs: Sequence[WriteJob],
    *,
    codec: Codec,
    ttl_s: int,
    timeout_s: float,
    tail: Sequence[bytes],
) -> list[Reply]:
    """Run write jobs, then the small `tail` commands; the answers of the latter.

    Each value is one SET, so it is there wholly or not at all. After the first refusal (full, slot moved) no more
    values are sent: the rest would only travel to be refused too.
    """
    suffix = b"\r\n$2\r\nEX\r\n$%d\r\n%d\r\n" % (len(b"%d" % ttl_s), ttl_s)
    with pool.connection(node, timeout_s=timeout_s) as connection:
        sent: list[WriteJob] = []
        num_answered = 0
        refusal: TierError | None = None
        for job in jobs:
            if len(sent) - num_answered == WINDOW:
                refusal = _read_stored(connection, sent[num_answered])
                num_answered += 1
            if refusal is not None:
                job.outcome = refusal
                continue
            _send_value(connection, job, codec, suffix)
            sent.append(job)
        if tail:
            connection.send(*tail)
        for job in sent[num_answered:]:
            _read_stored(connection, job)
        return [connection.read_reply() for _ in tail]


def _send_value(connection: RespConnection, job: WriteJob, codec: Codec, suffix: bytes) -> None:
    used, shuffle, payload = codecs.encode(codec, job.data, job.itemsize)
    header = encode_header(job.key, payload, codec=used, shuffle=shuffle, raw_nbytes=len(job.data))
    key = job.redis_key
    prefix = b"*5\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, HEADER_NBYTES + len(payload))
    connection.send(prefix + header, payload, suffix)


def _read_stored(connection: RespConnection, job: WriteJob) -> TierError | None:
    reply = connection.read_reply()
    if reply == b"OK":
        job.outcome = None
        return None
    if isinstance(reply, ErrorReply):
        job.outcome = error_of_reply(connection.where, reply.text)
    else:
        job.outcome = TierUnavailable(f"an unexpected answer to SET: {reply!r}", cause="error-reply")
    return job.outcome


def settle(jobs: Sequence[ReadJob] | Sequence[WriteJob], error: TierError) -> None:
    """Give the error to the jobs it kept from an answer.

    Those that seemed well count too: their generation was not confirmed any more.
    """
    for job in jobs:
        if job.outcome is None or job.outcome is UNANSWERED:
            job.outcome = error
