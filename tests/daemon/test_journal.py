"""The log: priorities and fields for the journal, plain lines elsewhere, and no sentence without end."""

from __future__ import annotations

import io
import logging
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.daemon import log_limit
from kvd.daemon.log_limit import BURST, PERIOD_S, LogLimit
from kvd.systemd.journal import MAX_DATAGRAM_NBYTES, JournalHandler, encode, fields_of, is_journal, one_line, priority
from tests.support.clock import FakeClock


def record(message: str, *args: object, level: int = logging.WARNING, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("kvd.part", level, "/src/part.py", 7, message, args, None, "step")
    made.__dict__.update(extra)
    return made


def decoded(datagram: bytes) -> dict[str, str]:
    """As journald reads it."""
    fields = {}
    while datagram:
        line, _, rest = datagram.partition(b"\n")
        name, equals, value = line.partition(b"=")
        if not equals:
            (length,) = struct.unpack_from("<Q", rest)
            value, rest = rest[8 : 8 + length], rest[9 + length :]
        fields[name.decode()] = value.decode()
        datagram = rest
    return fields


@pytest.mark.parametrize(
    ("level", "number"),
    [(logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6), (logging.DEBUG, 7), (25, 6)],
)
def test_priorities_are_syslogs(level, number):
    assert priority(level) == number


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as journal:
        journal.bind(str(tmp_path / "journal"))
        yield journal


def test_a_record_comes_with_its_fields(journal, tmp_path):
    handler = JournalHandler(io.StringIO(), str(tmp_path / "journal"))
    handler.emit(record("session %d ended", 3, kvd={"session": 3, "pid-of": 99}))
    handler.close()
    assert decoded(journal.recv(65536)) == {
        "MESSAGE": "session 3 ended", "PRIORITY": "4", "SYSLOG_IDENTIFIER": "kvd", "LOGGER": "kvd.part",
        "CODE_FILE": "/src/part.py", "CODE_LINE": "7", "CODE_FUNC": "step", "THREAD_NAME": "MainThread",
        "KVD_SESSION": "3", "KVD_PID_OF": "99",
    }  # fmt: skip


def test_line_breaks_stay_within_their_field():
    fields = {"MESSAGE": "one\nPRIORITY=0\n\ud800", "PRIORITY": "6"}
    assert decoded(encode(fields)) == {"MESSAGE": "one\nPRIORITY=0\n?", "PRIORITY": "6"}


def test_a_record_never_exceeds_a_datagram():
    assert len(encode(fields_of(record("x" * 10**6, kvd={f"k{n}": "y" * 10**6 for n in range(50)}), "x" * 10**6))) <= (
        MAX_DATAGRAM_NBYTES
    )


def test_without_the_socket_lines_have_their_priority(tmp_path):
    stream = io.StringIO()
    handler = JournalHandler(stream, str(tmp_path / "nowhere"))
    handler.emit(record("one\n<0>two", level=logging.ERROR))
    handler.close()
    assert stream.getvalue() == "<3>one\\n<0>two\n"


def test_a_journal_that_does_not_read_is_not_waited_for(journal, tmp_path):
    stream = io.StringIO()
    handler = JournalHandler(stream, str(tmp_path / "journal"))
    for number in range(5000):
        handler.emit(record("%d", number))
        if stream.getvalue():
            break
    handler.close()
    assert stream.getvalue().startswith("<4>")


def test_the_stream_must_be_the_very_one(tmp_path):
    with (tmp_path / "a").open("w") as stream, (tmp_path / "b").open("w") as other:
        seen = os.fstat(stream.fileno())
        environ = {"JOURNAL_STREAM": f"{seen.st_dev}:{seen.st_ino}"}
        assert is_journal(stream, environ)
        assert not is_journal(other, environ)
        assert not is_journal(stream, {})
        assert not is_journal(io.StringIO(), environ)


def test_one_line_has_no_other():
    assert one_line("a\r\nb") == "a\\r\\nb"


SCRIPT = """
import os, sys, logging
from kvd.daemon.process import start_log
if sys.argv[1] == "journal":
    seen = os.fstat(2)
    os.environ["JOURNAL_STREAM"] = f"{seen.st_dev}:{seen.st_ino}"
    import kvd.systemd.journal as journal
    journal.JournalHandler.__init__.__defaults__ = (None, "/nowhere")
start_log("info")
logging.getLogger("kvd").warning("one\\n<0>two")
logging.getLogger("kvd").debug("unseen")
"""


@pytest.mark.parametrize(("kind", "text"), [("journal", "<4>one\\n<0>two\n"), ("plain", "WARNING one\\n<0>two\n")])
def test_the_daemon_chooses_by_its_stderr(kind, text):
    done = subprocess.run([sys.executable, "-c", SCRIPT, kind], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == text


def shown(limit: LogLimit, message: str, *args: object) -> str | None:
    made = record(message, *args)
    return made.getMessage() if limit.filter(made) else None


def test_a_sentence_is_written_so_many_times_and_then_counted():
    clock = FakeClock()
    limit = LogLimit(clock)
    texts = [shown(limit, "session %d ended", number) for number in range(BURST + 30)]
    assert texts[:2] == ["session 0 ended", "session 1 ended"]
    assert texts[BURST - 1] == f"session {BURST - 1} ended (more like it are left out for {PERIOD_S:g} s)"
    assert texts[BURST:] == [None] * 30
    assert shown(limit, "another") == "another"
    clock.advance(PERIOD_S)
    assert shown(limit, "session %d ended", 99) == "session 99 ended (30 more like it were left out)"
    assert shown(limit, "session %d ended", 100) == "session 100 ended"


def test_sentences_of_two_loggers_are_two():
    limit = LogLimit(FakeClock())
    for _ in range(BURST):
        shown(limit, "x")
    other = record("x")
    other.name = "kvd.other"
    assert limit.filter(other)
    assert shown(limit, "x") is None


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(log_limit, "MAX_SENTENCES", 10)
    limit = LogLimit(FakeClock())
    for number in range(1000):
        assert shown(limit, f"sentence {number}")
    assert len(limit._seen) == 10
