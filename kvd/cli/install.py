"""`kvd install`: kvd as a service of systemd."""

from __future__ import annotations

import grp
import re
import stat
import subprocess
from pathlib import Path

import click

from kvd.cli.service_manager import Place, check_not_foreign, config_home, is_ours, own_unit, run, write
from kvd.errors import InstallError, InvalidRequest
from kvd.systemd.units import (
    DEFAULT_GROUP,
    GPU_GROUP,
    SYSTEM_UNIT,
    SYSUSERS,
    TMPFILES,
    Program,
    made_groups,
    system_files,
    this_program,
    user_files,
)

_READABLE = stat.S_IROTH | stat.S_IXOTH


@click.command()
@click.option("--user", "is_user", is_flag=True, help="A service of your own, for your own processes.")
@click.option(
    "--group", default=DEFAULT_GROUP, show_default=True, metavar="NAME", help="Members may connect; made if need be."
)
@click.option("--now", is_flag=True, help="Also start it, and let it start at every boot (with --user: login).")
@click.option("--dry-run", is_flag=True, help="Only show what would be written.")
@click.option(
    "--root", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER", help="Write below it, for a package."
)
def install(is_user: bool, group: str, now: bool, dry_run: bool, root: Path | None) -> None:
    """Install kvd as a service of systemd.

    It writes the units, the service's user and its folders, for the kvd that runs this command. Again later, after kvd
    was moved or updated, it writes what is another by then.
    """
    if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,30}", group):
        raise InvalidRequest(f"{group!r} is no name of a group")
    place = Place(is_user, root or Path("/"))
    program = this_program()
    if is_user:
        files = user_files(program, config_home())
    else:
        # A unit that names a group that is not there does not start.
        made = [] if _is_group(group) else [group]
        files = system_files(
            program,
            group,
            makes_groups=[*_groups_of_before(place), *made],
            gpu_group=GPU_GROUP if _is_group(GPU_GROUP) else None,
        )
    files = {place.path(path): text for path, text in files.items()}
    if dry_run:
        for path, text in files.items():
            click.echo(f"--- {path}\n{text}")
        return
    place.check_rights()
    _check_program(program, is_user=is_user)
    check_not_foreign(files)
    for path, text in files.items():
        click.echo(f"{'written' if write(path, text) else 'unchanged'}: {path}")
    if not place.is_live:
        if now:
            raise InstallError("written, but systemd does not run here: it cannot be started")
        return
    if not is_user:
        run(["systemd-sysusers", str(SYSUSERS)])
        run(["systemd-tmpfiles", "--create", str(TMPFILES)])
    place.systemctl("daemon-reload")
    unit = (own_unit() if is_user else SYSTEM_UNIT).name
    if now:
        place.systemctl("enable", unit)
        # Restarted, so that an installation over a running one takes effect.
        place.systemctl("restart", unit)
        click.echo("kvd runs; `kvd status` shows it")
    else:
        click.echo(f"next: systemctl {'--user ' if is_user else ''}enable --now {unit}")
    if not is_user:
        click.echo(f"who may connect: members of the group {group} (usermod -aG {group} NAME, then a new login)")


def _groups_of_before(place: Place) -> list[str]:
    """Those that an earlier installation made, which are to go with this one."""
    path = place.path(SYSUSERS)
    return made_groups(path.read_text(encoding="utf-8")) if is_ours(path) else []


def _is_group(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def _check_program(program: Program, *, is_user: bool) -> None:
    """Raises `InstallError` when the service could not run this kvd: found by its folder only, or closed to others."""
    done = subprocess.run([*program.argv, "--version"], cwd="/", capture_output=True, check=False)
    if done.returncode:
        raise InstallError(
            f"{program.argv[0]} does not find kvd from another folder; install it there: pip install kvd-daemon"
        )
    if is_user:
        return
    hidden = program.hidden_folders
    for folder in program.folders:
        # What the unit binds is seen by the service whatever its parents are.
        for part in (folder,) if folder in hidden else (folder, *folder.parents):
            if part.stat().st_mode & _READABLE != _READABLE:
                raise InstallError(f"the service's user could not read {part}: chmod o+rx, or install kvd elsewhere")
