"""Prompts that commands read from files: what they are cached under, and their token ids."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec
from msgspec import Meta

import kvd_client
from kvd.errors import InvalidRequest
from kvd.hashing import Namespace

FORMAT_HELP = """\
A FILE is a JSON object,
{"namespace": ..., "token_ids": [...]}, which Python writes with

\b
json.dump({"namespace": dataclasses.asdict(cache.namespace), "token_ids": token_ids}, file)
"""

TokenId = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class PromptFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prompt: `json.dumps({"namespace": dataclasses.asdict(cache.namespace), "token_ids": token_ids})`."""

    namespace: Namespace
    token_ids: list[TokenId]


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--model` and `--salt`, for plain text; the command hands them to `read_prompt`."""
    command = click.option(
        "--salt", default="", metavar="TEXT", help="With --model: the salt that the prompt is cached under."
    )(command)
    return click.option(
        "--model",
        metavar="PATH",
        type=click.Path(exists=True),
        help="FILE is plain text: tokenized and named as transformers does with the model of this folder or GGUF file.",
    )(command)


def read_prompt(path: Path, *, model: str | None = None, salt: str = "") -> PromptFile:
    """The prompt in a file: as `PromptFile` says, or with `model` plain text. Raises `InvalidRequest`."""
    if model is not None:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"cannot read {path} as text: {error}") from error
        from kvd.cli.text_prompt import prompt_of_text

        return prompt_of_text(text, Path(model), salt)
    if salt:
        raise InvalidRequest("--salt goes with --model; a JSON prompt has its own")
    try:
        return msgspec.json.decode(path.read_bytes(), type=PromptFile)
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{path} is no prompt: {error}; see `kvd prefetch --help`") from error


def open_cache(client: kvd_client.Client, namespace: Namespace) -> kvd_client.Cache:
    """The cache of a namespace."""
    return client.cache(
        model=namespace.model,
        layout=namespace.layout,
        engine=namespace.engine,
        positional=namespace.positional,
        adapter=namespace.adapter,
        salt=namespace.salt,
        ask_only=True,
    )
