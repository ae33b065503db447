from __future__ import annotations

from pathlib import Path

import pytest

from kvd.errors import RuntimeFolderError
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
