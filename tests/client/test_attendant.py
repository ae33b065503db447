"""The thread that attends to device memory: in order, never stopped by a fault, and fit for finalizers."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from kvd_client.memory.attendant import Attendant, attendant
from tests.client.test_fork import in_child


class Reader:
    """What a session is to the attendant: an end of a socket that is read when there is something."""

    def __init__(self) -> None:
        self.here, self.there = socket.socketpair()
        self.here.setblocking(False)
        self.read: list[bytes] = []
        self.told = threading.Event()
        self.fails = False

    def drain(self) -> None:
        if self.fails:
            self.told.set()
            raise ArithmeticError
        self.read.append(self.here.recv(100))
        self.told.set()

    def hears(self, word: bytes) -> bool:
        self.told.clear()
        self.there.send(word)
        return self.told.wait(10)

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader()
    yield reader
    reader.close()


@pytest.fixture
def attending(reader: Reader) -> Attendant:
    attending = Attendant()
    attending.watch(reader.here.fileno(), reader.drain)
    return attending


def test_without_anything_to_watch_there_is_no_thread() -> None:
    idle, done = Attendant(), []
    idle.put(lambda: done.append(1))
    assert idle.settle(0)
    assert idle._thread is None
    assert done == []


def test_what_was_put_before_the_thread_is_done_by_it(reader: Reader) -> None:
    attending, done = Attendant(), []
    attending.put(lambda: done.append(1))
    attending.watch(reader.here.fileno(), reader.drain)
    assert attending.settle(10)
    assert done == [1]


def test_work_is_done_in_its_order_whoever_puts_it(attending: Attendant) -> None:
    done: list[int] = []
    for number in range(100):
        attending.put(lambda number=number: done.append(number))
    assert attending.settle(10)
    assert done == list(range(100))


def test_work_that_fails_is_told_and_the_next_is_done(
    attending: Attendant, reader: Reader, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[int] = []
    attending.put(lambda: done.append(1 // 0))
    attending.put(lambda: done.append(2))
    assert attending.settle(10)
    assert done == [2]
    assert "work on device memory failed" in caplog.text
    assert reader.hears(b"still read")


def test_a_finalizer_that_comes_in_the_midst_of_a_put_is_served(attending: Attendant) -> None:
    done: list[str] = []

    class Dying:
        def __del__(self) -> None:
            attending.put(lambda: done.append("dead"))

    def work() -> None:
        cycle = [Dying()]
        cycle.append(cycle)  # type: ignore[arg-type]
        del cycle
        gc.collect()
        done.append("worked")

    attending.put(work)
    assert attending.settle(10)
    assert attending.settle(10)
    assert done == ["worked", "dead"]


def test_a_session_is_read_as_often_as_something_comes_until_it_is_closed(attending: Attendant, reader: Reader) -> None:
    assert reader.hears(b"one")
    assert reader.hears(b"two")
    assert reader.read == [b"one", b"two"]
    fd = reader.here.fileno()
    reader.close()
    # Its number is another's now, who is watched in turn.
    other = Reader()
    if other.here.fileno() != fd:
        os.dup2(other.here.fileno(), fd)
        other.here.close()
        other.here = socket.socket(fileno=fd)
        other.here.setblocking(False)
    attending.watch(fd, other.drain)
    assert other.hears(b"three")
    assert other.read == [b"three"]
    other.close()


def test_a_session_that_cannot_be_read_or_is_gone_does_not_keep_the_thread_busy(
    attending: Attendant, reader: Reader
) -> None:
    reader.fails = True
    assert reader.hears(b"never read")
    # Readable still, and looked at no more.
    assert attending.settle(10)
    reader.told.clear()
    assert attending.settle(10)
    assert not reader.told.is_set()
    other = Reader()
    attending.watch(other.here.fileno(), other.drain)
    here, there = other.here, other.there
    del other
    gc.collect()
    there.send(b"to nobody")
    assert attending.settle(10)
    here.close()
    there.close()


# case B9
def test_a_forked_child_has_an_attendant_of_its_own_and_closes_what_it_inherited(reader: Reader) -> None:
    attendant().watch(reader.here.fileno(), reader.drain)
    before = attendant()
    wake_fd = before._wake_fd

    def child() -> str:
        own = attendant()
        own.put(lambda: os._exit(3))
        try:
            os.fstat(wake_fd)
        except OSError:
            return f"{own is not before} {own._thread} closed"
        return "open"

    assert in_child(child) == "True None closed"
    assert reader.hears(b"the parent reads on")
