"""The configuration's keys as options of a command: made from the schema, so that none is forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from kvd.config.keys import KEYS, Key
from kvd.config.load import Loaded, load
from kvd.config.paths import config_file

_PATH = click.Path(readable=False)
"""Not looked at by click: that it may not be read is for who reads it to say, with an exit code of its own."""

_PARAMETER_BY_KEY = {name: name.replace(".", "__") for name in KEYS}


def _completions(key: Key) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    return lambda _context, _parameter, typed: [CompletionItem(text) for text in key.choices if text.startswith(typed)]


def _option(key: Key) -> Callable[[Any], Any]:
    parameter = _PARAMETER_BY_KEY[key.name]
    description = f"{key.description} [default: {key.format(key.default)}]" if key.default != "" else key.description
    if isinstance(key.default, bool):
        return click.option("/".join(key.flags), parameter, default=None, help=description)
    metavar = "SIZE" if key.is_size else "TEXT" if key.is_text else "NUMBER"
    if key.choices:
        metavar = "|".join((*key.choices, metavar)) if key.is_size else "|".join(key.choices)
    return click.option(
        key.flag, parameter, default=None, metavar=metavar, help=description, shell_complete=_completions(key)
    )


def config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--config FILE` and one option a key; the command gets them as keyword arguments for `loaded`."""
    for key in reversed(KEYS.values()):
        command = _option(key)(command)
    return click.option(
        "--config",
        "config_path",
        metavar="FILE",
        type=_PATH,
        help="TOML file [default: $KVD_CONFIG, ~/.config/kvd/kvd.toml, /etc/kvd/kvd.toml].",
    )(command)


def loaded(config_path: str | None, options: dict[str, object]) -> tuple[Loaded, str | None]:
    """The configuration these options, the environment and the file give; and the file's path, None without one."""
    path = config_file(config_path)
    flags = {name: options[parameter] for name, parameter in _PARAMETER_BY_KEY.items()}
    return load(path, None, flags), None if path is None else str(path)


runtime_dir_option = click.option(
    "--runtime-dir",
    metavar="FOLDER",
    type=_PATH,
    help="The daemon's folder [default: $KVD_RUNTIME_DIR, $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/kvd, /run/kvd].",
)
