"""All rows, in the order they are shown, and how a choice of them is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvd.bench import (
    begin,
    chain_hash,
    contiguous,
    llama_server,
    mapping,
    model,
    pool_scale,
    publish,
    restart,
    start,
    tier_get,
    tier_moves,
)
from kvd.bench.row import CannotMeasure, Group, Row, Run
from kvd.config.keys import nearest
from kvd.errors import InvalidRequest, KvdError

GROUPS: tuple[Group, ...] = (
    begin.GROUP,
    chain_hash.GROUP,
    mapping.MAP_GROUP,
    mapping.VIEW_GROUP,
    publish.GROUP,
    tier_get.GROUP,
    tier_moves.GROUP,
    model.GROUP,
    restart.GROUP,
    pool_scale.GROUP,
    start.START_GROUP,
    start.RSS_GROUP,
)

ENGINE_GROUPS: tuple[Group, ...] = (contiguous.GROUP, llama_server.GROUP)
"""What runs an engine, and so needs one installed."""

NAMES: tuple[str, ...] = tuple(target.name for group in (*GROUPS, *ENGINE_GROUPS) for target in group.targets)


def chosen(names: Sequence[str], *, engines: bool = False) -> list[Group]:
    """The groups that measure these rows; without names `GROUPS`, or with `engines` those of the engines and the model.

    Raises `InvalidRequest` naming the nearest.
    """
    for name in names:
        if name not in NAMES:
            alike = nearest(name, NAMES)
            raise InvalidRequest(f"no row {name}" + (f"; did you mean {alike}?" if alike else f"; {', '.join(NAMES)}"))
    if not names:
        return [model.GROUP, *ENGINE_GROUPS] if engines else list(GROUPS)
    return [group for group in (*GROUPS, *ENGINE_GROUPS) if any(target.name in names for target in group.targets)]


def measure(groups: Sequence[Group], run: Run, done: Callable[[Group], None]) -> Iterator[Row]:
    """The rows of each group as they come; what cannot be measured here becomes rows that say why."""
    for group in groups:
        try:
            rows = group.measure(run)
        except (CannotMeasure, KvdError) as error:
            rows = [target.missing(str(error)) for target in group.targets]
        done(group)
        yield from rows
