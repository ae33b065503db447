"""`kvd serve`."""

from __future__ import annotations

import click

from kvd.cli.options import config_options, loaded
from kvd.config.schema import Config
from kvd.daemon import serve as run_daemon


@click.command()
@config_options
def serve(config_path: str | None, **options: object) -> None:
    """Run the daemon in the foreground.

    It stops cleanly on SIGTERM and SIGINT; SIGHUP reads the configuration again. Options beat KVD_* variables, which
    beat the TOML file; `kvd config show` takes the same options and prints what they come to.
    """

    def read() -> Config:
        return loaded(config_path, options)[0].config

    click.get_current_context().exit(run_daemon(read(), reload=read))
