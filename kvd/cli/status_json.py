"""`kvd status --json`: the snapshot and the clients' processes, and the schema that both keep to.

docs/status.schema.json is made from here: `python -m kvd.cli.status_json > docs/status.schema.json`.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kvd import status
from kvd.cli.processes import UNKNOWN, Process
from kvd.status import ClientStatus, Snapshot

_OF_THE_PROCESS = {
    "command": {"type": ["string", "null"], "description": "The process's command line; null when it cannot be seen."},
    "private_nbytes": {
        "type": ["integer", "null"],
        "description": "Resident memory that the process shares with nobody; null when it cannot be seen.",
    },
}


def as_json_line(snapshot: Snapshot, processes: Mapping[int, Process]) -> str:
    """The snapshot's fields as they are; each client also has `command` and `private_nbytes` (null when not known)."""
    fields = msgspec.to_builtins(snapshot)
    fields["clients"] = clients_as_fields(snapshot.clients, processes)
    return msgspec.json.encode(fields).decode()


def clients_as_fields(clients: Iterable[ClientStatus], processes: Mapping[int, Process]) -> list[dict[str, Any]]:
    """Each client's fields, and those of its process."""
    found: list[dict[str, Any]] = []
    for client in clients:
        seen = processes.get(client.pid, UNKNOWN)
        of_process = {"command": seen.command or None, "private_nbytes": seen.private_nbytes}
        found.append(msgspec.to_builtins(client) | of_process)
    return found


def _field_words() -> dict[tuple[str, str], str]:
    """(struct, field) -> the text below the field in `kvd.status`."""
    found = {}
    for struct in ast.parse(inspect.getsource(status)).body:
        if isinstance(struct, ast.ClassDef):
            for field, text in itertools.pairwise(struct.body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    words = ast.literal_eval(text.value)
                    found[struct.name, ast.unparse(field.target)] = " ".join(words.split())
    return found


def schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of that line. A later version may add properties, so it allows ones it does not know."""
    made = msgspec.json.schema(Snapshot)
    client = made["$defs"][ClientStatus.__name__]
    client["properties"] |= _OF_THE_PROCESS
    words = _field_words()
    for part in made["$defs"].values():
        # Defaults are for readers of older daemons' messages; what is printed always has everything.
        part["required"] = list(part["properties"])
        for name, described in part["properties"].items():
            described.pop("default", None)
            if (text := words.get((part["title"], name))) is not None:
                described["description"] = text
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kvd status --json",
        "description": "Sizes are bytes, durations seconds; counters count up from the daemon's start.",
        **made,
    }


if __name__ == "__main__":
    print(json.dumps(schema(), indent=2))
