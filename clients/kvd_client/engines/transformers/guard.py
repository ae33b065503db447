"""Checks put onto a model while a `KvdCache` is attached, so that no cache is used for tokens it does not hold.

Two places see what the cache itself cannot. `generate` cuts the cached tokens off before it calls the model, so only
there can the whole prompt be compared with the cached one. The decoder's forward pass gets the ids of the new tokens,
which are the names of the blocks they fill. Both checks look only at calls that pass a `KvdCache`; everything else goes
through untouched, and the last cache that closes takes them off. A cache that is dropped without `close` leaves them
on, which harms nothing.
"""

from __future__ import annotations

import inspect
import threading
import types
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from kvd.errors import ClientClosed, EngineUnsupported, InvalidRequest, InvalidTokens, SequenceTooLong
from kvd_client.engines.transformers.cache import KvdCache
from kvd_client.engines.transformers.identity import state_stamp

CACHE_NAMES = ("cache", "past_key_values")
"""What transformers calls the argument; the second is the older name."""

_lock = threading.Lock()
_checks: weakref.WeakKeyDictionary[PreTrainedModel, _Checks] = weakref.WeakKeyDictionary()


class GuardedModel:
    """A model as one attach saw it. Holds no reference to it, so that a forgotten cache keeps no model alive."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._reference = weakref.ref(model)
        self._decoder = weakref.ref(model.get_decoder())
        self._stamp = state_stamp(model)

    def put_on(self) -> None:
        """Puts the checks onto the model, unless another cache has. Raises `ClientClosed` when the model is gone."""
        model = self._reference()
        if model is None:
            raise ClientClosed("the model of this KvdCache is gone")
        with _lock:
            if model not in _checks:
                _checks[model] = _Checks(model)
            _checks[model].num_caches += 1

    def take_off(self) -> None:
        """Takes the checks off again, when no other cache needs them."""
        model = self._reference()
        if model is None:
            return
        with _lock:
            checks = _checks[model]
            checks.num_caches -= 1
            if checks.num_caches == 0:
                checks.remove(model)
                del _checks[model]

    def is_decoder(self, module: torch.nn.Module) -> bool:
        """Whether this is the very module; a deepcopy of it has the checks too, but other weights perhaps."""
        return module is self._decoder()

    def is_unchanged(self) -> bool:
        """Whether weights and adapters are as they were."""
        model = self._reference()
        return model is not None and state_stamp(model) == self._stamp


class _Checks:
    """What is put onto one model."""

    def __init__(self, model: PreTrainedModel) -> None:
        decoder = model.get_decoder()
        # Unbound, as its own signature names what a positional argument is.
        names = tuple(inspect.signature(type(decoder).forward).parameters)[1:]

        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            _before_forward(module, dict(zip(names, args, strict=False)) | kwargs)

        def after(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
            cache = _cache_in(dict(zip(names, args, strict=False)) | kwargs)
            if cache is not None:
                cache.end_step()

        self.num_caches = 0
        self.own_generate = vars(model).get("generate")
        self._hooks = (
            decoder.register_forward_pre_hook(before, with_kwargs=True),
            decoder.register_forward_hook(after, with_kwargs=True),
        )
        # A bound method, so that a deepcopy of the model carries one bound to the copy.
        model.generate = types.MethodType(_checked_generate, model)

    def remove(self, model: PreTrainedModel) -> None:
        for hook in self._hooks:
            hook.remove()
        del model.generate
        if self.own_generate is not None:
            model.generate = self.own_generate


def _cache_in(arguments: Mapping[str, Any]) -> KvdCache | None:
    for name in CACHE_NAMES:
        cache = arguments.get(name)
        if isinstance(cache, KvdCache):
            return cache
    return None


def _before_forward(decoder: torch.nn.Module, arguments: Mapping[str, Any]) -> None:
    cache = _cache_in(arguments)
    if cache is None:
        return
    input_ids = arguments.get("input_ids")
    if input_ids is None:
        raise EngineUnsupported("inputs_embeds cannot be compared with cached tokens: pass input_ids")
    _require_one_row(input_ids)
    _require_plain_mask(arguments.get("attention_mask"), cache.sequence.num_tokens + input_ids.shape[1])
    cache.begin_step(decoder, input_ids[0].tolist(), arguments.get("position_ids"))


def _require_one_row(input_ids: torch.Tensor) -> None:
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise EngineUnsupported(
            f"input_ids of shape {list(input_ids.shape)} over a cache of one sequence: beams, num_return_sequences and "
            f"batches are not served; attach one cache a sequence"
        )


def _require_plain_mask(mask: Any, num_tokens: int) -> None:
    """Keys depend on what the mask let their token see, so only the mask that hides nothing gives sharable ones."""
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        raise EngineUnsupported("a custom attention mask changes the KV of every later layer: pass a 2D mask, or none")
    if mask.shape[1] != num_tokens:
        raise InvalidRequest(
            f"the attention mask covers {mask.shape[1]} tokens, cached and new ones are {num_tokens}: pass the mask of "
            f"the whole sequence, or none"
        )
    if not bool(mask.all()):
        raise InvalidRequest("the attention mask hides tokens (padding): a prompt over a KvdCache needs none")


def _checked_generate(self: PreTrainedModel, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`generate`, after the prompt was compared with what a `KvdCache` among the arguments holds."""
    cache = _cache_in(kwargs)
    if cache is not None:
        _check_prompt(cache, inputs if inputs is not None else kwargs.get("input_ids"), kwargs)
    checks = _checks.get(self)
    own = checks.own_generate if checks is not None else None
    if own is not None:
        return own(inputs, *args, **kwargs)
    return type(self).generate(self, inputs, *args, **kwargs)


