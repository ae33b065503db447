"""`kvd status --json` keeps to its published schema, which is the one the code makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace as with_fields

from kvd.cli.processes import Process
from kvd.cli.status_json import as_json_line, schema
from tests.cli.snapshots import CLIENT, EMPTY, FULL, HOST_TIER, MOVER, PIN, REDIS_TIER, SAVINGS, WAIT

SCHEMA: dict[str, Any] = json.loads((Path(__file__).parents[2] / "docs/status.schema.json").read_text())
EVERYTHING = with_fields(
    FULL, tiers=[HOST_TIER, REDIS_TIER], mover=MOVER, savings=SAVINGS, pins=[PIN], waits=[WAIT]
)  # fmt: skip


def validate(fields: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(fields)


def test_the_published_schema_is_the_codes():
    assert schema() == SCHEMA, "run: .venv/bin/python -m kvd.cli.status_json > docs/status.schema.json"


def test_fields_are_described_in_the_words_of_the_code():
    held = SCHEMA["$defs"]["PoolStatus"]["properties"]["num_referenced"]
    assert held["description"].startswith("Sealed blocks with at least one reference")


def test_it_is_a_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("snapshot", [EMPTY, EVERYTHING])
@pytest.mark.parametrize("processes", [{}, {CLIENT.pid: Process("python", 1)}])
def test_what_is_printed_keeps_to_it(snapshot, processes):
    validate(json.loads(as_json_line(snapshot, processes)))


def parts(fields: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where each property of each object is, the free ones (counters) left out."""
    found = []
    items = fields.items() if isinstance(fields, dict) else enumerate(fields) if isinstance(fields, list) else ()
    for key, value in items:
        if isinstance(fields, dict):
            found.append((*path, key))
        if key not in {"counters", "errors", "details", "queued", "running"}:
            found += parts(value, (*path, key))
    return found


@pytest.mark.parametrize("path", parts(json.loads(as_json_line(EVERYTHING, {}))), ids=lambda p: ".".join(map(str, p)))
def test_every_property_is_required_and_typed(path):
    fields = json.loads(as_json_line(EVERYTHING, {}))
    inner = fields
    for key in path[:-1]:
        inner = inner[key]
    kept = inner.pop(path[-1])
    with pytest.raises(jsonschema.ValidationError):
        validate(fields)
    inner[path[-1]] = {"of": "another type"} if not isinstance(kept, dict) else "text"
    with pytest.raises(jsonschema.ValidationError):
        validate(fields)


def test_what_a_later_version_adds_is_allowed():
    validate(json.loads(as_json_line(EVERYTHING, {})) | {"added_later": 1})
