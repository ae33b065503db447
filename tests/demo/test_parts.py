"""The demo's parts, without a model: documents, events, rendering, and how it fails."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from kvd.cli.demo import demo, documents, model
from kvd.cli.demo.acts import Result
from kvd.cli.demo.daemon import clean_environ, last_line, private_daemon
from kvd.cli.demo.events import Answered, Checked, Event, Loading, Ready, decode, encode
from kvd.cli.demo.render import describe, render_results, seconds
from kvd.cli.demo.workers import Worker, WorkerFailed, await_all
from kvd.errors import DaemonUnavailable

READY = Ready(session=3, num_prompt_tokens=2069)
WARM = Answered(num_cached_tokens=2048, num_copied_bytes=0, attach_s=0.002, first_token_s=0.06, text="118 kilograms.")
WAITED = Answered(num_cached_tokens=2048, num_copied_bytes=0, attach_s=3.9, first_token_s=3.96, text="Three\nof them.")
EQUAL = Checked(first_token_s=3.6, is_equal=True)


@pytest.mark.parametrize("name", documents.NAMES)
def test_a_document_is_worth_sharing(name: str) -> None:
    assert 1200 < len(documents.read(name).split()) < 2000


def test_documents_share_no_beginning() -> None:
    one, two = map(documents.read, documents.NAMES)
    assert one[:4] != two[:4]


@pytest.mark.parametrize("event", [Loading(stage="x", num_done=1, num_stages=4), READY, WARM, EQUAL])
def test_an_event_is_one_line_that_reads_back(event: Event) -> None:
    line = encode(event)
    assert line.count(b"\n") == 1
    assert decode(line) == event
    assert describe(event)


def test_rubbish_is_no_event() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode(b"Downloading 3%")


@pytest.mark.parametrize(("duration_s", "text"), [(0.0614, "61 ms"), (3.918, "3.92 s"), (61.0, "61.00 s")])
def test_times_have_three_digits_or_so(duration_s: float, text: str) -> None:
    assert seconds(duration_s) == text


def rendered(*results: Result) -> str:
    console = Console(width=100, color_system=None, record=True, file=None, quiet=False, force_terminal=False)
    with console.capture() as capture:
        console.print(render_results(results))
    return capture.get()


def test_a_row_tells_reuse_copies_times_ratio_and_equality() -> None:
    text = rendered(Result("B", "How heavy?", READY, WARM, EQUAL))
    row = next(line.split() for line in text.splitlines() if line.split()[:1] == ["B"])
    assert row == ["B", "2,069", "2,048", "0", "B", "-", "60", "ms", "3.60", "s", "60.0x", "yes"]
    assert "B: How heavy? 118 kilograms." in text


def test_a_wait_is_told_apart_and_an_answer_stays_on_one_line() -> None:
    text = rendered(Result("D", "How many?", READY, WAITED, Checked(first_token_s=3.6, is_equal=False)))
    assert re.search(r"D +2,069 +2,048 +0 B +3\.90 s +3\.96 s +3\.60 s +0\.9x +NO", text)
    assert "D: How many? Three of them." in text


def test_what_is_not_installed_is_named_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "MODULES", ("torch", "no_such_module"))
    result = CliRunner().invoke(demo)
    assert result.exit_code == 1
    assert result.output.splitlines() == [f"Error: the demo needs no_such_module: {model.INSTALL}"]


def test_nothing_of_the_users_settings_reaches_the_private_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVD_RUNTIME_DIR", "KVD_MEMORY_BUDGET", "RUNTIME_DIRECTORY", "NOTIFY_SOCKET"):
        monkeypatch.setenv(name, "/nonsense")
    assert not {"KVD_RUNTIME_DIR", "KVD_MEMORY_BUDGET", "RUNTIME_DIRECTORY", "NOTIFY_SOCKET"} & clean_environ().keys()
    with private_daemon("--memory-budget", "64MiB") as daemon:
        assert daemon.process.poll() is None
    assert daemon.process.poll() == 0
    assert not daemon.folder.exists()


def test_a_daemon_that_does_not_start_is_an_error_with_its_own_words() -> None:
    with pytest.raises(DaemonUnavailable, match="--no-such-option"), private_daemon("--no-such-option"):
        pytest.fail("there is no such option")


def test_a_worker_that_ends_early_is_named_with_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Worker(name="A", runtime_dir=tmp_path, log=log, document="nowhere", question="?", unpacked=tmp_path) as worker:
        with pytest.raises(WorkerFailed, match=r"A ended with exit code 1: FileNotFoundError.*nowhere"):
            await_all([worker], Ready, lambda *_: None)
        with pytest.raises(WorkerFailed, match="A ended: FileNotFoundError"):
            worker.cue("ask")


def test_a_silent_worker_is_not_waited_for_without_end(tmp_path: Path) -> None:
    worker = Worker(
        name="A", runtime_dir=tmp_path, log=tmp_path / "log", document="pump", question="?", unpacked=tmp_path
    )
    with pytest.raises(WorkerFailed, match="A did not answer in time"), worker:
        await_all([worker], Ready, lambda *_: None, timeout_s=0.0)


@pytest.mark.parametrize(("text", "line"), [("", ""), ("one\n\n", "one"), ("one\ntwo \n \n", "two")])
def test_the_last_words_of_a_log(tmp_path: Path, text: str, line: str) -> None:
    (tmp_path / "log").write_text(text)
    assert last_line(tmp_path / "log") == line
