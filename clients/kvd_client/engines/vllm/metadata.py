"""What the two halves of the connector tell each other with each step of the engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

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
    idle: bool = False
    """No token is computed in this step."""


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
