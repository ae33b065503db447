"""`kvd llama-server`."""

from __future__ import annotations

import logging

import click

from kvd.cli.options import runtime_dir_option
from kvd.errors import EngineUnsupported


@click.command("llama-server", context_settings={"ignore_unknown_options": True})
@click.option("--bin", "binary", metavar="PROGRAM", help="The llama-server to run [default: llama-server on PATH].")
@click.option(
    "--snapshot-dir",
    metavar="FOLDER",
    help="Where states pass between llama-server and kvd; wants room for two of them [default: /dev/shm].",
)
@runtime_dir_option
@click.argument("arguments", metavar="-- ARGS...", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def llama_server(
    ctx: click.Context,
    binary: str | None,
    snapshot_dir: str | None,
    runtime_dir: str | None,
    arguments: tuple[str, ...],
) -> None:
    """Run a llama-server that shares its KV cache through kvd.

    ARGS are those of llama-server itself. A proxy takes its place at --host and --port: before a completion it restores
    the longest snapshot that begins like the prompt, from whichever server of the same model; after it keeps the state.
    Everything else passes through unchanged. Without a daemon it is a plain llama-server. GET /kvd/status tells what
    was restored and kept. SIGTERM and SIGINT stop both.
    """
    try:
        from kvd_client.engines.llama_cpp.serve import serve
    except ImportError as error:
        raise EngineUnsupported("the proxy needs aiohttp: pip install 'kvd-daemon[llama-server]'") from error
    logging.basicConfig(level=logging.INFO, format="kvd %(levelname)s %(message)s")

    def listening(url: str) -> None:
        click.echo(f"kvd llama-server: {url}", err=True)

    ctx.exit(
        serve(arguments, binary=binary, snapshot_dir=snapshot_dir, runtime_dir=runtime_dir, on_listening=listening)
    )
