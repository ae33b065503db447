"""`kvd config show` and `kvd config check`."""

from __future__ import annotations

import json
import os

import click
import msgspec

from kvd.cli.options import config_options, loaded
from kvd.cli.render_config import as_toml
from kvd.config.keys import KEYS, POOLS
from kvd.config.load import Loaded, as_flat
from kvd.errors import TierUnavailable


@click.group()
def config() -> None:
    """Print or check the configuration.

    It is merged: TOML file < KVD_* environment < flags.
    """


def _warn_of_ignored(result: Loaded) -> None:
    for variable in result.ignored_environment:
        click.echo(f"kvd: {variable} in the environment is no configuration key and was ignored", err=True)


@config.command()
@config_options
@click.option("--json", "as_json", is_flag=True, help='An object: key -> {"value", "origin"}; sizes in bytes.')
def show(config_path: str | None, as_json: bool, **options: object) -> None:
    """Print every value and where it came from, as a TOML file that gives the same configuration."""
    result, path = loaded(config_path, options)
    _warn_of_ignored(result)
    if as_json:
        values = {
            name: KEYS[name].format(value) if KEYS[name].is_secret else value
            for name, value in as_flat(result.config).items()
        }
        shown: dict[str, object] = {name: {"value": values[name], "origin": result.origin[name]} for name in KEYS}
        rules = msgspec.to_builtins(result.config.pools)
        shown[POOLS] = {"value": rules, "origin": f"file {path}" if rules else "default"}
        click.echo(json.dumps(shown, indent=2))
    else:
        click.echo(as_toml(result), nl=False)


@config.command()
@config_options
def check(config_path: str | None, **options: object) -> None:
    """Say whether the configuration is right; a wrong one exits with 7 and one line that says what to change.

    Asks no server. Of the tiers it says more than `kvd serve` does, which serves from memory when one cannot be.
    """
    from kvd.build import check_tiers
    from kvd.daemon.folder import access_of_group
    from kvd.metrics import parse_address

    result, path = loaded(config_path, options)
    _warn_of_ignored(result)
    access_of_group(result.config.access.group)
    if result.config.metrics.listen:
        parse_address(result.config.metrics.listen)
    try:
        check_tiers(result.config.tiers, os.environ)
    except TierUnavailable as error:
        # Something is not installed here; the configuration may be right for all that.
        click.echo(f"kvd: no Redis tier: {error}", err=True)
    given = sum(origin != "default" for origin in result.origin.values())
    num_rules = len(result.config.pools)
    rules = f", {num_rules} pool rule{'s'[: num_rules > 1]}" if num_rules else ""
    click.echo(f"{path or 'no configuration file'}: right, {given} of {len(KEYS)} keys set{rules}")
