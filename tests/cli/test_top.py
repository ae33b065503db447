"""`kvd top` without a terminal: what keys do, what rates come to, and the screen as text."""

from __future__ import annotations

import io
import threading
from typing import NoReturn

import pytest
from msgspec.structs import replace as with_fields
from rich.console import Console

from kvd.cli.processes import Process
from kvd.cli.render_top import render_top, sparkline
from kvd.cli.top import Feed
from kvd.cli.top_state import MAX_HISTORY, Sort, TopState
from kvd.cli.top_terminal import split_keys
from kvd.errors import BY_CODE
from kvd.status import Snapshot
from tests.cli.snapshots import CLIENT, FULL, HOST_TIER, POOL, REDIS_TIER, SAVINGS

PROCESSES = {12345: Process("python generate.py --model smollm2 --prompts many.txt", 300 << 20)}
MAP = "u" * 30 + "c" * 40 + "b" * 20 + "w" * 3 + "f" + "." * 66
LIVE = with_fields(
    FULL,
    pools=[with_fields(POOL, block_map=MAP, map_step=40, counters={"hits": 900, "lookups": 1000})],
    tiers=[HOST_TIER, REDIS_TIER],
    savings=SAVINGS,
    warnings=[],
)
GOLDEN_80 = """\
kvd 0.1.0  pid 77  up 1 d 01 h  1 requests/s
memory host #################------------- 2.2 GiB of 4 GiB
hits                           #+ 90 % in all, saved 204,800 tokens, 5 min 20 s
host   up  holds 1 GiB of 2 GiB  hits 90 %  up 1 GiB/s  down 0 B/s
redis  down  hits -  up 0 B/s  down 0 B/s  1,201 errors

pool 0 group:kvd  6,216 blocks of 360 KiB  each letter the first of 40
uuuuuuuuuuuuuuuuuuuuuuuuuuuuuuccccccccccccccccccccccccccccccccccccccccbbbbbbbbbb
bbbbbbbbbbwwwf..................................................................
u in use  c cached  b copied below  w written  f coming up  . free

  pid   uid   memory  refs  mapped  mode      saved     prefill  client
12345  1000  300 MiB   272   2 GiB  mapped  204,800  5 min 20 s  reader: python?
"""


def later(snapshot: Snapshot, seconds: float, **counters: int) -> Snapshot:
    pool = snapshot.pools[0]
    moved = {name: pool.counters.get(name, 0) + more for name, more in counters.items()}
    return with_fields(
        snapshot,
        uptime_s=snapshot.uptime_s + seconds,
        pools=[with_fields(pool, counters={**pool.counters, **moved})],
    )


def live() -> TopState:
    """After two intervals: nothing missed, then every second block; a GiB came up in the last second."""
    state = TopState()
    second = later(LIVE, 1, hits=10, lookups=10)
    state.take(LIVE, PROCESSES)
    state.take(second, PROCESSES)
    third = later(second, 1, hits=5, lookups=10)
    counters = {"requests": second.counters["requests"] + 1}
    tiers = [with_fields(HOST_TIER, read_nbytes=HOST_TIER.read_nbytes + (1 << 30)), REDIS_TIER]
    state.take(with_fields(third, tiers=tiers, counters=counters), PROCESSES)
    return state


def text(state: TopState, width: int = 80, height: int = 24, *, is_plain: bool = True) -> str:
    lines = render_top(state, width, height, own_pid=1, is_plain=is_plain)
    assert len(lines) == height
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii" if is_plain else "utf-8", errors="replace", write_through=True)
    console = Console(file=stream, width=width, highlight=False, markup=False, no_color=True)
    for line in lines:
        assert line.cell_len <= width
        console.print(line, no_wrap=True, crop=True)
    return "".join(line.rstrip() + "\n" for line in raw.getvalue().decode().splitlines())


