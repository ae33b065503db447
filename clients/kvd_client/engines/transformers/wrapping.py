"""Something put around a model's `generate`, and taken off again, whoever else did the same meanwhile."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

Around = Callable[[PreTrainedModel, Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called as around(model, below, inputs, args, kwargs); below(inputs, *args, **kwargs) is what it is put around."""


def wrap_generate(model: PreTrainedModel, around: Around) -> Callable[[], None]:
    """Puts `around` around `model.generate`; what is returned undoes it. A deepcopy of the model has it too.

    Where somebody has wrapped it once more since, undoing leaves both in place: `around` must then pass calls on.
    What is returned does not keep the model alive.
    """
    reference = weakref.ref(model)
    before = vars(model).get("generate")
    is_method = isinstance(before, types.MethodType) and isinstance(before.__self__, PreTrainedModel)
    # Unbound it keeps no model alive, and of a copy it is the copy's own.
    below = before.__func__ if is_method else before

    def of(model: PreTrainedModel) -> Callable[..., Any]:
        if below is None:
            return types.MethodType(type(model).generate, model)
        found: Callable[..., Any] = types.MethodType(below, model) if is_method else below
        return found

    def generate(self: PreTrainedModel, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        return around(self, of(self), inputs, args, kwargs)

    # A bound method, so that a deepcopy of the model carries one bound to the copy.
    model.generate = types.MethodType(generate, model)

    def undo() -> None:
        model = reference()
        if model is not None and getattr(vars(model).get("generate"), "__func__", None) is generate:
            del model.generate
            if below is not None:
                model.generate = of(model)

    return undo
