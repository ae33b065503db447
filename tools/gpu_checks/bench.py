"""The process that owns memory in the checks, and other processes that it starts."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from kvd.cuda import DeviceExport
from kvd.errors import CudaMisuse
from kvd.memory.device import Choice
from kvd.memory.device_segment import DeviceSegment

MIB = 1 << 20
EPOCH = 1
ANSWER_BOUND_S = 60.0
_spawn = multiprocessing.get_context("spawn")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class Peer:
    """A spawned process that calls functions of `gpu_checks.actions` when asked."""

    def __init__(self) -> None:
        self._connection, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid or 0

    def call(
        self, function: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
    ) -> _Result:
        """Runs it there and returns its result, or raises what it raised. `TimeoutError` after a minute."""
        self._connection.send((function, arguments, named))
        if not self._connection.poll(ANSWER_BOUND_S):
            raise TimeoutError(f"no answer to {function.__name__} within {ANSWER_BOUND_S:.0f} s")
        result, error = self._connection.recv()
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def kill(self) -> None:
        """SIGKILL, and gone when this returns."""
        self._process.kill()
        self._process.join()


def _serve(connection: Connection) -> None:
    with contextlib.suppress(EOFError):
        while True:
            function, arguments, named = connection.recv()
            result: Any = None
            error: Exception | None = None
            try:
                result = function(*arguments, **named)
            except Exception as caught:  # noqa: BLE001 - it is raised where the result was waited for
                error = caught
            connection.send((result, error))


class Bench:
    """The chosen card, opened. Peers that are still there at the end are killed."""

    def __init__(self, choice: Choice) -> None:
        if choice.driver is None or choice.device is None:
            raise CudaMisuse("there is no card")
        self.reason = choice.reason
        self.driver = choice.driver
        self.device = choice.device
        self.context = self.driver.open(self.device)
        self._peers: list[Peer] = []

    def peer(self, **environ: str) -> Peer:
        """A new process, with these variables."""
        before = dict(os.environ)
        os.environ.update(environ)
        try:
            peer = Peer()
        finally:
            os.environ.clear()
            os.environ.update(before)
        self._peers.append(peer)
        return peer

    @contextlib.contextmanager
    def segment(self, nbytes: int) -> Iterator[tuple[DeviceSegment, DeviceExport]]:
        """A segment, and what a peer needs to open it."""
        with DeviceSegment(self.context, nbytes) as segment:
            yield segment, segment.export(EPOCH)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in self._peers:
            peer.kill()
        self.context.close()
