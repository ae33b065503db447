"""`Cache`: what a client holds for one namespace."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvd.hashing import Namespace, encode_tokens
from kvd.layout import KVLayout
from kvd_client.core import tier_verbs, verbs
from kvd_client.core.sequence_state import SequenceOptions
from kvd_client.core.tier_verbs import Pinned, Reach
from kvd_client.core.verb import Tokens
from kvd_client.sequence import Sequence
from kvd_client.session.opened_cache import CacheSpec, Mode, OpenedCache
from kvd_client.statistics import CacheStatistics, Ledger
from kvd_client.transport.blocking import Runner


class Cache:
    """The cached sequences of one namespace. Safe to use from several threads. Holds nothing; needs no closing."""

    def __init__(self, runner: Runner, spec: CacheSpec, *, checksums: bool = False) -> None:
        self._runner = runner
        self._spec = spec
        self._checksums = checksums
        self._ledger = Ledger(spec.namespace.layout.block_tokens)
        self._first = runner.run(lambda link: verbs.open_cache(link, spec))

    @property
    def namespace(self) -> Namespace:
        """What must be equal for KV to be exchangeable."""
        return self._spec.namespace

    @property
    def device(self) -> str:
        """Where its blocks are in this process: "host", or the UUID of a card. After a restart perhaps elsewhere."""
        return self._opened.device

    @property
    def mode(self) -> Mode:
        """Whether this process maps the pool itself ("mapped"), or host memory beside a card's ("staged").

        A sequence whose blocks the driver refuses to map is staged too, by itself; the log says so.
        """
        return self._opened.mode

    @property
    def _opened(self) -> OpenedCache:
        return self._runner.link.caches.get(self._spec, self._first)

    @property
    def digest(self) -> bytes:
        """The namespace's name everywhere, 32 bytes; the tenant that the daemon counts us to is part of it."""
        return self._first.digest

    @property
    def layout(self) -> KVLayout:
        """The shape of a block."""
        return self._spec.namespace.layout

    def sequence(
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
        """The longest cached prefix of `token_ids`, mapped, with room for the rest reserved: one round trip.

        At most len(token_ids) - 1 tokens are attached, so one at least is left to compute. `max_tokens` bounds what the
        sequence may ever hold (default: len(token_ids) + 1024); address space, not memory, is set aside for it.

        `attach_all` attaches the last token's block too when it is cached: for who copies the KV and computes nothing.

        `only_stores` is for who has computed the KV already: what is found then has spared nobody anything, and no
        figure of `kvd status` counts it as saved.

        `announce` tells the daemon that the missing blocks will be computed now; others who want them may wait.
        `wait_s` bounds the wait for blocks which another session announced: None is the daemon's default, refused with
        `WouldWait` while this session has open announcements of its own; 0 never waits.

        `materialize` copies the prefix once into private memory packed by layer, where the pool is: slower to attach,
        faster to attend over. `verify` compares each cached block that was sealed with a checksum and raises
        `CorruptBlock`. `populate` fills the page table for the cached part now (one call) rather than by a fault at
        each first touch.

        Raises `InvalidTokens`, `SequenceTooLong`, `OutOfBlocks`, `QuotaExceeded`, `OutOfMemory`, `WouldWait`.
        """
        # Here, not in the verb, which runs again after a restart: an iterator gives its ids once.
        tokens = encode_tokens(token_ids)
        options = SequenceOptions(materialize=materialize, populate=populate, checksums=self._checksums)
        core = self._runner.run(
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
        try:
            return Sequence(self._runner, core)
        except BaseException:
            core.close()
            raise

    def allocate_sequence(self, num_tokens: int, max_tokens: int | None = None, *, populate: bool = True) -> Sequence:
        """Room for `num_tokens` tokens without naming them: all or nothing, and never waiting.

        Name them later with `Sequence.add_tokens` to publish. `max_tokens` defaults to `num_tokens`.
        Raises `OutOfBlocks`, `QuotaExceeded`, `OutOfMemory`.
        """
        options = SequenceOptions(materialize=False, populate=populate, checksums=self._checksums)
        core = self._runner.run(
            lambda link: verbs.allocate(link, self._spec, num_tokens, max_tokens=max_tokens, options=options)
        )
        try:
            return Sequence(self._runner, core)
        except BaseException:
            core.close()
            raise

    def match(self, token_ids: Tokens) -> int:
        """How many leading tokens are resident now (a multiple of block_tokens). Pins nothing, promises nothing."""
        tokens = encode_tokens(token_ids)
        return self._runner.run(lambda link: verbs.match(link, self._spec, tokens))

    def reach(self, token_ids: Tokens) -> Reach:
        """How far the prefix is cached in memory, and with each tier below. Pins nothing, promises nothing."""
        tokens = encode_tokens(token_ids)
        return self._runner.run(lambda link: tier_verbs.reach(link, self._spec, tokens))

    def prefetch(self, token_ids: Tokens) -> None:
        """Has what the tiers below know of the prefix brought up to memory; does not wait for it, and pins nothing."""
        tokens = encode_tokens(token_ids)
        self._runner.run(lambda link: tier_verbs.prefetch(link, self._spec, tokens))

    def pin(self, token_ids: Tokens, *, label: str = "") -> Pinned:
        """Has the daemon keep the full blocks of a prompt resident: those it has, and the others once they are there.

        It outlives this session, and the daemon where that keeps its state on disk; `Client.unpin` ends it. `label` is
        shown by `kvd pin --list`. Raises `QuotaExceeded` beyond limits.pinned, `InvalidRequest` for less than a block.
        """
        tokens = encode_tokens(token_ids)
        return self._runner.run(lambda link: tier_verbs.pin(link, self._spec, tokens, label=label))

    def get_or_compute(
        self,
        token_ids: Tokens,
        compute: Callable[[Sequence], None],
        *,
        wait_s: float | None = None,
        max_tokens: int | None = None,
        materialize: bool = False,
        verify: bool = False,
        populate: bool = True,
    ) -> Sequence:
        """A sequence that holds all of `token_ids`, computed by one process only when several ask at once.

        `compute(seq)` must append tokens seq.num_cached_tokens .. len(token_ids) to every layer; the full blocks are
        then published. If it raises (or leaves tokens out: `InvalidRequest`), the sequence is closed and the
        announcement dropped at once, so whoever waits goes on. How long it took is what `kvd status` estimates saved
        prefill seconds by. Raises what `sequence` raises.
        """
        seq = self.sequence(
            token_ids,
            max_tokens,
            wait_s=wait_s,
            materialize=materialize,
            verify=verify,
            populate=populate,
        )
        missing, started_s = seq.num_missing_tokens, time.monotonic()
        self._ledger.began(seq.num_cached_tokens, missing)
        try:
            compute(seq)
            seq.require_complete()
            seq.computed(missing, time.monotonic() - started_s)
            seq.commit()
        except BaseException:
            self._ledger.ended(time.monotonic() - started_s, well=False)
            seq.close()
            raise
        self._ledger.ended(time.monotonic() - started_s, well=True)
        return seq

    def statistics(self) -> CacheStatistics:
        """What this object's `get_or_compute` found and computed, and where the daemon finds the namespace's blocks."""
        return self._runner.run(lambda link: self._ledger.with_daemons(link, self.digest))
