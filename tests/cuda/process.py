"""Other processes that own or import device memory, steered by a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from kvd import errors
from tests.support.processes import ROOT


class CudaProcess:
    """`tests.cuda.worker` in a process of its own. `process.verb(...)` calls the function of that name there."""

    def __init__(self, environ: Mapping[str, str], *, prefix: Sequence[str] = (), **extra: str) -> None:
        self._process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.cuda.worker"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "clients"), **environ, **extra},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def __getattr__(self, verb: str) -> Any:
        return lambda *arguments: self._ask(verb, *arguments)

    def _ask(self, verb: str, *arguments: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process ended during {verb}"
        answer = json.loads(line)
        if "error" in answer:
            raise getattr(errors, answer["error"])(answer["message"])
        return answer["result"]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
