"""One screen of `kvd top` as lines of text, as many and as wide as the terminal. Pure: no terminal, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from kvd.cli.render_memory import device_name
from kvd.cli.render_status import render_clients
from kvd.cli.text import count, duration, one_line, percent, printable, size
from kvd.cli.top_state import TopState
from kvd.status import BLOCK_LETTERS, PoolStatus, Snapshot, TierStatus

STYLES = {".": "dim", "w": "magenta", "f": "cyan", "u": "bold green", "c": "yellow", "b": "blue", "-": "red"}
_LEGEND = (("u", "in use"), ("c", "cached"), ("b", "copied below"), ("w", "written"), ("f", "coming up"), (".", "free"))
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-=+*%#"
_KEYS = "q quit  s sort  / filter  p pool  ? help  r reverse  space pause  +- speed"
MIN_CLIENT_LINES = 5
HELP = (
    "kvd top: blocks, tiers and clients of one daemon, live",
    "",
    "s            sort the clients by holds, saved, refs, requests, connected, pid",
    "r            the other way round",
    "/            show only clients whose pid, uid, label or command has this text",
    "up, down     scroll the clients; page up and page down by ten, home to the top",
    "p            the next pool's map",
    "space        pause, and go on",
    "+ -          faster, slower",
    "q, esc       quit",
    "",
    *(f"{letter}            a block that is {words}" for letter, words in BLOCK_LETTERS.items()),
    "",
    "any key goes back",
)


def render_top(state: TopState, width: int, height: int, *, own_pid: int, is_plain: bool) -> list[Text]:
    """Exactly `height` lines, none wider than `width`. `is_plain`: the terminal shows ASCII only."""
    if state.shows_help:
        lines = [Text(text) for text in HELP]
    elif state.snapshot is None:
        lines = [Text(state.trouble or "asking the daemon ...", style="yellow" if state.trouble else "")]
    else:
        lines = _page(state, state.snapshot, width, height, own_pid=own_pid, is_plain=is_plain)
    lines = lines[: height - 1]
    lines += [Text()] * (height - 1 - len(lines))
    lines.append(_foot(state))
    for line in lines:
        line.truncate(width, overflow="crop")
    return lines


def _page(state: TopState, snapshot: Snapshot, width: int, height: int, *, own_pid: int, is_plain: bool) -> list[Text]:
    head = [
        _first(snapshot, state),
        _memory(snapshot, width, is_plain=is_plain),
        _hits(state, width, is_plain=is_plain),
    ]
    head += [_tier(tier, state) for tier in snapshot.tiers]
    head += [Text(f"! {one_line(text)}", style="yellow") for text in snapshot.warnings[:2]]
    clients = state.clients(own_pid)
    # The clients keep a few lines, the map gets what it can use of the rest, and the clients what it leaves.
    room = max(1, height - 1 - len(head) - 1 - min(len(clients) + 1, MIN_CLIENT_LINES) - 1)
    block_map = _map(state, snapshot.pools, width, room)
    num_rows = max(1, height - 1 - len(head) - len(block_map) - 3)
    state.scroll = min(state.scroll, max(0, len(clients) - num_rows))
    shown = clients[state.scroll : state.scroll + num_rows]
    table: list[Text] = [Text("no clients" + (" that match" if state.needle else ""), style="dim")]
    if shown:
        table = _lines(render_clients(shown, state.processes), width)
    some = Text()
    if len(shown) < len(clients):
        first, last = state.scroll + 1, state.scroll + len(shown)
        some = Text(f"clients {count(first)} to {count(last)} of {count(len(clients))}", style="dim")
    return [*head, Text(), *block_map, some, *table]


def _first(snapshot: Snapshot, state: TopState) -> Text:
    text = Text.assemble(
        (f"kvd {printable(snapshot.version)}", "bold green"),
        f"  pid {snapshot.pid}  up {duration(snapshot.uptime_s)}",
    )
    if state.flows:
        text.append(f"  {count(round(state.flows[-1].requests_a_s))} requests/s")
    if state.is_paused:
        text.append("  paused", style="bold yellow")
    if state.trouble:
        text.append(f"  {one_line(state.trouble)}", style="bold red")
    return text


def _memory(snapshot: Snapshot, width: int, *, is_plain: bool) -> Text:
    memory = snapshot.memory
    bar_width = max(10, min(40, width - 50))
    share = min(1.0, memory.used_nbytes / max(1, memory.budget_nbytes))
    full = round(share * bar_width)
    text = Text(f"memory {device_name(memory.device)} ")
    text.append(("#" if is_plain else "━") * full, style="green" if share < 0.9 else "yellow")
    text.append(("-" if is_plain else "─") * (bar_width - full), style="dim")
    text.append(f" {size(memory.used_nbytes)} of {size(memory.budget_nbytes)}")
    return text


def _hits(state: TopState, width: int, *, is_plain: bool) -> Text:
    """The share of blocks that were found, interval by interval, the newest last; a gap where nothing was asked."""
    snapshot = state.snapshot
    text = Text("hits   ")
    if snapshot is None:
        return text
    hits = sum(pool.counters.get("hits", 0) for pool in snapshot.pools)
    lookups = sum(pool.counters.get("lookups", 0) for pool in snapshot.pools)
    words = f" {percent(hits, lookups)} in all"
    savings = snapshot.savings
    if savings.num_tokens:
        words += f", saved {count(savings.num_tokens)} tokens"
    if savings.num_tokens_rated:
        words += f", {duration(savings.prefill_s)}"
    room = max(8, min(40, width - 8 - len(words)))
    rates = [flow.hit_rate for flow in state.flows][-room:]
    text.append(" " * (room - len(rates)) + sparkline(rates, is_plain=is_plain), style="green")
    return text.append(words)


def sparkline(shares: Sequence[float | None], *, is_plain: bool) -> str:
    """One character a share from 0 to 1; a blank for None."""
    bars = _PLAIN_BARS if is_plain else _BARS
    return "".join(" " if share is None else bars[min(len(bars) - 1, int(share * len(bars)))] for share in shares)


def _tier(tier: TierStatus, state: TopState) -> Text:
    flow = state.flows[-1] if state.flows else None
    up = flow.up_a_s.get(tier.name, 0.0) if flow else 0.0
    down = flow.down_a_s.get(tier.name, 0.0) if flow else 0.0
    text = Text(f"{printable(tier.name):<6} ")
    text.append(printable(tier.state), style="green" if tier.state == "up" else "red")
    if tier.usage is not None:
        held = size(tier.usage.used_nbytes)
        text.append(f"  holds {held}")
        text.append(f" of {size(tier.usage.budget_nbytes)}" if tier.usage.budget_nbytes else "")
    text.append(f"  hits {percent(tier.num_found, tier.num_asked)}")
    text.append(f"  up {size(int(up))}/s  down {size(int(down))}/s")
    if tier.errors:
        text.append(f"  {count(sum(tier.errors.values()))} errors", style="yellow")
    return text


def _map(state: TopState, pools: Sequence[PoolStatus], width: int, room: int) -> list[Text]:
    """The chosen pool's blocks in at most `room` lines, with a heading and what the letters mean."""
    if not pools:
        return [Text("no pools: nobody has opened a cache yet", style="dim")]
    # The fullest first, so that the first look is at the one that matters.
    by_size = sorted(pools, key=lambda pool: -len(pool.block_map) * pool.map_step)
    pool = by_size[state.pool_at % len(by_size)]
    # Counted in columns: a letter is one.
    num_letters = max(1, width * max(1, room - 2))
    step = max(1, -(-len(pool.block_map) // num_letters))
    letters = pool.block_map[::step]
    each = step * pool.map_step
    num_blocks = pool.num_free + pool.num_reserved + pool.num_filling + pool.num_sealed
    head = Text(f"pool {pool.pool} {printable(pool.tenant)}  {count(num_blocks)} blocks of {size(pool.block_nbytes)}")
    if each > 1:
        head.append(f"  each letter the first of {count(each)}")
    if len(pools) > 1:
        head.append(f"  (pool {by_size.index(pool) + 1} of {len(pools)}, p for the next)", style="dim")
    lines = [head]
    for start in range(0, len(letters), width):
        line = Text()
        for letter in letters[start : start + width]:
            line.append(letter, style=STYLES.get(letter, ""))
        lines.append(line)
    legend = Text()
    for letter, words in _LEGEND:
        legend.append(letter, style=STYLES[letter]).append(f" {words}  ", style="dim")
    return [*lines[: max(2, room - 1)], legend]


def _foot(state: TopState) -> Text:
    if state.is_typing:
        return Text(f"filter: {state.needle}_", style="bold")
    order = f"by {state.sort.value}" + (" reversed" if state.is_reversed else "")
    order += f", only {printable(state.needle)!r}" if state.needle else ""
    return Text.assemble(f"{order}, {state.interval_s:g} s  ", (_KEYS, "reverse"))


def _lines(renderable: RenderableType, width: int) -> list[Text]:
    console = Console(width=width, color_system=None, highlight=False, markup=False, emoji=False, legacy_windows=False)
    rows = console.render_lines(renderable, console.options, pad=False)
    found = []
    for row in rows:
        line = Text()
        for segment in row:
            line.append(segment.text, style=segment.style)
        found.append(line)
    return found
