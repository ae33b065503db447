"""Free blocks as runs: fitting, joining, and never across segments."""

from __future__ import annotations

import random

from kvd.pool.free_runs import FreeRuns
from tests.pool.tiny import ALICE, Tiny, ids


def with_runs(run_limit: int, *runs: tuple[int, int]) -> FreeRuns:
    free = FreeRuns(run_limit)
    for start, length in runs:
        free.put(start, length)
    assert free.fault() is None
    return free


def test_neighbours_join_on_both_sides() -> None:
    free = with_runs(16, (0, 4), (8, 4))
    free.put(4, 4)
    assert free.runs() == [(0, 12)]
    assert free.fault() is None


def test_runs_of_two_segments_stay_apart() -> None:
    free = with_runs(8, (0, 8), (8, 8))
    assert free.runs() == [(0, 8), (8, 8)]
    free.put_all([])
    free.take(16)
    free.put_all(range(4, 12))
    assert free.runs() == [(4, 4), (8, 4)]


def test_the_run_that_fits_best_is_taken_from_its_head() -> None:
    free = with_runs(64, (0, 20), (32, 5), (48, 7))
    assert free.take(5) == [(32, 5)]
    assert free.take(5) == [(48, 5)]
    assert free.take(5) == [(0, 5)]
    assert free.runs() == [(5, 15), (53, 2)]


def test_the_largest_runs_serve_what_no_run_can() -> None:
    free = with_runs(32, (0, 3), (8, 9), (24, 2))
    assert free.take(11) == [(8, 9), (24, 2)]
    assert free.num_free == 3
    assert free.fault() is None


def test_a_segments_runs_can_be_forgotten() -> None:
    free = with_runs(8, (0, 8), (8, 2), (12, 3), (16, 8))
    free.remove_segment(8)
    assert free.runs() == [(0, 8), (16, 8)]
    assert free.num_free == 16
    assert free.fault() is None


def test_a_sequence_gets_one_run_where_there_is_one() -> None:
    tiny = Tiny(8)
    first = tiny.reserve(ALICE, 2)
    tiny.reserve(ALICE, 2)
    tiny.release(ALICE, reserved=first)
    assert tiny.reserve(ALICE, 4) == ids(4, 5, 6, 7)
    assert tiny.reserve(ALICE, 2) == ids(0, 1)


def test_random_takes_and_puts_keep_every_block_exactly_once() -> None:
    rng = random.Random(7)
    free = with_runs(32, *((start, 32) for start in range(0, 256, 32)))
    taken: set[int] = set()
    for _ in range(2000):
        if rng.random() < 0.5:
            wanted = rng.randint(0, min(40, free.num_free))
            got = [block for start, length in free.take(wanted) for block in range(start, start + length)]
            assert len(got) == wanted
            assert taken.isdisjoint(got)
            taken.update(got)
        else:
            back = rng.sample(sorted(taken), rng.randint(0, len(taken)))
            free.put_all(back)
            taken.difference_update(back)
        assert free.fault() is None
        assert free.num_free == 256 - len(taken)
