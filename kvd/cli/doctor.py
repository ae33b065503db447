"""`kvd doctor`."""

from __future__ import annotations

import click
import msgspec
from rich.console import Group
from rich.text import Text

from kvd.cli.console import console
from kvd.cli.doctor_checks import examine, worst
from kvd.cli.doctor_facts import Finding, Level
from kvd.cli.options import runtime_dir_option
from kvd.cli.text import one_line

EXIT_CODES = {Level.OK: 0, Level.NOTE: 0, Level.WARNING: 12, Level.ERROR: 13}
_STYLES = {Level.OK: "green", Level.NOTE: "", Level.WARNING: "yellow", Level.ERROR: "bold red"}


@click.command()
@runtime_dir_option
@click.option("--config", "config_path", metavar="FILE", type=click.Path(), help="The daemon's TOML file.")
@click.option("--verify", is_flag=True, help="Compare every sealed block with the checksum its writer gave, too.")
@click.option("--all", "show_all", is_flag=True, help="Show what is well, too.")
@click.option("--json", "as_json", is_flag=True, help="A list of objects: check, level, text, fix.")
@click.pass_context
def doctor(
    ctx: click.Context, runtime_dir: str | None, config_path: str | None, verify: bool, show_all: bool, as_json: bool
) -> None:
    """Check this machine and the daemon; say how to fix what is wrong.

    Exits with 0 when nothing is wrong, 12 when something could be better (a warning), 13 when something does not work
    (an error).
    """
    from kvd.cli.doctor_gather import gather

    findings = examine(gather(runtime_dir, config_path, verify=verify))
    if as_json:
        click.echo(msgspec.json.encode([_as_fields(finding) for finding in findings]).decode())
    else:
        console().print(render_findings(findings, show_all=show_all), soft_wrap=True)
    ctx.exit(EXIT_CODES[worst(findings)])


def _as_fields(finding: Finding) -> dict[str, str]:
    return {
        "check": finding.check,
        "level": finding.level.name.lower(),
        "text": one_line(finding.text),
        "fix": finding.fix,
    }


def render_findings(findings: list[Finding], *, show_all: bool) -> Group:
    """The worst first, each with its fix on a line of its own; a last line that counts. Pure."""
    lines: list[Text] = []
    for finding in sorted(findings, key=lambda one: -one.level):
        if finding.level is Level.OK and not show_all:
            continue
        lines.append(
            Text.assemble(
                (finding.level.name.lower(), _STYLES[finding.level]), f"  {finding.check}: {one_line(finding.text)}"
            )
        )
        if finding.fix:
            lines.append(Text(f"  -> {finding.fix}"))
    counts = {level: sum(one.level is level for one in findings) for level in Level}
    lines.append(
        Text(
            f"{counts[Level.ERROR]} errors, {counts[Level.WARNING]} warnings, {counts[Level.NOTE]} notes, "
            f"{counts[Level.OK]} well"
        )
    )
    return Group(*lines)
