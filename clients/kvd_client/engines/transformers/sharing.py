"""`shared`: after it plain `model.generate(...)` uses the cache, and never fails for kvd's sake.

Every call attaches to its prompts, generates over what was found, publishes, and gives everything back. What cannot be
served (no daemon, a model or a call that kvd does not know) runs as it would have run, and the reason is told once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from kvd.errors import ClientClosed, DaemonRestarted, EngineUnsupported, InvalidRequest, KvdError
from kvd_client.client import Client, connect
from kvd_client.engines.transformers.attach import attach
from kvd_client.engines.transformers.cache import KvdCache
from kvd_client.engines.transformers.guard import CACHE_NAMES, setting
from kvd_client.engines.transformers.support import unwrap
from kvd_client.engines.transformers.wrapping import wrap_generate

_log = logging.getLogger(__name__)

_DEFAULT_NEW_TOKENS = 20
"""What `generate` makes where nothing says how many: its documented default of max_length."""
_ROOM_TO_PROPOSE = 64
"""Tokens that assisted decoding may try and throw away; address space, not memory."""
_OTHER_INPUTS = ("inputs_embeds", "position_ids", "custom_generate")


@dataclass(slots=True)
class SharingStatistics:
    """What came of the calls so far."""

    num_calls: int = 0
    num_served: int = 0
    """Those that went over kvd; the others ran without."""
    num_prompt_tokens: int = 0
    """Of the calls served, padding left out."""
    num_cached_tokens: int = 0
    """Those of them that somebody had computed before."""
    last_reason: str = ""
    """Why the last call that was not served was not."""

    @property
    def hit_rate(self) -> float:
        """Cached tokens of each prompt token; 0.0 before the first."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


