"""The Redis tier on kvd's own server: the two of them, and the journal that makes a flush outlive a crash."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvd.block import NamespaceDigest
from kvd.errors import TierUnavailable
from kvd.tiers.base import Generation
from kvd.tiers.embedded import EmbeddedOptions, EmbeddedServer, check_persistence_dir, hold_persistence_dir
from kvd.tiers.embedded_config import find_server
from kvd.tiers.generation_journal import GenerationJournal
from kvd.tiers.redis_bulk import BulkPool, ask
from kvd.tiers.redis_errors import error_of_reply
from kvd.tiers.redis_generations import generation_in, name_in, record_of
from kvd.tiers.redis_keys import RedisKeys
from kvd.tiers.redis_tier import RedisOptions, RedisTier
from kvd.tiers.redis_url import RedisAddress
from kvd.tiers.resp_connection import ErrorReply, Reply, RespConnection, command

_PREPARE_TIMEOUT_S = 1.0
_FIRST_START_S = 1.0
"""How long the first calls wait for the server, which mostly takes a twentieth of that."""


class EmbeddedRedisTier(RedisTier):
    """Starts its server when made and stops it when closed.

    Raises `TierUnavailable` when there is no server binary, `ConfigError` and `RuntimeFolderError` for a budget or
    folder that cannot work. A server that will not start is a tier that is down, with the reason in its status.
    """

    def __init__(
        self,
        embedded: EmbeddedOptions,
        options: RedisOptions | None = None,
        *,
        name: str = "redis",
        binary: Path | None = None,
    ) -> None:
        self._journal: GenerationJournal | None = None
        with ExitStack() as held:
            if embedded.persistence_dir is not None:
                check_persistence_dir(embedded.persistence_dir)
                # Before the journal, which is rewritten; until the server has written its snapshot.
                held.callback(os.close, hold_persistence_dir(embedded.persistence_dir))
                self._journal = GenerationJournal(embedded.persistence_dir / "kvd.flushed")
            binary = binary or find_server()
            self.server = EmbeddedServer(binary, embedded, prepare=self._tell_flushes)
            super().__init__(self.server.address, options, name=name, records_expire=False, on_flush=self._record_flush)
            self._patient_until_s = time.monotonic() + _FIRST_START_S
            self.server.start()
            self._held = held.pop_all()

    def details(self) -> dict[str, str]:
        """Adds the server's restarts and its last words."""
        details = super().details()
        details |= {"embedded": "up" if self.server.is_up else "down", "restarts": str(self.server.num_restarts)}
        if self.server.last_error:
            details["embedded_error"] = self.server.last_error
        return details

    def close(self) -> None:
        """Stops the server, which writes its snapshot."""
        super().close()
        self.server.stop()
        self._held.close()

    @contextmanager
    def _call(self) -> Iterator[None]:
        # Else whoever uses a namespace just after the start would find the tier down, and a fault in its counters.
        if not self._closed and not self.server.is_up and (left_s := self._patient_until_s - time.monotonic()) > 0:
            with suppress(TierUnavailable):
                self.server.wait_until_up(left_s)
        with super()._call():
            yield

    def _record_flush(self, namespace: NamespaceDigest, generation: Generation) -> None:
        if self._journal is not None:
            self._journal.record(namespace, generation)

    def _tell_flushes(self, address: RedisAddress) -> None:
        """Before anybody can connect: the snapshot may be older than the flushes.

        A record that is of the flush's generation already stays as it is: it may say what the namespace is called.
        """
        if self._journal is None or not self._journal.flushed:
            return
        keys = RedisKeys(self._options.prefix)
        flushes = list(self._journal.flushed.items())
        pool = BulkPool(address, connect_timeout_s=_PREPARE_TIMEOUT_S)
        try:
            with pool.connection(address.nodes[0], timeout_s=_PREPARE_TIMEOUT_S) as connection:
                records = _asked(connection, [command(b"GET", keys.generation(one)) for one, _ in flushes])
                commands = [
                    command(
                        b"SET",
                        keys.generation(namespace),
                        record_of(generation, flushed=True, name=name_in(record)),
                    )
                    for (namespace, generation), record in zip(flushes, records, strict=True)
                    if generation_in(record) != generation
                ]
                _asked(connection, commands)
        finally:
            pool.close()


def _asked(connection: RespConnection, commands: Sequence[bytes]) -> list[Reply]:
    replies = ask(connection, commands)
    for reply in replies:
        if isinstance(reply, ErrorReply):
            raise error_of_reply("the embedded server", reply.text)
    return replies
