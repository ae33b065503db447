"""The status page as text: golden, at 80 columns, and safe with whatever a client calls itself."""

from __future__ import annotations

import io

import pytest
from msgspec.structs import replace as with_fields
from rich.console import Console

from kvd.cli.processes import Process
from kvd.cli.render_status import render_status
from kvd.status import MapStatus, Snapshot
from tests.cli.snapshots import (
    CLIENT,
    EMPTY,
    FULL,
    HOST_TIER,
    MEMORY,
    MOVER,
    NAMESPACE,
    PIN,
    POOL,
    REDIS_TIER,
    SAVINGS,
    WAIT,
)

PROCESSES = {12345: Process("python generate.py --model smollm2 --prompts many.txt", 300 << 20)}

GOLDEN = """\
kvd 0.1.0  pid 77  up 1 d 01 h  /run/user/1000/kvd
memory host  -------------             2.2 GiB of 4 GiB in pools
                                       512 MiB ready, 12 GiB more available

pool    block  segments  in use  cached   free  evicted  tenant
   0  360 KiB    9 (-1)     272   4,744  1,200   12,345  group:kvd

pool  cached tokens  reused  hits  engine          model
   0         80,000  14,400  90 %  transformers/1  smollm2-135m-instruct@sha256?

  pid   uid   memory  refs  mapped  mode      saved     prefill  client
12345  1000  300 MiB   272   2 GiB  mapped  204,800  5 min 20 s  reader: python?

! the budget was cut to 4 GiB: less memory is available than configured
"""

GOLDEN_SAVED = """\
saved  204,800 tokens, 5 min 20 s of prefill for 150,000 of them
"""

GOLDEN_WAITS = """\
pin           tokens  resident   holds  lasting  prompt
c0ffee123456   2,048      50 %  45 MiB  yes      manual.json  smollm2-135m-inst?

  pid   uid   memory  refs  mapped  mode      saved     prefill  client
12345  1000  300 MiB   272   2 GiB  mapped  204,800  5 min 20 s  reader: python?

waiting: 12345 for block 12ab34cd of pool 0, which pid 12345 computes, 8 s at
most
"""

GOLDEN_EMPTY = """\
kvd 0.1.0  pid 77  up 0 s  /run/kvd
memory host  -------------             2.2 GiB of 4 GiB in pools
                                       512 MiB ready, 12 GiB more available

no clients
"""

GOLDEN_TIERS = """\
tier   state               holds  hits     up   down  errors  where
host   up         1 GiB of 2 GiB  90 %  2 GiB  4 GiB       0
redis  down, 3 s               -     -      -      -   1,201  unix:///run/kvd/r?
speed: host 4 GiB/s up 4 GiB/s down
copying: 2 up (waited for), 4 up ahead of need, 1,008 down
! redis: the embedded server was started again 2 times
! redis: the server ended by itself: killed
! redis errors: 1,200 refused, 1 timeout
! 1 copy threads died of a defect and were replaced: see the log

pool  cached tokens  reused  hits  below  engine          model
   0         80,000  14,400  90 %   40 %  transformers/1  smollm2-135m-instruct?
"""

GOLDEN_CARD = """\
memory GPU-a0b1c2d3  ------        2.2 GiB of 4 GiB in pools
                                   512 MiB ready, 12 GiB more available
                                   64 MiB not closed yet by clients
                                   15 GiB of 24 GiB free, 512 MiB left to others
memory host          ------        2.2 GiB of 4 GiB in pools
                                   512 MiB ready, 12 GiB more available
card GPU-a0b1c2d3-e4f5-0011-2233-445566778899, compute 6.1, Tesla P40
"""

GOLDEN_MAPS = """\
  pid  pool  maps    segments   memory  to close  device
12345     0  mapped         3  192 MiB         1  GPU-a0b1c2d3
12345     1  staged         1   16 MiB         -  host
"""


def text(snapshot: Snapshot, *, width: int = 80, encoding: str = "ascii", own_pid: int | None = None) -> str:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors="replace", write_through=True)
    console = Console(file=stream, width=width, highlight=False, markup=False, no_color=True)
    console.print(render_status(snapshot, PROCESSES, own_pid))
    return "".join(line.rstrip() + "\n" for line in raw.getvalue().decode(encoding).splitlines())


def test_the_page():
    assert text(FULL) == GOLDEN


def test_what_was_saved_what_is_pinned_and_who_waits():
    snapshot = with_fields(FULL, savings=SAVINGS, pins=[PIN], waits=[WAIT], warnings=[])
    page = text(snapshot)
    assert GOLDEN_SAVED in page
    assert page.endswith(GOLDEN_WAITS)


def test_prefill_seconds_are_not_made_up():
    snapshot = with_fields(
        FULL,
        savings=with_fields(SAVINGS, num_tokens_rated=0, prefill_s=0.0),
        clients=[with_fields(CLIENT, prefill_s_saved=None)],
    )
    page = text(snapshot)
    assert "saved  204,800 tokens\n" in page
    assert "of prefill" not in page
    assert "  204,800        -  reader" in page


def test_a_wait_for_a_session_that_is_hidden_names_nobody():
    page = text(with_fields(FULL, clients=[], waits=[with_fields(WAIT, waiting=[9, 8, 7, 6, 5, 4])]), width=120)
    assert "waiting: ?, ?, ?, ? and 2 more for block 12ab34cd of pool 0, which another computes, 8 s at most" in page


