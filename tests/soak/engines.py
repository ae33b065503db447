"""Two llama-servers and two transformers processes that answer without a pause, and what they answered."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.engines.llama_cpp.servers import SharingServer
from tests.soak.engine_prompts import NUM_NEW, texts
from tests.support.daemon import ROOT

STOP_BOUND_S = 120.0
MAX_DEVIATION = 0.02
"""Of logits from those of the control: another history of a prefix changes their last bits, a wrong block far more."""
TORCH_ENVIRON = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "2000", "HF_HUB_OFFLINE": "1"}
"""Of processes that share two cores."""


def transformers_controls(file: Path) -> list[list[int]]:
    """The right tokens of each prompt; `file` gets what the workers compare their logits with."""
    run = [sys.executable, "-m", "tests.soak.transformers_oracle", str(file)]
    done = subprocess.run(
        run, cwd=ROOT, env=os.environ | TORCH_ENVIRON, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return [[int(token) for token in line.split()] for line in done.stdout.splitlines()]


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion."""

    engine: str
    """"llama 0", "transformers 1", ..."""
    prompt: int
    tokens: list[int]
    num_reused: int
    deviation: float = 0.0
    why_not: str = ""
    """Why it was computed without kvd, where the engine says so."""


class Engines:
    """The four processes. `answers` grows while they run, from threads that do nothing else."""

    NAMES = ("llama 0", "llama 1", "transformers 0", "transformers 1")

    def __init__(self, runtime_dir: Path, oracle: Path, right: Mapping[str, list[list[int]]]) -> None:
        """Starts them; returns when the llama-servers have loaded their model.

        `oracle` is what the transformers processes compare their logits with, `right` has by kind of engine ("llama",
        "transformers") the tokens of each prompt's answer.
        """
        self.answers: list[Answer] = []
        self._right = right
        self._errors: list[Exception] = []
        self._stopping = threading.Event()
        self._exits = contextlib.ExitStack()
        self._threads: list[threading.Thread] = []
        self._workers: list[subprocess.Popen[str]] = []
        self._servers: list[SharingServer] = []
        with contextlib.ExitStack() as starting:
            starting.callback(self._exits.close)
            for number in range(2):
                self._workers.append(self._exits.enter_context(_worker(runtime_dir, number, oracle)))
            for _ in range(2):
                self._servers.append(self._exits.enter_context(SharingServer(runtime_dir)))
            starting.pop_all()
        for number, server in enumerate(self._servers):
            self._begin(lambda name=self.NAMES[number], server=server: self._ask(name, server))
        for number, worker in enumerate(self._workers):
            self._begin(lambda name=self.NAMES[2 + number], worker=worker: self._read(name, worker))

    def check(self) -> None:
        """Fails when a process ended, or an answer was an error, or a wrong one."""
        if self._errors:
            raise self._errors[0]

    def since(self, number: int) -> dict[str, list[Answer]]:
        """The answers from that one on, by engine."""
        answers = self.answers[number:]
        return {name: [answer for answer in answers if answer.engine == name] for name in self.NAMES}

    def restores(self) -> list[int]:
        """How many snapshots each llama-server has loaded from kvd."""
        return [server.counters["restores"] for server in self._servers]

    def summary(self) -> str:
        """One line an engine."""
        return "\n".join(
            f"{name}: {len(answers)} answers, {sum(one.num_reused for one in answers)} tokens reused, "
            f"{sum(bool(one.why_not) for one in answers)} without kvd, "
            f"logits off by {max((one.deviation for one in answers), default=0.0):.1e} at most"
            for name, answers in self.since(0).items()
        )

    def stop(self) -> None:
        """Ends them as their users would, and each must end well."""
        self._stopping.set()
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for thread in self._threads:
            thread.join(STOP_BOUND_S)
            assert not thread.is_alive()
        self.check()
        assert [worker.wait(STOP_BOUND_S) for worker in self._workers] == [0, 0]
        assert [server.stop() for server in self._servers] == [0, 0]

    def _judge(self, answer: Answer) -> None:
        self.answers.append(answer)
        assert answer.tokens == self._right[answer.engine.split()[0]][answer.prompt], answer
        assert answer.deviation <= MAX_DEVIATION, answer

    def _begin(self, task: Callable[[], None]) -> None:
        def run() -> None:
            try:
                task()
            except Exception as error:  # noqa: BLE001 - for `check`, which runs in the test's thread
                self._errors.append(error)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()

    def _ask(self, name: str, server: SharingServer) -> None:
        choose = random.Random(name)
        prompts = texts()
        while not self._stopping.is_set():
            prompt = choose.randrange(len(prompts))
            answer = server.complete(prompts[prompt], NUM_NEW)
            self._judge(Answer(name, prompt, answer["tokens"], answer["timings"]["cache_n"]))

    def _read(self, name: str, worker: subprocess.Popen[str]) -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            self._judge(Answer(name, **json.loads(line)))
        if not self._stopping.is_set():
            raise AssertionError(f"{name} ended with {worker.wait()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._exits.__exit__(kind, error, trace)
        for thread in self._threads:
            thread.join(STOP_BOUND_S)


@contextlib.contextmanager
def _worker(runtime_dir: Path, number: int, oracle: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.soak.transformers_worker", str(runtime_dir), str(number), str(oracle)]
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | TORCH_ENVIRON, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
