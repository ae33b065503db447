"""Snapshots for the renderers' tests."""

from __future__ import annotations

from kvd.status import (
    ClientStatus,
    MemoryStatus,
    MoverStatus,
    NamespaceStatus,
    PoolStatus,
    Snapshot,
    TierStatus,
    TierUsage,
)

MEMORY = MemoryStatus(
    device="host", budget_nbytes=4 << 30, used_nbytes=2300 << 20, ready_nbytes=512 << 20, available_nbytes=12 << 30
)
POOL = PoolStatus(
    pool=0,
    tenant="group:kvd",
    block_nbytes=368_640,
    num_segments=9,
    num_segments_retiring=1,
    num_free=1200,
    num_reserved=16,
    num_filling=0,
    num_sealed=5000,
    num_referenced=256,
    num_references=512,
    counters={"evictions": 12_345},
)
NAMESPACE = NamespaceStatus(
    digest="ab" * 32,
    pool=0,
    model="smollm2-135m-instruct@sha256:" + "ab" * 32,
    engine="transformers/1",
    adapter="",
    has_salt=True,
    block_tokens=16,
    num_sealed=5000,
    counters={"hits": 900, "misses": 100},
)
CLIENT = ClientStatus(
    session=3,
    pid=12345,
    uid=1000,
    label="reader",
    client_version="0.1.0",
    connected_s=3700,
    num_references=256,
    num_reserved=16,
    held_nbytes=100 << 20,
    num_announced=0,
    num_waiting=1,
    tokens_saved=204_800,
    num_requests=12,
    stalled=False,
)
FULL = Snapshot(
    version="0.1.0",
    pid=77,
    epoch=5,
    uptime_s=90_061,
    runtime_dir="/run/user/1000/kvd",
    memory=MEMORY,
    pools=[POOL],
    namespaces=[NAMESPACE],
    clients=[CLIENT],
    counters={"requests": 99},
    warnings=["the budget was cut to 4 GiB: less memory is available than configured"],
)
EMPTY = Snapshot(
    version="0.1.0",
    pid=77,
    epoch=5,
    uptime_s=0.4,
    runtime_dir="/run/kvd",
    memory=MEMORY,
    pools=[],
    namespaces=[],
    clients=[],
    counters={},
    warnings=[],
)
HOST_TIER = TierStatus(
    name="host",
    kind="host",
    address="",
    state="up",
    reason="",
    retry_in_s=0,
    num_hits=900,
    num_misses=100,
    num_puts=2000,
    num_deletes=0,
    read_nbytes=2 << 30,
    read_s=0.5,
    written_nbytes=4 << 30,
    write_s=1.0,
    errors={},
    usage=TierUsage(num_blocks=100, used_nbytes=1 << 30, budget_nbytes=2 << 30),
    usage_age_s=1,
    details={},
)
REDIS_TIER = TierStatus(
    name="redis",
    kind="redis",
    address="unix:///run/kvd/redis.sock",
    state="down",
    reason="no answer within 50 ms",
    retry_in_s=2.4,
    num_hits=0,
    num_misses=0,
    num_puts=0,
    num_deletes=0,
    read_nbytes=0,
    read_s=0,
    written_nbytes=0,
    write_s=0,
    errors={"timeout": 1, "refused": 1200},
    usage=None,
    usage_age_s=0,
    details={"codec": "raw", "restarts": "2", "embedded_error": "the server ended by itself: killed"},
)
MOVER = MoverStatus(
    num_threads=3,
    num_threads_alive=3,
    num_thread_restarts=1,
    queued={"question": 0, "wanted_fill": 0, "flush": 0, "fill": 4, "spill": 1000, "measure": 0},
    running={"question": 1, "wanted_fill": 2, "flush": 0, "fill": 0, "spill": 8, "measure": 0},
    counters={},
)
