"""What a cache needs of the model it was attached for. `guard.GuardedModel` is the one there is; it knows the cache's
class, so the cache knows it by this alone.
"""

from __future__ import annotations

from typing import Protocol

import torch

FOREIGN_MODEL = (
    "this KvdCache belongs to another model, or the model's own forward was bypassed: attach one cache for each model "
    "and call the model itself"
)
"""What is said where the decoder, or a layer, is not one whose passes were announced."""


class Guarded(Protocol):
    """A model with the checks on that tell a cache which tokens a forward pass is about."""

    windows: list[int | None]
    """Per layer how many tokens it sees, None for all."""

    def put_on(self) -> None:
        """Puts the checks onto the model, which then calls `begin_step` and `end_step`."""

    def take_off(self) -> None:
        """Takes one cache's checks off."""

    def attend_by_rows(self) -> None:
        """Has the model understand `RowStates` until the last cache's checks are taken off."""

    def is_decoder(self, module: torch.nn.Module) -> bool:
        """Whether this is the very module whose KV the cache holds."""

    def is_unchanged(self) -> bool:
        """Whether weights and adapters are still those that the namespace names."""