def _check_prompt(cache: KvdCache, input_ids: Any, kwargs: Mapping[str, Any]) -> None:
    sequence = cache.sequence
    if sequence.closed:
        raise ClientClosed("this KvdCache was closed; attach again")
    if input_ids is None:
        raise EngineUnsupported("generate over a KvdCache needs input_ids, to compare them with the cached tokens")
    _require_one_row(input_ids)
    _require_one_sequence(kwargs)
    num_ids, num_held = input_ids.shape[1], sequence.num_tokens
    mask = kwargs.get("attention_mask")
    if mask is None or mask.shape[-1] == num_ids:
        # transformers takes these ids for the whole sequence and cuts the first num_held of them off.
        if num_held >= num_ids:
            raise InvalidRequest(
                f"the cache holds {num_held} tokens and input_ids has {num_ids}: pass the whole sequence with at least "
                f"one token more than the cache (after generate: its output and what follows)"
            )
        try:
            sequence.require_prefix_of(input_ids)
        except InvalidTokens as error:
            raise InvalidRequest(f"this KvdCache holds other tokens than input_ids: {error}") from error
        num_total = num_ids
    else:
        num_total = num_held + num_ids
        _require_plain_mask(mask, num_total)
    max_new_tokens = kwargs.get("max_new_tokens") or getattr(kwargs.get("generation_config"), "max_new_tokens", None)
    if max_new_tokens and num_total + max_new_tokens - 1 > sequence.max_tokens:
        raise SequenceTooLong(
            f"{num_total} tokens and {max_new_tokens} new ones need "
            f"attach(..., max_tokens={num_total + max_new_tokens}); this cache was attached for {sequence.max_tokens}"
        )


def _require_one_sequence(kwargs: Mapping[str, Any]) -> None:
    config = kwargs.get("generation_config")
    for name in ("num_beams", "num_return_sequences"):
        number = kwargs.get(name, getattr(config, name, None))
        if number is not None and number > 1:
            raise EngineUnsupported(
                f"{name}={number} over a KvdCache, which holds one sequence; attach one cache a sequence"
            )
    if kwargs.get("use_cache") is False:
        raise EngineUnsupported("use_cache=False and a KvdCache exclude each other; leave one of them out")