def test_the_screen_of_80_columns():
    page = text(live())
    assert page.startswith(GOLDEN_80)
    assert page.splitlines()[-1].startswith("by holds, 1 s  q quit  s sort  / filter")


@pytest.mark.parametrize(("width", "height"), [(20, 5), (40, 10), (80, 24), (160, 50), (300, 100)])
@pytest.mark.parametrize("num_clients", [0, 1, 200])
@pytest.mark.parametrize("is_plain", [True, False])
def test_it_fits_every_terminal(width, height, num_clients, is_plain):
    clients = [with_fields(CLIENT, session=number, pid=10_000 + number) for number in range(num_clients)]
    state = live()
    state.take(with_fields(LIVE, clients=clients, warnings=["one"] * 5), PROCESSES)
    text(state, width, height, is_plain=is_plain)
    state.press("?")
    text(state, width, height, is_plain=is_plain)


def test_rates_are_of_the_last_interval():
    flow = live().flows[-1]
    assert (flow.hit_rate, flow.requests_a_s, flow.up_a_s["host"], flow.down_a_s["redis"]) == (0.5, 1.0, 1 << 30, 0)


def test_an_interval_without_a_lookup_has_no_rate():
    state = TopState()
    state.take(LIVE, {})
    state.take(later(LIVE, 1), {})
    assert state.flows[-1].hit_rate is None


def test_another_daemon_begins_a_new_history():
    state = live()
    state.take(with_fields(LIVE, epoch=LIVE.epoch + 1, uptime_s=1.0), {})
    assert not state.flows


def test_the_history_is_bounded():
    state = TopState()
    for number in range(MAX_HISTORY + 50):
        state.take(later(LIVE, number, hits=number, lookups=number), {})
    assert len(state.flows) == MAX_HISTORY


@pytest.mark.parametrize(
    ("shares", "plain", "drawn"), [([0.0, 0.5, 1.0], "_+#", "▁▅█"), ([None, 0.99], " #", " █"), ([], "", "")]
)
def test_the_sparkline(shares, plain, drawn):
    assert sparkline(shares, is_plain=True) == plain
    assert sparkline(shares, is_plain=False) == drawn


def clients_of(state: TopState) -> list[int]:
    return [client.session for client in state.clients(own_pid=1)]


@pytest.fixture
def crowd() -> TopState:
    state = TopState()
    clients = [
        with_fields(CLIENT, session=1, pid=30, held_nbytes=5, tokens_saved=1, label="alpha"),
        with_fields(CLIENT, session=2, pid=10, held_nbytes=9, tokens_saved=7, label="beta"),
        with_fields(CLIENT, session=3, pid=20, held_nbytes=7, tokens_saved=9, label="gamma"),
        with_fields(CLIENT, session=4, pid=1, held_nbytes=99, label="kvd top"),
    ]
    state.take(with_fields(LIVE, clients=clients), {})
    return state


def test_clients_are_sorted_by_what_s_chooses(crowd):
    orders = {}
    for _ in Sort:
        orders[crowd.sort] = clients_of(crowd)
        crowd.press("s")
    assert crowd.sort is Sort.HOLDS
    assert (orders[Sort.HOLDS], orders[Sort.SAVED], orders[Sort.PID]) == ([2, 3, 1], [3, 2, 1], [1, 3, 2])
    crowd.press("r")
    assert clients_of(crowd) == [1, 3, 2]


def test_the_filter_takes_keys_as_text(crowd):
    for key in ("/", "q", "backspace", "G", "a", "m"):
        crowd.press(key)
    assert clients_of(crowd) == [3]
    assert "filter: Gam_" in text(crowd)
    crowd.press("enter")
    assert not crowd.is_over
    assert "only 'Gam'" in text(crowd)
    for key in ("/", "esc"):
        crowd.press(key)
    assert clients_of(crowd) == [2, 3, 1]
    for key in ("/", "z", "z", "enter"):
        crowd.press(key)
    assert "no clients that match" in text(crowd)


