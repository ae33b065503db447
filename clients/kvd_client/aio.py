"""The asyncio twin: the same verbs over the same core, awaited.

    async with kvd_client.aio.connect() as client:
        cache = await client.cache(model="...", layout=layout)
        async with await cache.sequence(token_ids) as seq:
            keys, values = seq.layer(0)
            await seq.append(0, new_keys, new_values)
            await seq.commit()

A cancelled call leaves nothing behind: what the daemon still answers is given back. Mapping and copying happen on the
event loop's thread (about 2 ms for 2048 tokens of a 135M model), and so does waiting for a card.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Generator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from kvd.blobs import DEFAULT_BLOCK_NBYTES
from kvd.hashing import Namespace, encode_tokens
from kvd.layout import KVLayout
from kvd.status import Snapshot
from kvd_client.aio_blobs import Blobs
from kvd_client.arguments import whole_number
from kvd_client.core import tier_verbs, verbs
from kvd_client.core.sequence_core import SequenceCore
from kvd_client.core.sequence_state import SequenceOptions
from kvd_client.core.tier_verbs import FlushOutcome, Pinned, Reach
from kvd_client.core.verb import Tokens, Verb
from kvd_client.core.verbs import VerifyOutcome
from kvd_client.memory.compute_device import device_name
from kvd_client.memory.device_order import Stream
from kvd_client.options import DEFAULT_OPTIONS, Options
from kvd_client.sequence_view import SequenceView
from kvd_client.session.opened_cache import CacheSpec, Mode, OpenedCache
from kvd_client.statistics import CacheStatistics, Ledger
from kvd_client.transport.aio_runner import AsyncRunner

if TYPE_CHECKING:
    import torch


T = TypeVar("T")


class connect:  # noqa: N801 - used as a function: `await connect()` or `async with connect()`
    """A session with the daemon: `client = await connect()`, or `async with connect() as client`.

    Arguments and errors are those of `kvd_client.connect`.
    """

    def __init__(
        self,
        runtime_dir: str | os.PathLike[str] | None = None,
        *,
        label: str = "",
        timeout_s: float = DEFAULT_OPTIONS.timeout_s,
        reserve_ahead_tokens: int = DEFAULT_OPTIONS.reserve_ahead_tokens,
    ) -> None:
        self._options = Options(
            runtime_dir=runtime_dir, label=label, timeout_s=timeout_s, reserve_ahead_tokens=reserve_ahead_tokens
        )
        self._client: Client | None = None

    async def _connect(self) -> Client:
        runner = AsyncRunner(self._options)
        await runner.connect()
        self._client = Client(runner)
        return self._client

    def __await__(self) -> Generator[Any, None, Client]:
        return self._connect().__await__()

    async def __aenter__(self) -> Client:
        return await self._connect()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            await self._client.close()


class Client:
    """One session with the daemon, of one event loop; see `kvd_client.Client`."""

    def __init__(self, runner: AsyncRunner) -> None:
        self._runner = runner

    @property
    def session_id(self) -> int:
        """The session's number in `kvd status`."""
        return self._runner.link.session_id

    @property
    def epoch(self) -> int:
        """The daemon's epoch."""
        return self._runner.link.epoch

    async def cache(
        self,
        *,
        model: str,
        layout: KVLayout,
        engine: str = "raw/1",
        positional: str = "",
        adapter: str = "",
        salt: str = "",
        checksums: bool = False,
        device: str = "",
        staged: bool = False,
        ask_only: bool = False,
        computes_on: torch.device | str | None = None,
    ) -> Cache:
        """See `kvd_client.Client.cache`."""
        namespace = Namespace(
            model=model, layout=layout, engine=engine, positional=positional, adapter=adapter, salt=salt
        )
        spec = CacheSpec(namespace, device, staged, ask_only, device_name(computes_on))
        opened = await self._runner.run(lambda link: verbs.open_cache(link, spec))
        return Cache(self._runner, opened, checksums=checksums)

    def blobs(self, name: str, *, salt: str = "", block_nbytes: int = DEFAULT_BLOCK_NBYTES) -> Blobs:
        """See `kvd_client.Client.blobs`."""
        return Blobs(self._runner, name, salt=salt, block_nbytes=block_nbytes)

    async def status(self, *, with_map: bool = False) -> Snapshot:
        """See `kvd_client.Client.status`."""
        return await self._runner.run(lambda link: verbs.status(link, with_map=with_map))

    async def reach(self, namespace: bytes, block_tokens: int, token_ids: Tokens) -> Reach:
        """See `kvd_client.Client.reach`."""
        tokens = encode_tokens(token_ids)
        block_tokens = whole_number("block_tokens", block_tokens, least=1)
        return await self._runner.run(lambda link: tier_verbs.reach_in(link, namespace, block_tokens, tokens))

    async def check(self) -> None:
        """Has the daemon verify every invariant of its pools."""
        await self._runner.run(verbs.check)

    async def verify(self) -> VerifyOutcome:
        """See `kvd_client.Client.verify`."""
        return await self._runner.run(verbs.verify)

    async def flush(
        self, *, namespace: bytes | None = None, model: str | None = None, tier: str | None = None
    ) -> FlushOutcome:
        """See `kvd_client.Client.flush`."""
        return await self._runner.run(lambda link: tier_verbs.flush(link, namespace=namespace, model=model, tier=tier))

    async def unpin(self, pin: str) -> None:
        """See `kvd_client.Client.unpin`."""
        await self._runner.run(lambda link: tier_verbs.unpin(link, pin))

    async def spill(self) -> int:
        """See `kvd_client.Client.spill`."""
        return await self._runner.run(tier_verbs.spill)

    async def resize(self, nbytes: int, device: str = "") -> tier_verbs.ResizeOutcome:
        """See `kvd_client.Client.resize`."""
        return await self._runner.run(lambda link: tier_verbs.resize(link, nbytes, device))

    async def close(self) -> None:
        """See `kvd_client.Client.close`."""
        await self._runner.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Cache:
    """The cached sequences of one namespace; see `kvd_client.Cache`."""

    def __init__(self, runner: AsyncRunner, opened: OpenedCache, *, checksums: bool) -> None:
        self._runner = runner
        self._spec = opened.spec
        self._first = opened
        self._checksums = checksums
        self._ledger = Ledger(opened.spec.namespace.layout.block_tokens)

    @property
    def namespace(self) -> Namespace:
        """What must be equal for KV to be exchangeable."""
        return self._spec.namespace

    @property
    def device(self) -> str:
        """See `kvd_client.Cache.device`."""
        return self._opened.device

    @property
    def mode(self) -> Mode:
        """See `kvd_client.Cache.mode`."""
        return self._opened.mode

    @property
    def _opened(self) -> OpenedCache:
        return self._runner.link.caches.get(self._spec, self._first)

    @property
    def digest(self) -> bytes:
        """See `kvd_client.Cache.digest`."""
        return self._first.digest

    @property
    def layout(self) -> KVLayout:
        """The shape of a block."""
        return self._spec.namespace.layout

    async def sequence(
        self,
        token_ids: Tokens,
        max_tokens: int | None = None,
        *,
        wait_s: float | None = None,
        materialize: bool = False,
        verify: bool = False,
        populate: bool = True,
        announce: bool = True,
        attach_all: bool = False,
        only_stores: bool = False,
    ) -> Sequence:
        """See `kvd_client.Cache.sequence`."""
        # Here, not in the verb, which runs again after a restart: an iterator gives its ids once.
        tokens = encode_tokens(token_ids)
        options = SequenceOptions(materialize=materialize, populate=populate, checksums=self._checksums)
        core = await self._runner.run(
            lambda link: verbs.begin(
                link,
                self._spec,
                tokens,
                max_tokens=max_tokens,
                wait_s=wait_s,
                verify=verify,
                announce=announce,
                attach_all=attach_all,
                only_stores=only_stores,
                options=options,
            )
        )
        return Sequence(self._runner, core)

    async def allocate_sequence(
        self, num_tokens: int, max_tokens: int | None = None, *, populate: bool = True
    ) -> Sequence:
        """See `kvd_client.Cache.allocate_sequence`."""
        options = SequenceOptions(materialize=False, populate=populate, checksums=self._checksums)
        core = await self._runner.run(
            lambda link: verbs.allocate(link, self._spec, num_tokens, max_tokens=max_tokens, options=options)
        )
        return Sequence(self._runner, core)

    async def match(self, token_ids: Tokens) -> int:
        """See `kvd_client.Cache.match`."""
        tokens = encode_tokens(token_ids)
        return await self._runner.run(lambda link: verbs.match(link, self._spec, tokens))

    async def reach(self, token_ids: Tokens) -> Reach:
        """See `kvd_client.Cache.reach`."""
        tokens = encode_tokens(token_ids)
        return await self._runner.run(lambda link: tier_verbs.reach(link, self._spec, tokens))

    async def prefetch(self, token_ids: Tokens) -> None:
        """See `kvd_client.Cache.prefetch`."""
        tokens = encode_tokens(token_ids)
        await self._runner.run(lambda link: tier_verbs.prefetch(link, self._spec, tokens))

    async def pin(self, token_ids: Tokens, *, label: str = "") -> Pinned:
        """See `kvd_client.Cache.pin`."""
        tokens = encode_tokens(token_ids)
        return await self._runner.run(lambda link: tier_verbs.pin(link, self._spec, tokens, label=label))

    async def get_or_compute(
        self,
        token_ids: Tokens,
        compute: Callable[[Sequence], Awaitable[None] | None],
        *,
        wait_s: float | None = None,
        max_tokens: int | None = None,
        materialize: bool = False,
        verify: bool = False,
        populate: bool = True,
    ) -> Sequence:
        """See `kvd_client.Cache.get_or_compute`; `compute` may be a coroutine function."""
        seq = await self.sequence(
            token_ids, max_tokens, wait_s=wait_s, materialize=materialize, verify=verify, populate=populate
        )
        missing, started_s = seq.num_missing_tokens, time.monotonic()
        self._ledger.began(seq.num_cached_tokens, missing)
        try:
            work = compute(seq)
            if inspect.isawaitable(work):
                await work
            seq.require_complete()
            seq.computed(missing, time.monotonic() - started_s)
            await seq.commit()
        except BaseException:
            self._ledger.ended(time.monotonic() - started_s, well=False)
            await seq.close()
            raise
        self._ledger.ended(time.monotonic() - started_s, well=True)
        return seq

    async def statistics(self) -> CacheStatistics:
        """See `kvd_client.Cache.statistics`."""
        return await self._runner.run(lambda link: self._ledger.with_daemons(link, self.digest))


