"""A device's budget changed while the daemon runs: what would be lost by it is copied down first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvd.errors import CudaOutOfMemory, InvalidRequest, OutOfMemory
from kvd.pool import Pools, Shrink
from kvd.service.homes import Home
from kvd.service.spilling import Spilling


@dataclass(slots=True)
class _Resize:
    home: Home
    nbytes: int
    until_s: float
    plan: Shrink
    num_left: int = 0


class Resizing:
    """At most one for each device; asking for another size gives up the one under way. Loop thread only."""

    def __init__(
        self,
        *,
        pools: Pools,
        spilling: Spilling | None,
        apply: Callable[[int, str], None],
        bound_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`apply(nbytes, device)` sets the budget. `bound_s` is how long copying may hold it up."""
        self._pools = pools
        self._spilling = spilling
        self._apply = apply
        self._bound_s = bound_s
        self._clock = clock
        self._open: dict[str, _Resize] = {}

    @property
    def next_deadline_s(self) -> float | None:
        """When copying has taken long enough."""
        return min((one.until_s for one in self._open.values()), default=None)

    def ask(self, home: Home, nbytes: int) -> int:
        """Begins it, or says how it goes: blocks that are copied down yet before memory goes; 0 when it is done.

        Raises `InvalidRequest` for less than a segment, `OutOfMemory` or `CudaOutOfMemory` for what can never be had.
        """
        begun = self._open.get(home.device)
        if begun is None or begun.nbytes != nbytes:
            if nbytes == self._pools.usage(home.device).budget_nbytes and begun is None:
                return 0
            self._check(home, nbytes)
            plan = self._pools.plan_shrink(nbytes, home.device)
            begun = self._open[home.device] = _Resize(home, nbytes, self._clock() + self._bound_s, plan)
        self.go_on()
        return begun.num_left if home.device in self._open else 0

    def go_on(self) -> None:
        """After copies have ended, or time has passed."""
        for resize in list(self._open.values()):
            if not self._is_copying(resize):
                del self._open[resize.home.device]
                self._apply(resize.nbytes, resize.home.device)

    def _is_copying(self, resize: _Resize) -> bool:
        spilling = self._spilling
        if spilling is None or self._clock() >= resize.until_s or not spilling.may_copy or resize.home.lost is not None:
            return False
        uncopied, num_copying = resize.plan.uncopied(spilling.accepts), resize.plan.num_copying
        if not uncopied and not num_copying:
            # Clients may have used other segments since, so that now others would go.
            resize.plan = self._pools.plan_shrink(resize.nbytes, resize.home.device)
            uncopied, num_copying = resize.plan.uncopied(spilling.accepts), resize.plan.num_copying
        resize.num_left = sum(map(len, uncopied.values())) + num_copying
        for pool_id, blocks in uncopied.items():
            spilling.copy_blocks(self._pools.get(pool_id), blocks)
        return bool(resize.num_left)

    def _check(self, home: Home, nbytes: int) -> None:
        segment_nbytes = home.stock.segment_nbytes
        if nbytes < segment_nbytes:
            raise InvalidRequest(
                f"a budget of {nbytes} bytes is less than one segment, which has {segment_nbytes >> 20} MiB here"
            )
        if home.card is not None:
            most_nbytes = home.card.stock.total_nbytes - home.card.stock.reserve
            if nbytes > most_nbytes:
                raise CudaOutOfMemory(
                    f"{home.device} has {most_nbytes >> 20} MiB beside its reserve, a budget of {nbytes >> 20} MiB is "
                    f"more"
                )
            return
        held_nbytes = self._pools.usage(home.device).used_nbytes + home.stock.ready_nbytes
        most_nbytes = held_nbytes + home.stock.available_nbytes()
        if nbytes > max(most_nbytes, self._pools.usage(home.device).budget_nbytes):
            raise OutOfMemory(
                f"a memory budget of {nbytes >> 20} MiB is more than the {most_nbytes >> 20} MiB that this machine can "
                f"give"
            )
