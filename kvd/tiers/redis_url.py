"""Where a Redis is and how to log in, from one URL.

    unix:///run/redis/redis.sock?db=0            redis://host:6379/0
    rediss://host:6380?ca_file=/etc/ssl/ca.pem   redis+cluster://host1:7000,host2:7000   (rediss+cluster:// with TLS)

A password comes from `?password_file=PATH`, `?password_env=NAME`, the variable KVD_REDIS_PASSWORD, or the URL itself,
in this order; an ACL user from `user@` or `?user=`. `cert_file` and `key_file` are the client's certificate. What is
printed, logged or shown never holds the password: it lives in `Secret`, whose text is stars.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kvd.errors import ConfigError

DEFAULT_PASSWORD_ENV = "KVD_REDIS_PASSWORD"  # noqa: S105 - the name of a variable
_SCHEMES = ("unix", "redis", "rediss", "redis+cluster", "rediss+cluster")
_OPTIONS = ("db", "user", "password_file", "password_env", "ca_file", "cert_file", "key_file")
_DEFAULT_PORT = 6379
_MAX_SOCKET_PATH_NBYTES = 107


class Secret:
    """Text that shows in no repr, log or traceback; `reveal()` where it goes on the wire."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself."""
        return self._text

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return "***" if self._text else "''"


class Node(NamedTuple):
    """One server: a TCP port, or a unix socket with `port` 0 and its path as `host`."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port else self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisAddress:
    """Everything a connection needs. `str()` is the URL without its secret."""

    nodes: tuple[Node, ...]
    cluster: bool = False
    tls: bool = False
    db: int = 0
    user: str = ""
    password: Secret = Secret("")  # noqa: RUF009 - immutable
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""

    @property
    def is_unix(self) -> bool:
        """Whether it is a unix socket on this machine."""
        return self.nodes[0].port == 0

    def __str__(self) -> str:
        scheme = "unix" if self.is_unix else ("rediss" if self.tls else "redis") + "+cluster" * self.cluster
        login = f"{self.user}@" if self.user else ""
        where = ",".join(str(node) for node in self.nodes)
        return f"{scheme}://{login}{where}" + (f"?db={self.db}" if self.db else "")


def parse_redis_url(url: str, environ: Mapping[str, str]) -> RedisAddress:
    """The address a URL stands for; reads the password file if one is named.

    Raises `ConfigError`, whose message never quotes the URL, since it may hold a password.
    """
    parts = _split(url)
    options = _options(parts.query)
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, inline_password = login.partition(":")
    is_unix, cluster = parts.scheme == "unix", parts.scheme.endswith("+cluster")
    if is_unix:
        nodes: tuple[Node, ...] = (_socket_node(hosts, parts.path),)
    else:
        nodes = tuple(_tcp_node(text) for text in hosts.split(","))
        if len(nodes) > 1 and not cluster:
            raise ConfigError("the Redis URL names several hosts; only redis+cluster:// takes them")
    if "cert_file" in options and "key_file" not in options:
        raise ConfigError("the Redis URL has cert_file without key_file")
    if cluster and _db(parts, options):
        raise ConfigError("a Redis cluster has only database 0")
    tls = parts.scheme.startswith("rediss")
    if not tls and (given := [one for one in ("ca_file", "cert_file", "key_file") if one in options]):
        raise ConfigError(f"the Redis URL has {given[0]} but no TLS: use rediss://")
    return RedisAddress(
        nodes=nodes,
        cluster=cluster,
        tls=tls,
        db=_db(parts, options),
        user=options.get("user", unquote(user)),
        password=_password(options, environ, unquote(inline_password)),
        ca_file=options.get("ca_file", ""),
        cert_file=options.get("cert_file", ""),
        key_file=options.get("key_file", ""),
    )


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError:
        # Not chained: the foreign message quotes the URL.
        raise ConfigError("the Redis URL cannot be read: check its brackets and ports") from None
    if parts.scheme not in _SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in _SCHEMES)
        raise ConfigError(f"the Redis URL must begin with one of {known}")
    return parts


def _options(query: str) -> dict[str, str]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    for name in options:
        if name not in _OPTIONS:
            near = difflib.get_close_matches(name, _OPTIONS, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(_OPTIONS)}"
            raise ConfigError(f"the Redis URL has an unknown option {name!r}{hint}")
    return options


def _socket_node(host: str, path: str) -> Node:
    if host or not path:
        raise ConfigError("a unix Redis URL is unix:///absolute/path/of.sock, with three slashes")
    path = unquote(path)
    if len(path.encode()) > _MAX_SOCKET_PATH_NBYTES:
        raise ConfigError(f"the Redis socket's path is over {_MAX_SOCKET_PATH_NBYTES} bytes, the kernel's limit")
    return Node(path, 0)


def _tcp_node(text: str) -> Node:
    try:
        one = urlsplit(f"//{text}")
        host, port = one.hostname, one.port
    except ValueError:
        host, port = None, None
    if not host or port == 0:
        raise ConfigError("the Redis URL needs a host, and a port from 1 to 65535 if any")
    return Node(host, port or _DEFAULT_PORT)


def _db(parts: SplitResult, options: Mapping[str, str]) -> int:
    from_path = "" if parts.scheme == "unix" else parts.path.strip("/")
    text = options.get("db", from_path) or "0"
    if not text.isascii() or not text.isdigit():
        raise ConfigError(f"the Redis database must be a number from 0, not {text!r}")
    return int(text)


def read_password_file(path: str) -> Secret:
    """Its first line. Raises `ConfigError`."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # undecodable text, a NUL in the path
        raise ConfigError(f"the Redis password file {path} cannot be read: {error}") from error
    return Secret(text.partition("\n")[0].rstrip("\r"))


def _password(options: Mapping[str, str], environ: Mapping[str, str], inline: str) -> Secret:
    if path := options.get("password_file"):
        return read_password_file(path)
    if name := options.get("password_env"):
        if name not in environ:
            raise ConfigError(f"the Redis URL takes its password from ${name}, which is not set")
        return Secret(environ[name])
    return Secret(inline or environ.get(DEFAULT_PASSWORD_ENV, ""))
