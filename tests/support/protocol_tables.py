"""The parts of PROTOCOL.md that follow from the code: tables of fields, errors, the worked example.

Run it to bring the page up to date: .venv/bin/python -m tests.support.protocol_tables
"""

from __future__ import annotations

import re
import struct
import types
import typing
from pathlib import Path

import msgspec

from kvd import errors
from kvd.hashing import Namespace, chain_hashes, encode_tokens, namespace_digest
from kvd.layout import KVLayout
from kvd.protocol import replies, requests, session, wire

PAGE = Path(__file__).parents[2] / "PROTOCOL.md"
TYPES = {int: "int", str: "str", bytes: "bin", bool: "bool", float: "float"}


def type_name(hint: object) -> str:
    if isinstance(hint, types.UnionType):
        return " or ".join(type_name(part) for part in typing.get_args(hint))
    if hint is type(None):
        return "nil"
    if typing.get_origin(hint) is list:
        return f"array of {type_name(typing.get_args(hint)[0])}"
    return TYPES.get(hint, "map")  # type: ignore[call-overload]


def fields(kind: type[msgspec.Struct], skip: int) -> str:
    """`name type`, in order, `= default` where there is one."""
    hints = typing.get_type_hints(kind)
    shown = []
    for field in msgspec.structs.fields(kind)[skip:]:
        value = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        default = "" if field.required else f" = {wire_text(value)}"
        shown.append(f"{field.name} {type_name(hints[field.name])}{default}")
    return ", ".join(shown) or "-"


def wire_text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "nil", True: "true", False: "false"}[value]
    return "empty" if value in (b"", "", []) else str(value)


def table(union: object, skip: int) -> list[str]:
    kinds = typing.get_args(union) or (union,)
    rows = [f"| `{kind.__struct_config__.tag}` | {fields(kind, skip)} |" for kind in kinds]
    return ["| tag | fields |", "|---|---|", *rows]


def error_table() -> list[str]:
    rows = []
    for code, kind in errors.BY_CODE.items():
        text = " ".join(str(kind.__doc__).split("\n\n", maxsplit=1)[0].split())
        rows.append(f"| `{code}` | {kind.exit_code} | {text} |")
    return ["| code | exit | meaning |", "|---|---|---|", *rows]


def worked_example() -> list[str]:
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=64, dtype="float16", block_tokens=16)
    namespace = Namespace(model="demo@sha256:00", layout=layout, engine="raw/1")
    canonical = b"kvd namespace 1"
    lines = []
    for tag, value in [*namespace.canonical_fields(), (b"tenant", b"gid:1000")]:
        piece = struct.pack("<I", len(tag)) + tag + struct.pack("<I", len(value)) + value
        canonical += piece
        lines.append(f"{piece.hex()}  {tag.decode()} = {value.decode() or 'empty'}")
    digest = namespace_digest(namespace, "gid:1000")
    first, second = chain_hashes(digest, encode_tokens(range(32)), 16)
    hello = session.encode(session.Hello(1, 1, client_version="1.0", label="example"))
    status = wire.encode(requests.Status(7, 5))
    return [
        f"{b'kvd namespace 1'.hex()}  the text 'kvd namespace 1'",
        *lines,
        f"namespace digest  {digest.hex()}",
        f"tokens 0..15      {encode_tokens(range(16)).hex()}",
        f"hash of block 0   {first.hex()}",
        f"hash of block 1   {second.hex()}",
        f"hello             {hello.hex()}",
        f"status request    {status.hex()}",
        f"done reply        {wire.encode(replies.Done(7, 5)).hex()}",
    ]


def blocks() -> dict[str, list[str]]:
    """By the name between the page's marks."""
    return {
        "from client": table(session.FromClient, 0),
        "from daemon": table(session.FromDaemon, 0),
        "requests": table(requests.Request, 2),
        "replies": table(replies.Reply, 2),
        "errors": error_table(),
        "example": ["```", *worked_example(), "```"],
    }


def updated(page: str) -> str:
    """The page with what stands between `<!-- name -->` and `<!-- end -->` as the code has it."""
    for name, lines in blocks().items():
        text = "\n".join(lines)
        page, num_found = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda m, text=text: f"{m[1]}{text}\n{m[2]}",
            page,
            flags=re.DOTALL,
        )
        assert num_found == 1, name
    return page


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
