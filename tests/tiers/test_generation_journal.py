from __future__ import annotations

import errno
from pathlib import Path

import pytest

from kvd.errors import RuntimeFolderError, TierUnavailable
from kvd.tiers import generation_journal
from kvd.tiers.base import Generation
from kvd.tiers.generation_journal import GenerationJournal
from tests.tiers.conformance import new_namespace


def test_the_last_flush_of_each_namespace_is_remembered(tmp_path: Path):
    path, one, other = tmp_path / "journal", new_namespace(), new_namespace()
    journal = GenerationJournal(path)
    for namespace, number in ((one, 1), (other, 2), (one, 2**64 - 1)):
        journal.record(namespace, Generation(number))
    assert GenerationJournal(path).flushed == {one: 2**64 - 1, other: 2}
    assert len(path.read_text().splitlines()) == 2


@pytest.mark.parametrize("rest", ["", "\xff\xfe garbage", "ab cd\n", "00" * 32 + " 12"])
def test_a_torn_or_foreign_line_is_ignored(tmp_path: Path, rest: str):
    path, namespace = tmp_path / "journal", new_namespace()
    GenerationJournal(path).record(namespace, Generation(7))
    with path.open("a", encoding="latin-1") as file:
        file.write(rest)
    journal = GenerationJournal(path)
    assert journal.flushed == {namespace: 7}
    journal.record(namespace, Generation(8))
    assert GenerationJournal(path).flushed == {namespace: 8}


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path):
    with pytest.raises(RuntimeFolderError):
        GenerationJournal(tmp_path / "absent" / "journal")


def test_a_full_disk_is_trouble_of_the_tier_and_the_next_line_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, torn, whole = tmp_path / "journal", new_namespace(), new_namespace()
    journal = GenerationJournal(path)

    def fills_up(path: Path, text: str, *, mode: str) -> None:
        path.write_text(path.read_text() + text[:40])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(generation_journal, "_append", fills_up)
        with pytest.raises(TierUnavailable, match="No space left") as caught:
            journal.record(torn, Generation(1))
    assert caught.value.cause == "journal"
    assert not journal.flushed
    journal.record(whole, Generation(2))
    assert GenerationJournal(path).flushed == {whole: 2}


def test_a_flush_that_is_there_is_not_written_again(tmp_path: Path):
    path, namespace = tmp_path / "journal", new_namespace()
    journal = GenerationJournal(path)
    for _ in range(3):
        journal.record(namespace, Generation(7))
    assert len(path.read_text().splitlines()) == 1
