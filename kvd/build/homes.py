"""Where pools live, as the configuration wants it: a card, with host memory beside it, or host memory alone."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvd.block import HOST
from kvd.build.sizes import Sizes, decide_card_sizes, decide_host_sizes, decide_sizes
from kvd.config.schema import Memory
from kvd.cuda import Context, pid_namespace
from kvd.errors import CudaError, OutOfMemory
from kvd.memory import Choice, CopyEngine, DeviceStock, SegmentStock, choose_device
from kvd.memory.device import AUTO
from kvd.service.homes import Card, Home

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltHomes:
    """The main home first. `main` are its sizes, `host` those of the home in host memory, zeros where there is none."""

    homes: list[Home]
    main: Sizes
    host: Sizes
    warnings: tuple[str, ...]

    @property
    def has_card(self) -> bool:
        """Whether copies to and from a card are needed."""
        return any(home.card is not None for home in self.homes)


def build_homes(
    memory: Memory, available_nbytes: int, closing: contextlib.ExitStack, on_ready: Callable[[], None]
) -> BuiltHomes:
    """Makes the first segment of the main home. `on_ready` is called on threads of the stocks.

    Raises `CudaError` when a card that was named cannot be used, `OutOfMemory`, `ConfigError`.
    """
    choice = choose_device(memory.device)
    if choice.device is not None:
        try:
            card, sizes = _card_home(memory, choice, closing, on_ready)
        except CudaError as error:
            if memory.device != AUTO:
                raise
            choice = Choice(None, None, f"blocks live in host memory: {choice.device} cannot be used: {error}")
    _log.info("%s", choice.reason)
    if choice.device is None:
        sizes = decide_sizes(memory, available_nbytes)
        return BuiltHomes([_host_home(memory, sizes, closing, on_ready)], sizes, sizes, ())
    host_sizes = decide_host_sizes(memory, available_nbytes)
    if not host_sizes.budget_nbytes:
        return BuiltHomes([card], sizes, host_sizes, ())
    try:
        host = _host_home(memory, host_sizes, closing, on_ready, lazy=True)
    except OutOfMemory as error:
        warning = f"no pools in host memory beside the card, for processes that cannot map it: {error}"
        _log.warning("%s", warning)
        return BuiltHomes([card], sizes, Sizes(0, host_sizes.segment_nbytes), (warning,))
    return BuiltHomes([card, host], sizes, host_sizes, ())


def _host_home(
    memory: Memory, sizes: Sizes, closing: contextlib.ExitStack, on_ready: Callable[[], None], *, lazy: bool = False
) -> Home:
    stock = SegmentStock(
        segment_nbytes=sizes.segment_nbytes,
        budget_nbytes=sizes.budget_nbytes,
        prefault="lazy" if lazy else memory.prefault,
        huge_pages=memory.huge_pages,
        on_ready=on_ready,
    )
    closing.callback(stock.close)
    stock.start()
    return Home(HOST, stock)


def _card_home(
    memory: Memory, choice: Choice, closing: contextlib.ExitStack, on_ready: Callable[[], None]
) -> tuple[Home, Sizes]:
    if choice.driver is None or choice.device is None:
        raise ValueError("host memory is no card")
    with contextlib.ExitStack() as opened:
        context = opened.enter_context(choice.driver.open(choice.device))
        sizes = decide_card_sizes(memory, *context.memory())
        stock = DeviceStock(
            context,
            segment_nbytes=sizes.segment_nbytes,
            budget_nbytes=sizes.budget_nbytes,
            prefault=memory.prefault,
            reserve=memory.reserve_nbytes,
            on_ready=on_ready,
        )
        opened.callback(stock.close)
        stock.start()
        engine = CopyEngine(context)
        opened.callback(engine.close)
        # Only now: what failed above is closed here, and an "auto" goes on without the card.
        closing.push(_closed_quietly(opened.pop_all(), context))
    card = Card(stock, engine, choice.device, pid_namespace())
    return Home(choice.device.uuid, stock, card), Sizes(sizes.budget_nbytes, stock.segment_nbytes)


def _closed_quietly(opened: contextlib.ExitStack, context: Context) -> Callable[..., None]:
    """Closes everything of a card at a stop: what the driver then says is logged, and keeps nothing else open."""

    def close(*_exception: object) -> None:
        try:
            opened.close()
        except CudaError as error:
            _log.error("the card %s was not closed: %s", context.device_uuid, error)

    return close
