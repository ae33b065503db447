"""Spill and restore: bytes right, and how fast, page-locked and not."""

from __future__ import annotations

import mmap
import random
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial

from gpu_checks.bench import MIB, Bench
from gpu_checks.table import Row, Verdict, expect
from kvd.cuda.page_lock import PageLock
from kvd.memory.device_copies import CopyEngine
from kvd.memory.device_segment import DeviceSegment

BLOCK_NBYTES = 2 * MIB
NUM_BLOCKS = 32
NBYTES = NUM_BLOCKS * BLOCK_NBYTES
NUM_RUNS = 5


def check(bench: Bench) -> Iterator[Row]:
    """64 MiB in blocks of 2 MiB; medians of five."""
    content = random.Random(3).randbytes(NBYTES)  # noqa: S311 - content, no secret
    host = mmap.mmap(-1, NBYTES)
    with bench.segment(NBYTES) as (segment, _):
        host[:] = content
        for kind in ("pageable", "page-locked"):
            engine = CopyEngine(bench.context, num_lanes=1, lane_nbytes=BLOCK_NBYTES)
            began_s = time.perf_counter()
            lock = PageLock(bench.context, host) if kind == "page-locked" else None
            if lock is not None:
                took_s = time.perf_counter() - began_s
                yield Row("speed", "page-locking", Verdict.TOLD, f"{took_s / NBYTES * (1 << 30):.3f} s a GiB")
            host[:] = content
            up = _median(partial(_restore, engine, segment, host))
            host[:] = bytes(NBYTES)
            down = _median(partial(_spill, engine, segment, host))
            right = zlib.crc32(memoryview(host)) == zlib.crc32(content)
            yield expect("speed", f"spill and restore, {kind}: same checksum", right)
            yield Row("speed", f"host to device, {kind}", Verdict.TOLD, f"{NBYTES / up / 1e9:.2f} GB/s")
            yield Row("speed", f"device to host, {kind}", Verdict.TOLD, f"{NBYTES / down / 1e9:.2f} GB/s")
            if lock is not None:
                lock.close()
            engine.close()
        began_s = time.perf_counter()
        bench.context.fill(segment.address, NBYTES)
        took_s = time.perf_counter() - began_s
        yield Row("speed", "zeroing a segment", Verdict.TOLD, f"{NBYTES / took_s / 1e9:.2f} GB/s")


def _median(call: Callable[[], None]) -> float:
    times = []
    for _ in range(NUM_RUNS):
        began_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_s)
    return sorted(times)[NUM_RUNS // 2]


def _restore(engine: CopyEngine, segment: DeviceSegment, host: mmap.mmap) -> None:
    with engine.lane() as lane:
        for offset in range(0, NBYTES, BLOCK_NBYTES):
            lane.upload_from(segment, offset, memoryview(host)[offset : offset + BLOCK_NBYTES])


def _spill(engine: CopyEngine, segment: DeviceSegment, host: mmap.mmap) -> None:
    with engine.lane() as lane:
        for offset in range(0, NBYTES, BLOCK_NBYTES):
            lane.download_into(segment, offset, memoryview(host)[offset : offset + BLOCK_NBYTES])