class Sharing:
    """A connection made when it is first needed, and `generate` over it. Safe to use from several threads.

    After a fork, and after a restart of the daemon, it connects again.
    """

    def __init__(
        self,
        client: Client | None = None,
        *,
        runtime_dir: str | os.PathLike[str] | None = None,
        tell: Callable[[str], None] = _log.warning,
        **options: Any,
    ) -> None:
        """`options` are those of `attach`. `tell` gets one sentence for each new thing there is to say."""
        self.statistics = SharingStatistics()
        self._given = client
        self._runtime_dir = runtime_dir
        self._tell = tell
        self._options = options
        self._own: tuple[int, Client] | None = None
        self._lock = threading.Lock()
        self._inside = threading.local()
        self._told: set[str] = set()
        self._is_over = False

    def generate(
        self,
        model: PreTrainedModel,
        below: Callable[..., Any],
        inputs: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """`below(inputs, *args, **kwargs)`, which is the model's own `generate`, over the cache if possible."""
        if (
            self._is_over
            or getattr(self._inside, "generate", False)
            or any(kwargs.get(name) is not None for name in CACHE_NAMES)
        ):
            return below(inputs, *args, **kwargs)
        self.statistics.num_calls += 1
        cache = self._attach(model, inputs, args, kwargs)
        if cache is None:
            return below(inputs, *args, **kwargs)
        num_columns = cache.num_columns
        result = None
        self._inside.generate = True
        try:
            # By way of the model, on which attaching has put its checks; they come back to `below`.
            result = model.generate(inputs, *args, **(kwargs | {"cache": cache}))
        except (EngineUnsupported, InvalidRequest) as error:
            if cache.is_closed or cache.num_columns != num_columns:
                raise
            self._runs_without(model, error)
        else:
            return result
        finally:
            self._inside.generate = False
            if getattr(result, "cache", None) is not cache:
                cache.close()
        return below(inputs, *args, **_without_prompt_again(kwargs))

    def _attach(
        self, model: PreTrainedModel, inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> KvdCache | None:
        try:
            input_ids = _served_ids(model, inputs, args, kwargs)
            mask = _mask_of(model, input_ids, kwargs)
            options = {"max_tokens": _max_tokens(model, input_ids, kwargs)} | self._options
            try:
                cache = attach(self._client(), model, input_ids, attention_mask=mask, **options)
            except (DaemonRestarted, ClientClosed):
                # Something of the old session is still open, perhaps a cache that an earlier call returned.
                self._forget_client()
                cache = attach(self._client(), model, input_ids, attention_mask=mask, **options)
        except Exception as error:  # noqa: BLE001 - nothing is raised for kvd's sake; a wrong call fails below, by itself
            self._runs_without(model, error)
            return None
        num_prompt_tokens = int(mask.sum()) if mask is not None else input_ids.numel()
        self.statistics.num_served += 1
        self.statistics.num_prompt_tokens += num_prompt_tokens
        self.statistics.num_cached_tokens += cache.num_cached_tokens
        self._say(
            f"attached {type(model).__name__}",
            f"{type(model).__name__} shares its KV cache; of the first prompt's {num_prompt_tokens:,} tokens "
            f"{cache.num_cached_tokens:,} were there",
        )
        return cache

    def _client(self) -> Client:
        if self._given is not None:
            return self._given
        with self._lock:
            if self._own is None or self._own[0] != os.getpid():
                self._own = os.getpid(), connect(self._runtime_dir, label="transformers")
            return self._own[1]

    def _forget_client(self) -> None:
        with self._lock:
            own, self._own = self._own, None
        if own is not None:
            own[1].close()

    def close(self) -> None:
        """Ends the session, if it is its own, and has every later call run as it would without; idempotent."""
        self._is_over = True
        self._forget_client()

    def _runs_without(self, model: PreTrainedModel, error: Exception) -> None:
        reason = str(error) if isinstance(error, KvdError) else f"{type(error).__name__}: {error}"
        self.statistics.last_reason = reason
        self._say(reason, f"{type(model).__name__} runs without the shared KV cache: {reason}")

    def _say(self, what: str, sentence: str) -> None:
        if what not in self._told:
            self._told.add(what)
            self._tell(sentence)


@contextlib.contextmanager
def shared(
    model: Any,
    client: Client | None = None,
    *,
    runtime_dir: str | os.PathLike[str] | None = None,
    salt: str = "",
    wait_s: float | None = None,
    materialize: bool = False,
    block_tokens: int | None = None,
) -> Iterator[SharingStatistics]:
    """Within it plain `model.generate(...)` finds what was computed before, by any process, and publishes what it
    computes; what it yields counts that.

    Without `client` it connects by itself to the daemon of `runtime_dir`, or of the usual folder. Nothing is raised for
    kvd's sake: a call that cannot be served runs as it would have, and the reason is logged once. Other arguments as in
    `attach`. A cache that a call returned (`return_dict_in_generate`) is closed at the end, unless `client` is given.
    """
    inner = unwrap(model)
    sharing = Sharing(
        client,
        runtime_dir=runtime_dir,
        salt=salt,
        wait_s=wait_s,
        materialize=materialize,
        block_tokens=block_tokens,
    )
    unwrap_generate = wrap_generate(inner, sharing.generate)
    try:
        yield sharing.statistics
    finally:
        unwrap_generate()
        sharing.close()


def _served_ids(model: PreTrainedModel, inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The call's token ids. Raises `EngineUnsupported` where these alone do not say what its KV is, or where it wants
    another cache.
    """
    input_ids = inputs if inputs is not None else kwargs.get("input_ids")
    other = next((name for name in _OTHER_INPUTS if kwargs.get(name) is not None), None)
    other = other or next((name for name in kwargs if name.startswith(("pixel_values", "input_features"))), None)
    if other is not None:
        raise EngineUnsupported(f"generate was given {other}, and kvd knows KV by its tokens alone")
    if args:
        raise EngineUnsupported("generate was given arguments by position; name them")
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or not input_ids.shape[1]:
        raise EngineUnsupported("generate was given no input_ids of shape [rows, n]")
    token_types = kwargs.get("token_type_ids")
    if token_types is not None and bool(token_types.any()):
        raise EngineUnsupported("generate was given token types, and kvd knows KV by its tokens alone")
    if setting(model, kwargs, "use_cache") is False:
        raise EngineUnsupported("generate was told not to use a cache (use_cache=False)")
    implementation = setting(model, kwargs, "cache_implementation")
    if implementation not in {None, "dynamic"}:
        raise EngineUnsupported(f"generate was told to use another cache (cache_implementation={implementation!r})")
    return input_ids


def _mask_of(model: PreTrainedModel, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    """The mask that `generate` will work with: the given one, or what it makes of the padding's token."""
    mask = kwargs.get("attention_mask")
    if mask is not None:
        return mask
    padding = setting(model, kwargs, "pad_token_id")
    ends = setting(model, kwargs, "eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if padding is None or padding in ends:
        return None
    seen = input_ids != padding
    return None if bool(seen.all()) else seen.long()


def _max_tokens(model: PreTrainedModel, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> int:
    num_ids = input_ids.shape[1]
    num_new = setting(model, kwargs, "max_new_tokens")
    max_length = setting(model, kwargs, "max_length")
    if num_new is None:
        num_new = max_length - num_ids if max_length is not None else _DEFAULT_NEW_TOKENS
    return int(num_ids + max(int(num_new), 1) + _ROOM_TO_PROPOSE)


class _NewTokensOnly:
    """A streamer that has seen the prompt already."""

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._is_prompt = True

    def put(self, value: Any) -> None:
        if not self._is_prompt:
            self._streamer.put(value)
        self._is_prompt = False

    def end(self) -> None:
        self._streamer.end()


def _without_prompt_again(kwargs: dict[str, Any]) -> dict[str, Any]:
    streamer = kwargs.get("streamer")
    return kwargs if streamer is None else kwargs | {"streamer": _NewTokensOnly(streamer)}
