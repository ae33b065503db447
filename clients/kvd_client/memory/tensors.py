"""torch tensors and memoryviews over an address range, and whether any of them still lives.

Every view, however derived, holds the one ctypes array it was made from (torch through its storage, a memoryview
directly). That array is the *anchor*: while it lives a view lives, and when it dies none is left.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from kvd.errors import EngineUnsupported

if TYPE_CHECKING:
    import torch


CPU = "cpu"
"""torch's name of host memory."""


class Views:
    """Makes views over `nbytes` at `address` and knows whether any is alive. Needs no numpy."""

    def __init__(self, address: int, nbytes: int, owner: object = None) -> None:
        """`owner` is what the memory belongs to, if it must live as long as a view does."""
        self._owner = owner
        self._address = address
        self._nbytes = nbytes
        self._anchor: weakref.ref[ctypes.Array[ctypes.c_ubyte]] | None = None
        self._when_dead: Callable[[], None] | None = None

    def bytes(self) -> memoryview:
        """All bytes, writable as far as the memory is."""
        return memoryview(self._live_anchor()).cast("B")

    def tensor(self, dtype: str) -> torch.Tensor:
        """All bytes as a one-dimensional tensor. Raises `EngineUnsupported` when torch is not installed."""
        module = import_torch()
        # Made outside inference mode: an inference tensor could not be written later outside of it.
        with module.inference_mode(mode=False):
            view: torch.Tensor = module.frombuffer(self._live_anchor(), dtype=getattr(module, dtype))
        return view

    def _live_anchor(self) -> ctypes.Array[ctypes.c_ubyte]:
        anchor = self._anchor() if self._anchor is not None else None
        if anchor is None:
            anchor = (ctypes.c_ubyte * self._nbytes).from_address(self._address)
            anchor.owner = self._owner  # type: ignore[attr-defined]
            self._anchor = weakref.ref(anchor, self._anchor_died)
        return anchor

    def any_alive(self) -> bool:
        """Whether a view exists. False is final only while nobody asks for another."""
        return self._anchor is not None and self._anchor() is not None

    def when_dead(self, call: Callable[[], None]) -> None:
        """Calls once when the last view dies, perhaps now, perhaps in any thread.

        `call` must be fit for a finalizer.
        """
        self._when_dead = call
        if not self.any_alive():
            self._anchor_died(None)

    def _anchor_died(self, _reference: object) -> None:
        call, self._when_dead = self._when_dead, None
        if call is not None:
            call()


def import_torch() -> ModuleType:
    """The module, imported where it is first needed. Raises `EngineUnsupported`."""
    try:
        import torch
    except ImportError as error:
        raise EngineUnsupported("tensors need torch: install kvd-daemon[torch]; `buffer` works without it") from error
    return torch
