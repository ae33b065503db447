"""begin_256_blocks and l1_get.

begin_256_blocks. Timed: a Begin request with 256 hashes, all resident, through the client's transport to its decoded
reply; the release that follows is not. Limit: a 64-byte message to `kvd.bench.echo` and back, with pollers on both
sides that watch as much as those of client and daemon do.

l1_get. Timed: token ids -> the first byte of one cached 2 MiB block, through the public API. Closing is not timed, and
the daemon has taken in the close before when the next one begins.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from kvd.bench.private_daemon import PrivateDaemon
from kvd.bench.row import CannotMeasure, Group, Row, Run, Target, interleaved, seconds
from kvd.bench.shapes import MIB, ONE_PAGE, TWO_MIB, prompt
from kvd.bench.writer import seal_prompt
from kvd.block import NamespaceDigest
from kvd.hashing import Namespace, chain_hashes, encode_tokens, pack_hashes
from kvd.protocol.replies import Begun
from kvd.protocol.requests import Begin, Release
from kvd.protocol.wire import BLOCK_ID_NBYTES
from kvd_client import Cache
from kvd_client.core import verbs
from kvd_client.core.verb import Verb, expect
from kvd_client.session.link import Link
from kvd_client.session.opened_cache import CacheSpec

NUM_BLOCKS = 256
REPEAT = 50

BEGIN = Target(name="begin_256_blocks", unit="us", text="<= 3x a ZeroMQ round trip", at_most=3)
GET = Target(name="l1_get", unit="ms", text="< 0.2 ms", at_most=0.2)


def timed_begin(link: Link, namespace: Namespace, packed_hashes: bytes) -> Verb[float]:
    """Seconds from the request to its decoded reply; what it acquired is given back afterwards."""
    cache = yield from verbs.open_cache(link, CacheSpec(namespace))
    start = time.perf_counter()
    reply = yield Begin(
        link.next_id(),
        link.epoch,
        cache.handle,
        packed_hashes,
        max_cached=NUM_BLOCKS,
        num_blocks=NUM_BLOCKS,
        wait_s=0.0,
    )
    taken = time.perf_counter() - start
    begun = expect(reply, Begun)
    if begun.num_cached != NUM_BLOCKS:
        raise CannotMeasure(f"only {begun.num_cached} of {NUM_BLOCKS} blocks were resident")
    cut = NUM_BLOCKS * BLOCK_ID_NBYTES
    yield Release(link.next_id(), link.epoch, cache.handle, blocks=begun.blocks[:cut], ack=True)
    return taken


@contextmanager
def echo_round_trip() -> Iterator[zmq.Poller]:
    """A poller over a DEALER that is connected to an echo process, and over two descriptors that stay silent."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        endpoint = f"ipc://{Path(folder) / 'echo.sock'}"
        argv = [sys.executable, "-m", "kvd.bench.echo", endpoint]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            if process.stdout is None or not process.stdout.readline():
                raise CannotMeasure("the echo process did not start")
            context = zmq.Context()
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(endpoint)
            poller = zmq.Poller()
            poller.register(dealer, zmq.POLLIN)
            wake_fd = os.eventfd(0)
            for silent in (process.stdout.fileno(), wake_fd):
                poller.register(silent, zmq.POLLIN)
            try:
                yield poller
            finally:
                os.close(wake_fd)
                context.destroy(linger=0)
                if process.stdin is not None:
                    process.stdin.close()


def ping(poller: zmq.Poller) -> None:
    """64 bytes there and back."""
    dealer: zmq.Socket[bytes] = poller.sockets[0][0]
    dealer.send(b"x" * 64)
    poller.poll()
    dealer.recv()


def seconds_to_block(cache: Cache, token_ids: list[int]) -> float:
    """Seconds until the first byte of a cached block was read. The sequence is closed afterwards."""
    start = time.perf_counter()
    with cache.sequence(token_ids, populate=False) as seq:
        view = seq.buffer(0, cache.layout.block_tokens)
        first = view[0]
        taken = time.perf_counter() - start
        view.release()
    if not first:
        raise CannotMeasure("the block was not found")
    return taken


def _measure(run: Run) -> list[Row]:
    run.step("starting a daemon")
    with PrivateDaemon(memory_budget=512 * MIB) as daemon, daemon.connect() as client, echo_round_trip() as poller:
        small = client.cache(model="bench", layout=ONE_PAGE)
        ids = prompt(1, NUM_BLOCKS * ONE_PAGE.block_tokens)
        seal_prompt(small, ids)
        large = client.cache(model="bench", layout=TWO_MIB)
        one_block = prompt(2, TWO_MIB.block_tokens + 1)
        seal_prompt(large, one_block, b"\1")

        runner = client._runner
        packed = runner.run(lambda link: packed_hashes(link, small.namespace, ids))

        def begin() -> float:
            taken = (runner.run(lambda link: timed_begin(link, small.namespace, packed)) for _ in range(REPEAT))
            return statistics.median(taken)

        def get() -> float:
            taken = []
            for _ in range(REPEAT):
                runner.run(verbs.settle)
                taken.append(seconds_to_block(large, one_block))
            return statistics.median(taken)

        medians = interleaved(
            run,
            {
                "begin": begin,
                "round trip": lambda: seconds(lambda: ping(poller), REPEAT),
                "get one block": get,
            },
        )
    return [
        BEGIN.row(medians["begin"] * 1e6, medians["round trip"] * 1e6),
        GET.row(medians["get one block"] * 1e3),
    ]


def packed_hashes(link: Link, namespace: Namespace, token_ids: list[int]) -> Verb[bytes]:
    """The chain hashes of a prompt's full blocks, as they travel."""
    cache = yield from verbs.open_cache(link, CacheSpec(namespace))
    tokens = encode_tokens(token_ids)
    return pack_hashes(chain_hashes(NamespaceDigest(cache.digest), tokens, namespace.layout.block_tokens))


GROUP = Group((BEGIN, GET), _measure)
