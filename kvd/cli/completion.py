"""`kvd completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_HELP = """\
Print a script for the shell's completion.

\b
bash:  kvd completion bash > ~/.local/share/bash-completion/completions/kvd
zsh:   kvd completion zsh > ~/.zfunc/_kvd        (with ~/.zfunc in $fpath)
fish:  kvd completion fish > ~/.config/fish/completions/kvd.fish
"""


@click.command(help=_HELP)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Prints what click generates for the whole command tree."""
    maker = get_completion_class(shell)
    if maker is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(maker(ctx.find_root().command, {}, "kvd", "_KVD_COMPLETE").source())
