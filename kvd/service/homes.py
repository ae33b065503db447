"""Where pools may live: the memory of this machine, and that of its cards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvd.block import HOST
from kvd.cuda import Device
from kvd.errors import CudaDeviceLost, CudaUnavailable, KvdError, StateError
from kvd.memory import CopyEngine
from kvd.pool import Pool


class Stock(Protocol):
    """Where memory comes from; `kvd.memory.SegmentStock` and `CardMemory` are some, and say what each member promises.

    What `take` gives is a `HostSegment` or a `DeviceSegment`.
    """

    segment_nbytes: int

    @property
    def failed(self) -> str | None: ...
    @property
    def ready_nbytes(self) -> int: ...
    def take(self, *, huge_pages: bool = False) -> Any: ...
    def request(self, num_segments: int, *, huge_pages: bool = False) -> None: ...
    def withdraw(self) -> None: ...
    def discard(self, segment: Any) -> None: ...
    def retry(self) -> None: ...
    def set_budget(self, budget_nbytes: int) -> None: ...
    def available_nbytes(self) -> int: ...


class CardStock(Stock, Protocol):
    """The stock of a card, which may be released for a while; `kvd.memory.CardMemory` is one."""

    reserve: int
    failure: KvdError | None

    @property
    def engine(self) -> CopyEngine: ...
    @property
    def is_open(self) -> bool: ...
    @property
    def is_changing(self) -> bool: ...
    def restore(self) -> None: ...
    def release(self) -> None: ...
    @property
    def lost(self) -> str | None: ...
    @property
    def total_nbytes(self) -> int: ...
    @property
    def free_nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Card:
    """What a home on a card has beside its stock."""

    stock: CardStock
    device: Device
    pid_namespace: str
    """Of this daemon: the only one in which its segments can be opened."""


@dataclass(slots=True, eq=False)
class Home:
    """One device that pools live on. Loop thread only."""

    device: str
    """"host", or the card's UUID."""
    stock: Stock
    card: Card | None = None
    retry_at_s: float | None = None
    """When its stock is asked again for memory that could not be had."""

    @property
    def lost(self) -> str | None:
        """Why the card is gone for good, None while it is there."""
        return None if self.card is None else self.card.stock.lost

    @property
    def engine(self) -> CopyEngine:
        """What copies blocks from the card and to it. Raises `StateError` for host memory, which needs none."""
        if self.card is None:
            raise StateError(f"there is nothing to copy with on {self.device}")
        return self.card.stock.engine

    @property
    def pid_namespace(self) -> str:
        """The only one in which its segments can be opened; "" for host memory, which knows no such wall."""
        return "" if self.card is None else self.card.pid_namespace

    @property
    def is_away(self) -> bool:
        """Whether the card was released, and is not back."""
        return self.card is not None and not self.card.stock.is_open

    def check(self) -> None:
        """Raises `CudaDeviceLost` when nothing can be had or read here any more."""
        lost = self.lost
        if lost is not None:
            raise CudaDeviceLost(
                f"the card {self.device} is lost, and every block on it: {lost}. Open a cache on another device; "
                f"restarting the daemon brings the card back if anything does"
            )


@dataclass(frozen=True, slots=True)
class Chosen:
    """Where a cache is to be: in `home`, as a staged one when `source` is the home on the card it stands beside."""

    home: Home
    source: Home | None = None


class Homes:
    """All of them; the first one is where a cache goes that names no device."""

    def __init__(self, homes: Sequence[Home]) -> None:
        self.main = homes[0]
        self._by_device = {home.device: home for home in homes}

    def __iter__(self) -> Iterator[Home]:
        return iter(self._by_device.values())

    @property
    def has_host(self) -> bool:
        """Whether there are pools in host memory."""
        return HOST in self._by_device

    def get(self, device: str) -> Home:
        """The home of that device. Raises `CudaUnavailable`."""
        home = self._by_device.get(device)
        if home is None:
            raise CudaUnavailable(f"this daemon has no pools on {device}; {self._there_are()}")
        return home

    def named(self, word: str) -> Home:
        """The home that a person means: "" for the main one, host or cpu, cuda:0, a UUID or its beginning.

        Raises `CudaUnavailable` when it is none, or several.
        """
        wanted = word.lower().removeprefix("cuda:")
        if not wanted:
            return self.main
        if wanted in {HOST, "cpu"}:
            return self.get(HOST)
        wanted = wanted.removeprefix("gpu-")
        found = [
            home
            for home in self
            if home.card is not None
            and (
                int(wanted) == home.card.device.ordinal
                if wanted.isdecimal() and len(wanted) < 4
                else home.device.lower().removeprefix("gpu-").startswith(wanted)
            )
        ]
        if len(found) != 1:
            raise CudaUnavailable(f"{word!r} is no device of this daemon; {self._there_are()}")
        return found[0]

    def of(self, pool: Pool) -> Home:
        """Where the pool lives."""
        return self._by_device[pool.device]

    def choose(self, device: str, *, staged: bool, by_rule: str = "") -> Chosen:
        """Where a cache goes whose client named `device`, "" for none; then `by_rule` says it, or else the main home.

        Raises `CudaUnavailable` for a device that this daemon does not serve, `CudaDeviceLost` for one that is lost;
        but who named none gets host memory then, if there is some.
        """
        home = self.get(device or by_rule or self.main.device)
        host = self._by_device.get(HOST)
        if home.lost is not None and not device and host is not None:
            return Chosen(host)
        home.check()
        if not staged or home.device == HOST:
            return Chosen(home)
        if host is None:
            raise CudaUnavailable(
                f"this process cannot map {home.device}, and this daemon keeps no pools in host memory beside it; see "
                f"memory.host.budget"
            )
        return Chosen(host, source=home)

    def _there_are(self) -> str:
        return f"there are {', '.join(self._by_device)}" if len(self._by_device) > 1 else f"there is {self.main.device}"
