"""The tiers below the pools as text for people: a table, and a line for whatever is not well. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from kvd.cli.tables import plain_table
from kvd.cli.text import count, duration, percent, printable, size
from kvd.status import MoverStatus, TierStatus

_STATE_STYLES = {"up": "green", "down": "red"}
_RANKS = (
    ("wanted_fill", "up (waited for)"),
    ("fill", "up ahead of need"),
    ("spill", "down"),
    ("flush", "flushes"),
)


def render_tiers(tiers: Sequence[TierStatus], mover: MoverStatus | None) -> list[RenderableType]:
    """The table, what is being copied, and a line for each trouble; nothing without tiers."""
    if not tiers:
        return []
    table = plain_table(
        ("tier", "l"), ("state", "l"), ("holds", "r"), ("hits", "r"), ("up", "r"), ("down", "r"), ("errors", "r"),
        ("where", "rest"),
    )  # fmt: skip
    for tier in tiers:
        table.add_row(
            Text(printable(tier.name)),
            Text(_state(tier), style=_STATE_STYLES.get(tier.state, "yellow")),
            _holds(tier),
            percent(tier.num_found, tier.num_asked),
            size(tier.read_nbytes) if tier.read_nbytes else "-",
            size(tier.written_nbytes) if tier.written_nbytes else "-",
            count(sum(tier.errors.values())),
            Text(printable(tier.address)),
        )
    parts: list[RenderableType] = [table]
    if speeds := [text for tier in tiers if (text := _speed(tier))]:
        parts.append(Text(f"speed: {', '.join(speeds)}", style="dim"))
    if mover is not None and (text := _copying(mover)):
        parts.append(Text(f"copying: {text}", style="dim"))
    parts += [Text(f"! {printable(text)}", style="yellow") for text in _troubles(tiers, mover)]
    return parts


def _state(tier: TierStatus) -> str:
    """With how long it is left alone, when it is down; the reason stands among the daemon's warnings."""
    rest = f", {duration(tier.retry_in_s + 0.999)}" if tier.retry_in_s > 0 else ""
    return printable(tier.state) + rest


def _holds(tier: TierStatus) -> str:
    if tier.usage is None:
        return "-"
    used = size(tier.usage.used_nbytes)
    return f"{used} of {size(tier.usage.budget_nbytes)}" if tier.usage.budget_nbytes else used


def _speed(tier: TierStatus) -> str:
    """Bytes moved in all over the time that took."""
    ways = ((tier.read_nbytes, tier.read_s, "up"), (tier.written_nbytes, tier.write_s, "down"))
    parts = [f"{size(int(nbytes / seconds))}/s {way}" for nbytes, seconds, way in ways if nbytes and seconds]
    return f"{printable(tier.name)} {' '.join(parts)}" if parts else ""


def _copying(mover: MoverStatus) -> str:
    parts = []
    for rank, words in _RANKS:
        running, queued = mover.running.get(rank, 0), mover.queued.get(rank, 0)
        if running or queued:
            parts.append(f"{count(running + queued)} {words}")
    return ", ".join(parts)


def _troubles(tiers: Sequence[TierStatus], mover: MoverStatus | None) -> list[str]:
    found = []
    for tier in tiers:
        details = tier.details
        if writes := details.get("writes"):
            found.append(f"{tier.name} takes no blocks: {writes}")
        if (restarts := details.get("restarts", "0")) != "0":
            found.append(f"{tier.name}: the embedded server was started again {restarts} times")
        if (words := details.get("embedded_error")) and words not in tier.reason:
            found.append(f"{tier.name}: {words}")
        if tier.errors:
            found.append(f"{tier.name} errors: {_by_cause(tier.errors)}")
    if mover is not None and mover.num_thread_restarts:
        found.append(f"{mover.num_thread_restarts} copy threads died of a defect and were replaced: see the log")
    return found


def _by_cause(errors: Mapping[str, int]) -> str:
    most_first = sorted(errors.items(), key=lambda one: (-one[1], one[0]))
    return ", ".join(f"{count(number)} {cause}" for cause, number in most_first)
