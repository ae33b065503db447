"""view_64x2mib, view_64x2mib_touch and map_2048_tokens.

view_64x2mib. Timed: token ids -> one memoryview over 64 cached 2 MiB blocks that another process wrote; nothing is
touched. Closing is not timed, and the daemon has taken in the close before when the next one begins.

view_64x2mib_touch. Timed: reading that view once, every cache line, page faults included. Limit: reading 128 MiB of
this process's own resident memory the same way (re.search for a byte that is not there: one memchr over the buffer).

map_2048_tokens. Timed: token ids -> torch views of all 30 layers of 2048 cached tokens of SmolLM2, every page of them
in the page table (checked: reading them takes no more than a handful of faults). Not reached if a byte was copied.
"""

from __future__ import annotations

import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import kvd_client
from kvd.bench.private_daemon import PrivateDaemon
from kvd.bench.row import CannotMeasure, Group, Row, Run, Target, interleaved, seconds
from kvd.bench.shapes import MIB, SEGMENT_NBYTES, SMOLLM2, TWO_MIB, prompt
from kvd.bench.writer import MODEL, READ_SEED, seal_prompt
from kvd_client.core import verbs

NUM_BLOCKS = 64
NUM_TOKENS = 2048
REPEAT = 20
MAX_FAULTS = 64

VIEW = Target(name="view_64x2mib", unit="ms", text="<= 0.3 ms", at_most=0.3)
TOUCH = Target(name="view_64x2mib_touch", unit="ms", text="<= 1.5x resident memory", at_most=1.5)
MAP = Target(name="map_2048_tokens", unit="ms", text="<= 3 ms, 0 bytes copied", at_most=3)

_ABSENT = re.compile(b"\xff")


def touch(view: memoryview | bytearray) -> None:
    """Reads every byte once."""
    if _ABSENT.search(view):
        raise CannotMeasure("bytes nobody wrote")


class Reader:
    """Attaches to the 64 blocks."""

    def __init__(self, client: kvd_client.Client) -> None:
        self._runner = client._runner
        self._cache = client.cache(model=MODEL, layout=TWO_MIB)
        self._num_tokens = NUM_BLOCKS * TWO_MIB.block_tokens
        self._ids = prompt(READ_SEED, self._num_tokens + 1)

    def view_s(self) -> float:
        """Median of the seconds to the view."""
        return statistics.median(self._attach(lambda _view: None)[0] for _ in range(REPEAT))

    def touch_s(self) -> float:
        """Seconds that touching a new view took."""
        return self._attach(touch)[1]

    def _attach(self, use: Callable[[memoryview], None]) -> tuple[float, float]:
        """Seconds to the view, and of its use."""
        self._runner.run(verbs.settle)
        start = time.perf_counter()
        with self._cache.sequence(self._ids, populate=False) as seq:
            view = seq.buffer(0, self._num_tokens)
            middle = time.perf_counter()
            if seq.num_cached_tokens != self._num_tokens:
                raise CannotMeasure(f"only {seq.num_cached_tokens} of {self._num_tokens} tokens were cached")
            use(view)
            end = time.perf_counter()
            view.release()
        return middle - start, end - middle


def map_tokens(cache: kvd_client.Cache, token_ids: list[int]) -> tuple[float, int, int]:
    """(seconds, bytes copied, page faults when everything is read) of one attachment with the views of all layers."""
    start = time.perf_counter()
    with cache.sequence(token_ids) as seq:
        views = [seq.layer(layer) for layer in range(SMOLLM2.num_layers)]
        taken = time.perf_counter() - start
        if views[0][0].shape[1] != NUM_TOKENS:
            raise CannotMeasure(f"only {views[0][0].shape[1]} of {NUM_TOKENS} tokens were cached")
        copied = seq.num_copied_bytes
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        view = seq.buffer(0, NUM_TOKENS)
        touch(view)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        view.release()
        del views
    return taken, copied, faults


def _measure_views(run: Run) -> list[Row]:
    run.step("writing 64 blocks in another process")
    with PrivateDaemon(memory_budget=512 * MIB, memory_segment=SEGMENT_NBYTES) as daemon, daemon.connect() as client:
        argv = [sys.executable, "-m", "kvd.bench.writer", str(daemon.runtime_dir), str(NUM_BLOCKS)]
        subprocess.run(argv, check=True)
        reader = Reader(client)
        own = bytearray(b"\1" * (NUM_BLOCKS * TWO_MIB.block_nbytes))
        medians = interleaved(
            run,
            {"views": reader.view_s, "touch": reader.touch_s, "touch own memory": lambda: seconds(lambda: touch(own))},
        )
    return [
        VIEW.row(medians["views"] * 1e3),
        TOUCH.row(medians["touch"] * 1e3, medians["touch own memory"] * 1e3),
    ]


def _measure_map(run: Run) -> list[Row]:
    try:
        import torch
    except ImportError as error:
        raise CannotMeasure("needs torch: pip install 'kvd-daemon[torch]'") from error
    run.step(f"torch {torch.__version__}")
    with PrivateDaemon(memory_budget=512 * MIB, memory_segment=SEGMENT_NBYTES) as daemon, daemon.connect() as client:
        cache = client.cache(model="smollm2 shape", layout=SMOLLM2)
        ids = prompt(4, NUM_TOKENS + 1)
        seal_prompt(cache, ids, b"\1")
        copied, faults = 0, 0

        def attach() -> float:
            nonlocal copied, faults
            taken, copied_now, faults_now = map_tokens(cache, ids)
            copied, faults = max(copied, copied_now), max(faults, faults_now)
            return taken

        median_ms = interleaved(run, {"map": attach})["map"] * 1e3
    note = f"{copied} bytes copied, at most {faults} page faults reading all of it"
    row = MAP.row(median_ms, note=note)
    if copied or faults > MAX_FAULTS:
        row = Row(name=row.name, unit=row.unit, value=row.value, target=row.target, ok=False, note=note)
    return [row]


VIEW_GROUP = Group((VIEW, TOUCH), _measure_views)
MAP_GROUP = Group((MAP,), _measure_map)
