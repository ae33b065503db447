"""What `kvd top` shows and how: keys, sorting, filter, scrolling, the last minutes' rates. No terminal, no clock."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvd.cli.processes import UNKNOWN, Process
from kvd.status import ClientStatus, Snapshot

MAX_HISTORY = 240
"""Intervals kept, as many as a wide terminal has columns."""
INTERVALS_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Sort(enum.Enum):
    """By what the clients are sorted, greatest first."""

    HOLDS = "holds"
    SAVED = "saved"
    REFS = "refs"
    REQUESTS = "requests"
    CONNECTED = "connected"
    PID = "pid"


@dataclass(frozen=True, slots=True)
class Flow:
    """What moved in one interval: shares are None where nothing was asked."""

    hit_rate: float | None
    requests_a_s: float
    up_a_s: dict[str, float]
    """Tier -> bytes a second that came up."""
    down_a_s: dict[str, float]


@dataclass(slots=True)
class TopState:
    """Changed by `take` (a new snapshot) and `press` (a key)."""

    interval_s: float = 1.0
    sort: Sort = Sort.HOLDS
    is_reversed: bool = False
    needle: str = ""
    is_typing: bool = False
    """The filter is being edited: keys are text."""
    is_paused: bool = False
    is_over: bool = False
    shows_help: bool = False
    scroll: int = 0
    pool_at: int = 0
    snapshot: Snapshot | None = None
    processes: Mapping[int, Process] = field(default_factory=dict)
    trouble: str = ""
    """Why there is no newer snapshot."""
    flows: deque[Flow] = field(default_factory=lambda: deque(maxlen=MAX_HISTORY))

    def take(self, snapshot: Snapshot, processes: Mapping[int, Process]) -> None:
        """The newest snapshot; ignored while paused."""
        self.trouble = ""
        if self.is_paused:
            return
        if self.snapshot is not None and self.snapshot.epoch == snapshot.epoch:
            seconds = snapshot.uptime_s - self.snapshot.uptime_s
            if seconds > 0:
                self.flows.append(_flow(self.snapshot, snapshot, seconds))
        else:
            self.flows.clear()
        self.snapshot, self.processes = snapshot, processes

    def press(self, key: str) -> None:
        """One key: a character, or the name of one (up, down, pageup, pagedown, home, end, enter, backspace, esc)."""
        if self.is_typing:
            self._type(key)
        elif self.shows_help:
            self.shows_help = False
        elif key in {"q", "Q", "esc", "\x03", "\x04"}:
            self.is_over = True
        elif key == "s":
            members = list(Sort)
            self.sort, self.scroll = members[(members.index(self.sort) + 1) % len(members)], 0
        elif key == "r":
            self.is_reversed, self.scroll = not self.is_reversed, 0
        elif key == "/":
            self.is_typing = True
        elif key == " ":
            self.is_paused = not self.is_paused
        elif key in {"+", "="}:
            self.interval_s = max((one for one in INTERVALS_S if one < self.interval_s), default=INTERVALS_S[0])
        elif key == "-":
            self.interval_s = min((one for one in INTERVALS_S if one > self.interval_s), default=INTERVALS_S[-1])
        elif key == "p":
            self.pool_at += 1
        elif key in {"?", "h"}:
            self.shows_help = True
        else:
            self._scroll(key)

    def _type(self, key: str) -> None:
        if key == "enter":
            self.is_typing = False
        elif key == "esc":
            self.is_typing, self.needle = False, ""
        elif key == "backspace":
            self.needle = self.needle[:-1]
        elif len(key) == 1 and key.isprintable():
            self.needle += key
        self.scroll = 0

    def _scroll(self, key: str) -> None:
        steps = {"up": -1, "k": -1, "down": 1, "j": 1, "pageup": -10, "pagedown": 10, "home": -(1 << 30)}
        self.scroll = max(0, self.scroll + steps.get(key, 0))

    def clients(self, own_pid: int) -> list[ClientStatus]:
        """Those to show, sorted and filtered, without the process that looks."""
        if self.snapshot is None:
            return []
        found = [one for one in self.snapshot.clients if one.pid != own_pid and self._matches(one)]
        return sorted(found, key=lambda one: (_measure(one, self.sort), one.session), reverse=not self.is_reversed)

    def _matches(self, client: ClientStatus) -> bool:
        text = f"{client.pid} {client.uid} {client.label} {self.processes.get(client.pid, UNKNOWN).command}"
        return self.needle.lower() in text.lower()


def _measure(client: ClientStatus, sort: Sort) -> float:
    return {
        Sort.HOLDS: client.held_nbytes,
        Sort.SAVED: client.tokens_saved,
        Sort.REFS: client.num_references + client.num_reserved,
        Sort.REQUESTS: client.num_requests,
        Sort.CONNECTED: client.connected_s,
        Sort.PID: client.pid,
    }[sort]


def _flow(before: Snapshot, after: Snapshot, seconds: float) -> Flow:
    hits = _counted(after, "hits") - _counted(before, "hits")
    lookups = _counted(after, "lookups") - _counted(before, "lookups")
    old = {tier.name: tier for tier in before.tiers}
    pairs = [(old[tier.name], tier) for tier in after.tiers if tier.name in old]
    return Flow(
        hit_rate=max(0.0, min(1.0, hits / lookups)) if lookups > 0 else None,
        requests_a_s=max(0.0, after.counters.get("requests", 0) - before.counters.get("requests", 0)) / seconds,
        up_a_s={new.name: max(0, new.read_nbytes - was.read_nbytes) / seconds for was, new in pairs},
        down_a_s={new.name: max(0, new.written_nbytes - was.written_nbytes) / seconds for was, new in pairs},
    )


def _counted(snapshot: Snapshot, name: str) -> int:
    return sum(pool.counters.get(name, 0) for pool in snapshot.pools)
