"""`kvd run`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import click

import kvd_client
from kvd.cli.options import runtime_dir_option
from kvd.errors import InvalidRequest

BOOT_FOLDER = Path(kvd_client.__file__).parent / "engines" / "transformers" / "boot"
"""Holds a sitecustomize.py and nothing else."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@runtime_dir_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(runtime_dir: str | None, command: tuple[str, ...]) -> NoReturn:
    """Run a Python program with kvd behind its transformers models.

    `kvd run -- python script.py`: the script need not know of kvd. Each `generate` uses what any process has computed
    of its prompt, and publishes what it computes. One line on stderr says what was attached, or why nothing was; the
    program runs in any case, and its exit code is this command's.

    Works with every program that an interpreter starts which can import kvd and reads PYTHONPATH (not `python -I`).
    """
    environ = environment(os.environ, runtime_dir)
    try:
        os.execvpe(command[0], command, environ)  # noqa: S606 - the user's own command
    except OSError as error:
        raise InvalidRequest(f"cannot run {command[0]!r}: {error.strerror}") from error


def environment(environ: Mapping[str, str], runtime_dir: str | None) -> dict[str, str]:
    """The program's environment."""
    path: Sequence[str] = [str(BOOT_FOLDER), *filter(None, [environ.get("PYTHONPATH")])]
    changed = dict(environ) | {"PYTHONPATH": os.pathsep.join(path), "KVD_RUN_PID": str(os.getpid())}
    if runtime_dir is not None:
        changed["KVD_RUNTIME_DIR"] = str(Path(runtime_dir).absolute())
    return changed
