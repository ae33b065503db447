"""`connect` and `Client`: a process's session with the daemon."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvd.blobs import DEFAULT_BLOCK_NBYTES
from kvd.hashing import Namespace, encode_tokens
from kvd.layout import KVLayout
from kvd.status import Snapshot
from kvd_client.arguments import whole_number
from kvd_client.blobs import Blobs
from kvd_client.cache import Cache
from kvd_client.core import tier_verbs, verbs
from kvd_client.core.tier_verbs import FlushOutcome, Reach
from kvd_client.core.verb import Tokens
from kvd_client.core.verbs import VerifyOutcome
from kvd_client.memory.compute_device import device_name
from kvd_client.options import DEFAULT_OPTIONS, Options
from kvd_client.session.opened_cache import CacheSpec
from kvd_client.transport.blocking import Runner

if TYPE_CHECKING:
    import torch


def connect(
    runtime_dir: str | os.PathLike[str] | None = None,
    *,
    label: str = "",
    timeout_s: float = DEFAULT_OPTIONS.timeout_s,
    reserve_ahead_tokens: int = DEFAULT_OPTIONS.reserve_ahead_tokens,
) -> Client:
    """A session with the daemon of `runtime_dir`.

    Without an argument the folder is the first of $KVD_RUNTIME_DIR, $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/kvd, /run/kvd.
    `label` is shown by `kvd status`. `timeout_s` bounds every request beyond the wait it asks for itself.
    `reserve_ahead_tokens` is how much room a sequence reserves beyond what it holds, so that a decode loop seldom asks.

    Raises `DaemonUnavailable`, `PermissionRefused` or `VersionMismatch`.
    """
    options = Options(
        runtime_dir=runtime_dir, label=label, timeout_s=timeout_s, reserve_ahead_tokens=reserve_ahead_tokens
    )
    return Client(options)


class Client:
    """One session with the daemon. Safe to use from several threads; a context manager.

    When the daemon has gone, calls raise `DaemonRestarted` while anything of the old session is open; a client that
    holds nothing connects again by itself. In a forked child every call raises `ForkedClient`.
    """

    def __init__(self, options: Options) -> None:
        self._runner = Runner(options)

    @property
    def session_id(self) -> int:
        """The session's number in `kvd status`."""
        return self._runner.link.session_id

    @property
    def epoch(self) -> int:
        """The daemon's epoch; another one means another daemon, and none of the old ids counts."""
        return self._runner.link.epoch

    def cache(
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
        """The cache of one namespace; the arguments up to `salt` are part of it (see `kvd.hashing.Namespace`).

        `device` is where its pool shall be: the UUID of one of the daemon's cards, "host", or "" for what the daemon's
        rules say. A process that cannot map a card's memory (it does not see the card, has no torch for it, or is in
        another PID namespace) uses host memory beside it, which the daemon fills from the card and copies back: by
        itself, with a line in the log, and `Cache.mode` tells. `staged` has it so in any case. `ask_only` spares the
        look for torch and the card where only `match`, `reach`, `prefetch` and `pin` are wanted. Raises
        `CudaUnavailable` for a card that the daemon does not serve.

        `computes_on` is the torch device that attends over the sequences, if that need not be where the pool is: their
        tensors are on it. Where the pool is elsewhere each sequence is a copy, by way of host memory: the prefix is
        copied when it is attached, and what was computed when it is committed. Raises `EngineUnsupported` for devices
        that are neither CPU nor CUDA card.

        With `checksums`, blocks sealed through this cache carry an xxh3-64 that readers compare with `verify=True`.
        Raises `InvalidLayout` when client and daemon compute different block sizes, `InvalidRequest` for the 257th
        cache of a session, which keeps them to its end; the same one again counts once.
        """
        namespace = Namespace(
            model=model, layout=layout, engine=engine, positional=positional, adapter=adapter, salt=salt
        )
        spec = CacheSpec(namespace, device, staged, ask_only, device_name(computes_on))
        return Cache(self._runner, spec, checksums=checksums)

    def blobs(self, name: str, *, salt: str = "", block_nbytes: int = DEFAULT_BLOCK_NBYTES) -> Blobs:
        """Byte strings of any length under keys; see `kvd_client.blobs`.

        `name` and `salt` are what must be equal for the blobs to be exchangeable. `block_nbytes`, part of that, is the
        unit of memory they take: a multiple of 4096. Asks the daemon nothing yet.
        """
        return Blobs(self._runner, name, salt=salt, block_nbytes=block_nbytes)

    def status(self, *, with_map: bool = False) -> Snapshot:
        """What `kvd status` shows; `with_map` with a picture of each pool's blocks (`PoolStatus.block_map`)."""
        return self._runner.run(lambda link: verbs.status(link, with_map=with_map))

    def reach(self, namespace: bytes, block_tokens: int, token_ids: Tokens) -> Reach:
        """As `Cache.reach`, in a namespace that somebody else opened: `status` has its digest and its block_tokens.

        Raises `InvalidRequest` for one that the daemon does not know, or of another tenant.
        """
        tokens = encode_tokens(token_ids)
        block_tokens = whole_number("block_tokens", block_tokens, least=1)
        return self._runner.run(lambda link: tier_verbs.reach_in(link, namespace, block_tokens, tokens))

    def check(self) -> None:
        """Has the daemon verify every invariant of its pools. Raises `StateError` naming the fault."""
        self._runner.run(verbs.check)

    def verify(self) -> VerifyOutcome:
        """Has the daemon compare every sealed block with the checksum its writer gave; what differs is dropped.

        Many short requests, so that nobody else waits for it. Raises `PermissionRefused`.
        """
        return self._runner.run(verbs.verify)

    def flush(
        self, *, namespace: bytes | None = None, model: str | None = None, tier: str | None = None
    ) -> FlushOutcome:
        """Has cached blocks forgotten for good, in memory and every tier below: weights changed, and the name did not.

        `namespace` is one digest (`Cache.digest`); without it every namespace, or those of `model`,
        whoever stored them in a tier.
        `tier` is the only one that forgets, "pool" being memory. Open sequences keep their bytes until they are closed.
        Raises `PermissionRefused` where others share the blocks, `InvalidRequest` for a tier that is not there
        and for an empty argument.
        """
        return self._runner.run(lambda link: tier_verbs.flush(link, namespace=namespace, model=model, tier=tier))

    def unpin(self, pin: str) -> None:
        """Ends a pin, named as `Cache.pin` did. Raises `PermissionRefused` for another user's."""
        self._runner.run(lambda link: tier_verbs.unpin(link, pin))

    def spill(self) -> int:
        """Has every idle block without a copy below copied down; how many there still are. Does not wait: ask again.

        Raises `PermissionRefused` where others share the blocks.
        """
        return self._runner.run(tier_verbs.spill)

    def resize(self, nbytes: int, device: str = "") -> tier_verbs.ResizeOutcome:
        """Gives the pools of a device another budget, until the daemon stops. Does not wait: ask again to follow it.

        `device` is "" for the main one, "host", cuda:0, or the beginning of a card's UUID. Raises `PermissionRefused`
        for anybody but root and the daemon's user, `InvalidRequest` and `OutOfMemory` for sizes that cannot be.
        """
        return self._runner.run(lambda link: tier_verbs.resize(link, nbytes, device))

    def close(self) -> None:
        """Ends the session; idempotent. Open sequences are closed.

        Where tensors still live over a sequence the daemon keeps its blocks, and the session, until the last one dies.
        """
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
