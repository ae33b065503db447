"""The one place where what Redis, its client library and the sockets say becomes kvd's errors."""

from __future__ import annotations

import ssl

import redis.exceptions as foreign

from kvd.errors import BlockCorrupt, TierError, TierFull, TierRefused, TierUnavailable

_REFUSALS = {
    "NOAUTH": ("auth", "it wants a password: give password_file or password_env in the URL"),
    "WRONGPASS": ("auth", "it refuses the user name or password"),
    "NOPERM": (
        "no-permission",
        "the user lacks a right: it needs get, set, getex, exists, unlink, scan, strlen, info, watch, multi, exec",
    ),
}
_TROUBLES = {
    "LOADING": "loading",
    "MASTERDOWN": "master-down",
    "CLUSTERDOWN": "cluster-down",
    "READONLY": "read-only",
    "MOVED": "slot-moved",
    "ASK": "slot-moving",
    "TRYAGAIN": "slot-moving",
    "BUSY": "busy",
}

_CODES: tuple[tuple[type[Exception], str], ...] = (
    (foreign.BusyLoadingError, "LOADING"),
    (foreign.OutOfMemoryError, "OOM"),
    (foreign.ReadOnlyError, "READONLY"),
    (foreign.NoPermissionError, "NOPERM"),
    (foreign.MasterDownError, "MASTERDOWN"),
    (foreign.ClusterDownError, "CLUSTERDOWN"),
    (foreign.MovedError, "MOVED"),
    (foreign.AskError, "ASK"),
    (foreign.TryAgainError, "TRYAGAIN"),
)
"""redis-py gives these codes classes of their own and takes them out of the message. Subclasses come first."""


def error_of_reply(where: str, text: str) -> TierError:
    """The error a `-CODE message` reply stands for."""
    code = text.partition(" ")[0]
    if code == "OOM":
        return TierFull(f"{where} is full and may not evict: raise its maxmemory, or set volatile-lru", cause="full")
    if code == "MISCONF":
        return TierFull(f"{where} cannot write its disk and so takes no more writes", cause="disk")
    if code == "WRONGTYPE":
        return BlockCorrupt(f"{where} holds something else than a value there", cause="foreign-value")
    if code in _REFUSALS or (code == "ERR" and "AUTH" in text.upper()):
        cause, advice = _REFUSALS.get(code, ("auth", "it refuses the login"))
        return TierRefused(f"{where}: {advice}", cause=cause)
    if code in _TROUBLES:
        return TierUnavailable(f"{where}: {text}", cause=_TROUBLES[code])
    if "max number of clients" in text:
        return TierUnavailable(f"{where} has no connection left for us: raise its maxclients", cause="too-many-clients")
    return TierRefused(f"{where} does not understand us: {text[:200]}", cause="error-reply")


def error_of_exception(where: str, error: BaseException) -> TierError:
    """The error an exception of redis-py or of a socket stands for."""
    if isinstance(error, TierError):
        return error
    if isinstance(error, (foreign.AuthenticationError, foreign.AuthorizationError)):
        return TierRefused(f"{where} refuses the user name or password", cause="auth")
    if isinstance(error, foreign.AuthenticationWrongNumberOfArgsError):
        return TierRefused(f"{where} knows no users: leave the user name out", cause="auth")
    for kind, code in _CODES:
        if isinstance(error, kind):
            return error_of_reply(where, f"{code} {error}")
    if isinstance(error, (foreign.TimeoutError, TimeoutError)):
        return TierUnavailable(f"{where} did not answer in time", cause="timeout")
    if isinstance(error, foreign.InvalidResponse) or "Protocol Error" in str(error):
        return TierRefused(f"{where} is not a Redis: its answer is not Redis's protocol", cause="not-redis")
    if isinstance(error, foreign.ResponseError):
        return error_of_reply(where, str(error))
    if isinstance(error, ssl.SSLError) or "SSL" in str(error) or "certificate" in str(error):
        return TierRefused(f"{where}: TLS failed: {error}", cause="tls")
    cause = "refused" if _is_refusal(error) else "connection"
    return TierUnavailable(f"{where} cannot be reached: {error}", cause=cause)


def _is_refusal(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, (ConnectionRefusedError, FileNotFoundError)):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
