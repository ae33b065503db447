"""The control side of a Redis: is it there, is it one we can use, who holds which slot, what does it hold.

redis-py does the work here (log-in, TLS, cluster topology); blocks travel over sockets of our own (`resp_connection`).
Nothing is retried and every wait is short: a miss now is better than a hit late, and the breaker decides when to ask
again. All commands are small, so redis-py's defaults for packing and parsing (hiredis) are the fastest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis
import redis.exceptions
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.retry import Retry

from kvd.errors import TierError, TierRefused, TierUnavailable
from kvd.tiers.redis_errors import error_of_exception
from kvd.tiers.redis_url import Node, RedisAddress

MIN_VERSION = (6, 2)
"""GETEX came with it."""

_FOREIGN = (redis.exceptions.RedisError, redis.exceptions.RedisClusterException, OSError)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server that passed the check."""

    name: str
    version: str
    run_id: str
    """Another one after each start of the server."""


class RedisControl:
    """One address, connected when first needed. Thread-safe; every method raises only `TierError`s."""

    def __init__(self, address: RedisAddress, *, timeout_s: float, connect_timeout_s: float) -> None:
        self.where = str(address)
        self._address = address
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._lock = threading.Lock()
        self._closed = False
        self._client: Any = None  # redis.Redis or RedisCluster; redis-py's types of the two have no common base

    def check(self) -> ServerInfo:
        """Ask every server who it is; in a cluster some may be away.

        Raises `TierRefused` when one is not a Redis, too old or of the wrong mode, `TierUnavailable` if none answers.
        """
        infos: list[ServerInfo] = []
        away = TierUnavailable(f"{self.where}: no node serves any slot", cause="cluster-down")
        for server in self._servers():
            try:
                infos.append(self._server_info(server))
            except TierRefused:
                raise
            except TierUnavailable as error:
                away = error
        if not infos:
            raise away
        return infos[0]

    def run(self, commands: Sequence[tuple[str | bytes | int, ...]]) -> list[Any]:
        """Run commands in one round trip (one per node of a cluster). A command that fails gives its `TierError`."""
        try:
            pipeline = self._connected().pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            results = pipeline.execute(raise_on_error=False)
        except _FOREIGN as error:
            raise self._mapped(error) from error
        return [self._mapped(one) if isinstance(one, Exception) else one for one in results]

    def amend(self, key: bytes, change: Callable[[object], bytes | None], options: Sequence[bytes] = ()) -> None:
        """Sets the key to what `change` makes of its value, unless that is None, or somebody sets it meanwhile.

        Two round trips.
        """
        try:
            with self._server_of(key).pipeline(transaction=True) as pipeline:
                pipeline.watch(key)
                after = change(pipeline.get(key))
                if after is not None:
                    pipeline.multi()
                    pipeline.execute_command("SET", key, after, *options)
                    pipeline.execute()
        except redis.exceptions.WatchError:
            pass  # the caller looks again
        except _FOREIGN as error:
            raise self._mapped(error) from error

    def node_of(self, key: bytes) -> Node:
        """The server that holds this key's slot, as far as the topology is known here."""
        if not self._address.cluster:
            return self._address.nodes[0]
        try:
            node = self._connected().get_node_from_key(key)
        except _FOREIGN as error:
            raise self._mapped(error) from error
        if node is None:
            raise TierUnavailable(f"{self.where}: no node serves a slot we need", cause="cluster-down")
        return Node(node.host, node.port)

    def refresh_topology(self) -> None:
        """Learn anew which node holds what, after a node said that a slot moved."""
        if self._address.cluster:
            try:
                self._connected().nodes_manager.initialize()
            except _FOREIGN as error:
                raise self._mapped(error) from error

    def scan(self, pattern: bytes, count: int = 2000) -> Iterator[list[bytes]]:
        """The keys that match, a page at a time, over all servers; those expired by now are left out by the server."""
        for server in self._servers():
            cursor = 0
            while True:
                try:
                    cursor, page = server.scan(cursor, match=pattern, count=count)
                except _FOREIGN as error:
                    raise self._mapped(error) from error
                if page:
                    yield page
                if cursor == 0:
                    break

    def max_memory_nbytes(self) -> int:
        """The sum of the servers' memory limits; 0 when any has none."""
        try:
            limits = [int(server.info("memory").get("maxmemory", 0)) for server in self._servers()]
        except _FOREIGN as error:
            raise self._mapped(error) from error
        return sum(limits) if all(limits) else 0

    def close(self) -> None:
        """Drop every connection. Idempotent; calls after it fail."""
        with self._lock:
            self._closed = True
            client, self._client = self._client, None
        if client is not None:
            _close(client)

    def _servers(self) -> list[Any]:
        client = self._connected()
        if not self._address.cluster:
            return [client]
        try:
            return [client.get_redis_connection(node) for node in client.get_primaries()]
        except _FOREIGN as error:
            raise self._mapped(error) from error

    def _server_of(self, key: bytes) -> Any:
        client = self._connected()
        if not self._address.cluster:
            return client
        node = client.get_node_from_key(key)
        if node is None:
            raise TierUnavailable(f"{self.where}: no node serves a slot we need", cause="cluster-down")
        return client.get_redis_connection(node)

    def _connected(self) -> Any:
        with self._lock:
            if self._client is not None or self._closed:
                return self._require_open()
        try:
            client = self._make_cluster() if self._address.cluster else self._make_single()
        except _FOREIGN as error:
            raise self._mapped(error) from error
        with self._lock:
            # Another thread may have been first; connecting under the lock would make all wait for one time-out.
            if self._client is None and not self._closed:
                self._client = client
            kept = self._client
        if kept is not client:
            _close(client)
        return kept if kept is client else self._require_open()

    def _require_open(self) -> Any:
        client = self._client
        if client is None:
            raise TierUnavailable(f"{self.where} was closed", cause="closed")
        return client

    def _make_single(self) -> Any:
        address = self._address
        options: dict[str, Any] = self._options() | {"db": address.db, "retry": Retry(NoBackoff(), 0)}
        kind: Any = redis.Connection
        if address.is_unix:
            kind = redis.UnixDomainSocketConnection
            options["path"] = address.nodes[0].host
        else:
            options |= {"host": address.nodes[0].host, "port": address.nodes[0].port}
            if address.tls:
                kind = redis.SSLConnection
                options |= self._tls_options()
        return redis.Redis(connection_pool=redis.ConnectionPool(connection_class=kind, **options))

    def _make_cluster(self) -> Any:
        options = self._options()
        if self._address.tls:
            options |= {"ssl": True} | self._tls_options()
        return RedisCluster(
            startup_nodes=[ClusterNode(node.host, node.port) for node in self._address.nodes],  # type: ignore[no-untyped-call]
            retry=Retry(NoBackoff(), 1),  # one, so that a slot that moved is found in its new place
            require_full_coverage=False,
            **options,
        )

    def _options(self) -> dict[str, Any]:
        return {
            "username": self._address.user or None,
            "password": self._address.password.reveal() or None,
            "socket_timeout": self._timeout_s,
            "socket_connect_timeout": self._connect_timeout_s,
            "protocol": 2,
        }

    def _tls_options(self) -> dict[str, Any]:
        address = self._address
        return {
            "ssl_ca_certs": address.ca_file or None,
            "ssl_certfile": address.cert_file or None,
            "ssl_keyfile": address.key_file or None,
        }

    def _server_info(self, server: Any) -> ServerInfo:
        try:
            info = server.info("server")
        except _FOREIGN as error:
            raise self._mapped(error) from error
        version = str(info.get("redis_version", "")) if isinstance(info, dict) else ""
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if not numbers:
            raise TierRefused(f"{self.where} is not a Redis: it does not say its version", cause="not-redis")
        if numbers < MIN_VERSION:
            wanted = ".".join(map(str, MIN_VERSION))
            raise TierRefused(f"{self.where} is Redis {version}; kvd needs {wanted} or any Valkey", cause="too-old")
        if (info.get("redis_mode") == "cluster") != self._address.cluster:
            raise TierRefused(f"{self.where}: redis+cluster:// is for clusters, and only for them", cause="wrong-mode")
        return ServerInfo(
            name=str(info.get("server_name", "redis")),
            version=str(info.get("valkey_version", version)),
            run_id=str(info.get("run_id", "")),
        )

    def _mapped(self, error: BaseException) -> TierError:
        if isinstance(error, redis.exceptions.RedisClusterException):
            if "not enabled" in str(error):
                return TierRefused(f"{self.where} is not a cluster: use redis://", cause="wrong-mode")
            inner = error.__cause__ or error.__context__
            if isinstance(inner, redis.exceptions.RedisError):
                return error_of_exception(self.where, inner)
            return TierUnavailable(f"{self.where}: no node of the cluster answers", cause="cluster-down")
        return error_of_exception(self.where, error)


def _close(client: Any) -> None:
    client.close()
    if isinstance(client, redis.Redis):
        client.connection_pool.disconnect()
