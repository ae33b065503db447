"""Checks put onto a model while a `KvdCache` is attached, so that no cache is used for tokens it does not hold.

Three places see what the cache itself cannot. `generate` cuts the cached tokens off before it calls the model, so only
there can the whole prompt be compared with the cached one, and only there is it known that every row will be wanted
several times (beams). Assisted decoding gives the model the whole prompt at its first step, cached or not. The
decoder's forward pass gets the ids of the new tokens, which are the names of the blocks they fill. All look only at
calls that pass a `KvdCache`; everything else goes through untouched, and the last cache that closes takes them off. A
cache that is dropped without `close` leaves them on, which harms nothing.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from kvd.errors import ClientClosed, EngineUnsupported
from kvd_client.engines.transformers.cache import KvdCache
from kvd_client.engines.transformers.identity import state_stamp
from kvd_client.engines.transformers.row_attention import switch_attention
from kvd_client.engines.transformers.step_checks import check_beginning, check_room
from kvd_client.engines.transformers.support import layer_windows, require_eval
from kvd_client.engines.transformers.wrapping import wrap_generate

CACHE_NAMES = ("cache", "past_key_values")
"""What transformers calls the argument; the second is the older name."""

_LOOKED_AT = frozenset({"input_ids", "attention_mask", "position_ids", "cache_position", "logits_to_keep"})
"""Arguments of a decoder with which a pass is known to compute the KV of its tokens, or none."""

_lock = threading.Lock()
_checks: weakref.WeakKeyDictionary[PreTrainedModel, _Checks] = weakref.WeakKeyDictionary()


class GuardedModel:
    """A model as one attach saw it. Holds no reference to it, so that a forgotten cache keeps no model alive."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._reference = weakref.ref(model)
        self._decoder = weakref.ref(model.get_decoder())
        self._stamp = state_stamp(model)
        self.windows = layer_windows(model)

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

    def attend_by_rows(self) -> None:
        """Switches the model's attention functions, once. Raises `EngineUnsupported`."""
        model = self._reference()
        if model is None:
            raise ClientClosed("the model of this KvdCache is gone")
        with _lock:
            checks = _checks[model]
            if checks.undo_attention is None:
                checks.undo_attention = switch_attention(model)

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
            _before_forward(module, dict(zip(names, args, strict=False)) | kwargs, names)

        def after(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
            cache = _cache_in(dict(zip(names, args, strict=False)) | kwargs)
            if cache is not None:
                cache.end_step()

        def cut(
            module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            return _without_cached(args, kwargs)

        self.num_caches = 0
        self.undo_attention: Callable[[], None] | None = None
        self._hooks = (
            model.register_forward_pre_hook(cut, with_kwargs=True),
            decoder.register_forward_pre_hook(before, with_kwargs=True),
            decoder.register_forward_hook(after, with_kwargs=True),
        )
        self._unwrap = wrap_generate(model, _checked_generate)

    def remove(self, model: PreTrainedModel) -> None:
        for hook in self._hooks:
            hook.remove()
        if self.undo_attention is not None:
            self.undo_attention()
        self._unwrap()


def _cache_in(arguments: Mapping[str, Any]) -> KvdCache | None:
    for name in CACHE_NAMES:
        cache = arguments.get(name)
        if isinstance(cache, KvdCache):
            return cache
    return None


def _without_cached(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The first step of assisted decoding without the columns that the cache holds."""
    cache = _cache_in(kwargs)
    if cache is None:
        return None
    input_ids, positions = kwargs.get("input_ids"), kwargs.get("position_ids")
    num_cut = cache.num_columns_to_cut(positions)
    if not num_cut or input_ids is None or positions is None or input_ids.shape[1] <= num_cut:
        return None
    return args, kwargs | {"input_ids": input_ids[:, num_cut:], "position_ids": positions[..., num_cut:]}


def _before_forward(decoder: Any, arguments: Mapping[str, Any], names: Iterable[str]) -> None:
    """`names` are those of the arguments that the decoder knows; others it ignores."""
    cache = _cache_in(arguments)
    if cache is None:
        return
    input_ids = arguments.get("input_ids")
    if input_ids is None:
        raise EngineUnsupported("inputs_embeds cannot be compared with cached tokens: pass input_ids")
    for name in names:
        # Token types, another tower's states, and what is not known to be harmless.
        if name not in _LOOKED_AT and isinstance(arguments.get(name), torch.Tensor | list | tuple):
            raise EngineUnsupported(f"the model was given {name}, and kvd knows KV by its tokens alone")
    require_eval(decoder)
    cache.begin_step(decoder, input_ids, arguments.get("attention_mask"), arguments.get("position_ids"))


def _checked_generate(
    self: PreTrainedModel, generate: Callable[..., Any], inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`generate`, after the prompt was compared with what a `KvdCache` among the arguments holds.

    Where every row is wanted several times, and the cache has it once, `generate` gets a fork with the rows repeated,
    so that the caller's own cache is afterwards what it was.
    """
    name = next((each for each in CACHE_NAMES if isinstance(kwargs.get(each), KvdCache)), None)
    if name is None:
        return generate(inputs, *args, **kwargs)
    cache: KvdCache = kwargs[name]
    repeats = _check_prompt(self, cache, inputs if inputs is not None else kwargs.get("input_ids"), kwargs)
    used = cache if repeats == 1 else cache.repeated(repeats)
    result = None
    try:
        result = generate(inputs, *args, **(kwargs | {name: used}))
        return result
    finally:
        used.end_recording()
        if used is not cache and getattr(result, "cache", None) is not used:
            used.close()


def _check_prompt(model: PreTrainedModel, cache: KvdCache, input_ids: Any, kwargs: Mapping[str, Any]) -> int:
    """How often every row of the cache must be repeated first. Raises what stands in the way."""
    cache.require_open()
    if input_ids is None:
        raise EngineUnsupported("generate over a KvdCache needs input_ids, to compare them with the cached tokens")
    if setting(model, kwargs, "use_cache") is False:
        raise EngineUnsupported("use_cache=False and a KvdCache exclude each other; leave one of them out")
    wanted = max(setting(model, kwargs, name) or 1 for name in ("num_beams", "num_return_sequences"))
    num_rows: int = len(cache.rows)
    num_wanted: int = input_ids.shape[0] * wanted
    if input_ids.dim() != 2 or num_rows not in {input_ids.shape[0], num_wanted}:
        holds = "one sequence" if num_rows == 1 else f"{num_rows} sequences"
        raise EngineUnsupported(
            f"input_ids of shape {list(input_ids.shape)} over a cache of {holds}: attach with the whole batch"
        )
    mask = kwargs.get("attention_mask")
    if num_rows == num_wanted:
        # The caller repeated the rows himself, or nobody needs to.
        input_ids = input_ids.repeat_interleave(wanted, dim=0)
        mask = mask.repeat_interleave(wanted, dim=0) if mask is not None else None
    num_ids = input_ids.shape[1]
    if mask is None or mask.shape[-1] == num_ids:
        # transformers takes these ids for the whole sequence and cuts off as many of them as the cache holds.
        check_beginning(cache.rows, cache.num_columns, input_ids, mask)
        num_columns = num_ids
    else:
        num_columns = cache.get_seq_length() + num_ids
    max_new_tokens = setting(model, kwargs, "max_new_tokens")
    if max_new_tokens:
        check_room(cache.rows, cache.paddings_under(mask), num_columns, max_new_tokens)
    return num_wanted // num_rows


def setting(model: PreTrainedModel, kwargs: Mapping[str, Any], name: str) -> Any:
    """What `generate` will take for it: an argument, else the given generation configuration, else the model's own."""
    for source in (kwargs.get("generation_config"), model.generation_config):
        found = kwargs.get(name) if kwargs.get(name) is not None else getattr(source, name, None)
        if found is not None:
            return found
    return None
