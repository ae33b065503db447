"""Every error kvd raises, on either side of the socket.

    KvdError
    ├── InvalidRequest            the caller sent something that can never be right
    │   ├── InvalidTokens         token ids that are not integers in 0 .. 2**32-1
    │   ├── InvalidLayout         sizes that do not give whole pages, or absurd ones
    │   └── SequenceTooLong       growing beyond the declared max_tokens
    ├── NotOwned                  release, seal or use of what this session does not hold
    ├── UnknownCache              a cache handle this session never opened
    ├── OutOfBlocks               no block is free and none may be evicted
    │   └── QuotaExceeded         the session's or its user's share is used up
    ├── OutOfMemory               the machine cannot give the memory that was asked for
    ├── WouldWait                 a wait would risk a cycle, or its bound was zero
    ├── Overloaded                more requests in flight than the session was granted
    ├── ConnectionFailed          no daemon there, or it refused us
    │   ├── DaemonUnavailable     nobody listens in the runtime folder
    │   ├── PermissionRefused     the kernel or the daemon says this user may not connect
    │   └── VersionMismatch       both versions are named
    ├── DaemonRestarted           ids of an earlier daemon; old mappings stay readable until closed
    ├── RequestTimeout            the daemon lives but did not answer in time
    ├── ClientClosed              use after close
    │   └── ForkedClient          use in a child of the process that connected
    ├── CorruptBlock              a block's bytes are not those its writer gave the checksum of
    ├── StateError                a block asked to make an illegal move: a defect in kvd itself
    ├── ConfigError               an unknown key, a wrong type, a value out of range
    │   └── RuntimeFolderError    the runtime folder cannot be made, written or locked
    ├── AlreadyRunning            another daemon holds the runtime folder
    ├── InstallError              the service cannot be installed or removed so
    ├── TierError                 one tier could not do what was asked; memory serves on
    │   ├── TierUnavailable       unreachable, too slow, closed, or its circuit breaker is open
    │   │   └── TierRefused       it answers, but not to us: password, rights, version, not a Redis
    │   ├── TierFull              no room, and nothing there may be evicted
    │   ├── BlockMissing          the tier does not hold the block (any more)
    │   ├── BlockCorrupt          it held something else; that was deleted
    │   ├── CodecUnavailable      the value's codec needs a library that is not installed here
    │   └── StaleGeneration       the namespace was flushed since the block was sealed
    ├── EngineUnsupported         an engine's model or call that cannot be served rightly
    └── CudaError                 the NVIDIA driver refused a call; its own name and text are in the message
        ├── CudaUnavailable       no driver, no such card, or one that cannot be used
        ├── CudaOutOfMemory       the card has not that much memory left
        ├── CudaDeviceLost        the card, or this process's context on it, is gone for good
        ├── CudaImportRefused     this process cannot map the daemon's device memory; it can use host memory
        └── CudaMisuse            a call that is wrong whatever the card's state
            └── CudaForked        the driver was started before a fork, and does not live in the child

Each class has a `code` that travels on the wire (so a client in any language can tell them apart) and, where it can
end a command, an `exit_code`. Foreign exceptions are mapped where they arise and chained with `from`.
"""

from __future__ import annotations

from typing import ClassVar


class KvdError(Exception):
    """Base of all; never raised itself."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[int] = 1


class InvalidRequest(KvdError, ValueError):
    """The request can never be right, whatever the daemon's state. The caller erred."""

    code = "invalid-request"
    exit_code = 2


class InvalidTokens(InvalidRequest):
    """A token id is not an integer in 0 .. 2**32-1. The caller erred."""

    code = "invalid-tokens"


class InvalidLayout(InvalidRequest):
    """A block would not be whole pages, or a size is zero or absurd. The message says what would fit."""

    code = "invalid-layout"


class SequenceTooLong(InvalidRequest):
    """A sequence was asked to grow beyond its declared max_tokens. Nothing was changed."""

    code = "sequence-too-long"


class NotOwned(KvdError):
    """The session does not hold what it wants to release, seal or use. Nothing was changed. The caller erred."""

    code = "not-owned"


class UnknownCache(KvdError):
    """The cache handle was never opened by this session. The caller erred."""

    code = "unknown-cache"


class OutOfBlocks(KvdError):
    """Every block is held by somebody; the message names the holders. Nothing was changed."""

    code = "out-of-blocks"


class QuotaExceeded(OutOfBlocks):
    """The session, or its user over all sessions, would hold more than its share. Nothing was changed."""

    code = "quota-exceeded"


class OutOfMemory(KvdError, MemoryError):
    """The machine (or the cgroup) cannot give the memory asked for. Nothing half made stays behind."""

    code = "out-of-memory"
    exit_code = 5


class WouldWait(KvdError):
    """Waiting would risk a cycle (this session has open announcements), or the caller did not want to wait."""

    code = "would-wait"


class Overloaded(KvdError):
    """More requests in flight than the credits granted at the start of the session. The caller erred."""

    code = "overloaded"


class ConnectionFailed(KvdError, ConnectionError):
    """There is no session."""

    code = "connection-failed"
    exit_code = 3


class DaemonUnavailable(ConnectionFailed):
    """Nobody listens in the runtime folder. The message names the folder and how to start a daemon."""

    code = "daemon-unavailable"


