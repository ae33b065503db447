"""What the two halves of the connector tell each other with each step of the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvd_client.engines.vllm.names import Variant


@dataclass(frozen=True, slots=True)
class Load:
    """Tokens first .. len(tokens) of a request are to be copied from kvd into vLLM's blocks."""

    request: str
    variant: Variant
    tokens: list[int]
    first: int
    blocks: list[int]
    """vLLM's blocks, one for each block of its own size from `first` on."""


@dataclass(frozen=True, slots=True)
class Save:
    """All of `tokens` are computed after this step, and lie in `blocks`, vLLM's, from the first token on."""

    number: int
    """Unique, growing; the worker reports it when it no longer needs the blocks."""
    request: str
    variant: Variant
    tokens: list[int]
    blocks: list[int]
    num_prefilled: int = 0
    """Tokens that this step computes for the request, 0 for so few that they tell nothing of a prefill."""
    prefill_s: float = 0.0
    """How long they took; the worker fills it in."""

    def after(self, earlier: Save) -> Save:
        """This one in the place of an earlier one of the request, which was not carried out."""
        return replace(
            self,
            num_prefilled=self.num_prefilled + earlier.num_prefilled,
            prefill_s=self.prefill_s + earlier.prefill_s,
        )


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to worker, every step."""

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """Requests whose blocks belong to others from this step on."""
    finishing: list[str] = field(default_factory=list)
    """Finished requests whose blocks the scheduler keeps until the worker reports them."""
    reset: int = 0
    """Grows with each reset: everything that was to be saved before is forgotten."""
    num_tokens: int = 0
    """That are computed in this step, for all requests."""


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Worker to scheduler; of several workers, added up."""

    done: Counter[int] = field(default_factory=Counter)
    """Number of a save -> workers that are done with its blocks."""
    resets: Counter[int] = field(default_factory=Counter)
    """Number of a reset -> workers that carried it out."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Both."""
        assert isinstance(other, WorkerReport)  # noqa: S101 - vLLM hands over our own
        return WorkerReport(self.done + other.done, self.resets + other.resets)
