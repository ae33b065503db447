"""Something put around a model's `generate`, and taken off again, whoever else did the same meanwhile."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

Around = Callable[[PreTrainedModel, Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""Called as around(model, below, inputs, args, kwargs); below(inputs, *args, **kwargs) is what it is put around."""


def wrap_generate(model: PreTrainedModel, around: Around) -> Callable[[], None]:
    """Puts `around` around `model.generate`; what is returned undoes it. A deepcopy of the model has it too.

    Where somebody has wrapped it once more since, undoing leaves both in place: `around` must then pass calls on.
    """
    before = vars(model).get("generate")

    def generate(self: PreTrainedModel, inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        return around(self, _bound(before, self), inputs, args, kwargs)

    # A bound method, so that a deepcopy of the model carries one bound to the copy.
    ours = model.generate = types.MethodType(generate, model)

    def undo() -> None:
        if vars(model).get("generate") is ours:
            del model.generate
            if before is not None:
                model.generate = before

    return undo


def _bound(before: Any, model: PreTrainedModel) -> Callable[..., Any]:
    if before is None:
        return types.MethodType(type(model).generate, model)
    if isinstance(before, types.MethodType) and isinstance(before.__self__, PreTrainedModel):
        # Of a copy it is the copy's own, not that of the model it was copied from.
        return types.MethodType(before.__func__, model)
    found: Callable[..., Any] = before
    return found
