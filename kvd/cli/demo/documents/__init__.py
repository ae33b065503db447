"""The documents that the demo asks about; about 2,000 tokens each. Their machines exist only here."""

from __future__ import annotations

from importlib.resources import files

NAMES = ("pump", "oven")


def read(name: str) -> str:
    """The text of a document."""
    return (files(__package__) / f"{name}.txt").read_text(encoding="utf-8")