def test_namespaces_that_somebody_only_asked_about_are_left_out():
    idle = with_fields(NAMESPACE, num_sealed=0, counters={"hits": 0, "lookups": 0})
    assert "cached tokens" not in text(with_fields(FULL, namespaces=[idle]))


@pytest.mark.parametrize(
    ("width", "gone"), [(60, "connected holds memory mode refs"), (80, "connected holds"), (100, ""), (140, "")]
)
def test_a_narrow_page_leaves_columns_out_rather_than_cut_numbers(width, gone):
    heading = next(line for line in text(FULL, width=width).splitlines() if "pid " in line and "uid" in line)
    assert heading.split()[-1] == "client"
    for name in ("memory", "refs", "holds", "mapped", "mode", "connected"):
        assert (name in heading.split()) is (name not in gone.split()), name


def test_the_page_of_a_daemon_nobody_uses():
    assert text(EMPTY) == GOLDEN_EMPTY


def test_tiers_show_what_they_do_and_what_is_wrong():
    counters = {**NAMESPACE.counters, "asked_below": 50, "found_below": 20}
    snapshot = with_fields(
        FULL,
        tiers=[HOST_TIER, REDIS_TIER],
        mover=MOVER,
        namespaces=[with_fields(NAMESPACE, counters=counters)],
    )
    assert GOLDEN_TIERS in text(snapshot)


def test_a_pool_of_a_rule_shows_its_name():
    page = text(with_fields(FULL, pools=[POOL, with_fields(POOL, pool=1, name="agents")]))
    assert "evicted  tenant, rule\n" in page
    assert "12,345  group:kvd\n" in page
    assert "12,345  group:kvd, agents\n" in page


def test_cards_show_what_they_are_and_who_maps_them():
    card = with_fields(
        MEMORY,
        device="GPU-a0b1c2d3-e4f5-0011-2233-445566778899",
        draining_nbytes=64 << 20,
        name="Tesla P40",
        compute_capability="6.1",
        total_nbytes=24 << 30,
        free_nbytes=15 << 30,
        reserved_nbytes=512 << 20,
    )
    snapshot = with_fields(
        FULL,
        memory=card,
        memories=[card, MEMORY],
        pools=[
            with_fields(POOL, device=card.device),
            with_fields(POOL, pool=1, tenant="gid:1", staged_from=card.device),
        ],
        clients=[
            with_fields(
                CLIENT,
                maps=[
                    MapStatus(
                        pool=0, device=card.device, mode="mapped", num_segments=3, nbytes=192 << 20, num_to_close=1
                    ),
                    MapStatus(pool=1, device="host", mode="staged", num_segments=1, nbytes=16 << 20),
                ],
            )
        ],
    )
    page = text(snapshot)
    assert GOLDEN_CARD in page
    assert GOLDEN_MAPS in page
    assert "evicted  tenant, device\n" in page
    assert "gid:1, host beside GPU-a0b1c2d3\n" in text(snapshot, width=100)
    lost = with_fields(card, state="lost", reason="cuStreamSynchronize: CUDA_ERROR_LAUNCH_FAILED")
    assert "\n                                   lost\n" in text(with_fields(FULL, memories=[lost]))


def test_only_the_namespaces_with_most_tokens_are_listed():
    many = [with_fields(NAMESPACE, model=f"model-{index}", num_sealed=index) for index in range(25)]
    page = text(with_fields(FULL, namespaces=many, num_namespaces_omitted=1000))
    assert "... 1,005 more" in page
    assert page.index("model-24") < page.index("model-5")
    assert "model-4" not in page


def test_a_page_that_is_cut_to_the_asker_says_so():
    assert "only what is yours (uid:1000)" in text(with_fields(FULL, tenant="uid:1000"))


def test_the_session_that_asks_is_left_out():
    assert "no clients" in text(FULL, own_pid=CLIENT.pid)


@pytest.mark.parametrize("width", [80, 100, 200])
@pytest.mark.parametrize("encoding", ["ascii", "utf-8", "latin-1"])
def test_no_number_is_ever_cut(width, encoding):
    big = 10**12
    snapshot = with_fields(
        FULL,
        pools=[with_fields(POOL, num_free=10**9, num_sealed=10**9, counters={"evictions": 10**6})],
        namespaces=[with_fields(NAMESPACE, num_sealed=big // 16)],
        clients=[with_fields(CLIENT, tokens_saved=big, pid=4_194_304)],
    )
    page = text(snapshot, width=width, encoding=encoding)
    assert max(map(len, page.splitlines())) <= width
    for number in ("1,000,000,000", "1,000,000,000,000", "4194304"):
        assert number in page


def test_foreign_text_neither_steers_the_terminal_nor_the_markup():
    client = with_fields(CLIENT, label="\x1b[31mred\x07[bold]\n\u202e", stalled=True)
    page = text(with_fields(FULL, clients=[client]), width=160, encoding="utf-8")
    assert "\x1b" not in page
    assert "\x07" not in page
    assert "\u202e" not in page
    assert "stalled: ?[31mred?[bold]??" in page


def test_a_process_that_cannot_be_seen_leaves_a_dash():
    client = with_fields(CLIENT, pid=1, label="")
    row = text(with_fields(FULL, clients=[client])).splitlines()[-3]
    assert row.split()[:3] == ["1", "1000", "-"]
    assert row.endswith("uid 1000")


def test_colour_only_where_wanted():
    raw = io.StringIO()
    Console(file=raw, force_terminal=True, width=80, color_system="standard").print(render_status(FULL, PROCESSES))
    assert "\x1b[" in raw.getvalue()