class Sequence(SequenceView):
    """A sequence driven by awaited calls; see `kvd_client.Sequence`. Calls that change it exclude each other."""

    def __init__(self, runner: AsyncRunner, core: SequenceCore) -> None:
        super().__init__(core)
        self._runner = runner
        self._exclusive = asyncio.Lock()

    async def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See `kvd_client.Sequence.append`."""

        async def append() -> None:
            async with self._exclusive:
                wanted = self._core.check_append(layer, keys, values)
                if wanted > self._core.capacity_tokens:
                    await self._runner.drive(self._core.extend(wanted))
                self._core.write(layer, keys, values)

        await self._runner.see_through(append())

    async def extend(self, num_tokens: int) -> None:
        """See `kvd_client.Sequence.extend`."""
        await self._exclusively(self._core.extend(num_tokens))

    async def commit(self, token_ids: Tokens | None = None, *, stream: Stream | None = None) -> int:
        """See `kvd_client.Sequence.commit`. The event loop waits for the stream too."""
        return await self._exclusively(self._core.commit(token_ids, stream))

    async def truncate(self, num_tokens: int) -> None:
        """See `kvd_client.Sequence.truncate`."""
        await self._exclusively(self._core.truncate(num_tokens))

    async def fork(self, max_tokens: int | None = None) -> Sequence:
        """See `kvd_client.Sequence.fork`."""
        return Sequence(self._runner, await self._exclusively(self._core.fork(max_tokens)))

    async def _exclusively(self, verb: Verb[T]) -> T:
        # The lock is taken inside: when the caller is cancelled it is still held until the verb has ended.
        async def drive() -> T:
            async with self._exclusive:
                return await self._runner.drive(verb)

        return await self._runner.see_through(drive())

    async def get_or_compute(
        self,
        layer: int,
        compute_layer: Callable[
            [int, int], tuple[torch.Tensor, torch.Tensor] | Awaitable[tuple[torch.Tensor, torch.Tensor]]
        ],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `kvd_client.Sequence.get_or_compute`; `compute_layer` may be a coroutine function."""
        start, stop = self._core.missing_tokens(layer)
        if start < stop:
            computed = compute_layer(start, stop)
            keys, values = await computed if inspect.isawaitable(computed) else computed
            await self.append(layer, keys, values)
            if self.num_tokens >= self._core.num_named_tokens:
                await self.commit()
        return self.layer(layer)

    async def close(self) -> None:
        """See `kvd_client.Sequence.close`."""
        async with self._exclusive:
            self._core.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
