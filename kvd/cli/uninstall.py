"""`kvd uninstall`: takes away what `kvd install` made, and what the service kept."""

from __future__ import annotations

import contextlib
import grp
import pwd
import shutil
from pathlib import Path

import click

from kvd.cli.service_manager import Place, check_not_foreign, is_ours, own_unit, remove, run
from kvd.errors import InstallError
from kvd.systemd.units import DEFAULT_GROUP, NVIDIA_UNIT, SYSTEM_UNIT, SYSUSERS, TMPFILES, USER, made_groups

STATE = Path("/var/lib/kvd")
CONFIGURATION = Path("/etc/kvd")


@click.command()
@click.option("--user", "is_user", is_flag=True, help="The service of your own.")
@click.option("--keep-data", is_flag=True, help="Leave what it keeps across restarts, and its user.")
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@click.option(
    "--root", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER", help="As it was given to install."
)
def uninstall(is_user: bool, keep_data: bool, dry_run: bool, root: Path | None) -> None:
    """Stop the service and remove what install wrote.

    With it go the blocks that it kept across restarts, and its user. A configuration in /etc/kvd stays: it is yours.
    """
    place = Place(is_user, root or Path("/"))
    units = (own_unit(),) if is_user else (SYSTEM_UNIT, NVIDIA_UNIT)
    others = () if is_user else (SYSUSERS, TMPFILES)
    state = Path.home() / ".local" / "state" / "kvd" if is_user else STATE
    found = [path for path in map(place.path, (*units, *others)) if path.exists()]
    if not dry_run:
        place.check_rights()
    check_not_foreign(found)
    if place.is_live and not dry_run and found:
        # Also of one that was never enabled or started; that is no failure.
        place.systemctl("disable", "--now", *(unit.name for unit in units if is_ours(place.path(unit))))
    groups = [DEFAULT_GROUP]
    if (sysusers := place.path(SYSUSERS)) in found:
        groups += made_groups(sysusers.read_text(encoding="utf-8"))
    for path in found:
        _say(dry_run, str(path))
        if not dry_run:
            remove(path)
    if not keep_data:
        _forget(place.path(state), dry_run=dry_run)
    if not is_user and not keep_data and place.root == Path("/"):
        _remove_user(groups, dry_run=dry_run)
    if not is_user:
        configuration = place.path(CONFIGURATION)
        with contextlib.suppress(OSError):
            if not dry_run:
                configuration.rmdir()  # only if it is empty
        if configuration.exists():
            click.echo(f"left, as it is yours: {configuration}")
    if place.is_live and not dry_run:
        place.systemctl("daemon-reload")
        with contextlib.suppress(InstallError):  # none of them had failed
            place.systemctl("reset-failed", *(unit.name for unit in units))
    if not found:
        click.echo("kvd was not installed here" if not is_user else "you have no kvd service of your own")


def _say(dry_run: bool, what: str) -> None:
    click.echo(f"{'would remove' if dry_run else 'removed'}: {what}")


def _forget(folder: Path, *, dry_run: bool) -> None:
    if not folder.is_dir() or folder.is_symlink():
        return
    _say(dry_run, str(folder))
    if not dry_run:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise InstallError(f"cannot remove {folder}: {error.strerror}") from error


def _remove_user(groups: list[str], *, dry_run: bool) -> None:
    """The user that sysusers made, known by its home, and the groups that it made."""
    try:
        user = pwd.getpwnam(USER)
    except KeyError:
        return
    if user.pw_dir != str(STATE):
        return
    _say(dry_run, f"user {USER}")
    if dry_run:
        return
    run(["userdel", USER])
    for group in groups:
        with contextlib.suppress(KeyError, InstallError):  # gone with its user, or somebody's primary group by now
            grp.getgrnam(group)
            run(["groupdel", group])
