"""The `kvd` command. `app` lists the commands; each is one module; `render_*` are pure functions from data to text."""


def main() -> None:
    """Entry point of the `kvd` script."""
    from kvd.cli.app import app

    app(prog_name="kvd")