def test_a_pause_keeps_the_picture(crowd):
    crowd.press(" ")
    crowd.take(with_fields(LIVE, clients=[]), {})
    assert clients_of(crowd) == [2, 3, 1]
    assert "paused" in text(crowd)
    crowd.press(" ")
    crowd.take(with_fields(LIVE, clients=[]), {})
    assert clients_of(crowd) == []


def test_scrolling_stops_at_both_ends():
    state = TopState()
    state.take(with_fields(LIVE, clients=[with_fields(CLIENT, session=n, pid=1000 + n) for n in range(50)]), {})
    assert "clients 1 to " in text(state)
    state.press("up")
    assert "clients 1 to " in text(state)
    for _ in range(20):
        state.press("pagedown")
    assert " to 50 of 50" in text(state)
    state.press("up")
    assert " to 49 of 50" in text(state)
    state.press("home")
    assert "clients 1 to " in text(state)


def test_p_shows_the_next_pool():
    other = with_fields(POOL, pool=1, tenant="group:other", block_map="..", map_step=1)
    state = TopState()
    state.take(with_fields(LIVE, pools=[*LIVE.pools, other]), {})
    assert "pool 0 group:kvd" in text(state)
    state.press("p")
    assert "pool 1 group:other" in text(state)
    state.press("p")
    assert "pool 0 group:kvd" in text(state)


def test_speed_has_steps_and_ends(crowd):
    for _ in range(20):
        crowd.press("+")
    assert crowd.interval_s == 0.2
    for _ in range(20):
        crowd.press("-")
    assert crowd.interval_s == 30.0


@pytest.mark.parametrize("key", ["q", "esc", "\x03", "\x04"])
def test_ways_out(crowd, key):
    crowd.press(key)
    assert crowd.is_over


def test_help_lists_the_keys_and_goes_away(crowd):
    crowd.press("?")
    assert "sort the clients" in text(crowd)
    crowd.press("q")
    assert not crowd.is_over
    assert "sort the clients" not in text(crowd)


def test_a_daemon_that_is_gone_is_said_beside_the_last_picture(crowd):
    crowd.trouble = "nobody listens there"
    assert "nobody listens there" in text(crowd).splitlines()[0]
    assert "alpha" in text(crowd)


def test_foreign_text_does_not_steer_the_terminal(crowd):
    clients = [with_fields(CLIENT, label="\x1b[2Jx\x07")]
    crowd.take(with_fields(LIVE, clients=clients, pools=[with_fields(POOL, tenant="\x1b]0;t\x07")]), {})
    page = text(crowd, is_plain=False)
    assert "\x1b" not in page
    assert "\x07" not in page


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        ("q", ["q"]),
        ("\x1b", ["esc"]),
        ("\x1b[A\x1b[B", ["up", "down"]),
        ("\x1bOA", ["up"]),
        ("\x1b[5~j\x1b[6~", ["pageup", "j", "pagedown"]),
        ("\x1b[15~q", ["q"]),
        ("\x1b[1;5Cq", ["q"]),
        ("\x1b[", []),
        ("é/", ["é", "/"]),
        ("\r\x7f", ["enter", "backspace"]),
    ],
)
def test_keys_come_in_bursts(typed, keys):
    assert split_keys(typed) == keys


@pytest.mark.parametrize("kind", sorted({*BY_CODE.values()}, key=lambda kind: kind.code))
def test_whatever_a_daemon_refuses_is_shown(kind, monkeypatch):
    def connect(*_args: object, **_options: object) -> NoReturn:
        raise kind("refused so")

    monkeypatch.setattr("kvd_client.connect", connect)
    heard = threading.Event()
    feed = Feed(None, 0.0, heard.set)
    feed.start()
    assert heard.wait(30)
    feed.end()
    feed.join(30)
    assert feed.news.get_nowait() == "refused so"
