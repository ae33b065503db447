"""Keys and values are what people wrote: no core dump of a client has them."""

from __future__ import annotations

import kvd_client
from tests.client.homes import host_only
from tests.client.kv import LAYOUT, MODEL, fill
from tests.support.mappings import segment_flags

PROMPT = list(range(100))
pytestmark = host_only("about the page table: memory of a card is in no core dump")


def test_every_mapping_of_a_block_is_left_out_of_core_dumps(client: kvd_client.Client) -> None:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    with cache.sequence(PROMPT, max_tokens=300) as seq:
        fill(seq, PROMPT)
        seq.commit()  # the full blocks are read-only from here on, the rest is written to
        with seq.fork() as fork, cache.sequence(PROMPT) as again:
            assert again.num_cached_tokens
            fork.truncate(3)
            flags = segment_flags("self")
    assert len(flags) >= 4
    assert {"wr" in one for one in flags} == {True, False}
    for one in flags:
        assert {"dd", "dc"} <= one


def test_what_was_copied_is_left_out_too(client: kvd_client.Client) -> None:
    cache = client.cache(model=MODEL, layout=LAYOUT)
    with cache.sequence(PROMPT) as seq:
        fill(seq, PROMPT)
        seq.commit()
    with cache.sequence(PROMPT, materialize=True) as copy:
        assert copy.num_copied_bytes
        assert "dd" in flags_at(copy.array().data_ptr())


def flags_at(address: int) -> set[str]:
    inside = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            head, _, rest = line.partition(" ")
            if not head.endswith(":"):
                first, _, last = head.partition("-")
                inside = int(first, 16) <= address < int(last, 16)
            elif inside and head == "VmFlags:":
                return set(rest.split())
    raise AssertionError("nothing is mapped there")
