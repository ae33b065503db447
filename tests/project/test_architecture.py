"""ARCHITECTURE.md names files, modules and classes that there are."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("kvd", "clients/kvd_client")
FOLDERS = (ROOT, ROOT / "kvd", ROOT / "clients", ROOT / "clients/kvd_client")
"""Where a path may begin: the page leaves out what is plain from its place."""


def words() -> list[str]:
    """All that stands in backticks, but for blocks of code."""
    text = re.sub(r"^```.*?^```", "", (ROOT / "ARCHITECTURE.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    return sorted(set(re.findall(r"`([^`\n]+)`", text)))


@cache
def names_by_class() -> dict[str, set[str]]:
    """What the classes of a name have: methods and fields."""
    found: dict[str, set[str]] = {}
    for path in (path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                names = found.setdefault(node.name, set())
                names |= {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
                fields = (one.target for one in node.body if isinstance(one, ast.AnnAssign))
                names |= {field.id for field in fields if isinstance(field, ast.Name)}
    return found


def places(path: str) -> list[Path]:
    """The files or folders that a path of the page may mean; a bare file name is one anywhere in the code."""
    found = [place for folder in FOLDERS for place in folder.glob(path)]
    if "/" not in path:
        found += [place for folder in CODE for place in (ROOT / folder).rglob(path)]
    return found


def is_right(word: str) -> bool | None:
    """Whether what the page names exists; None for what names nothing of the code (a command, an error, a call)."""
    if match := re.fullmatch(r"([\w/]+\.py): (\w+)", word):
        return any(re.search(rf"\b(def|class) {match[2]}\b", place.read_text()) for place in places(match[1]))
    if re.fullmatch(r"[\w*]+\.py|[\w*./]+/[\w*./]*", word):
        return bool(places(word.rstrip("/")))
    if match := re.match(r"python -m ([\w.]+)|(kvd(?:\.\w+)+)$", word):
        module = (match[1] or match[2]).replace(".", "/")
        return (ROOT / module).is_dir() or (ROOT / f"{module}.py").is_file()
    if match := re.fullmatch(r"(?:\w+\.)?([A-Z]\w*[a-z]\w*)(?:\.(\w+))?", word):
        names = names_by_class().get(match[1])
        return names is not None and (match[2] is None or match[2] in names)
    return None


@pytest.mark.parametrize("word", [word for word in words() if is_right(word) is not None])
def test_what_the_page_names_exists(word: str) -> None:
    assert is_right(word)


def test_the_page_has_such_names() -> None:
    kinds = ("server/server.py: turn", "service/parking.py", "kvd.hashing", "Pool.begin", "SegmentGranted")
    assert [word for word in kinds if word not in words()] == []


@pytest.mark.parametrize(
    "word", ["server/server.py: nothing", "service/nothing.py", "nothing.py", "kvd.nothing", "Pool.nothing", "Nothing"]
)
def test_what_does_not_exist_is_noticed(word: str) -> None:
    assert is_right(word) is False


@pytest.mark.parametrize("folder", [*(ROOT / "kvd").iterdir()], ids=lambda folder: folder.name)
def test_every_part_of_the_daemon_is_in_the_picture_of_the_layers(folder: Path) -> None:
    if folder.name.startswith("_") or folder.suffix not in {"", ".py"}:
        return
    picture = (ROOT / "ARCHITECTURE.md").read_text().partition("```")[2].partition("```")[0]
    assert re.search(rf"\bkvd\.{folder.stem}\b", picture)