class PermissionRefused(ConnectionFailed):
    """The kernel or the daemon says that this user may not connect."""

    code = "permission-refused"
    exit_code = 4


class VersionMismatch(ConnectionFailed):
    """Client and daemon share no protocol version; the message names both."""

    code = "version-mismatch"


class DaemonRestarted(KvdError):
    """The daemon that gave these ids is gone. Old mappings stay readable until closed; connect again for new ones."""

    code = "daemon-restarted"
    exit_code = 3


class RequestTimeout(KvdError, TimeoutError):
    """The daemon lives but did not answer within the bound; the session ends as soon as nothing of it is mapped."""

    code = "request-timeout"
    exit_code = 6


class ClientClosed(KvdError):
    """The client, cache or sequence was closed. The caller erred."""

    code = "client-closed"


class ForkedClient(ClientClosed):
    """This process is a fork of the one that connected; it has no mapping. Connect again in the child."""

    code = "forked-client"


class CorruptBlock(KvdError):
    """A block's bytes differ from the checksum its writer gave when it sealed it. Recompute; nothing is held."""

    code = "corrupt-block"


class StateError(KvdError, RuntimeError):
    """A block was asked to make an illegal move. Always a defect in kvd; the message gives block, from and to."""

    code = "state-error"


class ConfigError(KvdError, ValueError):
    """An unknown key (the nearest is named), a wrong type, or a value out of range."""

    code = "config-error"
    exit_code = 7


class RuntimeFolderError(ConfigError):
    """The runtime folder cannot be made or written, or its disk is full."""

    code = "runtime-folder"
    exit_code = 8


class AlreadyRunning(KvdError):
    """Another daemon holds the runtime folder; it is unharmed."""

    code = "already-running"
    exit_code = 9


class InstallError(KvdError):
    """`kvd install` or `kvd uninstall` could not do its work; the message says what is in the way."""

    code = "install-error"


class TierError(KvdError):
    """A tier could not do what was asked. The source of a put is unharmed; the target of a get holds no meaning.

    `cause` is a short word under which the tier counts the fault; several causes share one class.
    """

    code = "tier-error"

    def __init__(self, message: str = "", *, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause or self.code


class TierUnavailable(TierError):
    """The tier is unreachable, did not answer in time, was closed, or its circuit breaker is open. Ask again later."""

    code = "tier-unavailable"


class TierRefused(TierUnavailable):
    """Something answers, but cannot serve as configured: wrong password, no rights, too old, not a Redis."""

    code = "tier-refused"


class TierFull(TierError):
    """The tier has no room and may not make any. Nothing was stored."""

    code = "tier-full"


class BlockMissing(TierError):
    """The tier does not hold the block. Never a fault: blocks may be evicted, expire or be flushed at any moment."""

    code = "block-missing"


class BlockCorrupt(TierError):
    """What lay under the block's name was not that block; it was deleted and counts as a miss."""

    code = "block-corrupt"


class CodecUnavailable(TierError):
    """The value is encoded by a codec whose library is not installed here; it was left alone. A miss."""

    code = "codec-unavailable"


class StaleGeneration(TierError):
    """The namespace's generation is not the one the block was sealed under. Nothing readable was stored.

    `cause` is "flushed" when somebody flushed the namespace (drop it everywhere), or "generation-lost" when the tier
    forgot it, restarted empty for instance (ask for the new generation and go on).
    """

    code = "stale-generation"


class EngineUnsupported(KvdError):
    """The engine's model, layer or call cannot be served rightly; the message names it and says what can be done."""

    code = "engine-unsupported"
    exit_code = 10


class CudaError(KvdError):
    """The NVIDIA driver refused a call. The message ends with the driver's own name and text for it.

    `call` is the driver function, `result` its return code; "" and 0 where kvd itself refused before any call.
    """

    code = "cuda-error"
    exit_code = 11

    def __init__(self, message: str = "", *, call: str = "", result: int = 0) -> None:
        super().__init__(message)
        self.call = call
        self.result = result


class CudaUnavailable(CudaError):
    """No driver, no such card, or one that cannot be used here. The message says which, and what to do."""

    code = "cuda-unavailable"


class CudaOutOfMemory(CudaError, MemoryError):
    """The card has not that much memory left. What was allocated before stays."""

    code = "cuda-out-of-memory"
    exit_code = 5


class CudaDeviceLost(CudaError):
    """The card fell off the bus or its context is broken: every later call fails too. End the process to recover."""

    code = "cuda-device-lost"


class CudaImportRefused(CudaError):
    """This process cannot map the daemon's device memory. The message says why and what to do; host memory serves."""

    code = "cuda-import-refused"


class CudaMisuse(CudaError):
    """A handle, address or size that the driver does not know, or a thread without a context. The caller erred."""

    code = "cuda-misuse"


class CudaForked(CudaMisuse):
    """The driver was started in the parent of this process; it does not survive a fork. Use spawn."""

    code = "cuda-forked"


def _tree(root: type[KvdError]) -> dict[str, type[KvdError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


BY_CODE: dict[str, type[KvdError]] = _tree(KvdError)
"""Wire code -> class, for the side that receives an error."""


def from_wire(code: str, message: str) -> KvdError:
    """The exception a reply's (code, message) stands for; an unknown code of a newer daemon gives `KvdError`."""
    return BY_CODE.get(code, KvdError)(message)
