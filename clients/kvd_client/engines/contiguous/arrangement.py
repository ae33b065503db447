"""How the tensors that go in and out are laid out. One name says it; nothing is told from a shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvd.errors import InvalidRequest
from kvd.layout import KVLayout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The axes of a layer's keys (and values), of which kvd keeps [heads, seq, dim]."""

    axes: tuple[str, ...]

    @property
    def seq_axis(self) -> int:
        """Which axis counts tokens."""
        return self.axes.index("seq")

    def shape(self, layout: KVLayout, num_tokens: int) -> tuple[int, ...]:
        """The only shape that `num_tokens` tokens of one layer have."""
        if self.axes[-1] == "seq":
            return (layout.num_kv_heads, layout.head_dim, num_tokens)
        if len(self.axes) == 3:
            return (layout.num_kv_heads, num_tokens, layout.head_dim)
        return (1, layout.num_kv_heads, num_tokens, layout.head_dim)

    def show(self, states: torch.Tensor) -> torch.Tensor:
        """A view of [heads, seq, dim] with these axes; no copy."""
        if "batch" in self.axes:
            states = states.unsqueeze(0)
        return states.transpose(-1, -2) if self.axes[-1] == "seq" else states

    def __str__(self) -> str:
        return f"[{', '.join('batch=1' if axis == 'batch' else axis for axis in self.axes)}]"


ARRANGEMENTS: dict[str, Arrangement] = {
    "bhsd": Arrangement(("batch", "heads", "seq", "dim")),
    "hsd": Arrangement(("heads", "seq", "dim")),
    "hds": Arrangement(("heads", "dim", "seq")),
}
"""Names that `layout=` takes."""


def arrangement(name: str) -> Arrangement:
    """The arrangement of that name. Raises `InvalidRequest` naming those there are."""
    found = ARRANGEMENTS.get(name)
    if found is None:
        known = ", ".join(f"{each!r} for {axes}" for each, axes in ARRANGEMENTS.items())
        raise InvalidRequest(f"layout must be {known}; not {name!r}")
    return found
