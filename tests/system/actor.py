"""A client process of some user: does what each JSON line on its stdin says, and answers with one.

{"do": "connect"} -> {"code": ""} or the error's code; the other verbs need a session.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

import kvd_client
from kvd.errors import KvdError
from kvd.protocol import requests, wire
from kvd.protocol.replies import Failed
from kvd.protocol.session import Goodbye, Welcome
from tests.support.mappings import segment_flags
from tests.support.raw_client import RawClient, hashes
from tests.support.wait import eventually

WAIT_S = 2.0
PTRACE_ATTACH = 16


class Actor:
    """The verbs. Each returns what can be written as JSON."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.raw: RawClient | None = None
        self.caches: dict[str, int] = {}

    @property
    def session(self) -> RawClient:
        assert self.raw is not None
        return self.raw

    def cache(self, model: str) -> int:
        if model not in self.caches:
            self.caches[model] = self.session.open_cache(model)
        return self.caches[model]

    def who(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "uid": os.geteuid(), "gid": os.getegid()}

    def connect(self, label: str = "raw") -> dict[str, Any]:
        """Through the library first, which maps the kernel's refusal to an error; then by hand, for the other verbs."""
        try:
            kvd_client.connect(self.folder).close()
        except KvdError as error:
            return {"code": error.code}
        self.raw = RawClient(self.folder, label=label)
        return {"code": ""}

    def seal(self, model: str, names: list[str]) -> dict[str, Any]:
        cache, packed = self.cache(model), hashes(*names)
        begun = self.session.begin(cache, packed, num_blocks=len(names))
        if not begun.num_cached:
            self.session.seal(cache, begun.blocks, packed)
        return {"num_cached": begun.num_cached}

    def match(self, model: str, names: list[str]) -> dict[str, Any]:
        return {"num_resident": self.session.ask(requests.Match, self.cache(model), hashes(*names)).num_resident}

    def status(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.to_builtins(self.session.status())
        return fields

    def ask(self, request: str, *fields: Any) -> dict[str, Any]:
        """The code of the refusal; empty when it was granted."""
        reply = self.session.ask(getattr(requests, request), *fields)
        return {"code": reply.code if isinstance(reply, Failed) else ""}

    def token(self) -> dict[str, Any]:
        assert isinstance(self.session.answer, Welcome)
        return {"token": self.session.answer.token.hex(), "epoch": self.session.epoch}

    def use_token(self, token: str, epoch: int) -> dict[str, Any]:
        """As another's: whether a request under it is answered."""
        dealer = self.session.connect_dealer(bytes.fromhex(token))
        try:
            dealer.send(wire.encode(requests.Status(1, epoch)))
            return {"answered": bool(dealer.poll(WAIT_S * 1000))}
        except zmq.Again:
            return {"answered": False}
        finally:
            dealer.close()

    def open(self, paths: list[str], writable: bool = False) -> dict[str, Any]:
        """Path -> name of the error; empty where the kernel let it through. A folder is listed."""
        found = {}
        for path in paths:
            try:
                if Path(path).is_dir():
                    list(Path(path).iterdir())
                    found[path] = ""
                    continue
                descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
            except OSError as error:
                found[path] = errno.errorcode[error.errno or 0]
            else:
                os.close(descriptor)
                found[path] = ""
        return found

    def read_memory(self, pid: int, address: int) -> dict[str, Any]:
        """process_vm_readv(2) and ptrace(2)."""
        libc = ctypes.CDLL(None, use_errno=True)
        here = ctypes.create_string_buffer(8)

        class Piece(ctypes.Structure):
            _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))

        local, remote = Piece(ctypes.addressof(here), 8), Piece(address, 8)
        taken = libc.process_vm_readv(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        vm_error = errno.errorcode[ctypes.get_errno()] if taken < 0 else ""
        libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        traced = libc.ptrace(PTRACE_ATTACH, pid, None, None)
        return {"vm": vm_error, "ptrace": errno.errorcode[ctypes.get_errno()] if traced else ""}

    def descriptors(self) -> dict[str, Any]:
        """The paths in /proc of what the daemon gave this process: the control page and segments."""
        self.session.drain()
        return {"paths": [f"/proc/{os.getpid()}/fd/{one}" for one in self.session.descriptors]}

    def reopen_writable(self) -> dict[str, Any]:
        """Each of them, opened anew for writing through /proc/self."""
        self.session.drain()
        return self.open([f"/proc/self/fd/{one}" for one in self.session.descriptors], writable=True)

    def connect_often(self, num_sessions: int) -> dict[str, Any]:
        """As many sessions as asked for; how many were welcome. They end with this call."""
        with contextlib.ExitStack() as closing:
            made = [closing.enter_context(RawClient(self.folder, connect=False)) for _ in range(num_sessions)]
            return {"num_welcome": sum(isinstance(one.answer, Welcome) for one in made)}

    def flood(self, num_requests: int) -> dict[str, Any]:
        """Requests without any regard to credits; how many were answered before the daemon had enough, if it had."""
        raw, cache = self.session, self.cache("flood")
        packed = hashes("x")
        num_answered = 0
        for number in range(num_requests):
            if not number % 64 and select.select([raw.session_socket], [], [], 0)[0]:
                break
            raw.post(requests.Match, cache, packed)
            while raw.dealer.poll(0):
                raw.receive()
                num_answered += 1
        return {"num_answered": num_answered}

    def reserve_all(self) -> dict[str, Any]:
        """Reserves until it is refused; the refusal's code, and how many blocks it has then."""
        num_blocks = 0
        while not isinstance(reply := self.session.ask(requests.Reserve, self.cache("greedy"), 64), Failed):
            num_blocks += 64
        return {"code": reply.code, "num_blocks": num_blocks}

    def until_goodbye(self) -> dict[str, Any]:
        """Asks without a break until the daemon says goodbye."""
        raw, cache, num_answered = self.session, self.cache("load"), 0
        print(json.dumps({"started": True}), flush=True)
        while not isinstance(said := self._next(raw), Goodbye):
            raw.post(requests.Match, cache, hashes("x"))
            if raw.dealer.poll(100):
                raw.receive()
                num_answered += 1
        return {"code": said.code, "num_answered": num_answered}

    @staticmethod
    def _next(raw: RawClient) -> object:
        return raw.next_datagram() if select.select([raw.session_socket], [], [], 0)[0] else None

    def segment_flags(self, pid: int) -> dict[str, Any]:
        return {"flags": [sorted(flags) for flags in segment_flags(pid)]}


def main(folder: str) -> None:
    actor = Actor(Path(folder))
    for line in sys.stdin:
        todo = json.loads(line)
        answer = getattr(actor, todo.pop("do"))(*todo.pop("args", ()), **todo)
        print(json.dumps(answer), flush=True)


class ActorProcess:
    """The test's end of one."""

    def __init__(self, prefix: Sequence[str], folder: str = "/run/kvd") -> None:
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.system.actor", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, verb: str, **arguments: Any) -> None:
        """Has it start something; `result` waits for the end."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": verb, **arguments}) + "\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the client ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def do(self, verb: str, **arguments: Any) -> dict[str, Any]:
        self.begin(verb, **arguments)
        return self.result()

    def await_redis(self) -> None:
        """The service is ready before its own server is, and finds nothing of yesterday's without."""

        def is_up() -> bool:
            (tier,) = self.do("status")["tiers"]
            return (tier["name"], tier["state"], tier["details"]["embedded"]) == ("redis", "up", "up")

        eventually(is_up, 30)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextlib.contextmanager
def actor(prefix: Sequence[str], folder: str = "/run/kvd", *, connects: bool = True) -> Iterator[ActorProcess]:
    """A client of that user, with a session unless told otherwise."""
    process = ActorProcess(prefix, folder)
    try:
        if connects:
            assert process.do("connect") == {"code": ""}
        yield process
    finally:
        process.close()


if __name__ == "__main__":
    main(sys.argv[1])
