"""The command group: which commands there are, and the one place where errors become a line and an exit code.

Commands are imported when they are used, so that `kvd --help` stays quick and a daemon never loads what only another
command needs.
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from typing import Any, NamedTuple

import click

from kvd import __version__
from kvd.cli.text import one_line
from kvd.errors import KvdError


class Entry(NamedTuple):
    """Where a command is defined, and its line in the help (a test compares it with the command's own)."""

    module: str
    attribute: str
    summary: str


COMMANDS = {
    "serve": Entry("kvd.cli.serve", "serve", "Run the daemon in the foreground."),
    "status": Entry("kvd.cli.status", "status", "Show memory, pools, models and clients of the running daemon."),
    "top": Entry("kvd.cli.top", "top", "Watch blocks, tiers and clients live, full screen."),
    "pools": Entry("kvd.cli.tables_of_status", "pools", "List the pools: segments, blocks in each state, evictions."),
    "clients": Entry(
        "kvd.cli.tables_of_status",
        "clients",
        "List the clients: what each holds, maps and was spared.",
    ),
    "why": Entry("kvd.cli.why", "why", "Say how far a prompt is cached, and why no further."),
    "pin": Entry("kvd.cli.pin", "pin", "Keep prompts resident, across restarts too."),
    "flush": Entry("kvd.cli.flush", "flush", "Forget cached blocks for good, in memory and every tier below."),
    "spill": Entry("kvd.cli.spill", "spill", "Copy every idle block that has no copy yet to the tiers below."),
    "prefetch": Entry(
        "kvd.cli.prefetch", "prefetch", "Bring prompts up from the tiers below before they are asked for."
    ),
    "resize": Entry("kvd.cli.resize", "resize", "Change how much memory the pools of a device may have."),
    "size": Entry("kvd.cli.size", "size_command", "Say how much memory a model's KV takes, and how many tokens fit."),
    "doctor": Entry("kvd.cli.doctor", "doctor", "Check this machine and the daemon; say how to fix what is wrong."),
    "run": Entry("kvd.cli.run", "run", "Run a Python program with kvd behind its transformers models."),
    "demo": Entry("kvd.cli.demo", "demo", "Watch processes share a real model's KV cache."),
    "bench": Entry("kvd.cli.bench", "bench", "Measure kvd, each number beside its limit in the same run."),
    "llama-server": Entry(
        "kvd.cli.llama_server", "llama_server", "Run a llama-server that shares its KV cache through kvd."
    ),
    "install": Entry("kvd.cli.install", "install", "Install kvd as a service of systemd."),
    "uninstall": Entry("kvd.cli.uninstall", "uninstall", "Stop the service and remove what install wrote."),
    "config": Entry("kvd.cli.config", "config", "Print or check the configuration."),
    "completion": Entry("kvd.cli.completion", "completion", "Print a script for the shell's completion."),
}
"""In the order of the help."""

OUTPUT_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""What write(2) says of a file, disk or terminal that takes no more."""


class App(click.Group):
    """A group whose commands are imported on first use, and whose `KvdError`s end as one line and their exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command; None for an unknown name, which click then reports."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command: click.Command = getattr(importlib.import_module(entry.module), entry.attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in the help, without importing a command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the program. Output that cannot be written (a full disk) is one line too; click knows closed pipes."""
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            # Of kvd's own calls none may let an OSError through, and those that open a file name it.
            if error.errno not in OUTPUT_ERRNOS or error.filename is not None:
                raise
            _give_up_output()
            click.echo(f"kvd: cannot write the output: {error.strerror}", err=True)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except KvdError as error:
            click.echo(f"kvd: {one_line(str(error)) or type(error).__name__}", err=True)
            raise click.exceptions.Exit(error.exit_code) from error


def _give_up_output() -> None:
    """What stdout still keeps goes nowhere: the interpreter flushes it once more at its end, and must not fail then."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@click.group(cls=App, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="kvd")
def app() -> None:
    """A daemon that owns KV-cache memory and shares it between inference processes.

    Exit codes: 0 done, 2 a request or command line that can never be right, 3 no daemon there, 4 no right to connect,
    5 not enough memory, 6 the daemon did not answer in time, 7 a wrong configuration, 8 an unusable runtime folder,
    9 another daemon runs there, 10 a model that cannot be served, 11 the GPU or its driver, 12 and 13 what `kvd doctor`
    found (warnings, errors), 1 anything else.
    """
