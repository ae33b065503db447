"""Where pools live, as the configuration wants it: a card, with host memory beside it, or host memory alone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from kvd.block import HOST, PAGE_NBYTES
from kvd.build.sizes import Sizes, decide_card_sizes, decide_host_sizes, decide_sizes
from kvd.config.pool_rule import PoolRule
from kvd.config.schema import Memory
from kvd.cuda import pid_namespace
from kvd.errors import ConfigError, CudaError, OutOfMemory
from kvd.memory import CardMemory, Choice, HostSegment, Prefault, SegmentStock, choose_device
from kvd.memory.device import AUTO, CPU
from kvd.service.homes import Card, Home

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltHomes:
    """The main home first, each with its sizes. `devices` are all of them, by the words that rules have for them."""

    homes: tuple[tuple[Home, Sizes], ...]
    devices: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    @property
    def main(self) -> Sizes:
        """Of the main home."""
        return self.homes[0][1]

    @property
    def host(self) -> Sizes:
        """Of the home in host memory; a budget of 0 where there is none."""
        return next((sizes for home, sizes in self.homes if home.device == HOST), Sizes(0, PAGE_NBYTES))

    @property
    def max_segment_nbytes(self) -> int:
        """No block is larger than this."""
        return max(sizes.segment_nbytes for _, sizes in self.homes)

    @property
    def has_card(self) -> bool:
        """Whether copies to and from a card are needed."""
        return any(home.card is not None for home, _ in self.homes)


def build_homes(
    memory: Memory,
    rules: Sequence[PoolRule],
    available_nbytes: int,
    closing: contextlib.ExitStack,
    on_ready: Callable[[], None],
) -> BuiltHomes:
    """Makes the first segment of every home but the one beside a card. `on_ready` is called on threads of the stocks.

    Raises `CudaError` when a card that was named cannot be used, `OutOfMemory`, `ConfigError`.
    """
    builder = _Builder(memory, available_nbytes, closing, on_ready)
    builder.add_main()
    for rule in rules:
        if rule.device is not None:
            builder.add_for_rule(rule, [one.budget or 0 for one in rules if one.device == rule.device])
    if any(home.card is not None for home, _ in builder.homes.values()):
        builder.add_host_beside()
    for rule in rules:
        if rule.device == CPU and HOST not in builder.homes:
            raise ConfigError(f"the pool rule {rule.name!r} wants host memory, and memory.host.budget leaves none")
    return BuiltHomes(tuple(builder.homes.values()), builder.devices, tuple(builder.warnings))


class _Builder:
    """Collects homes, each device once."""

    def __init__(
        self, memory: Memory, available_nbytes: int, closing: contextlib.ExitStack, on_ready: Callable[[], None]
    ) -> None:
        self._memory = memory
        self._available_nbytes = available_nbytes
        self._closing = closing
        self._on_ready = on_ready
        self.homes: dict[str, tuple[Home, Sizes]] = {}
        self.devices: dict[str, str] = {CPU: HOST}
        self.warnings: list[str] = []
        self._cards: list[CardMemory] = []

    def add_main(self) -> None:
        """The device that memory.device names, or is taken for "auto"."""
        choice = choose_device(self._memory.device)
        if choice.device is not None:
            try:
                self._add_card(self._memory, choice)
                self.devices[self._memory.device] = choice.device.uuid
            except CudaError as error:
                if self._memory.device != AUTO:
                    raise
                choice = Choice(None, None, f"blocks live in host memory: {choice.device} cannot be used: {error}")
        _log.info("%s", choice.reason)
        if choice.device is None:
            sizes = decide_sizes(self._memory, self._available_nbytes)
            self.homes[HOST] = self._host(sizes, self._memory.prefault), sizes

    def add_for_rule(self, rule: PoolRule, budgets: Sequence[int]) -> None:
        """The card that a pool rule names, unless it is there already."""
        if rule.device is None or rule.device in self.devices:
            return
        choice = choose_device(rule.device)
        if choice.device is None:
            return
        self.devices[rule.device] = choice.device.uuid
        if choice.device.uuid not in self.homes:
            _log.info("pools of the rule %s: %s", rule.name, choice.reason)
            self._add_card(structs.replace(self._memory, budget=max(budgets) or AUTO), choice)

    def add_host_beside(self) -> None:
        """Host memory beside the cards, made only as it is needed; trouble with it is a warning."""
        if HOST in self.homes:
            return
        sizes = decide_host_sizes(self._memory, self._available_nbytes)
        if not sizes.budget_nbytes:
            return
        try:
            self.homes[HOST] = self._host(sizes, "lazy"), sizes
        except OutOfMemory as error:
            self.warnings.append(f"no pools in host memory beside the card, for processes that cannot map it: {error}")
            _log.warning("%s", self.warnings[-1])

    def _host(self, sizes: Sizes, prefault: Prefault) -> Home:
        stock = SegmentStock(
            segment_nbytes=sizes.segment_nbytes,
            budget_nbytes=sizes.budget_nbytes,
            prefault=prefault,
            huge_pages=self._memory.huge_pages,
            on_ready=self._on_ready,
            prepare=self._lock,
        )
        self._closing.callback(stock.close)
        stock.start()
        return Home(HOST, stock)

    def _lock(self, segment: HostSegment) -> None:
        # Locked for one card it is locked for all.
        if self._cards:
            self._cards[0].lock(segment)

    def _add_card(self, memory: Memory, choice: Choice) -> None:
        if choice.driver is None or choice.device is None:
            raise ValueError("host memory is no card")
        budget_nbytes = 0

        def decide(free_nbytes: int, total_nbytes: int) -> tuple[int, int]:
            nonlocal budget_nbytes
            sizes = decide_card_sizes(memory, free_nbytes, total_nbytes)
            budget_nbytes = sizes.budget_nbytes
            return sizes.budget_nbytes, sizes.segment_nbytes

        stock = CardMemory(
            choice.driver,
            choice.device,
            decide=decide,
            prefault=memory.prefault,
            reserve=memory.reserve_nbytes,
            on_ready=self._on_ready,
        )
        stock.open()
        self._closing.callback(stock.close)
        self._cards.append(stock)
        home = Home(choice.device.uuid, stock, Card(stock, choice.device, pid_namespace()))
        self.homes[home.device] = home, Sizes(budget_nbytes, stock.segment_nbytes)
