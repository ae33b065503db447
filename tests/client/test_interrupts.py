"""KeyboardInterrupt between any two steps of `extend`: no mapping and no block is lost, nobody is left waiting.

Signals raise in Python where a function begins and where a call of C returns. A profiler sees just these places, so it
raises at the first of them, then at the second, and so on: no timing is involved.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest

import kvd.cuda
import kvd_client
from kvd.errors import ConnectionFailed, OutOfMemory
from kvd_client.memory import device_imports
from kvd_client.memory.address_range import AddressRange
from kvd_client.memory.mapped_storage import MappedStorage
from tests.client.homes import host_only, let_go
from tests.client.kv import LAYOUT, MODEL, fill, holds
from tests.support.daemon import Daemon
from tests.support.mappings import is_mapped
from tests.support.wait import eventually

PROMPT, OTHER = list(range(3000, 3100)), list(range(5000, 5100))
LIBRARY = (str(Path(kvd_client.__file__).parent), str(Path(kvd.cuda.__file__).parent))

WITHIN_A_MESSAGE = {"_receive", "_send_outgoing", "drain_session"}
"""Functions where nobody can know whether a message has arrived: the session ends, and with it all that it holds."""


class InterruptAt:
    """Raises KeyboardInterrupt at the `number`th place of the library that the block passes."""

    def __init__(self, number: int) -> None:
        self.left = number
        self.where = ""
        self.was_within_a_message = False
        self.error: BaseException | None = None

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event not in {"call", "c_return"} or not frame.f_code.co_filename.startswith(LIBRARY):
            return
        callers = {one.f_code.co_name for one, _ in traceback.walk_stack(frame)}
        if "__del__" in callers or (frame.f_code.co_name == "<genexpr>" and "/cuda/" in frame.f_code.co_filename):
            return  # what is raised there goes nowhere: a generator is called to be closed, too
        self.left -= 1
        if not self.left:
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {event}"
            self.was_within_a_message = bool(callers & WITHIN_A_MESSAGE)
            raise KeyboardInterrupt(self.where)

    def __enter__(self) -> Self:
        gc.disable()
        sys.setprofile(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> bool:
        sys.setprofile(None)
        # With its traceback, and so with every frame: nothing is put right by the garbage collector alone.
        self.error = error
        gc.enable()
        return kind is KeyboardInterrupt


def memory_mappings() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:kvd" in line]


def holds_blocks(client: kvd_client.Client, num_references: int, num_reserved: int) -> bool:
    own = next(entry for entry in client.status().clients if entry.session == client.session_id)
    return (own.num_references, own.num_reserved) == (num_references, num_reserved)


def at_every_place(daemon: Daemon, prepare: Callable[[kvd_client.Sequence], object]) -> Iterator[str]:
    """Interrupts one extend after the other; yields where, until one gets through."""
    for number in range(1, 1000):
        with kvd_client.connect(daemon.folder, timeout_s=5) as client, kvd_client.connect(daemon.folder) as observer:
            seq = client.cache(model=MODEL, layout=LAYOUT).sequence(PROMPT, max_tokens=3000)
            fill(seq, PROMPT)
            seq.commit()
            prepare(seq)
            capacity_tokens, before = seq.capacity_tokens, len(memory_mappings())
            interrupt = InterruptAt(number)
            with interrupt:
                seq.extend(2800)
            yield interrupt.where
            said = interrupt.where
            assert holds(seq, PROMPT, 100), said
            if client._runner.link.lost is None:
                num_blocks = LAYOUT.num_blocks(seq.capacity_tokens)
                # A request that was queued and not sent is sent with the next one, and what it brings goes back then.
                eventually(partial(holds_blocks, client, 6, num_blocks - 6), what=partial(str, interrupt.where))
                if seq.is_materialized:
                    # What it has left is still shown by a tensor, and may be sealed: nobody writes there any more.
                    assert all(line.split()[1] == "r--s" for line in memory_mappings()), said
                elif seq.capacity_tokens == capacity_tokens:
                    assert len(memory_mappings()) == before, said
                longer = [*PROMPT, *[9] * 200]
                fill(seq, longer)
                assert holds(seq, longer, 300), said
                assert seq.commit(longer) == 288
            else:
                assert interrupt.was_within_a_message, said
                with pytest.raises(ConnectionFailed):
                    seq.extend(2800)
            seq.close()
            interrupt.error = None
            del seq
            assert memory_mappings() == [], said
            client.close()
            eventually(lambda: len(observer.status().clients) == 1)
            observer.check()
            assert sum(pool.num_references + pool.num_reserved for pool in observer.status().pools) == 0, said
        if not interrupt.where:
            return
    raise AssertionError("it never got through")


@host_only("what may be lost is a mapping")
@pytest.mark.timeout(600)
def test_an_interrupted_extend_loses_neither_a_mapping_nor_a_block(daemon: Daemon) -> None:
    places = list(at_every_place(daemon, lambda _: None))
    assert len(places) > 50
    for file in ("address_range", "mapped_storage", "libc", "sequence_core", "channel", "lifetimes", "segments"):
        assert any(place.startswith(f"{file}.py") for place in places), file


@host_only("memory on a card is not mapped piece by piece")
@pytest.mark.timeout(600)
def test_an_interrupted_fall_back_to_private_memory_loses_nothing(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object, **_options: object) -> None:
        raise OutOfMemory("no more mappings")

    def prepare(seq: kvd_client.Sequence) -> None:
        kept.append(seq.layer(0)[0])
        patch.setattr(MappedStorage, "attach", refuse)

    kept: list[object] = []
    with monkeypatch.context() as patch:
        for _place in at_every_place(daemon, prepare):
            kept.clear()
            patch.undo()


@host_only("what may be lost is a mapping")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("verb", ["sequence", "fork"])
def test_an_interrupted_begin_or_fork_leaves_nothing(daemon: Daemon, verb: str) -> None:
    for number in range(1, 1000):
        with kvd_client.connect(daemon.folder, timeout_s=5) as client:
            cache = client.cache(model=MODEL, layout=LAYOUT)
            origin = cache.sequence(PROMPT[:20])
            fill(origin, PROMPT[:20])
            # Before: an interrupted seal ends the session, since nobody knows whether it happened.
            origin.commit()
            begin = origin.fork if verb == "fork" else partial(cache.sequence, PROMPT)
            interrupt, begun = InterruptAt(number), []
            with interrupt:
                # Kept: what is raised in a finalizer goes nowhere.
                begun.append(begin())
            begun.clear()
            if not interrupt.where:
                return
            if client._runner.link.lost is None:
                own = LAYOUT.num_blocks(origin.capacity_tokens)
                num_sealed = origin.num_sealed_tokens // LAYOUT.block_tokens
                eventually(
                    partial(holds_blocks, client, num_sealed, own - num_sealed), what=partial(str, interrupt.where)
                )
            else:
                assert interrupt.was_within_a_message, interrupt.where
            interrupt.error = None
            origin.close()
            assert memory_mappings() == [], interrupt.where
    raise AssertionError("it never got through")


VERBS: dict[str, Callable[[kvd_client.Client, kvd_client.Cache, kvd_client.Sequence], object]] = {
    "cache": lambda client, _cache, _seq: client.cache(model="another", layout=LAYOUT),
    "sequence": lambda _client, cache, _seq: cache.sequence(OTHER, wait_s=0),
    "fork": lambda _client, _cache, seq: seq.fork(),
    "extend": lambda _client, _cache, seq: seq.extend(2800),
    "commit": lambda _client, _cache, seq: seq.commit(),
}


@pytest.mark.parametrize("home", ["card"], indirect=True)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("verb", VERBS)
def test_an_interrupted_call_on_a_card_loses_neither_a_segment_nor_a_block(daemon: Daemon, verb: str) -> None:
    with kvd_client.connect(daemon.folder) as observer:
        for number in range(1, 1000):
            client = kvd_client.connect(daemon.folder, timeout_s=5)
            cache = client.cache(model=MODEL, layout=LAYOUT)
            seq = cache.sequence(PROMPT, wait_s=0, max_tokens=3000)
            fill(seq, PROMPT)
            if verb != "commit":
                seq.commit()
            interrupt, made = InterruptAt(number), []
            with interrupt:
                # Kept: what is raised in a finalizer goes nowhere.
                made.append(VERBS[verb](client, cache, seq))
            said = interrupt.where
            if verb in {"fork", "extend", "commit"}:
                assert holds(seq, PROMPT, 100), said
                if client._runner.link.lost is None:
                    assert seq.commit() == 96, said
                else:
                    assert interrupt.was_within_a_message, said
            made.clear()
            interrupt.error = None
            seq.close()
            client.close()
            del client, cache, seq
            let_go()
            assert device_imports.num_open() == 0, said
            eventually(lambda: len(observer.status().clients) == 1, what=partial(str, said))
            assert sum(pool.num_references + pool.num_reserved for pool in observer.status().pools) == 0, said
            observer.check()
            if not said:
                return
    raise AssertionError("it never got through")


def test_a_range_that_nobody_has_seen_goes_with_its_object() -> None:
    before = Path("/proc/self/maps").read_text().count("\n")
    dropped = [AddressRange(1 << 20) for _ in range(50)]
    viewed = [AddressRange(1 << 20) for _ in range(3)]
    for space in viewed:
        space.is_viewed = True
    del space
    # The kernel joins neighbours, so the bases are looked for and not their number.
    bases, kept = [one._base for one in dropped], [one._base for one in viewed]
    dropped.clear()
    viewed.clear()
    assert before
    assert not any(is_mapped(base) for base in bases)
    assert all(is_mapped(base) for base in kept)
