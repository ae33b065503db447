"""Every transformers model of this process shares its KV cache; what `kvd run` puts into a program."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

from kvd_client.engines.transformers.sharing import Sharing


def _tell(sentence: str) -> None:
    sys.stderr.write(f"kvd run: {' '.join(sentence.split())}\n")


_sharing = Sharing(tell=_tell)


def generate(
    original: Callable[..., Any], model: Any, inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`original(model, inputs, *args, **kwargs)` over the cache where possible; `original` is transformers' own."""
    return _sharing.generate(model, types.MethodType(original, model), inputs, args, kwargs)
